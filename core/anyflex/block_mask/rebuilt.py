"""Checks of a block mask's parts that come without the mask that was built of them.

Whoever maps a function over a pytree makes a mask of any leaves, and a compiled or exported
program hands an operation bare tensors. Kernels read them by address, in the form that they trust.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.errors import BlockMaskError
from anyflex.mask_structure.run_checks import check_form, check_values
from anyflex.mask_structure.views_registry import holds_numbers
from anyflex.mod_graph.graph import parse_graph
from anyflex.tensors.symbolic_numbers import NUMBERS
from anyflex.tensors.torch_versions import dispatch_modes
from anyflex.tracing.trace import TracedMod

__all__ = ["can_be_read", "check_captured", "check_reads", "checked_structure"]


def can_be_read(offsets: Any, runs: Any) -> bool:
    """Whether the numbers of both can be looked at: not those of fake tensors, nor inside of a
    transform or of a mode, which sees each look."""
    return (
        dispatch_modes() == 0
        and isinstance(offsets, Tensor)
        and isinstance(runs, Tensor)
        and holds_numbers(offsets)
        and holds_numbers(runs)
    )


def checked_structure(
    offsets: Tensor,
    runs: Tensor,
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    *,
    values: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return offsets and runs, contiguous, after a look at their form.

    Args:
        values: their numbers are looked at too, on the CPU: another device would be waited for.

    Raises:
        BlockMaskError: they aren't those of a mask that was built.
    """
    try:
        check_form(offsets, runs, lengths, block_size)
        offsets, runs = offsets.contiguous(), runs.contiguous()
        if values and offsets.device.type == "cpu":
            used = max(0, int(offsets.view(-1)[-1])) if offsets.numel() else 0
            check_values(offsets, runs[:used], lengths, block_size)
    except BlockMaskError as error:
        raise BlockMaskError(
            f"block_mask holds other tensors than it was built with: {error}. What a "
            "map over a mask's tensors (tree_map) puts in their place, or a caller of a compiled "
            "program, may be copies of them, nothing else."
        ) from None
    return offsets, runs


def check_reads(traced: TracedMod) -> None:
    """Check what a traced mask mod reads against the text that was made of it.

    Raises:
        BlockMaskError: as `check_captured` raises it, or a number is none any more.
    """
    for number in (*traced.ints, *traced.floats):
        if not isinstance(number, NUMBERS):
            raise BlockMaskError(
                "numbers of block_mask's mask mod must be ints and floats, as they were when the "
                f"mask was built, got a {type(number).__name__}: build the mask anew"
            )
    for position, facts in parse_graph(traced.text).loads().items():
        check_captured(position, traced.captured[position], *facts)


def check_captured(position: int, tensor: Any, dtype: torch.dtype, rank: int) -> None:
    """Check a tensor that a traced mask mod reads, by its position, against what was traced.

    Raises:
        BlockMaskError: it is no tensor, or one of another dtype or rank.
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
