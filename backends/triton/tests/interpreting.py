"""Triton's interpreter without what it does for nothing, which is more than half of its time.

Nothing that a kernel computes is touched. The kernels call each other a lot, and at each call the
interpreter puts its own operations into triton.language, where they have been since the launch;
and for each sum of 32-bit integers it works out whether it overflows, and doesn't say.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

__all__ = ["MOST_PROGRAMS", "hasten"]

MOST_PROGRAMS = 20_000
"""Of a launch; at 3 to 15 ms each, more would take so long that a test is better off failing."""


class _Language:
    """What the interpreter looks for in the globals of a kernel."""

    __globals__ = {"language": tl, "core": tl.core}  # noqa: RUF012


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

    interpreter._patch_lang = enter_all
    interpreter.InterpretedFunction.__call__ = call_inner
    builder.set_grid_dim = start_limited
