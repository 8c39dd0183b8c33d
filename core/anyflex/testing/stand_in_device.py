"""posing: CPU tensors stand in for tensors of a device that isn't there."""

from __future__ import annotations

import os
import re
import threading
from contextlib import ContextDecorator
from dataclasses import dataclass

from anyflex.errors import ArgumentError, ArgumentTypeError
from anyflex.tensors import stand_in
from anyflex.tensors.dynamo_disabled import outside_graphs

__all__ = ["posing"]

_DEVICE_TYPE = re.compile(r"[a-z][a-z0-9_]*")
_ARCHITECTURE = re.compile(r"[\x21-\x7e]*")


class posing(ContextDecorator):
    """Let CPU tensors stand in for tensors of `device_type`, in a ``with`` block or a decorated
    function: a backend is tested on a machine that lacks its device.

    Every call of the block whose tensors are on the CPU is a call on that device: the registry
    asks the backends of that type, ``spec.device_type`` names it, warnings, refusals and
    `anyflex.explain` speak of it, forced names bind as they do there, and the kernel gets CPU
    tensors. A probe that rejects is no obstacle: it misses the device. ``create_block_mask`` and
    ``BlockMask.to`` take the device too, and make a mask on the CPU. Everything else is unchanged:
    tensors report that they are on the CPU, and autocast is the CPU's.

    The block holds for the whole process, so for threads that are started in it and for those
    that run already; a forked child inherits it, a spawned one doesn't. Blocks nest, the inner
    one counts. Two threads may be in blocks of the same type at once, not of different ones.
    Backward of a call of the block, and a program that is exported in it, run in it too.
    ``torch.compile`` compiles anew for the block, and for the code after it.

    Args:
        device_type: as torch names it, for example ``"xpu"``, or as it will: a type that torch
            doesn't know is all right. ``"cpu"`` ends an outer block's effect.
        arch: ``spec.arch``, for backends that look at it (``"sm_90"``).

    Raises:
        ArgumentTypeError: `device_type` or `arch` is no str.
        ArgumentError: `device_type` is no device type, ``"meta"``, or has an index; an `arch` with
            a space, or for ``"cpu"``; on entry, another thread is in a block of another type; on
            exit, the block was not entered.

    Examples:
        >>> import torch, anyflex
        >>> from anyflex.testing import posing
        >>> q = torch.randn(1, 2, 16, 8)
        >>> with posing("xpu"):
        ...     print(anyflex.explain(q, q, q, backend="reference").selection.spec.device_type)
        xpu
    """

    def __init__(self, device_type: str, *, arch: str = "") -> None:
        if not isinstance(device_type, str):
            raise ArgumentTypeError(
                "posing(device_type): device_type must be a str such as 'xpu', got "
                f"{device_type!r} ({type(device_type).__name__})"
            )
        if not _DEVICE_TYPE.fullmatch(device_type):
            raise ArgumentError(
                f"posing(device_type): {device_type!r} is no device type; it is lower case and "
                "has no index: 'xpu', not 'XPU' or 'xpu:0'"
            )
        if device_type == "meta":
            raise ArgumentError(
                "posing(device_type): no backend computes on 'meta', whose tensors hold no "
                "numbers; name the device type of the backend"
            )
        if not isinstance(arch, str):
            raise ArgumentTypeError(
                f"posing(arch=...): arch must be a str, got {arch!r} ({type(arch).__name__})"
            )
        if not _ARCHITECTURE.fullmatch(arch):
            raise ArgumentError(
                f"posing(arch=...): {arch!r} must be printable ASCII without spaces, as 'sm_90'"
            )
        if arch and device_type == "cpu":
            raise ArgumentError(
                f"posing(arch=...): arch {arch!r} is of no use for 'cpu', where tensors stand "
                "for themselves; leave it out"
            )
        self.device_type = device_type
        self.arch = arch
        self._entered: list[_Block] = []

    @outside_graphs
    def __enter__(self) -> posing:
        posed = None if self.device_type == "cpu" else (self.device_type, self.arch)
        block = _Block(posed, threading.get_ident())
        with _lock:
            for other in _blocks:
                if other.thread != block.thread and other.posed != posed:
                    raise ArgumentError(
                        f"{self!r}: another thread is in posing({_name(other.posed)!r}), and the "
                        "block holds for the whole process; run the two one after the other"
                    )
            _blocks.append(block)
            stand_in.pose(posed)
        self._entered.append(block)
        return self

    @outside_graphs
    def __exit__(self, *exception: object) -> None:
        if not self._entered:
            raise ArgumentError(f"{self!r}: left without having been entered")
        block = self._entered.pop()
        with _lock:
            _blocks.remove(block)
            stand_in.pose(_blocks[-1].posed if _blocks else None)

    def _recreate_cm(self) -> posing:
        # A decorated function may run in many threads at once: each call has its own block.
        return posing(self.device_type, arch=self.arch)

    def __repr__(self) -> str:
        arch = f", arch={self.arch!r}" if self.arch else ""
        return f"posing({self.device_type!r}{arch})"


@dataclass(eq=False, slots=True)
class _Block:
    """An entered block; two of equal content are two."""

    posed: stand_in.Posed | None
    thread: int


_blocks: list[_Block] = []
_lock = threading.Lock()


def _name(posed: stand_in.Posed | None) -> str:
    return "cpu" if posed is None else posed[0]


def _after_fork() -> None:
    # A thread that doesn't exist in the child may have held the lock. Blocks of such threads stay
    # in force, as the child's work began under them, and do no harm.
    global _lock
    _lock = threading.Lock()
    for block in _blocks:
        block.thread = threading.get_ident()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
