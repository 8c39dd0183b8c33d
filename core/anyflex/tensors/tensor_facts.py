"""Run-time facts of tensors, reduced to the classes that a spec knows."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from anyflex.tensors.storage_checks import (
    PLAIN,
    check_captured,
    check_readable,
    last_element,
)
from anyflex.tensors.torch_versions import dynamo_constant, fp32_setting

__all__ = [
    "Alignment",
    "architecture",
    "determinism",
    "empty_dense",
    "fp32_precision",
    "memories",
    "memory",
    "q_class",
]


Alignment = Literal["aligned", "strided", "scattered"]
"""Class of one tensor's memory: ``aligned`` has last stride 1, a 16-byte aligned pointer and all
other strides multiples of 16 bytes; ``strided`` has last stride 1; ``scattered`` has not."""


def memory(tensor: Tensor, name: str = "") -> tuple[Alignment, bool]:
    """Return the class of the tensor's memory (`Alignment`), and whether the
    offset of every element fits a signed 32-bit integer.

    Raises:
        ArgumentError: with a `name` to tell, the tensor can't be read
            (`anyflex.tensors.storage_checks`).
    """
    size = tensor.element_size()
    begin = tensor.data_ptr()
    odd = begin & 15
    scattered = False
    if tensor.is_contiguous():
        last = tensor.numel() - 1
        odd |= tensor.shape[3] * size & 15
    else:
        last, steps, scattered = _layout(tensor.shape, tensor.stride())
        odd |= steps * size & 15
    if name:
        storage = tensor.untyped_storage()
        if not begin or begin + (last + 1) * size > storage.data_ptr() + len(storage):
            check_readable(name, tensor)
    narrow = last < 2**31
    if scattered:
        return "scattered", narrow
    return "strided" if odd else "aligned", narrow


@functools.lru_cache(maxsize=1024)
def _layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, bool]:
    """Number of elements from the first to the last, the outer strides' bits, and whether the last
    dimension isn't contiguous."""
    *outer, inner = strides
    # A multiple of a power of two has zero low bits, and so has the bitwise or of several.
    return (
        last_element(shape, strides),
        functools.reduce(operator.or_, outer),
        inner != 1 and shape[-1] > 1,
    )


def memories(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: tuple[Tensor, ...],
    names: tuple[Sequence[str], Sequence[str]],
) -> tuple[tuple[Alignment, bool], ...] | None:
    """Key that, together with dtype and head dims, determines `memory` of all three: `memory`
    itself, or None for the usual case.

    Args:
        captured, names: tensors that mods read, which are checked too; as for `check_captured`.

    Raises:
        ArgumentError: one of them can't be read (`anyflex.tensors.storage_checks`).
    """
    for tensor in captured:
        # `check_captured` of the usual tensor, without a call.
        try:
            if type(tensor) in PLAIN and (begin := tensor.data_ptr()) and tensor.is_contiguous():
                storage = tensor.untyped_storage()
                if begin + tensor.nbytes <= storage.data_ptr() + len(storage):
                    continue
        except RuntimeError:  # torch's error where there is no storage, which the check reports
            pass
        check_captured(captured, names)
        break
    try:
        query_at, key_at, value_at = query.data_ptr(), key.data_ptr(), value.data_ptr()
    except RuntimeError:  # torch's error where there is no storage
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            check_readable(name, tensor)
        raise
    if (
        query_at
        and key_at
        and value_at
        and not (query_at | key_at | value_at) & 15
        and query.is_contiguous()
        and key.is_contiguous()
        and value.is_contiguous()
    ):
        # `check_readable` of all three, inlined.
        queries, keys, values = (
            query.untyped_storage(),
            key.untyped_storage(),
            value.untyped_storage(),
        )
        query_bytes, key_bytes, value_bytes = query.nbytes, key.nbytes, value.nbytes
        if (
            (query_bytes | key_bytes | value_bytes) < 2**31
            and query_at + query_bytes <= queries.data_ptr() + len(queries)
            and key_at + key_bytes <= keys.data_ptr() + len(keys)
            and value_at + value_bytes <= values.data_ptr() + len(values)
        ):
            return None
    return memory(query, "query"), memory(key, "key"), memory(value, "value")


