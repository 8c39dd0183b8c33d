"""Calling a mod outside of Dynamo, where torch reads arguments before a symbol can answer."""

from __future__ import annotations

import dis
import os
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from anyflex.failing import fail
from anyflex.mod_graph.symbol import Symbol

__all__ = ["call_mod", "codes_of", "error_location", "functorch_level"]

functorch_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level

_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_ARGUMENTS = re.compile(
    r"(\w+)\(\):? "
    r"(argument '\w+' .*must be .+, not \w+|received an invalid combination of arguments)"
)
"""How the messages of torch's C++ argument parser begin."""


def call_mod(function: Callable[..., Any], symbols: list[Symbol]) -> Any:
    """Return what a mod gives for symbols.

    Raises:
        ModTraceError: torch's argument parser doesn't take what the mod gives it, or the mod
            compiles a function.
        Whatever else `function` itself raises.
    """
    if isinstance(function, types.FunctionType) and _compiles(function.__code__):
        fail(
            "ModTraceError",
            "a compiled function inside a mod: torch.compile",
            operation="torch.compile",
            hint="Call the plain function: the mod is compiled with the attention.",
            file=function.__code__.co_filename,
            line=function.__code__.co_firstlineno,
        )
    try:
        return function(*symbols)
    except TypeError as error:
        match = _ARGUMENTS.match(str(error))
        if match is None:
            raise
        file, line = error_location(error)
        fail(
            "ModTraceError",
            f"torch.{match[1]} does not take its arguments: {match[2]}",
            operation=f"torch.{match[1]}",
            hint="Where torch wants a tensor, give one, as torch.full_like(x, 1.0); for "
            "torch.maximum(x, 1.0) and torch.minimum(x, 1.0), use torch.clamp(x, min=1.0) and "
            "torch.clamp(x, max=1.0).",
            file=file,
            line=line,
        )


def error_location(error: BaseException) -> tuple[str | None, int | None]:
    """File and line of the innermost frame of an error that is not torch's."""
    place: tuple[str | None, int | None] = (None, None)
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith(_TORCH):
            place = file, traceback.tb_lineno
        traceback = traceback.tb_next
    return place


def _compiles(code: types.CodeType) -> bool:
    """Does the mod's own code name ``torch.compile``? A symbol may go through what that returns
    unseen."""
    for part in codes_of(code):
        if "compile" in part.co_names and "torch" in part.co_names:
            before = None
            for instruction in dis.get_instructions(part):
                if instruction.argval == "compile" and before == "torch":
                    return True
                before = instruction.argval
    return False


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and those of the functions that it makes."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)
