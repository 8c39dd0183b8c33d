"""Python's collector of cycles is paused while a plan is made, and only then."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import anyflex
from anyflex import collector
from anyflex.plugin import (
    Artifacts,
    Call,
    Kernel,
    Outputs,
    Spec,
    collector_paused,
    isolated,
    register,
)
from tests.testing.backends import Dense, DenseKernel

__all__: list[str] = []


FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
pytestmark = pytest.mark.filterwarnings("ignore:This process.*is multi-threaded")


@pytest.fixture(autouse=True)
def collector_on() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_is_off_within_and_on_again_after() -> None:
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_one_that_was_off_stays_off() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


def test_an_error_turns_it_on_again() -> None:
    with pytest.raises(ValueError, match="within"), collector_paused():
        raise ValueError("within")
    assert gc.isenabled()


@contextlib.contextmanager
def paused_by_another_thread() -> Iterator[None]:
    began, ends = threading.Event(), threading.Event()

    def pause() -> None:
        with collector_paused():
            began.set()
            assert ends.wait(60)

    thread = threading.Thread(target=pause)
    thread.start()
    try:
        assert began.wait(60)
        yield
    finally:
        ends.set()
        thread.join()


def test_the_last_of_several_threads_turns_it_on() -> None:
    mine = contextlib.ExitStack()
    mine.enter_context(collector_paused())
    with paused_by_another_thread():
        mine.close()
        assert not gc.isenabled()
    assert gc.isenabled()


@FORKS
def test_a_child_has_no_pauses_of_other_threads() -> None:
    with paused_by_another_thread():
        child = os.fork()
        if child == 0:
            right = gc.isenabled()
            with collector_paused():
                right = right and not gc.isenabled()
            os._exit(0 if right and gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@FORKS
def test_a_pause_around_a_fork_ends_in_the_child_too() -> None:
    with collector_paused():
        child = os.fork()
    if child == 0:
        with collector_paused():
            pass
        os._exit(0 if gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.isenabled()


@FORKS
def test_a_child_of_the_moment_when_it_is_turned_on_has_it_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children: list[int] = []
    asked = []

    def enable() -> None:
        gc.enable()
        asked.append(True)
        if len(asked) == 1:
            gc.disable()  # as if the child had come before
            children.append(os.fork())
            if children[0] == 0:
                os._exit(0 if gc.isenabled() else 1)
            gc.enable()

    monkeypatch.setattr(collector, "gc", SimpleNamespace(**{**vars(gc), "enable": enable}))
    with collector_paused():
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0


def test_a_plan_is_made_in_a_pause_and_a_kernel_runs_outside_of_it() -> None:
    seen: dict[str, bool] = {}

    class NotingKernel(DenseKernel):
        def forward(self, call: Call, out: Outputs) -> None:
            seen["forward"] = gc.isenabled()
            super().forward(call, out)

    class Noting(Dense):
        def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
            seen["compile"] = gc.isenabled()
            return NotingKernel()

    q = torch.randn(1, 1, 8, 16)
    with isolated():
        register("cpu.noting", Noting)
        anyflex.flex_attention(q, q, q, backend="cpu.noting")
    assert seen == {"compile": False, "forward": True}