def q_class(length: int) -> str:
    return "long" if length > 64 else "one" if length == 1 else "short"


def determinism() -> str:
    """Return torch's mode at this moment."""
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"


_PRECISIONS = {"none": "highest", "ieee": "highest", "tf32": "high", "bf16": "medium"}
"""torch's setting of a backend -> setting of `torch.set_float32_matmul_precision`."""


# A compiled program keeps the precision that was allowed when it was compiled. torch.compile
# compiles again where CUDA's allowed precision has changed.
@dynamo_constant
def fp32_precision(dtype: torch.dtype, device_type: str) -> str:
    """Return to what torch allows products of float32 on the device to be rounded at this moment:
    a word of `torch.set_float32_matmul_precision`; "" for other types.

    `torch.get_float32_matmul_precision` doesn't know what was set by `torch.backends`, and raises
    where that allows more. Both ways set the following. Devices other than CUDA's have no setting
    of their own, but oneDNN's.
    """
    if dtype is not torch.float32:
        return ""
    setting = fp32_setting("cuda" if device_type == "cuda" else "mkldnn", "matmul")
    # Unknown settings of newer torch versions count as "highest".
    return _PRECISIONS.get(setting, "highest")


_APPLE_FAMILIES = {
    "M1": "apple7", "M2": "apple8", "M3": "apple9", "M4": "apple9", "M5": "apple10",
    "A14": "apple7", "A15": "apple8", "A16": "apple8", "A17": "apple9", "A18": "apple9",
    "A19": "apple10",
}  # fmt: skip
"""Apple's chip -> Metal's name of its GPU family."""


@functools.lru_cache(maxsize=64)
def architecture(device: torch.device) -> str:
    """The device's architecture, or "" where torch has no name for it.

    An Apple GPU's is Metal's family, ``"apple7"`` (M1) to ``"apple10"`` (M5); a chip that came
    later has its own name, ``"apple-m6-pro"``.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip is not None:
            return str(properties.gcnArchName)
        return f"sm_{properties.major}{properties.minor}"
    if device.type == "mps" and torch.backends.mps.is_available():
        return _apple_family(torch.backends.mps.get_name())
    return ""


def _apple_family(chip: str) -> str:
    """Return the GPU family of ``"Apple M4 Pro"``, or an unknown chip's name as one word."""
    known = re.match(r"Apple ([AM]\d+)\b", chip)
    family = _APPLE_FAMILIES.get(known[1]) if known else None
    return family or "-".join(re.findall(r"[a-z0-9]+", chip.lower()))


def empty_dense(tensor: Tensor, last: int | None = None) -> Tensor:
    """Allocate like `tensor` (its last dimension resized to `last`): dense, in its dimension
    order, last stride 1. A stride 0 is never copied: it would alias what are distinct elements."""
    contiguous = tensor.is_contiguous()
    if contiguous and last is None:
        # Where a size is 1 the tensor's own stride can be anything.
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    shape: tuple[int, ...] = tensor.shape
    if last is not None:
        shape = (*shape[:-1], last)
    if contiguous:
        return tensor.new_empty(shape)
    strides = tensor.stride()
    # Under torch.compile sizes may be symbols, which have no hash.
    dense = _dense if type(tensor) in PLAIN else _dense.__wrapped__
    return tensor.new_empty_strided(shape, dense(shape, strides))


@functools.lru_cache(maxsize=1024)
def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a dense tensor of that shape, whose dimensions lie as with those strides."""
    rank = len(shape)
    # The outermost dimension has the largest stride; expanded ones go outside of all.
    order = sorted(range(rank - 1), key=lambda d: (1 if strides[d] != 0 else 0, -strides[d], d))
    dense = [1] * rank
    step = shape[-1]
    for d in reversed(order):
        dense[d] = step
        step *= shape[d]
    return tuple(dense)
