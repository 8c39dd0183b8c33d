"""The C ABI's structs (native/include/anyflex_cpu.h): as ctypes classes, and in parts to pack.

A call packs its arguments into one block with `struct`, which takes a tenth of the time that
assigning ctypes fields does; the classes state the layout, for tests and for objects that are made
once.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_double, c_int32, c_int64, c_void_p
from typing import Any

import torch

__all__ = [
    "ABI",
    "BACKWARD",
    "DTYPE_CODES",
    "FORWARD",
    "MODS",
    "STATUS",
    "STRUCTS",
    "TENSORS",
    "TYPE_CODES",
    "BackwardArgs",
    "Captured",
    "Error",
    "ForwardArgs",
    "ModInputs",
    "Part",
    "Problem",
    "Program",
    "Runs",
    "Tensor",
    "Tile",
]

ABI = 2
"""ABI version of the header that this file was written for: its AF_ABI."""

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""af_dtype."""

TYPE_CODES = {
    dtype: code
    for code, dtype in enumerate(
        (
            torch.bool,
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
        )
    )
}
"""af_type."""

STATUS = {
    1: "AF_READ_OUTSIDE",
    2: "AF_WORKSPACE_TOO_SMALL",
    3: "AF_BAD_ARGUMENT",
    4: "AF_BAD_PROGRAM",
}
"""af_status, without AF_OK."""


class Tensor(ctypes.Structure):
    """af_tensor."""

    _fields_ = (("data", c_void_p), ("stride", c_int64 * 4))


class Captured(ctypes.Structure):
    """af_captured."""

    _fields_ = (
        ("data", c_void_p),
        ("size", c_void_p),
        ("stride", c_void_p),
        ("type", c_int32),
        ("rank", c_int32),
    )


class ModInputs(ctypes.Structure):
    """af_mod_inputs."""

    _fields_ = (
        ("captured", c_void_p),
        ("ints", c_void_p),
        ("floats", c_void_p),
        ("offset", c_int64 * 4),
    )


class Error(ctypes.Structure):
    """af_error."""

    _fields_ = (
        ("code", c_int32),
        ("mod", c_int32),
        ("captured", c_int32),
        ("dim", c_int32),
        ("index", c_int64),
    )


class Tile(ctypes.Structure):
    """af_tile."""

    _fields_ = (
        ("score", c_void_p),
        ("grad", c_void_p),
        ("live", c_void_p),
        ("ld", c_int64),
        ("live_ld", c_int64),
        ("rows", c_int32),
        ("cols", c_int32),
        ("b", c_int64),
        ("h", c_int64),
        ("q", c_int64),
        ("kv", c_int64),
        ("inputs", c_void_p),
        ("captured_grad", c_void_p),
        ("scratch", c_void_p),
        ("error", c_void_p),
    )


class Program(ctypes.Structure):
    """af_program."""

    _fields_ = (
        ("function", c_void_p),
        ("code", c_void_p),
        ("code_bytes", c_int64),
        ("scratch_bytes", c_int64),
    )


class Runs(ctypes.Structure):
    """af_runs."""

    _fields_ = (
        ("offsets", c_void_p),
        ("runs", c_void_p),
        ("batch", c_int64),
        ("heads", c_int64),
        ("blocks", c_int64),
        ("count", c_int64),
    )


class Problem(ctypes.Structure):
    """af_problem."""

    _fields_ = (
        ("dtype", c_int32),
        ("threads", c_int32),
        ("batch", c_int64),
        ("q_heads", c_int64),
        ("kv_heads", c_int64),
        ("q_length", c_int64),
        ("kv_length", c_int64),
        ("head_dim", c_int64),
        ("value_head_dim", c_int64),
        ("query", Tensor),
        ("key", Tensor),
        ("value", Tensor),
        ("scale", c_double),
        ("has_mask", c_int32),
        ("q_block", c_int32),
        ("kv_block", c_int32),
        ("mask_is_per_call", c_int32),
        ("runs", Runs),
        ("transposed", Runs),
        ("mask", c_void_p),
        ("score", c_void_p),
        ("score_backward", c_void_p),
        ("inputs", ModInputs),
        ("wanted", c_int32),
        ("kv_batch_is_shared", c_int32),
    )


class ForwardArgs(ctypes.Structure):
    """af_forward_args."""

    _fields_ = (
        ("problem", Problem),
        ("out", Tensor),
        ("lse", c_void_p),
        ("max_scores", c_void_p),
        ("unrounded_out", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
    )


class BackwardArgs(ctypes.Structure):
    """af_backward_args."""

    _fields_ = (
        ("problem", Problem),
        ("out", Tensor),
        ("unrounded_out", c_void_p),
        ("lse", c_void_p),
        ("dout", Tensor),
        ("dlse", c_void_p),
        ("delta", c_void_p),
        ("dq", Tensor),
        ("dk", Tensor),
        ("dv", Tensor),
        ("captured_grad", c_void_p),
        ("captured_grad_f64", c_void_p),
        ("captured_grad_elements", c_void_p),
        ("captured_count", c_int64),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
    )


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "af_tensor": Tensor,
    "af_captured": Captured,
    "af_mod_inputs": ModInputs,
    "af_error": Error,
    "af_tile": Tile,
    "af_program": Program,
    "af_runs": Runs,
    "af_problem": Problem,
    "af_forward_args": ForwardArgs,
    "af_backward_args": BackwardArgs,
}
"""The header's name -> class."""

_FORMATS = {c_void_p: "P", c_int64: "q", c_int32: "i", c_double: "d"}


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
BACKWARD = Part(BackwardArgs, "out")
"""af_backward_args after its problem."""
