"""Calls in CUDA graphs: a replay reads the present contents of its tensors, and leaves nothing
from one replay to the next."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import anyflex

__all__: list[str] = []

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device on this machine"
)

KEYS = 700
DIM = 64
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def fill(leaves: list[Tensor], slopes: Tensor, seed: int) -> None:
    """Draw new values in the same memory."""
    generator = torch.Generator(slopes.device).manual_seed(seed)
    with torch.no_grad():
        for tensor in (*leaves, slopes):
            tensor.normal_(generator=generator)


def dense(leaves: list[Tensor], slopes: Tensor) -> Tensor:
    """Out in float64."""
    q, k, v = (x.double() for x in leaves)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    rows, keys = q.shape[2], k.shape[2]
    distance = torch.arange(rows, device=q.device)[:, None] - torch.arange(keys, device=q.device)
    scores = q @ k.mT / math.sqrt(DIM) + slopes.double()[:, None, None] * distance / 100
    return scores.masked_fill(distance < rows - keys, -math.inf).softmax(-1) @ v


def captured(call: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of the call, and the tensors that each replay fills."""
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, found


@pytest.mark.parametrize("learns", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("rows", [1, 5, 300, KEYS])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("cuda", torch.bfloat16),
        ("cuda.triton", torch.bfloat16),
        ("cuda.triton", torch.float32),
    ],
)
def test_a_replay_computes_what_its_tensors_hold(
    backend: str, dtype: torch.dtype, rows: int, learns: bool
) -> None:
    """Decoding, whose splits add up, and tiles; with a captured tensor and a block mask."""
    shapes = ((2, 4, rows, DIM), (2, 2, KEYS, DIM), (2, 2, KEYS, DIM))
    leaves = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]
    slopes = torch.empty(4, device="cuda")
    fill(leaves, slopes, 0)
    for leaf in leaves:
        leaf.requires_grad_(learns)
    query, key, value = leaves
    mask = anyflex.create_block_mask(
        lambda b, h, q, k: q - k >= rows - KEYS, None, None, rows, KEYS, device="cuda"
    )

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + slopes[h] * (q - k) / 100

    def call() -> list[Tensor]:
        out = anyflex.flex_attention(
            query, key, value, score, mask, enable_gqa=True, backend=backend
        )
        assert isinstance(out, Tensor)
        if not learns:
            return [out]
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    graph, found = captured(call)
    outs = []
    for seed in (1, 2, 1):
        fill(leaves, slopes, seed)
        # Memory that others have used between replays holds NaN.
        others = [torch.full_like(leaves[1], math.nan) for _ in range(4)]
        for tensor in found:
            tensor.fill_(math.nan)
        del others
        graph.replay()
        wanted = [dense(leaves, slopes)]
        if learns:
            wanted += torch.autograd.grad(wanted[0], leaves, torch.ones_like(wanted[0]))
        for got, right in zip(found, wanted, strict=True):
            scale = max(1.0, float(right.abs().max()))
            difference = float((got.double() - right.double()).abs().max()) / scale
            assert difference <= CLOSE[dtype], (difference, scale)
        outs.append(found[0].clone())
    assert torch.equal(outs[0], outs[2]) and not torch.equal(outs[0], outs[1])
