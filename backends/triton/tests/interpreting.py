"""Triton's interpreter without needless work, which is more than half of its time.

The results of kernels stay the same. The kernels call each other a lot, and at each call the
interpreter puts its own operations into triton.language, where they have been since the launch.
For each sum of 32-bit integers it computes whether it overflows, and doesn't report that. It makes
the types and shapes of its tensors over and over, and a table of all types at each access.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

__all__ = ["MOST_PROGRAMS", "hasten"]

MOST_PROGRAMS = 20_000
"""Maximum number of programs of a launch; at 3 to 15 ms each, a test with more had better fail."""


class _Language:
    """Stand-in for the globals of a kernel, with the names that the interpreter looks up."""

    __globals__ = {"language": tl, "core": tl.core}  # noqa: RUF012


class _LateType(tl.core.tuple_type):
    """Type of a tuple that is made when it is asked for: of a tensor's shape it never is."""

    def __init__(self, values: list[Any], fields: list[str] | None = None) -> None:
        self.values, self.fields = values, fields or [""] * len(values)

    def __getattr__(self, name: str) -> Any:
        if name not in ("types", "name"):
            raise AttributeError(name)
        made = _type_of_values(self.values, self.fields)
        self.types, self.name = made.types, made.name
        return getattr(made, name)


_type_of_values = tl.core._type_for_tuple_values
_numpy_type = interpreter._get_np_dtype
_block_type = tl.core.block_type.__init__
_numpy_types: dict[str, Any] = {}
_block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
_tensor = tl.tensor.__init__
_tensors: dict[str, dict[str, Any]] = {}


def _remembered_numpy_type(kind: Any) -> Any:
    name = kind.scalar.name
    if name not in _numpy_types:
        _numpy_types[name] = _numpy_type(kind)
    return _numpy_types[name]


def _remembered_block_type(block: Any, element: Any, shape: Any) -> None:
    key = element.name, *map(tl.core._unwrap_if_constexpr, shape)
    if key not in _block_types:
        _block_type(block, element, shape)
        _block_types[key] = vars(block).copy()
    vars(block).update(_block_types[key])


def _remembered_tensor(tensor: Any, handle: Any, type: Any) -> None:
    if type.name not in _tensors:
        _tensor(tensor, handle, type)
        _tensors[type.name] = vars(tensor).copy()
    vars(tensor).update(_tensors[type.name], handle=handle, type=type)


def hasten() -> None:
    """Change the interpreter in this process, at most once."""
    builder = interpreter.interpreter_builder
    if not builder.options.sanitize_overflow:
        return
    # Overflows are asserted where `debug` is on.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    enter, start = interpreter._patch_lang, builder.set_grid_dim

    def enter_all(function: object) -> Any:
        return enter(_Language)

    def call_inner(inner: Any, *arguments: Any, **keywords: Any) -> Any:
        return inner.rewrite()(*arguments, **keywords)

    def start_limited(*grid: int) -> None:
        if math.prod(grid) > MOST_PROGRAMS:
            raise RuntimeError(
                f"a launch of {math.prod(grid)} programs; interpreting more than {MOST_PROGRAMS} "
                "takes too long"
            )
        start(*grid)

    tl.core._type_for_tuple_values = _LateType
    tl.core.block_type.__init__ = _remembered_block_type
    tl.tensor.__init__ = _remembered_tensor
    interpreter._get_np_dtype = _remembered_numpy_type
    interpreter._patch_lang = enter_all
    interpreter.InterpretedFunction.__call__ = call_inner
    builder.set_grid_dim = start_limited
