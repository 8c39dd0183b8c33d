"""How often threads give Python's lock back while something is compiled beside."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from anyflex_triton import launch
from anyflex_triton.python_lock import INTERVAL, often_given_back


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_it_is_as_before_when_the_last_of_them_ends() -> None:
    sys.setswitchinterval(0.004)
    inside, leave = threading.Barrier(2), threading.Event()

    def stay() -> None:
        with often_given_back():
            inside.wait(timeout=20)
            leave.wait(timeout=20)

    other = threading.Thread(target=stay)
    with pytest.raises(RuntimeError, match="no compiler"), often_given_back():
        other.start()
        inside.wait(timeout=20)
        assert sys.getswitchinterval() == INTERVAL
        raise RuntimeError("no compiler")
    assert sys.getswitchinterval() == INTERVAL
    leave.set()
    other.join()
    assert sys.getswitchinterval() == 0.004


@pytest.mark.parametrize("interval", [0.00025, 0.02])
def test_whoever_sets_another_keeps_it(interval: float) -> None:
    with often_given_back():
        sys.setswitchinterval(interval)
    assert sys.getswitchinterval() == interval


def test_it_is_never_longer_than_before() -> None:
    sys.setswitchinterval(0.00025)
    with often_given_back():
        assert sys.getswitchinterval() == 0.00025
    assert sys.getswitchinterval() == 0.00025


def test_what_is_compiled_ahead_gives_it_back_often() -> None:
    seen: list[float] = []

    class Ahead:
        def compile_ahead(self, target: object, meanwhile: object) -> None:
            seen.append(sys.getswitchinterval())
            raise RuntimeError("no compiler")

    sys.setswitchinterval(0.005)
    before = set(threading.enumerate())
    launch.begin_compiling([Ahead()], "sm_90")  # type: ignore[list-item]
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert seen == [INTERVAL] and sys.getswitchinterval() == 0.005
