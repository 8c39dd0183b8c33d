"""The tensors of one configuration, and its results by each oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyflex.testing.mods import MASK_MODS, SCORE_MODS, Mod
from anyflex.testing.oracle import dense_attention, dense_mask
from anyflex.testing.results import Forward, Results, gradients
from tests.oracles.torch_flex import NotTaken, torch_attention
from tests.random_configurations.configuration import Configuration, Memory

__all__ = ["Case", "dense_results", "make_case", "torch_results", "with_gradients"]


@dataclass(frozen=True)
class Case:
    """Tensors of a call.

    Args:
        bases: leaves that own the memory of query, key and value; some require gradients.
        query, key, value: the bases, or views of them.
        dout, dlse: gradients that arrive, [B, Hq, L, Ev] and [B, Hq, L]; None where nothing does.
    """

    configuration: Configuration
    bases: dict[str, Tensor]
    query: Tensor
    key: Tensor
    value: Tensor
    score: Mod | None
    mask: Mod | None
    dout: Tensor | None
    dlse: Tensor | None


def make_case(configuration: Configuration) -> Case:
    """Draw the values; the number of the configuration is the seed."""
    generator = torch.Generator().manual_seed(configuration.number)
    sizes = configuration.sizes
    score, mask = configuration.score, configuration.mask
    shapes = {
        "q": (sizes.batch, sizes.heads, sizes.q_length, configuration.head_dim),
        "k": (configuration.kv_batch, sizes.kv_heads, sizes.kv_length, configuration.head_dim),
        "v": (
            configuration.kv_batch,
            sizes.kv_heads,
            sizes.kv_length,
            configuration.value_head_dim,
        ),
    }
    bases, views = {}, {}
    for (name, shape), memory in zip(shapes.items(), configuration.memory, strict=True):
        bases[name], views[name] = _laid_out(
            shape, memory, generator, name in configuration.wanted, score == "big_scores"
        )
    out_shape = (*shapes["q"][:3], configuration.value_head_dim)
    dout = torch.randn(out_shape, generator=generator, dtype=torch.float64)
    if configuration.expanded_dout:
        dout = torch.full((), 0.75, dtype=torch.float64).expand(out_shape)
    dlse = torch.randn(out_shape[:3], generator=generator, dtype=torch.float64)
    return Case(
        configuration,
        bases,
        views["q"],
        views["k"],
        views["v"],
        SCORE_MODS[score].make(sizes, generator, torch.float64) if score else None,
        MASK_MODS[mask].make(sizes, generator, torch.float64) if mask else None,
        dout if configuration.arrives != "lse" else None,
        dlse if configuration.arrives != "out" else None,
    )


def _laid_out(
    shape: tuple[int, int, int, int],
    memory: Memory,
    generator: torch.Generator,
    wanted: bool,
    on_grid: bool,
) -> tuple[Tensor, Tensor]:
    """A leaf, and a view of it of this shape.

    Args:
        wanted: the leaf requires a gradient.
        on_grid: multiples of 1/64: dot products are exact, whatever the order of their sums.
    """
    batch, heads, length, dim = shape

    def leaf(*sizes: int) -> Tensor:
        values = torch.randn(sizes, generator=generator, dtype=torch.float64)
        if on_grid:
            values = (values * 64).round() / 64
        return values.requires_grad_(wanted)

    if memory == "transposed":
        base = leaf(batch, length, heads, dim)
        return base, base.transpose(1, 2)
    if memory == "expanded_batch":
        base = leaf(1, heads, length, dim)
        return base, base.expand(shape)
    if memory == "expanded_heads":
        base = leaf(batch, 1, length, dim)
        return base, base.expand(shape)
    if memory == "every_second":
        base = leaf(batch, heads, length, 2 * dim + 1)
        return base, base[..., 1::2]
    if memory == "column":
        base = leaf(batch, heads, dim, length)
        return base, base.transpose(2, 3)
    base = leaf(*shape)
    return base, base


def with_gradients(
    case: Case, forward: Forward, score: Mod | None, *, missing_is_zero: bool
) -> Results:
    """Add the gradients of the bases and of the score mod's learned leaves."""
    learned = score.learned if score is not None else {}
    bases = {f"d{name}": base for name, base in case.bases.items() if base.requires_grad}
    inputs = bases | learned
    if not inputs:
        assert not forward.out.requires_grad
        return Results(forward)
    grads = gradients(forward, inputs, case.dout, case.dlse, missing_is_zero=missing_is_zero)
    if case.score is not None:
        # A widened table's gradient is compared as its owner would get it: cast once.
        for name, leaf in case.score.learned.items():
            grads[name] = grads[name].to(leaf.dtype)
    return Results(forward, grads)


def _widened(score: Mod | None) -> Mod | None:
    """The same values in float64 tables, so that the oracle sums their gradients in float64."""
    if score is None:
        return None
    leaves = {
        name: leaf.detach().double().requires_grad_() if leaf.requires_grad else leaf
        for name, leaf in score.leaves.items()
    }
    return score.with_leaves(leaves)


def live_pairs(case: Case) -> Tensor | None:
    """Bool [B', H', L, S] by the mask function, or None without one."""
    if case.mask is None:
        return None
    c = case.configuration
    return dense_mask(
        case.mask.function(), c.mask_batch, c.mask_heads, c.sizes.q_length, c.sizes.kv_length
    )


def dense_results(case: Case) -> Results:
    """Oracle (a)."""
    score = _widened(case.score)
    forward = dense_attention(
        case.query,
        case.key,
        case.value,
        score.function() if score is not None else None,
        live_pairs(case),
        case.configuration.scale,
    )
    return with_gradients(case, forward, score, missing_is_zero=True)


def torch_results(case: Case) -> tuple[Results, str]:
    """Oracle (b), and the reason if it gives no gradients.

    Raises:
        NotTaken: if torch gives not even outputs.
    """
    score = _widened(case.score)
    mask: Callable[..., Any] | None = case.mask.function() if case.mask is not None else None
    tensors = (case.query, case.key, case.value, score, mask, case.configuration.scale)
    try:
        forward = torch_attention(*tensors)
    except NotTaken as reason:
        with torch.no_grad():
            return Results(torch_attention(*tensors, needs_grad=False)), str(reason)
    return with_gradients(case, forward, score, missing_is_zero=True), ""
