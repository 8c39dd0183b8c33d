"""Checks that a tensor has the memory that its sizes and strides reach.

Kernels read by address, and torch itself doesn't check: a tensor whose storage was freed or made
smaller would be read past its end, and one that never had any at address 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anyflex.errors import ArgumentError
from anyflex.tensors.torch_versions import is_functional

__all__ = [
    "PLAIN",
    "bytes_of",
    "captured_name",
    "check_captured",
    "check_readable",
    "last_element",
    "why_unreadable",
]

PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors that hold their numbers themselves."""


def check_readable(name: str, tensor: Tensor) -> None:
    """Raise ArgumentError, with `name`, where `why_unreadable` has a reason."""
    if not _is_usual(tensor):
        _refuse(name, tensor)


def check_captured(
    captured: Sequence[Tensor], names: tuple[Sequence[str], Sequence[str]] = ((), ())
) -> None:
    """Check the tensors that mods read.

    Args:
        names: of the score mod's and of the mask mod's in the user's functions; "" or none where
            unknown.

    Raises:
        ArgumentError: one can't be read.
    """
    for position, tensor in enumerate(captured):
        if not _is_usual(tensor):
            _refuse(captured_name(position, names), tensor)


def captured_name(position: int, names: tuple[Sequence[str], Sequence[str]]) -> str:
    """Return the name of a captured tensor in messages; arguments as for `check_captured`."""
    known = [*names[0], *names[1]]
    name = known[position] if position < len(known) else ""
    return f"captured tensor {name!r}" if name else f"captured tensor {position}"


def _is_usual(tensor: Tensor) -> bool:
    """Whether the tensor is a plain one inside its memory."""
    # FakeTensor warns when its address is read.
    if type(tensor) not in PLAIN:
        return False
    try:
        begin = tensor.data_ptr()  # with the tensor's offset in its storage
        if begin == 0:
            return False
        storage = tensor.untyped_storage()
        return begin + bytes_of(tensor) <= storage.data_ptr() + len(storage)
    except RuntimeError:  # torch's error for a BatchedTensor, which has no storage
        return False


def bytes_of(tensor: Tensor) -> int:
    """Number of bytes from a strided tensor's first element to the end of its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    return (last_element(tensor.shape, tensor.stride()) + 1) * tensor.element_size()


def last_element(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Number of elements from the first to the last that a tensor addresses; 0 for one without
    elements."""
    return sum([max(0, size - 1) * step for size, step in zip(shape, strides, strict=True)])


def _refuse(name: str, tensor: Tensor) -> None:
    """Raise ArgumentError if there is a reason."""
    reason = why_unreadable(tensor)
    if reason:
        raise ArgumentError(f"{name} {reason}.")


def why_unreadable(tensor: Tensor) -> str:
    """Return why the tensor's elements can't be read from memory, and the cure, as what follows
    the tensor's name; or "" where they can."""
    if tensor.layout is not torch.strided:
        return (
            f"has layout {tensor.layout}, and kernels read dense tensors (torch.strided): pass "
            "its .to_dense()"
        )
    if tensor.numel() == 0:
        return ""
    if getattr(tensor, "fake_mode", None) is not None:
        return (
            "is a FakeTensor, which holds no numbers, in a call that computes: make every tensor "
            "of the call fake, under one FakeTensorMode, or none"
        )
    kind = type(tensor).__name__
    cure = (
        "its .to_local()"
        if hasattr(tensor, "to_local")
        else "a plain tensor, such as its .clone()"
    )
    none = f"is a {kind} without memory of its own that a kernel could read: pass {cure}"
    try:
        storage, begin = tensor.untyped_storage(), tensor.data_ptr()
    except RuntimeError:  # torch's error where there is no storage
        return none
    # An accelerator's tensors may have no addresses, which is up to its backend.
    if is_functional(tensor) or (begin == 0 and storage.nbytes() and tensor.device.type == "cpu"):
        return none
    last = tensor.storage_offset() + last_element(tensor.shape, tensor.stride())
    end = (last + 1) * tensor.element_size()
    if end > storage.nbytes():
        return (
            f"of shape {list(tensor.shape)} and strides {list(tensor.stride())} needs a storage "
            f"of {end} bytes and has one of {storage.nbytes()}, which was freed or made smaller: "
            "resize it back and fill it, or pass a tensor that was .clone()d before"
        )
    return ""
