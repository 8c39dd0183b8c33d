"""Checks of the saved tensors that backward is given.

A hook on saved tensors (`torch.autograd.graph.saved_tensors_hooks`), or an assignment to `.data`,
may put another tensor in a saved one's place, and kernels read by address as what was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from anyflex.errors import ArgumentError, ArgumentTypeError
from anyflex.tensors.storage_checks import PLAIN, check_readable

__all__ = ["CURE", "Facts", "as_saved", "check_like", "facts_of"]

CURE = (
    " Forward saved it: a hook on saved tensors must give back what it was given, and .data must "
    "not be assigned between forward and backward."
)

Facts = tuple[torch.Size, torch.dtype, torch.device, tuple[int, ...], int]
"""Properties of a tensor that a kernel relies on: shape, dtype, device, strides, and the address
modulo 16."""


def facts_of(tensor: Tensor) -> Facts:
    """Return a tensor's facts."""
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride(), tensor.data_ptr() & 15


def as_saved(
    tensors: Sequence[Tensor], facts: Sequence[Facts], name: Callable[[int], str]
) -> list[Tensor]:
    """Return the tensors that autograd has unpacked, laid out as they were saved: a hook may have
    moved them. Whether they lie inside of their memory `check_backward` looks.

    Args:
        facts: of what was saved.
        name: says what the tensor at a position is, for messages.

    Raises:
        ArgumentError: one has another shape, layout or device, or can't be read.
        ArgumentTypeError: one has another dtype.
    """
    found = list(tensors)
    for position, (tensor, wanted) in enumerate(zip(tensors, facts, strict=True)):
        try:
            # FakeTensor warns when it is asked for its address.
            if type(tensor) in PLAIN and facts_of(tensor) == wanted and not tensor.is_neg():
                continue
        except RuntimeError:  # torch's answer where there are no strides, or no storage
            pass
        shape, dtype, device, stride, _ = wanted
        check_like(name(position), tensor, shape, dtype, device, CURE)
        check_readable(name(position), tensor)
        found[position] = _laid_out(tensor, stride)
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
    if tensor.is_nested:
        _refuse(ArgumentError, name, "be one dense tensor", "a nested one", cure)
    if tensor.layout is not torch.strided:
        _refuse(ArgumentError, name, "be dense (layout torch.strided)", tensor.layout, cure)
    if tensor.shape != torch.Size(shape):
        _refuse(ArgumentError, name, f"have shape {list(shape)}", list(tensor.shape), cure)
    if tensor.dtype is not dtype:
        _refuse(ArgumentTypeError, name, f"have dtype {dtype}", tensor.dtype, cure)
    if tensor.device != device:
        _refuse(ArgumentError, name, f"be on {device}", tensor.device, cure)


def _refuse(
    kind: type[ArgumentError | ArgumentTypeError], name: str, wanted: str, got: Any, cure: str
) -> NoReturn:
    raise kind(f"{name} must {wanted}, got {got}.{cure}")


def _laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Copy a tensor into new memory with these strides."""
    once = tensor
    if tensor.numel():
        for dim, step in enumerate(stride):
            if step == 0:  # what was expanded is one element, which can be written once
                once = once.narrow(dim, 0, 1)
    made = torch.empty_strided(once.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(once).expand(tensor.shape)
