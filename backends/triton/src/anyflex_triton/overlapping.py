"""Kernels that begin while the one before them ends: programmatic dependent launch.

The last programs of a launch leave cores idle, and the next launch begins some microseconds after
they end. From Hopper on a launch that asks for it (`overlapping`) may begin as soon as all
programs of the launch before it have called `let_next_begin`, or have ended. See PTX's
`griddepcontrol` and CUDA's programming guide, "Programmatic Dependent Launch".

Two rules make that safe whatever else is launched on the stream in between:

- A kernel that is launched so calls `await_earlier` before its first access to what an earlier
  launch of the call writes, and if there is none, or it is known to have ended, before it ends
  itself: only so does its end say that all earlier launches have ended.
- It doesn't call `let_next_begin` before that: so that what begins then, if it needs nothing of
  this launch, may take all earlier ones as ended.

A kernel that is launched as usual begins when all earlier launches have ended, and may call
`let_next_begin` at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from anyflex_triton.launch import Options

__all__ = ["OVERLAPPING_TARGETS", "await_earlier", "let_next_begin", "overlapping"]

OVERLAPPING_TARGETS = frozenset({"hopper", "blackwell"})
"""Whose launches can."""


def overlapping(options: Options) -> Options:
    """Return a compiler's options for a kernel that may begin before the launch before it ends."""
    return replace(options, more=(*options.more, ("launch_pdl", True)))


@triton.jit
def await_earlier():  # type: ignore[no-untyped-def]
    """Wait until all earlier launches on the stream have ended; their stores are seen then."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r,~{memory}", [], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def let_next_begin():  # type: ignore[no-untyped-def]
    """Let the next launch begin when all programs of this one have said so, or have ended."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
