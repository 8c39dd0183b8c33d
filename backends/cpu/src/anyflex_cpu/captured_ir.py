"""Reads of captured tensors: facts about one in a function, bounded indices, gathers.

An index in -N..-1 wraps once, then it is clamped, so that no value of it reads outside. A tensor
without elements is replaced by one zero with strides of 0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from anyflex_cpu import structs
from anyflex_cpu.llvm_text import LANES, WIDTHS, Emitter, Value
from anyflex_cpu.narrow_floats_ir import from_memory

__all__ = [
    "MEMORY_TYPES",
    "Index",
    "Table",
    "bounded",
    "decode",
    "element_offset",
    "field",
    "first_indices",
    "gather",
    "open_table",
    "read",
    "tile_field",
]

MEMORY_TYPES = {
    torch.bool: "i8",
    torch.uint8: "i8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "i16",
    torch.bfloat16: "i16",
    torch.float32: "float",
    torch.float64: "double",
}
"""Type of an element in memory."""

_ZERO = "@af.zero"
_STRIDE = ctypes.sizeof(structs.Captured)


class Table(NamedTuple):
    """A captured tensor in a function, in one lane: base address; sizes, last indices (0 for a
    size of 0) and strides as i64, one per dimension."""

    dtype: torch.dtype
    data: str
    sizes: tuple[Value, ...]
    lasts: tuple[Value, ...]
    strides: tuple[Value, ...]


class Index(NamedTuple):
    """One index of a read.

    Args:
        value: any integer type.
        signed: how it is extended.
        wraps: it may be negative.
    """

    value: Value
    signed: bool
    wraps: bool


def open_table(e: Emitter, captured: str, position: int, dtype: torch.dtype, rank: int) -> Table:
    """Load what the af_captured at `position` says; `e` has one lane."""
    at = position * _STRIDE
    data = field(e, captured, at + structs.Captured.data.offset, "ptr")
    if rank == 0:
        return Table(dtype, data.text, (), (), ())
    e.module.globals[_ZERO] = f"{_ZERO} = internal constant i64 0, align 8"
    size = field(e, captured, at + structs.Captured.size.offset, "ptr").text
    stride = field(e, captured, at + structs.Captured.stride.offset, "ptr").text
    zero, one = e.constant("i64", 0), e.constant("i64", 1)
    sizes = [field(e, size, 8 * dim, "i64") for dim in range(rank)]
    empty = e.compare("eq", sizes[0], zero)
    for other in sizes[1:]:
        empty = e.op("or", empty, e.compare("eq", other, zero))
    base = e.put(f"select {empty}, ptr {_ZERO}, {data}", "ptr")
    lasts = [e.intrinsic("smax", e.sub(n, one), zero) for n in sizes]
    strides = [e.select(empty, zero, field(e, stride, 8 * dim, "i64")) for dim in range(rank)]
    return Table(dtype, base.text, tuple(sizes), tuple(lasts), tuple(strides))


def field(e: Emitter, base: str, offset: int, type_: str) -> Value:
    """Load a field of a struct."""
    if offset:
        base = e.address(base, "i8", e.constant("i64", offset))
    return e.load(base, type_, 4 if type_ == "i32" else 8)


def tile_field(e: Emitter, member: str, type_: str) -> Value:
    """Load a field of the function's tile."""
    return field(e, "%tile", getattr(structs.Tile, member).offset, type_)


def first_indices(e: Emitter, inputs: str) -> list[Value]:
    """The tile's first b, h, q_idx and kv_idx with the offsets of `inputs`, i64."""
    offset = structs.ModInputs.offset.offset
    return [
        e.add(tile_field(e, name, "i64"), field(e, inputs, offset + 8 * i, "i64"))
        for i, name in enumerate(("b", "h", "q", "kv"))
    ]


def bounded(e: Emitter, index: Index, size: Value, last: Value) -> tuple[Value, Value]:
    """(index in 0..size-1, whether it was outside of -size..size-1); all of one type."""
    value, kind = index.value, index.value.type
    if not index.wraps:
        inside = e.intrinsic("umin", value, last)
        return inside, e.compare("uge", value, size)
    outside = e.compare("uge", e.add(value, size), e.add(size, size))
    zero = e.constant(kind, 0)
    wrapped = e.select(e.compare("slt", value, zero), e.add(value, size), value)
    return e.intrinsic("smax", e.intrinsic("smin", wrapped, last), zero), outside


def element_offset(e: Emitter, table: Table, dim: int, index: Index) -> tuple[Value, Value]:
    """(what one index adds to the element's offset, i64, whether it was outside); of one lane."""
    wide = index._replace(value=e.resize(index.value, "i64", signed=index.signed))
    place, outside = bounded(e, wide, table.sizes[dim], table.lasts[dim])
    return e.mul(place, table.strides[dim]), outside


def read(e: Emitter, table: Table, indices: Sequence[Index]) -> tuple[Value, list[Value]]:
    """(element, for each dimension whether the index was outside); of one lane."""
    offset = e.constant("i64", 0)
    beyond = []
    for dim, index in enumerate(indices):
        share, outside = element_offset(e, table, dim, index)
        offset = e.add(offset, share)
        beyond.append(outside)
    type_ = MEMORY_TYPES[table.dtype]
    raw = e.load(e.address(table.data, type_, offset), type_, WIDTHS[type_] // 8)
    return decode(e, raw, table.dtype), beyond


def gather(e: Emitter, table: Table, offset: Value) -> Value:
    """Raw elements at `offset` elements from the base; of `LANES` lanes."""
    type_ = MEMORY_TYPES[table.dtype]
    pointers = e.put(f"getelementptr {type_}, ptr {table.data}, {offset}", "ptr")
    suffix = {"float": "f32", "double": "f64"}.get(type_, type_)
    name = f"llvm.masked.gather.v{LANES}{suffix}.v{LANES}p0"
    full, mask = e.full(type_), e.full("i1")
    e.module.declare(name, full, [pointers.full_type, "i32", mask, full])
    everywhere = e.constant("i1", True)
    return e.put(
        f"call {full} @{name}({pointers}, i32 {WIDTHS[type_] // 8}, {everywhere}, {full} poison)",
        type_,
    )


def decode(e: Emitter, raw: Value, dtype: torch.dtype) -> Value:
    """Convert an element of memory to its type in registers."""
    if dtype is torch.bool:
        return e.compare("ne", raw, e.constant("i8", 0))
    if dtype in (torch.float16, torch.bfloat16):
        return from_memory(e, raw, dtype)
    return raw
