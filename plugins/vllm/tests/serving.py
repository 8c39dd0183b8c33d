"""A vLLM engine in this process, and requests that come and go while it runs."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any, NamedTuple

# One process, so that what a test does to the engine is done; nothing from or to the network.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
)

import anyflex_vllm
import vllm

__all__ = ["Answer", "Request", "serve"]


class Request(NamedTuple):
    """A prompt that joins at a step of the engine, and may be aborted at another."""

    prompt: list[int]
    tokens: int
    joins: int = 0
    leaves: int | None = None


class Answer(NamedTuple):
    """Tokens chosen greedily, their log probabilities, and prompt tokens found in the cache."""

    tokens: list[int]
    logprobs: list[float]
    cached: int


def serve(
    folder: Path, backend: str, requests: list[Request], **options: Any
) -> tuple[list[Answer], dict[str, float]]:
    """Return the answers of an engine of its own, and its counters.

    Args:
        folder: the model's.
        backend: value of attention_backend.
        options: more arguments of vLLM's engine.
    """
    anyflex_vllm.register()
    engine = vllm.LLM(
        str(folder),
        attention_backend=backend,
        **{
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "block_size": 32,
            "kv_cache_memory_bytes": 1 << 24,
            "disable_log_stats": False,
            **options,
        },
    )
    engine.collective_rpc(_poison)
    answers: dict[int, Answer] = {}
    step = 0
    while step <= max(r.joins for r in requests) or engine.llm_engine.has_unfinished_requests():
        for number, request in enumerate(requests):
            if step == request.joins:
                engine.llm_engine.add_request(
                    str(number),
                    {"prompt_token_ids": request.prompt},
                    vllm.SamplingParams(
                        max_tokens=request.tokens,
                        temperature=0,
                        ignore_eos=True,
                        detokenize=False,
                        logprobs=0,
                    ),
                )
            if step == request.leaves:
                engine.llm_engine.abort_request([str(number)])
        for output in engine.llm_engine.step():
            (found,) = output.outputs
            logprobs = [next(iter(each.values())).logprob for each in found.logprobs]
            answers[int(output.request_id)] = Answer(
                list(found.token_ids), logprobs, output.num_cached_tokens
            )
        step += 1
    counters = {
        metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")
    }
    del engine
    gc.collect()
    vllm.distributed.cleanup_dist_env_and_memory()
    return [answers[number] for number in sorted(answers)], counters


def _poison(worker: Any) -> None:
    """Fill the cache with NaN: only rows that were written may reach a result."""
    for cache in worker.model_runner.kv_caches:
        cache.fill_(float("nan"))
