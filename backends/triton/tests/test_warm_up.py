"""The modules in C and the checksum are begun once a process, and a failure is the first use's."""

from __future__ import annotations

import functools
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
    warm_up.begin_warm_up(compiles=False)
    warm_up.begin_warm_up(compiles=False)
    assert "driver" not in begun
    go_on.set()
    assert warm_up.current_target() == "sm_90"
    for thread in warm_up._threads.values():
        thread.join(20)
    assert sorted(begun) == ["driver", "launcher"]


def test_the_checksum_is_made_once_where_kernels_are_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    go_on = threading.Event()

    @functools.lru_cache
    def triton_key() -> str:
        go_on.wait(20)
        made.append(threading.current_thread().name)
        return "key"

    monkeypatch.setattr(warm_up, "_make_driver", lambda: None)
    monkeypatch.setattr(warm_up, "launch_module", lambda: None)
    monkeypatch.setattr(warm_up.cache, "triton_key", triton_key)
    warm_up.begin_warm_up(compiles=False)
    warm_up.await_checksum()
    assert made == []
    warm_up.begin_warm_up(compiles=True)
    threading.Timer(0.1, go_on.set).start()
    warm_up.await_checksum()
    assert triton_key() == "key" and made == ["anyflex-triton"]


def test_what_fails_in_a_thread_is_raised_by_whoever_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Missing:
        @property
        def active(self) -> object:
            raise RuntimeError("0 active drivers")

    monkeypatch.setattr(warm_up, "IS_KNOWN", False)
    monkeypatch.setattr(warm_up, "driver", Missing())
    monkeypatch.delattr(warm_up.cache, "triton_key")
    warm_up.begin_warm_up(compiles=True)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        warm_up.current_target()
    warm_up.await_checksum()


def test_without_threads_nothing_is_begun_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    warm_up.begin_warm_up(compiles=True)
    assert not warm_up._threads
