"""Checks of the tensors that a backward kernel reads by address."""

from __future__ import annotations

from collections.abc import Sequence

from anyflex.contract.call import Call, GradInputs, Saved
from anyflex.tensors.storage_checks import check_captured, check_readable

__all__ = ["check_backward", "kept_name"]


def kept_name(position: int) -> str:
    """Return the name, in messages, of a tensor that the kernel left in forward."""
    return f"tensor {position} of those that the kernel keeps for backward"


def check_backward(
    call: Call,
    saved: Saved,
    grad: GradInputs,
    names: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> None:
    """Check the tensors that backward reads: a storage may have been resized since forward.

    Args:
        names: as for `check_captured`.

    Raises:
        ArgumentError: a tensor can't be read.
    """
    read = (grad.dout, call.query, call.key, call.value, saved.out, saved.lse)
    for position, tensor in enumerate(read):
        check_readable(_READ_BY_BACKWARD[position], tensor)
    if grad.dlse is not None:
        check_readable("dlse, the gradient that arrives at lse,", grad.dlse)
    if grad.delta is not None:
        check_readable("delta", grad.delta)
    if call.captured:
        check_captured(call.captured, names)
    for position, tensor in enumerate(saved.extras):
        check_readable(kept_name(position), tensor)


_READ_BY_BACKWARD = (
    "dout, the gradient that arrives at out,",
    "query",
    "key",
    "value",
    "out",
    "lse",
)
