"""A vLLM engine in this process, and requests that come and go while it runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
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
import torch
import vllm

__all__ = ["Answer", "Request", "embed", "serve"]


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
    arguments = {
        "attention_backend": backend,
        "max_model_len": 256,
        "max_num_batched_tokens": 32,
        "kv_cache_memory_bytes": 1 << 24,
        "disable_log_stats": False,
    }
    answers: dict[int, Answer] = {}
    step = 0
    with _engine(folder, **(arguments | options)) as engine:
        if backend == "ANYFLEX":
            # vLLM's own backend multiplies rows that nobody has written by 0.
            engine.collective_rpc(_poison)
        while step <= max(r.joins for r in requests) or engine.has_unfinished_requests():
            for number, request in enumerate(requests):
                if step == request.joins:
                    prompt = {"prompt_token_ids": request.prompt}
                    engine.add_request(str(number), prompt, _greedy(request.tokens))
                if step == request.leaves:
                    engine.abort_request([str(number)])
            for output in engine.step():
                (found,) = output.outputs
                logprobs = [next(iter(each.values())).logprob for each in found.logprobs]
                answers[int(output.request_id)] = Answer(
                    list(found.token_ids), logprobs, output.num_cached_tokens
                )
            step += 1
        metrics = engine.get_metrics()
    counters = {metric.name: metric.value for metric in metrics if hasattr(metric, "value")}
    return [answers[number] for number in sorted(answers)], counters


def embed(folder: Path, prompts: list[list[int]]) -> list[list[float]]:
    """Return the embeddings that an encoder on ANYFLEX gives prompts."""
    found: dict[int, list[float]] = {}
    with _engine(folder, attention_backend="ANYFLEX", runner="pooling") as engine:
        for number, prompt in enumerate(prompts):
            params = vllm.PoolingParams(task="embed")
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[int(output.request_id)] = output.outputs.data.tolist()
    return [found[number] for number in range(len(prompts))]


@contextlib.contextmanager
def _engine(folder: Path, **options: Any) -> Iterator[Any]:
    anyflex_vllm.register()
    arguments = vllm.EngineArgs(
        str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_num_seqs=4,
        block_size=32,
        **options,
    )
    engine = vllm.LLMEngine.from_engine_args(arguments)
    try:
        yield engine
    finally:
        engine.engine_core.shutdown()
        # The next engine of this process may need other groups of processes.
        vllm.distributed.cleanup_dist_env_and_memory()


def _greedy(tokens: int) -> Any:
    return vllm.SamplingParams(
        max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, logprobs=0
    )


def _poison(worker: Any) -> None:
    """Fill the cache with NaN: only rows that were written may reach a result."""
    for cache in worker.model_runner.kv_caches:
        # All bits set are a NaN in each floating type, fp8 too.
        cache.view(torch.uint8).fill_(0xFF)
