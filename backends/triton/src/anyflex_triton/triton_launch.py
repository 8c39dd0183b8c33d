"""Loading and launching a compiled kernel with Triton's own launcher."""

from __future__ import annotations

import sys
import threading
from typing import Any

from triton import knobs
from triton.runtime import driver

from anyflex.plugin import free_in_child

__all__ = ["hooked", "interpret", "launch_kernel", "load_kernel", "make_launcher"]

_loading = threading.RLock()
"""Serializes loading. Up to Triton 3.6 every launcher is an extension module of the same name:
loading two at once can hand one kernel the other's launcher. It also keeps a second thread from a
kernel whose `run` is there before its `function`. Reentrant: a load hook may make a call."""
_interpreter = threading.Lock()
"""Serializes interpreted launches: the interpreter's program id is global."""

free_in_child(sys.modules[__name__], "_interpreter", "_loading")


def load_kernel(kernel: Any) -> None:
    """Load a compiled kernel on the current device, and make Triton's launcher for it."""
    with _loading:
        kernel.run  # noqa: B018


def make_launcher(kernel: Any) -> None:
    """Make Triton's launcher for a kernel that `nvidia_launch` has loaded. Reading ``run`` would
    load it again."""
    with _loading:
        if kernel._run is None:
            kernel._run = driver.active.launcher_cls(kernel.src, kernel.metadata)


def launch_kernel(kernel: Any, grid: int, arguments: tuple[object, ...]) -> None:
    """Launch a loaded kernel as ``kernel[(grid, 1, 1)](*arguments)`` does, on the current stream.

    Hooks are passed only where some exist: Triton records the launch for an empty chain too, and
    calls it twice, which takes 3 of 24 us.
    """
    active = driver.active
    stream = active.get_current_stream(active.get_current_device())
    enter = _listened(knobs.runtime.launch_enter_hook)
    leave = _listened(knobs.runtime.launch_exit_hook)
    record = None
    if enter is not None or leave is not None:
        record = kernel.launch_metadata((grid, 1, 1), stream, *arguments)
    kernel.run(
        grid, 1, 1, stream, kernel.function, kernel.packed_metadata, record, enter, leave,
        *arguments,
    )  # fmt: skip


def interpret(
    function: Any, grid: int, arguments: tuple[object, ...], keywords: dict[str, Any]
) -> None:
    """Run a kernel in Triton's interpreter."""
    with _interpreter:
        function[(grid,)](*arguments, **keywords)


def hooked() -> bool:
    """Whether one of Triton's hooks listens to launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _listened(hook: Any) -> Any:
    """Return a launch hook of Triton's, or None for an empty chain."""
    return hook if getattr(hook, "calls", hook) else None
