"""Tiny models served by vLLM on anyflex, beside each request alone in eager attention."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM isn't installed; it needs a torch of its own")

from models import FAMILIES, write
from serving import Answer, Request, serve

RANDOM = random.Random(0)
PREFIX = [RANDOM.randrange(3, 256) for _ in range(70)]


def prompt(length: int, prefix: int = 0) -> list[int]:
    return PREFIX[:prefix] + [RANDOM.randrange(3, 256) for _ in range(length - prefix)]


# Four run at a time; 32 tokens a step cut the longer prompts in chunks; two share a prefix of
# whole pages with the first, one of them after the first has ended.
REQUESTS = [
    Request(prompt(75, 70), 20),
    Request(prompt(1), 9),
    Request(prompt(33), 30, joins=2),
    Request(prompt(5), 60, joins=3, leaves=12),
    Request(prompt(90, 70), 12, joins=5),
    Request(prompt(100), 17, joins=6),
    Request(prompt(71, 70), 25, joins=40),
]


def check(
    model: Any, requests: list[Request], answers: list[Answer], tolerance: float = 1e-4
) -> None:
    """Check that each token is the likeliest one of the model alone, and its probability."""
    assert len(answers) == len(requests)
    for request, answer in zip(requests, answers, strict=True):
        if request.leaves is None:
            assert len(answer.tokens) == request.tokens
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt + answer.tokens])).logits[0]
        alone = logits[len(request.prompt) - 1 : -1].log_softmax(-1)
        chosen = alone.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        likeliest = alone.max(-1).values
        torch.testing.assert_close(chosen, likeliest, atol=tolerance, rtol=1e-4)
        torch.testing.assert_close(
            torch.tensor(answer.logprobs), chosen, atol=tolerance, rtol=1e-4
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_requests_that_join_and_leave_get_the_tokens_of_each_alone(
    name: str, tmp_path: Path
) -> None:
    model = write(FAMILIES[name], tmp_path)
    answers, _ = serve(tmp_path, "ANYFLEX", REQUESTS)
    check(model, REQUESTS, answers)
    assert len(answers[3].tokens) < REQUESTS[3].tokens
    assert answers[6].cached > 0


def test_requests_that_are_preempted_resume_with_the_same_tokens(tmp_path: Path) -> None:
    model = write(FAMILIES["grouped queries"], tmp_path)
    requests = [Request(prompt(40), 60, joins=number) for number in range(4)]
    # 9 pages of 32 for four requests that end with 4 each.
    answers, counters = serve(tmp_path, "ANYFLEX", requests, num_gpu_blocks_override=10)
    assert counters["vllm:num_preemptions"] > 0
    check(model, requests, answers)


def test_it_agrees_with_the_backend_of_vllm(tmp_path: Path) -> None:
    write(FAMILIES["grouped queries"], tmp_path)
    (ours, _), (theirs, _) = (
        serve(tmp_path, backend, REQUESTS) for backend in ("ANYFLEX", "CPU_ATTN")
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.tokens == other.tokens and mine.cached == other.cached
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-4, rel=1e-4)
