"""Programs that a call needs together are compiled side by side, and run in their order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import cast

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton to launch with")

from anyflex_triton import launch

GPU = torch.device("cuda", 1)


class Pretended:
    """A program that is compiled when another one is, and notes what it does."""

    def __init__(self, name: str, notes: list[str], together: threading.Barrier) -> None:
        self.name, self.notes, self.together = name, notes, together
        self.compiled: set[int | None] = set()

    def is_compiled(self, device: int | None) -> bool:
        return device in self.compiled

    def compile(self, device: int | None = None) -> None:
        self.together.wait(timeout=20)
        if self.name == "broken":
            raise RuntimeError("no such instruction")
        self.compiled.add(device)

    def launch(self, grid: int, device: torch.device, values: Mapping[str, object]) -> None:
        self.notes.append(f"{self.name} {grid} {device.index} {values}")


def pretended(*names: str) -> tuple[list[launch.Launch], list[str]]:
    notes: list[str] = []
    together = threading.Barrier(len(names))
    programs = [Pretended(name, notes, together) for name in names]
    launches = [
        launch.Launch(cast(launch.Program, program), 3 + i, {"x": i})
        for i, program in enumerate(programs)
    ]
    return launches, notes


@pytest.fixture(autouse=True)
def current_devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Which devices threads made the current one."""
    seen: list[torch.device] = []

    @contextlib.contextmanager
    def enter(device: torch.device) -> object:  # type: ignore[misc]
        seen.append(device)
        yield

    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(device=enter))
    return seen


def test_what_is_not_compiled_is_compiled_side_by_side(
    current_devices: list[torch.device],
) -> None:
    launches, notes = pretended("a", "b", "c")
    # Each waits for the others.
    launch.launch_all(launches, GPU)
    assert notes == ["a 3 1 {'x': 0}", "b 4 1 {'x': 1}", "c 5 1 {'x': 2}"]
    assert current_devices == [GPU] * 3
    launch.launch_all(launches, GPU)
    assert len(notes) == 6 and len(current_devices) == 3


def test_a_compilers_error_comes_before_any_launch() -> None:
    launches, notes = pretended("a", "broken")
    with pytest.raises(RuntimeError, match="no such instruction"):
        launch.launch_all(launches, GPU)
    assert not notes


def test_nothing_is_compiled_for_the_interpreter() -> None:
    launches, notes = pretended("a", "b")
    launch.launch_all(launches, torch.device("cpu"))
    assert len(notes) == 2


@pytest.fixture
def unprepared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was begun; nothing was yet."""
    begun: list[str] = []
    monkeypatch.setattr(launch, "_preparing", [])
    for name in ("_make_driver", "_sum_files"):
        monkeypatch.setattr(launch, name, lambda name=name: begun.append(name))
    return begun


def test_what_is_done_once_is_begun_once(unprepared: list[str]) -> None:
    launch.prepare()
    launch.prepare()
    for thread in launch._preparing:
        thread.join(timeout=20)
    assert sorted(unprepared) == ["_make_driver", "_sum_files"]


def test_what_fails_early_fails_no_call(
    unprepared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise AssertionError("libcuda.so cannot found!")

    monkeypatch.setattr(launch, "_make_driver", missing)
    launch.prepare()
    for thread in launch._preparing:
        thread.join(timeout=20)
    assert unprepared == ["_sum_files"]


def test_without_a_thread_nothing_is_begun_and_a_later_call_tries_again(
    unprepared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refused)
        launch.prepare()
    assert launch._preparing == []
    launch.prepare()
    assert len(launch._preparing) == 2
