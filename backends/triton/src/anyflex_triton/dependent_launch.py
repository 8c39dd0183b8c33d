"""Programmatic dependent launch: kernels that begin while the launch before them ends.

The last programs of a launch leave cores idle, and the next launch begins some microseconds after
they end. On Hopper and Blackwell (sm_90, sm_100) a launch that asks for it (`overlapping`) may
begin as soon as all programs of the launch before it have called `let_next_begin`, or have ended.
See PTX's `griddepcontrol` and CUDA's programming guide, "Programmatic Dependent Launch".

A call's first launch is an ordinary one: it begins when all earlier ones have ended, and may let
the next begin at once. `overlapping` launches follow three rules, which make that safe whatever
other threads launch on the stream in between:

- Some program of each launch calls `await_earlier`, before its first access to memory that an
  earlier launch writes, or, where that memory is known to be complete, before it ends. Only then
  does the launch's end imply that all earlier ones have ended. Programs without work may return
  without the call.
- No program calls `let_next_begin` before that.
- Memory that a program accesses without having waited was complete before an ordinary launch of
  the same call, or before a launch all of whose programs have waited.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from anyflex_triton.configs import Target
    from anyflex_triton.program import Options

__all__ = ["await_earlier", "let_next_begin", "overlapping", "overlaps"]

_TARGETS = frozenset({"hopper", "blackwell"})
_DRIVER = 12030
"""First version of CUDA's driver whose graphs record such launches: 12.3."""


def overlaps(target: Target) -> bool:
    """Whether launches for a target can be `overlapping`."""
    return target in _TARGETS and _driver_version() >= _DRIVER


@lru_cache
def _driver_version() -> int:
    """Return the version of NVIDIA's driver, or `_DRIVER` where kernels are only compiled."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return _DRIVER
    version = ctypes.c_int()
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0


def overlapping(options: Options, does: bool) -> Options:
    """Return a compiler's options for a kernel; if it `does`, it may begin before the launch
    before it ends."""
    return replace(options, more=(*options.more, ("launch_pdl", True))) if does else options


# Triton's own `gdc_wait` doesn't tell LLVM that loads and stores must not move across it.
@triton.jit
def await_earlier():  # type: ignore[no-untyped-def]
    """Wait until all earlier launches on the stream have ended; then their stores are visible."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r,~{memory}", [], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def let_next_begin():  # type: ignore[no-untyped-def]
    """Let the next launch begin when all programs of this one have called this, or have ended."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
