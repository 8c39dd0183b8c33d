"""Triton's interpreter without needless work, which is more than half of its time.

The results of kernels stay the same. The kernels call each other a lot, and at each call the
interpreter puts its own operations into triton.language, where they have been since the launch.
For each sum of 32-bit integers it computes whether it overflows, and doesn't report that.
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
