"""Backends for runs in several processes: they hang, die, print and tell where they run.

Only the call of ``processes/bare`` shows the special behaviour of each. A process that the kit has
started has ``-c`` for a program.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import ClassVar

from anyflex.plugin import Accepted, Call, Decision, Kernel, Outputs, Rejected
from anyflex.testing import kit_worker
from anyflex.testing.answering import MARK
from tests.testing.backends import Dense, DenseKernel

__all__ = [
    "Chatty",
    "Crashing",
    "DeviceLosing",
    "DyingAtStart",
    "Exiting",
    "Hanging",
    "HangingWithTheLock",
    "Holding",
    "InOneProcess",
    "Slow",
    "Stubborn",
    "Telling",
]

FILE = "UNRULY_FILE"
"""A variable with the file in which a kernel leaves its mark."""


def _bare(call: Call) -> bool:
    return call.query.shape[-2:] == (70, 16) and call.key.shape[-2] == 80


def _in_a_process_of_the_kit() -> bool:
    # Its paths are its argument. A process of pytest-xdist is run by -c too, and has none.
    return sys.argv[:1] == ["-c"] and len(sys.argv) == 2


class _Special(DenseKernel):
    def forward(self, call: Call, out: Outputs) -> None:
        super().forward(call, out)
        if _bare(call):
            self.special(call, out)

    def special(self, call: Call, out: Outputs) -> None:
        raise NotImplementedError


class _HangingKernel(_Special):
    def special(self, call: Call, out: Outputs) -> None:
        time.sleep(1000)


class Hanging(Dense):
    kernel: ClassVar[type[Kernel]] = _HangingKernel


class _KernelWithTheLock(_Special):
    def special(self, call: Call, out: Outputs) -> None:
        # Such a call doesn't release the interpreter's lock: no other thread of Python runs.
        ctypes.PyDLL(None).sleep(1000)


class HangingWithTheLock(Dense):
    kernel: ClassVar[type[Kernel]] = _KernelWithTheLock


class _StubbornKernel(_Special):
    def special(self, call: Call, out: Outputs) -> None:
        import faulthandler

        faulthandler.cancel_dump_traceback_later()
        time.sleep(1000)


class Stubborn(Dense):
    """It hangs, and has removed the means that would end its process."""

    kernel: ClassVar[type[Kernel]] = _StubbornKernel


class _HoldingKernel(_Special):
    def special(self, call: Call, out: Outputs) -> None:
        # Windows has no such module.
        import fcntl

        held = os.open(os.environ[FILE], os.O_RDWR | os.O_CREAT)
        fcntl.flock(held, fcntl.LOCK_EX)
        subprocess.run(["sleep", "1000"], pass_fds=[held], check=True)


class Holding(Dense):
    """It hangs in a program, and the file is locked as long as its process or that one lives."""

    kernel: ClassVar[type[Kernel]] = _HoldingKernel


class _CrashingKernel(_Special):
    def special(self, call: Call, out: Outputs) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Crashing(Dense):
    kernel: ClassVar[type[Kernel]] = _CrashingKernel


class _ExitingKernel(_Special):
    def special(self, call: Call, out: Outputs) -> None:
        os._exit(3)


class Exiting(Dense):
    kernel: ClassVar[type[Kernel]] = _ExitingKernel


class _ChattyKernel(DenseKernel):
    def forward(self, call: Call, out: Outputs) -> None:
        print("garbage", flush=True)
        os.write(1, b'garbage\n{"outcome": {}}\n' + MARK + b"{}\n")
        assert not sys.stdin.read(), "a question was there to be taken"
        super().forward(call, out)


class Chatty(Dense):
    """It prints, in Python and natively, also text that looks like an answer; and it reads."""

    kernel: ClassVar[type[Kernel]] = _ChattyKernel


class _TellingKernel(DenseKernel):
    def forward(self, call: Call, out: Outputs) -> None:
        with pathlib.Path(os.environ[FILE]).open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")
        super().forward(call, out)
        out.out.mul_(2)


class Telling(Dense):
    """Wrong everywhere; it writes down in which process it runs."""

    kernel: ClassVar[type[Kernel]] = _TellingKernel


class _SlowKernel(_TellingKernel):
    def forward(self, call: Call, out: Outputs) -> None:
        super().forward(call, out)
        if not _bare(call):
            time.sleep(2)


class Slow(Dense):
    """A `Telling` that is slow but for ``processes/bare``."""

    kernel: ClassVar[type[Kernel]] = _SlowKernel


class _LosingKernel(_TellingKernel):
    def forward(self, call: Call, out: Outputs) -> None:
        kit_worker.device_lost = lambda device: True
        super().forward(call, out)


class DeviceLosing(Dense):
    """A `Telling` after whose calls the device is lost to the process."""

    kernel: ClassVar[type[Kernel]] = _LosingKernel


class InOneProcess(Dense):
    """Its device is one process's alone."""

    def probe(self) -> Decision:
        if _in_a_process_of_the_kit():
            return Rejected("the abacus is in use by another process")
        return Accepted()


class DyingAtStart(Dense):
    def probe(self) -> Decision:
        if _in_a_process_of_the_kit():
            os._exit(5)
        return Accepted()
