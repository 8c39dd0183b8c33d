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
from anyflex.runtime.readable import PLAIN

__all__ = ["CURE", "Usual", "are_aligned", "as_saved", "check_like", "facts_of"]

CURE = (
    " Forward saved it: a hook on saved tensors must give back what it was given, and .data must "
    "not be assigned between forward and backward."
)

_Facts = tuple[torch.Size, torch.dtype, torch.device, tuple[int, ...], int]
"""What a kernel relies on of a tensor: shape, dtype, device, strides, and by how many bytes its
address is more than a multiple of 16. Equal facts, equal code."""
Usual = tuple[Sequence[torch.Size], Sequence[torch.dtype], torch.device]
"""Shapes, dtypes and the device of tensors that are contiguous and begin at multiples of 16."""


def are_aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors are contiguous and begin at multiples of 16 bytes."""
    for tensor in tensors:  # noqa: SIM110  a generator costs more than what it asks
        if tensor.data_ptr() & 15 or not tensor.is_contiguous():
            return False
    return True


def facts_of(tensors: Sequence[Tensor]) -> list[_Facts]:
    """Return each tensor's facts."""
    return [(t.shape, t.dtype, t.device, t.stride(), t.data_ptr() & 15) for t in tensors]


def as_saved(
    tensors: Sequence[Tensor], facts: Usual | list[_Facts], name: Callable[[int], str]
) -> tuple[Sequence[Tensor], bool]:
    """Return the tensors, laid out as they were saved, for a hook may move them; and whether all
    of them are known to lie inside of their memory (`anyflex.runtime.readable`).

    Args:
        tensors: what autograd has unpacked.
        facts: of what was saved: `facts_of` it, or less where it was all usual.
        name: says what the tensor at a position is, for messages.

    Raises:
        ArgumentError: one has another shape, layout or device.
        ArgumentTypeError: one has another dtype.
    """
    if isinstance(facts, tuple):
        if _are_usual(tensors, *facts):
            return tensors, True
        shapes, dtypes, device = facts
        facts = [
            (shape, dtype, device, torch.empty(shape, device="meta").stride(), 0)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
    try:
        if facts_of(tensors) == facts:
            return tensors, False
    except RuntimeError:  # torch's answer where there are no strides, or no storage
        pass
    found = []
    for position, (tensor, fact) in enumerate(zip(tensors, facts, strict=True)):
        shape, dtype, device, stride, odd = fact
        check_like(name(position), tensor, shape, dtype, device, CURE)
        if tensor.stride() != stride or (not odd and _is_odd(tensor)):
            tensor = _laid_out(tensor, stride)
        found.append(tensor)
    return found, False


def _are_usual(
    tensors: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> bool:
    """Whether the tensors still are what was saved, as plain ones, and lie inside of their memory:
    in one pass, for every backward comes here."""
    try:
        for tensor, shape, dtype in zip(tensors, shapes, dtypes, strict=True):
            # FakeTensor warns when it is asked for its address.
            if type(tensor) not in PLAIN or tensor.shape != shape or tensor.dtype is not dtype:
                return False
            begin = tensor.data_ptr()
            if not begin or begin & 15 or not tensor.is_contiguous() or tensor.device != device:
                return False
            storage = tensor.untyped_storage()
            if begin + tensor.nbytes > storage.data_ptr() + len(storage):
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


def _is_odd(tensor: Tensor) -> bool:
    try:
        return bool(tensor.data_ptr() & 15)
    except RuntimeError:  # without storage, which the check of what backward reads tells
        return False


def _laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Copy a tensor into new memory with these strides."""
    once = tensor
    if tensor.numel():
        for dim, step in enumerate(stride):
            if step == 0:  # what was expanded is one element, which can be written once
                once = once.narrow(dim, 0, 1)
    made = torch.empty_strided(once.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(once).expand(tensor.shape)
