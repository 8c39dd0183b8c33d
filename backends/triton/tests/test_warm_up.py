"""The modules in C are begun once a process, and a failure is the first launch's own."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from anyflex_triton import warm_up

__all__: list[str] = []


@pytest.fixture(autouse=True)
def nothing_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "_threads", {})


def test_each_module_is_begun_once_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    go_on = threading.Event()

    def make_driver() -> None:
        go_on.wait(20)
        begun.append("driver")

    monkeypatch.setattr(warm_up, "IS_KNOWN", True)
    monkeypatch.setattr(warm_up, "_make_driver", make_driver)
    monkeypatch.setattr(warm_up, "launch_module", lambda: begun.append("launcher"))
    target = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: "sm_90"))
    monkeypatch.setattr(warm_up, "driver", target)
    warm_up.begin_warm_up()
    warm_up.begin_warm_up()
    assert "driver" not in begun
    go_on.set()
    assert warm_up.current_target() == "sm_90"
    for thread in warm_up._threads.values():
        thread.join(20)
    assert sorted(begun) == ["driver", "launcher"]


def test_what_fails_in_a_thread_is_raised_by_whoever_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Missing:
        @property
        def active(self) -> object:
            raise RuntimeError("0 active drivers")

    monkeypatch.setattr(warm_up, "IS_KNOWN", False)
    monkeypatch.setattr(warm_up, "driver", Missing())
    warm_up.begin_warm_up()
    with pytest.raises(RuntimeError, match="0 active drivers"):
        warm_up.current_target()


def test_without_threads_nothing_is_begun_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    warm_up.begin_warm_up()
    assert not warm_up._threads
