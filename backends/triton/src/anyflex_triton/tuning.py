"""Autotuning: times the configs around the table's at the first call of a size.

Nothing of this runs unless the user sets the option ``autotune``. Each result is an artifact of
the spec, one per kernel, size and device: core keeps it in the disk cache, under a key that covers
this package's sources, Triton's version and the user's other options.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from triton.errors import TritonError

from anyflex.plugin import Artifacts, Call, PerformanceWarning, ProgressLine, free_in_child
from anyflex_triton.configs import Config, KernelName
from anyflex_triton.launch import Launch, compile_all

__all__ = ["Clock", "Tuner"]

Clock = Callable[[Callable[[], None]], float]
"""Function that returns the milliseconds of a launch on the current device."""

_COMPILER_ERRORS = (TritonError, RuntimeError)
"""Errors of a config that can't be compiled: Triton's own, and RuntimeError, which its passes
raise."""
_ONE_AT_A_TIME = threading.Lock()
"""Serializes timing: kernels that run meanwhile would be timed too."""
free_in_child(sys.modules[__name__], "_ONE_AT_A_TIME")


class Size(NamedTuple):
    """Class of calls that share a fastest config.

    Args:
        kernel: name of the kernel.
        device: the device that runs it.
        heads: batch times query heads, rounded up to a power of two.
        rows, keys: lengths of query and key, likewise.
    """

    kernel: KernelName
    device: torch.device
    heads: int
    rows: int
    keys: int

    def __str__(self) -> str:
        return (
            f"{self.kernel} of up to {self.heads} heads, {self.rows} rows and {self.keys} keys "
            f"on {device_name(self.device)}"
        )

    def artifact(self) -> str:
        """Return the name of the artifact: the same on each device of a product."""
        device = re.sub(r"[^A-Za-z0-9]+", "_", device_name(self.device))
        return f"tuned-{self.kernel}-{self.heads}-{self.rows}-{self.keys}-{device}.json"


def size_of(kernel: KernelName, call: Call) -> Size:
    """Return the size class of a call."""
    batch, heads, rows = call.query.shape[:3]
    return Size(
        kernel,
        call.query.device,
        _power_from(batch * heads),
        _power_from(rows),
        _power_from(call.key.shape[2]),
    )


def _power_from(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def device_name(device: torch.device) -> str:
    """Return the product's name, or the device's type where it has none."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else str(name(device))


def _is_capturing(device: torch.device) -> bool:
    """Whether the current stream is capturing a graph."""
    capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return capturing is not None and bool(capturing())


