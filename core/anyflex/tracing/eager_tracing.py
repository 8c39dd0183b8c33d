"""Calling a mod outside of Dynamo, where torch reads arguments before a symbol can answer."""

from __future__ import annotations

import dis
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from anyflex.errors import AnyflexError
from anyflex.process.user_frames import error_location
from anyflex.tensors.dynamo_errors import fail
from anyflex.tracing.symbol import Symbol
from anyflex.tracing.trace_errors import TRANSFORM

__all__ = [
    "call_mod",
    "codes_of",
    "refuse_recursion",
    "refuse_transform",
]

_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_FUNCTORCH = os.path.join(_TORCH, "_functorch")
_ARGUMENTS = re.compile(
    r"(\w+)\(\):? "
    r"(argument '\w+' .*must be .+, not \w+|received an invalid combination of arguments)"
)
"""How the messages of torch's C++ argument parser begin."""


def call_mod(function: Callable[..., Any], symbols: list[Symbol]) -> Any:
    """Return what a mod gives for symbols.

    Raises:
        ModTraceError: torch's argument parser doesn't take what the mod gives it, the mod compiles
            a function or transforms one, or its calls are nested too deeply; a score function
            that can't be called so.
        BlockMaskError: a mask function that can't be called so.
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
    except RecursionError as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        refuse_recursion(f"{'score_mod' if len(symbols) == 5 else 'mask_mod'} {name}", error)
    except TypeError as error:
        if isinstance(error, AnyflexError):
            raise
        refused = symbols[0].tracer.refused
        if refused is not None:  # Python took its TypeError for "not my operand"
            raise refused from error
        file, line = error_location(error)
        match = _ARGUMENTS.match(str(error))
        if match is None:
            if file is None:  # no line of the user's has run
                _refuse_call(len(symbols), error)
            raise
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
    except ValueError as error:
        if not isinstance(error, AnyflexError):
            refuse_transform(error)
        raise


def _refuse_call(count: int, error: TypeError) -> NoReturn:
    """Raise for a mod, or a member of one that is composed, that takes other arguments than it is
    given, where its signature didn't tell."""
    if count == 4:
        fail(
            "BlockMaskError",
            f"mask_mod can't be called as f(b, h, q_idx, kv_idx), with 4 arguments: {error}",
        )
    fail(
        "ModTraceError",
        f"score_mod can't be called as f(score, b, h, q_idx, kv_idx), with 5 arguments: {error}",
        operation="signature",
    )


def refuse_transform(error: ValueError) -> None:
    """Raise ModTraceError if an error comes from torch's transforms, which read shapes before they
    call anything."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None or not traceback.tb_frame.f_code.co_filename.startswith(_FUNCTORCH):
        return
    problem, operation, hint = TRANSFORM
    file, line = error_location(error)
    fail("ModTraceError", problem, operation=operation, hint=hint, file=file, line=line)


def refuse_recursion(mod: str, error: RecursionError) -> NoReturn:
    """Raise ModTraceError for a mod whose calls Python found nested too deeply."""
    file, line = error_location(error)
    fail(
        "ModTraceError",
        f"{mod} calls functions within each other more deeply than Python allows "
        f"({sys.getrecursionlimit()} calls)",
        operation="recursion",
        hint="Does a function that calls itself ever stop? Many functions that are composed can "
        "be called in a loop; sys.setrecursionlimit() allows more.",
        file=file,
        line=line,
    )


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
