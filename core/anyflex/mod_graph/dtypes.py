"""Types of scalars in a mod graph."""

from __future__ import annotations

import torch

__all__ = ["DTYPES", "DTYPE_NAMES", "type_class"]

DTYPES: dict[str, torch.dtype] = {
    "bool": torch.bool,
    "u8": torch.uint8,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
}
"""Names of the scalar types in a graph's text."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def type_class(dtype: torch.dtype) -> str:
    """Return ``"bool"``, ``"int"`` or ``"float"``."""
    if dtype is torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"
