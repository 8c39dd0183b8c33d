"""Mask mods in the forms that a block mask holds: traced, opaque, rebuilt, or still to be
assigned."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from anyflex.errors import BlockMaskError, ModTraceError
from anyflex.mod_graph.evaluate import evaluate
from anyflex.mod_graph.graph import parse_graph
from anyflex.tracing.mod_types import MaskMod
from anyflex.tracing.trace import TracedMod

__all__ = [
    "RebuiltMaskMod",
    "captured_name",
    "check_captured",
    "check_reads",
    "moved",
    "sliced_mask_mod",
    "trace_mask_mod",
]


class RebuiltMaskMod:
    """A mask mod made from its traced form, after a copy, a move, a pickle or an export.

    It computes what the user's function did, on tensors of indices of any shapes that broadcast.
    """

    def __init__(self, traced: TracedMod) -> None:
        self.traced = traced

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        graph = parse_graph(self.traced.text)
        return evaluate(
            graph.nodes,
            (graph.output,),
            inputs={"b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx},
            captured=self.traced.captured,
            ints=self.traced.ints,
            floats=self.traced.floats,
            read=read_within,
        )[0]

    def __repr__(self) -> str:
        return f"RebuiltMaskMod({self.traced.text!r})"


def read_within(table: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """Read a captured tensor. The bounds keep reads of dead elements from raising."""
    # Plain indexing, which vmap and the tracer follow.
    bounded = (i.clamp(-size, size - 1) for i, size in zip(indices, table.shape, strict=True))
    return table[tuple(bounded)]


def sliced_mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> NoReturn:
    """Stand in for the mask mod of a slice whose indices would have to be shifted."""
    raise BlockMaskError(
        "this block mask is a slice, and its mask_mod would see shifted indices: assign "
        "`mask.mask_mod = ...` with a function for the slice's own indices"
    )


def trace_mask_mod(
    function: Any, device: torch.device | None = None
) -> tuple[TracedMod | None, MaskMod | None]:
    """Return (traced, None), or (None, function) where only vmap can run it.

    Args:
        device: where such a function runs; None means the CPU.

    Raises:
        BlockMaskError: a wrong signature or result.
        ModTraceError: the function is not a mod: it branches, reads values, is not pure.
    """
    if isinstance(function, RebuiltMaskMod):
        return function.traced, None
    from anyflex.tracing.trace_cache import traced as trace_with_names

    try:
        traced = trace_with_names(function, "mask", torch.float32, torch.device("cpu"))
    except ModTraceError as error:
        if not error.pure:
            raise
        from anyflex.tracing.vmapped_mods import run_mask_once

        with torch.no_grad():
            run_mask_once(function, device)
        return None, function
    # A mask's bools have no gradient. A detached tensor shares its values.
    captured = [tensor.detach() if tensor.requires_grad else tensor for tensor in traced.captured]
    return dataclasses.replace(traced, captured=captured), None


def captured_name(traced: TracedMod, position: int) -> str:
    """Return the name of a captured tensor for messages."""
    name = traced.names[position]
    return f"captured tensor '{name}'" if name else f"captured tensor {position}"


def check_reads(traced: TracedMod) -> None:
    """Check the tensors that a traced mask mod reads, after a map over a pytree, against its text.
    Raises as `check_captured`."""
    for position, facts in parse_graph(traced.text).loads().items():
        check_captured(position, traced.captured[position], *facts)


def check_captured(position: int, tensor: Any, dtype: torch.dtype, rank: int) -> None:
    """Check a tensor that a traced mask mod reads, by its position, against its traced facts.

    Raises:
        BlockMaskError: it isn't a tensor, or has another dtype or rank.
    """
    if isinstance(tensor, Tensor):
        if tensor.dtype is dtype and tensor.dim() == rank:
            return
        got = f"dtype {tensor.dtype} and {tensor.dim()} dimensions"
    else:
        got = f"a {type(tensor).__name__}"
    raise BlockMaskError(
        f"captured tensor {position} of block_mask's mask mod must have dtype {dtype} and {rank} "
        f"dimensions, as it had when the mask was built, got {got}: build the mask anew of it"
    )


def moved(traced: TracedMod, device: torch.device) -> TracedMod:
    """Return the traced mod with its captured tensors on `device`."""
    return TracedMod(
        traced.text,
        [tensor.to(device) for tensor in traced.captured],
        list(traced.ints),
        list(traced.floats),
        list(traced.names),
        traced.depends_on_facts,
    )
