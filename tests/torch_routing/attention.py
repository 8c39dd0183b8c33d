"""A program through torch's functions, and the dense formula that it is held to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import anyflex
from anyflex.testing.oracle import dense_attention, dense_mask
from tests.torch_routing.programs import Captured, Program, Sizes, captured

__all__ = [
    "ALL_AUX",
    "Inputs",
    "agree",
    "attend",
    "expected",
    "gradients",
    "inputs",
    "poisoned",
    "rerouted",
    "weighted",
]

# Largest error in units of the largest value that the formula gives.
_TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 3e-6,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}


@dataclasses.dataclass
class Inputs:
    """Leaves of a call, and torch's mask."""

    query: Tensor
    key: Tensor
    value: Tensor
    captured: Captured
    mask: Any = None

    def leaves(self) -> list[Tensor]:
        return [self.query, self.key, self.value, *self.captured.learned()]


@contextmanager
def rerouted(devices: Any = "cpu") -> Iterator[None]:
    """Re-route torch in the body."""
    anyflex.reroute_torch(devices)
    try:
        yield
    finally:
        anyflex.restore_torch()


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill fresh memory with NaN, which reveals what a kernel leaves unwritten."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def inputs(
    program: Program,
    sizes: Sizes,
    dtype: torch.dtype = torch.float32,
    *,
    key_batch: int | None = None,
    block_size: Any = 16,
    make_mask: Callable[..., Any] = create_block_mask,
) -> Inputs:
    """Draw leaves and build the mask by `make_mask`, torch's function unless another is given."""
    draw = torch.Generator().manual_seed(3)
    batch = key_batch or sizes.batch

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype).requires_grad_()

    query = leaf(sizes.batch, sizes.heads, sizes.q_length, sizes.head_dim)
    key = leaf(batch, sizes.key_heads, sizes.kv_length, sizes.head_dim)
    value = leaf(batch, sizes.key_heads, sizes.kv_length, sizes.value_dim)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    given = Inputs(query, key, value, captured(sizes).copied(wide))
    if program.mask is not None:
        given.mask = make_mask(
            program.mask(given.captured, sizes),
            sizes.batch,
            sizes.heads,
            sizes.q_length,
            sizes.kv_length,
            device="cpu",
            BLOCK_SIZE=block_size,
        )
    return given


def attend(program: Program, sizes: Sizes, given: Inputs, **options: Any) -> Any:
    """Call torch's flex_attention as a user does."""
    score_mod = None if program.score is None else program.score(given.captured, sizes)
    return flex_attention(
        given.query,
        given.key,
        given.value,
        score_mod,
        given.mask,
        enable_gqa=sizes.heads != sizes.key_heads,
        **options,
    )


def gradients(outputs: list[Tensor], given: Inputs) -> list[Tensor]:
    """Gradients of a fixed weighting of the outputs; zero for a leaf that isn't read."""
    loss = sum((weighted(output) for output in outputs), torch.zeros(()))
    leaves = given.leaves()
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    pairs = zip(found, leaves, strict=True)
    return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in pairs]


def weighted(output: Tensor) -> Tensor:
    """Return the sum of the finite elements with weights that differ: -inf is an empty row's lse,
    through which there is no gradient."""
    weights = torch.linspace(0.5, 1.5, output.numel(), dtype=torch.float64).reshape(output.shape)
    finite = torch.where(output == -torch.inf, 0.0, output)
    return (finite.double() * weights).sum().to(torch.float64)


def expected(
    program: Program, sizes: Sizes, given: Inputs, *, aux: bool = False, scale: float | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Out (with `aux` also lse and max_scores) and the gradients by the dense formula in
    float64."""
    wide = Inputs(
        *[t.detach().double().requires_grad_() for t in (given.query, given.key, given.value)],
        given.captured.copied(torch.float64),
    )
    score_mod = None if program.score is None else program.score(wide.captured, sizes)
    mask = None
    if program.mask is not None:
        extents = (sizes.batch, sizes.heads, sizes.q_length, sizes.kv_length)
        mask = dense_mask(program.mask(wide.captured, sizes), *extents)
    found = dense_attention(wide.query, wide.key, wide.value, score_mod, mask, scale)
    outputs = [found.out, found.lse] if aux else [found.out]
    grads = gradients(outputs, wide)
    return [*outputs, *([found.max_scores] if aux else [])], grads


def agree(found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype = torch.float32) -> None:
    """Compare each tensor with the formula's, by the largest error."""
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        one = one.detach().double()
        other = other.detach()
        assert torch.equal(one == -torch.inf, other == -torch.inf)
        finite = other != -torch.inf
        error = (one - other)[finite].abs().amax() if finite.any() else torch.zeros(())
        largest = other[finite].abs().amax().clamp(min=1.0) if finite.any() else torch.ones(())
        assert error <= _TOLERANCE[dtype] * largest, (float(error), float(largest))


ALL_AUX = AuxRequest(lse=True, max_scores=True)