class Tuner:
    """Fastest configs of one spec's kernels. Thread-safe: of several threads that need the same
    one, one finds it and the others wait.

    Args:
        artifacts: the spec's artifacts.
        backend: the backend's name, for messages.
        clock: times a launch.
    """

    def __init__(self, artifacts: Artifacts, backend: str, clock: Clock) -> None:
        self._artifacts = artifacts
        self._backend = backend
        self._clock = clock
        self._found: dict[Size, Config] = {}
        self._given_up: set[Size] = set()

    def known(self, kernel: KernelName, call: Call, configs: Sequence[Config]) -> Config | None:
        """Return the config that was found earlier, in this process or another, or None. Times
        nothing."""
        size = size_of(kernel, call)
        if size not in self._found:
            kept = self._artifacts.get(size.artifact())
            if kept is None:
                return None
            chosen = json.loads(kept)["chosen"]
            config = next((config for config in configs if str(config) == chosen), None)
            if config is None:  # CPU tensors stood in for a device with another table.
                return None
            self._found[size] = config
        return self._found[size]

    def find(
        self,
        kernel: KernelName,
        call: Call,
        configs: Sequence[Config],
        launch_with: Callable[[Config], Launch],
        before: Sequence[Launch],
    ) -> Config:
        """Return the fastest of `configs` for the call, and store it. Afterwards the tensors that
        launches overwrite hold any values, and those that they add to hold zeros. Where timing is
        impossible, in a graph capture or for lack of memory, the result is the first config, with
        a `PerformanceWarning`.

        Args:
            configs: candidates; the table's is the first.
            launch_with: returns the launch with a config.
            before: launches that run before anything is timed.

        Raises:
            TritonError, RuntimeError: the compiler's error for the first config, if none can be
                compiled.
        """
        device = call.query.device
        size = size_of(kernel, call)
        if size in self._given_up:
            return configs[0]
        if _is_capturing(device):
            self._warn(size, "a graph is being captured; make such a call before the capture")
            return configs[0]
        with _ONE_AT_A_TIME:
            # Another thread may have found it meanwhile.
            config = self.known(kernel, call, configs)
            if config is not None:
                return config
            for launch in before:
                launch.run(device)
            # The programs stay: another size tries the same ones.
            launches = {config: launch_with(config) for config in configs}
            try:
                times, failed = self._time(size, launches, device)
            except torch.OutOfMemoryError as error:
                self._given_up.add(size)
                self._warn(size, f"the device has no memory left for it: {error}")
                return configs[0]
            if not times:
                raise failed[configs[0]]
            return self._kept(size, configs[0], times, failed)

    def _time(
        self, size: Size, launches: Mapping[Config, Launch], device: torch.device
    ) -> tuple[dict[Config, float], dict[Config, BaseException]]:
        """Return the milliseconds of each config, and the errors of those that can't be compiled
        or don't fit the device."""
        progress = ProgressLine(sys.stderr)

        def show(what: str, done: int) -> None:
            progress.show(
                f"anyflex: tuning {self._backend} {size.kernel}: {what} {done}/{len(launches)}"
            )

        times: dict[Config, float] = {}
        failed: dict[Config, BaseException] = {}
        first = next(iter(launches))
        try:
            if device.type != "cpu":
                configs = {launch.program: config for config, launch in launches.items()}
                show("compiled", 0)
                for done, (program, error) in enumerate(compile_all(list(configs), device), 1):
                    show("compiled", done)
                    if isinstance(error, _COMPILER_ERRORS):
                        failed[configs[program]] = error
                    elif error is not None:
                        raise error
                    elif program.gives_up_stages and configs[program] != first:
                        # With fewer stages it equals another config, which is timed by itself.
                        failed[configs[program]] = TritonError("its stages don't fit the device")
            for done, (config, launch) in enumerate(launches.items()):
                show("timed", done)
                if config in failed:
                    continue
                try:
                    times[config] = self._clock(partial(launch.run, device))
                except TritonError as error:  # It needs too many resources.
                    failed[config] = error
                finally:
                    for tensor in launch.sums:
                        tensor.zero_()
        finally:
            progress.clear()
        return times, failed

    def _kept(
        self,
        size: Size,
        first: Config,
        times: Mapping[Config, float],
        failed: Mapping[Config, BaseException],
    ) -> Config:
        """Store the fastest config, tell the user, and return it.

        Args:
            first: the table's config.
        """
        config = self._found[size] = min(times, key=times.__getitem__)
        record = {
            "of": str(size),
            "chosen": str(config),
            "milliseconds": {str(c): times[c] for c in sorted(times, key=times.__getitem__)},
            "failed": {str(c): f"{type(e).__name__}: {e}" for c, e in failed.items()},
        }
        self._artifacts.put(size.artifact(), json.dumps(record, indent=1).encode())
        line = f"anyflex: tuned {self._backend} {size}: {config}: {times[config]:.3g} ms"
        if config is not first:
            usual = f"{times[first]:.3g} ms" if first in times else "failed"
            line += f" (the table's {first}: {usual})"
        if failed:
            line += f"; {len(failed)} of {len(times) + len(failed)} failed"
        sys.stderr.write(f"{line}\n")
        return config

    def _warn(self, size: Size, reason: str) -> None:
        warnings.warn(
            f"{self._backend} runs {size} as it would without autotuning: {reason}",
            PerformanceWarning,
            stacklevel=2,
        )
