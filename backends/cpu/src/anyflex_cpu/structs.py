"""The C ABI's structs (native/include/anyflex_cpu.h): as ctypes classes, and in parts to pack.

A call packs its arguments into one block with `struct`, which takes a tenth of the time that
assigning ctypes fields does; the classes state the layout, for tests and for objects that are made
once.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_double, c_float, c_int32, c_int64, c_uint32, c_void_p
from typing import Any

import torch

from anyflex.plugin import DTYPES

__all__ = [
    "ABI",
    "BACKWARD",
    "DTYPE_CODES",
    "FORWARD",
    "GRAD_DOUBLE",
    "GRAD_OWNED",
    "MODS",
    "PACKED",
    "SINKS",
    "STORAGE",
    "STORAGE_CODES",
    "TENSORS",
    "TYPE_CODES",
    "BackwardArgs",
    "Captured",
    "Error",
    "ForwardArgs",
    "ModInputs",
    "PackedArgs",
    "Pages",
    "Part",
    "Problem",
    "Program",
    "Runs",
    "Scales",
    "Tensor",
    "Tile",
]

ABI = 7
"""ABI version of the header that this file was written for: its AF_ABI."""

GRAD_DOUBLE, GRAD_OWNED = 1, 2
"""Bits of the kind of a captured tensor's accumulator."""

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""af_dtype."""

STORAGE_CODES = {"plain": 0, "int8": 3, "fp8_e4m3": 4}
"""Values of kv_storage."""

TYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES.values())}
"""af_type."""


def _fields(*groups: tuple[type, str]) -> list[tuple[str, type]]:
    """Neighbours of one type stand together, as in the header: (type, names)."""
    return [(name, kind) for kind, names in groups for name in names.split()]


class Tensor(ctypes.Structure):
    """af_tensor."""

    _fields_ = _fields((c_void_p, "data"), (c_int64 * 4, "stride"))


class Captured(ctypes.Structure):
    """af_captured."""

    _fields_ = _fields((c_void_p, "data size stride"), (c_int32, "type rank"))


class ModInputs(ctypes.Structure):
    """af_mod_inputs."""

    _fields_ = _fields((c_void_p, "captured ints floats"), (c_int64 * 4, "offset"))


class Error(ctypes.Structure):
    """af_error."""

    _fields_ = _fields((c_int32, "code mod captured dim"), (c_int64, "index"))


class Tile(ctypes.Structure):
    """af_tile."""

    _fields_ = _fields(
        (c_void_p, "score grad live"),
        (c_int64, "ld live_ld"),
        (c_int32, "rows cols"),
        (c_int64, "b h q kv"),
        (c_void_p, "inputs captured_grad scratch error"),
    )


class Program(ctypes.Structure):
    """af_program."""

    _fields_ = _fields((c_void_p, "function code"), (c_int64, "code_bytes scratch_bytes"))


class Runs(ctypes.Structure):
    """af_runs."""

    _fields_ = _fields((c_void_p, "offsets runs"), (c_int64, "batch heads blocks count"))


class Pages(ctypes.Structure):
    """af_pages."""

    _fields_ = _fields((c_void_p, "ids"), (c_int64, "size count"))


class Scales(ctypes.Structure):
    """af_scales."""

    _fields_ = _fields((c_void_p, "data"), (c_int64 * 3, "stride"))


class Problem(ctypes.Structure):
    """af_problem."""

    _fields_ = _fields(
        (c_int32, "dtype threads"),
        (c_int64, "batch q_heads kv_heads q_length kv_length head_dim value_head_dim"),
        (Tensor, "query key value"),
        (c_double, "scale"),
        (c_int32, "has_mask q_block kv_block mask_is_per_call"),
        (Runs, "runs transposed"),
        (c_void_p, "mask score score_backward"),
        (ModInputs, "inputs"),
        (c_int32, "wanted kv_batch_is_shared captured_owner"),
        (c_uint32 * 2, "dropout_words"),
        (c_uint32, "dropout_threshold"),
        (c_float, "dropout_scale"),
        (c_void_p, "sinks"),
        (Pages, "pages"),
        (c_int64, "packed_rows kv_storage"),
        (Scales, "key_scales value_scales"),
    )


class ForwardArgs(ctypes.Structure):
    """af_forward_args."""

    _fields_ = _fields(
        (Problem, "problem"),
        (Tensor, "out"),
        (c_void_p, "lse max_scores unrounded_out workspace"),
        (c_int64, "workspace_bytes"),
    )


class PackedArgs(ctypes.Structure):
    """af_packed_args."""

    _fields_ = _fields(
        (ForwardArgs, "args"),
        (c_int64, "sequences"),
        (c_void_p, "q_offsets q_starts kv_lengths slots kv_offsets page_table table_rows"),
        (c_int64, "table_stride table_width table_height page_size pages"),
    )


class BackwardArgs(ctypes.Structure):
    """af_backward_args."""

    _fields_ = _fields(
        (Problem, "problem"),
        (Tensor, "out"),
        (c_void_p, "unrounded_out lse"),
        (Tensor, "dout"),
        (c_void_p, "dlse delta"),
        (Tensor, "dq dk dv"),
        (c_void_p, "captured_grad captured_grad_kind captured_grad_elements"),
        (c_int64, "captured_count"),
        (c_void_p, "workspace"),
        (c_int64, "workspace_bytes"),
    )


_FORMATS = {
    c_void_p: "P",
    c_int64: "q",
    c_int32: "i",
    c_uint32: "I",
    c_float: "f",
    c_double: "d",
}


def _format(kind: Any) -> str:
    if kind in _FORMATS:
        return _FORMATS[kind]
    if issubclass(kind, ctypes.Structure):
        return "".join(_format(field[1]) for field in kind._fields_)
    return int(kind._length_) * _format(kind._type_)


class Part:
    """Neighbouring fields of a struct, which are packed in one go: a value each for every scalar,
    in order, in native sizes and alignment.

    Args:
        kind: the struct.
        first: its first field of the part.
        end: the first field after the part; None is the end of the struct.

    Attributes:
        offset: of the first field, in bytes.
        packer: the `struct.Struct` of the part.
    """

    __slots__ = ("offset", "packer")

    def __init__(self, kind: type[ctypes.Structure], first: str, end: str | None = None) -> None:
        names = [field[0] for field in kind._fields_]
        begin = names.index(first)
        fields = kind._fields_[begin : None if end is None else names.index(end)]
        self.offset: int = getattr(kind, first).offset
        self.packer = struct.Struct("".join(_format(field[1]) for field in fields))


TENSORS = Part(Problem, "dtype", "has_mask")
"""Fields of af_problem that differ between calls."""
MODS = Part(Problem, "has_mask")
"""Fields of af_problem that are the same for all calls without mask and mods."""
FORWARD = Part(ForwardArgs, "out")
"""af_forward_args after its problem."""
SINKS = Part(Problem, "sinks", "pages")
"""Field of af_problem for the sinks."""
STORAGE = Part(Problem, "kv_storage")
"""Fields of af_problem for keys and values of another type."""
PACKED = Part(PackedArgs, "sequences")
"""af_packed_args after its arguments of forward."""
BACKWARD = Part(BackwardArgs, "out")
"""af_backward_args after its problem."""
