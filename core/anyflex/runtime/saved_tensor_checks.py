"""What backward is given for the tensors that forward saved.

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

__all__ = ["CURE", "Contiguous", "are_contiguous", "as_saved", "check_like", "facts_of"]

CURE = (
    " Forward saved it: a hook on saved tensors must give back what it was given, and .data must "
    "not be assigned between forward and backward."
)

_Facts = tuple[torch.Size, torch.dtype, torch.device, tuple[int, ...], int, bool]
"""What a kernel relies on of a tensor: shape, dtype, device, strides, by how many bytes its
address exceeds a multiple of 16, and whether it has torch's negative bit. Equal facts, equal
code."""
Contiguous = tuple[Sequence[torch.Size], Sequence[torch.dtype], torch.device]
"""Shapes, dtypes and the device of tensors that `are_contiguous`."""


def are_contiguous(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors are contiguous, begin at multiples of 16 bytes, and lie in memory as
    they are, without the negative bit."""
    for tensor in tensors:
        if tensor.data_ptr() & 15 or not tensor.is_contiguous() or tensor.is_neg():
            return False
    return True


def facts_of(tensors: Sequence[Tensor]) -> list[_Facts]:
    """Return each tensor's facts."""
    return [
        (t.shape, t.dtype, t.device, t.stride(), t.data_ptr() & 15, t.is_neg()) for t in tensors
    ]


def as_saved(
    tensors: Sequence[Tensor], facts: Contiguous | list[_Facts], name: Callable[[int], str]
) -> tuple[Sequence[Tensor], bool]:
    """Return the tensors, laid out as they were saved, for a hook may move them; and whether all
    of them are known to lie inside of their memory (`anyflex.tensors.storage_checks`).

    Args:
        tensors: what autograd has unpacked.
        facts: of what was saved: `facts_of` it, or less where all of it `are_contiguous`.
        name: says what the tensor at a position is, for messages.

    Raises:
        ArgumentError: one has another shape, layout or device, or can't be read.
        ArgumentTypeError: one has another dtype.
    """
    if isinstance(facts, tuple):
        if _are_unchanged(tensors, *facts):
            return tensors, True
        shapes, dtypes, device = facts
        facts = [
            (shape, dtype, device, torch.empty(shape, device="meta").stride(), 0, False)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
    elif all(type(tensor) in PLAIN for tensor in tensors):
        try:
            if facts_of(tensors) == facts:
                return tensors, False
        except RuntimeError:  # torch's answer where there are no strides, or no storage
            pass
    found = []
    for position, (tensor, fact) in enumerate(zip(tensors, facts, strict=True)):
        shape, dtype, device, stride, odd, negative = fact
        check_like(name(position), tensor, shape, dtype, device, CURE)
        check_readable(name(position), tensor)
        moved = not odd and tensor.numel() and tensor.data_ptr() & 15
        if moved or tensor.stride() != stride or tensor.is_neg() != negative:
            tensor = _laid_out(tensor, stride)
        found.append(tensor)
    return found, True


def _are_unchanged(
    tensors: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> bool:
    """Whether the tensors `are_contiguous` of these shapes, dtypes and device, and are plain ones
    that lie inside of their memory: in one pass, for every backward comes here."""
    try:
        for tensor, shape, dtype in zip(tensors, shapes, dtypes, strict=True):
            # FakeTensor warns when it is asked for its address.
            if type(tensor) not in PLAIN or tensor.shape != shape or tensor.dtype is not dtype:
                return False
            begin = tensor.data_ptr()
            if begin & 15 or not tensor.is_contiguous() or tensor.device != device:
                return False
            size = tensor.nbytes
            storage = tensor.untyped_storage()
            if (not begin and size) or begin + size > storage.data_ptr() + len(storage):
                return False
            if tensor.is_neg():
                return False
    except RuntimeError:  # as above
        return False
    return True


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
