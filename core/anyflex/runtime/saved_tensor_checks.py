"""Checks of the tensors that backward is given, before a kernel reads them by address.

A hook on saved tensors (`torch.autograd.graph.saved_tensors_hooks`), or an assignment to `.data`,
may put another tensor in a saved one's place, and kernels read by address as what was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anyflex.errors import ArgumentError, ArgumentTypeError
from anyflex.tensors.storage_checks import PLAIN, bytes_of, check_captured, check_readable

if TYPE_CHECKING:
    from anyflex.contract.call import Call, GradInputs, Saved

__all__ = [
    "CURE",
    "Layout",
    "as_saved",
    "check_backward",
    "check_like",
    "kept_name",
    "layout_of",
]

CURE = (
    " Forward saved it: a hook on saved tensors must give back what it was given, and .data must "
    "not be assigned between forward and backward."
)

Layout = tuple[torch.Size, torch.dtype, tuple[int, ...] | None, bool, int]
"""Properties of a tensor that a kernel relies on: shape, dtype, strides (None where it is
contiguous), whether its address is a multiple of 16, and the bytes from its first element to the
end of its last."""


def layout_of(tensor: Tensor) -> Layout:
    """Return a tensor's layout."""
    strides = None if tensor.is_contiguous() else tensor.stride()
    return tensor.shape, tensor.dtype, strides, not tensor.data_ptr() & 15, bytes_of(tensor)


def as_saved(
    tensors: Sequence[Tensor],
    layouts: Sequence[Layout],
    device: torch.device,
    name: Callable[[int], str],
) -> list[Tensor]:
    """Return the tensors that autograd has unpacked, laid out as they were saved: a hook may have
    moved them, and their storages may have been resized since.

    Args:
        layouts: of what was saved.
        device: of all of them.
        name: says what the tensor at a position is, for messages.

    Raises:
        ArgumentError: one has another shape, layout or device, or can't be read.
        ArgumentTypeError: one has another dtype.
    """
    found = list(tensors)
    for position, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True)):
        shape, dtype, strides, aligned, size = layout
        try:
            # The last condition is `check_readable`'s, without its two function calls a tensor.
            if (
                type(tensor) in PLAIN  # FakeTensor warns when it is asked for its address
                and tensor.shape == shape
                and tensor.dtype is dtype
                and tensor.device == device
                and (tensor.is_contiguous() if strides is None else tensor.stride() == strides)
                and not ((begin := tensor.data_ptr()) & 15 and aligned)
                and not tensor.is_neg()
                and begin + size
                <= (storage := tensor.untyped_storage()).data_ptr() + storage.nbytes()
            ):
                continue
        except RuntimeError:  # torch's answer where there are no strides, or no storage
            pass
        check_like(name(position), tensor, shape, dtype, device, CURE)
        check_readable(name(position), tensor)
        found[position] = _laid_out(tensor, strides)
    return found


def check_like(
    name: str,
    tensor: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    cure: str = "",
) -> None:
    """Check a tensor that a kernel reads without looking.

    Raises:
        ArgumentError: it has another shape, layout or device.
        ArgumentTypeError: it has another dtype.
    """
    kind: type[ArgumentError | ArgumentTypeError] = ArgumentError
    got: object
    if tensor.is_nested:
        wanted, got = "be one dense tensor", "a nested one"
    elif tensor.layout is not torch.strided:
        wanted, got = "be dense (layout torch.strided)", tensor.layout
    elif tensor.shape != torch.Size(shape):
        wanted, got = f"have shape {list(shape)}", list(tensor.shape)
    elif tensor.dtype is not dtype:
        kind, wanted, got = ArgumentTypeError, f"have dtype {dtype}", tensor.dtype
    elif tensor.device != device:
        wanted, got = f"be on {device}", tensor.device
    else:
        return
    raise kind(f"{name} must {wanted}, got {got}.{cure}")


def _laid_out(tensor: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """Copy a tensor into new memory with these strides, or contiguously."""
    if stride is None:
        return tensor.resolve_neg().clone(memory_format=torch.contiguous_format)
    once = tensor
    if tensor.numel():
        for dim, step in enumerate(stride):
            if step == 0:  # what was expanded is one element, which can be written once
                once = once.narrow(dim, 0, 1)
    made = torch.empty_strided(once.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(once).expand(tensor.shape)


def kept_name(position: int) -> str:
    """Return the name, in messages, of a tensor that the kernel left in forward."""
    return f"tensor {position} of those that the kernel keeps for backward"


def check_backward(call: Call, saved: Saved, grad: GradInputs) -> None:
    """Check the tensors that backward reads: a storage may have been resized since forward. Those
    that autograd saved `as_saved` has checked.

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
        check_captured(call.captured)
    if call.sinks is not None:
        check_readable("sinks", call.sinks)
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
