"""Generated modules are complete for every process that gets them."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from anyflex_triton.mods import load_module

TEXT = """
import sys

sys.begun.set()
sys.go_on.wait()
DONE = True
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_forked_while_a_module_is_executed_makes_it_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "begun", begun, raising=False)
    monkeypatch.setattr(sys, "go_on", go_on, raising=False)
    loading = threading.Thread(target=load_module, args=(TEXT,))
    loading.start()
    assert begun.wait(timeout=30)
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(30)
            # The parent's thread may hold the events' locks at the fork.
            sys.begun, sys.go_on = threading.Event(), threading.Event()  # type: ignore[attr-defined]
            sys.go_on.set()  # type: ignore[attr-defined]
            os._exit(0 if hasattr(load_module(TEXT), "DONE") else 1)
        finally:
            os._exit(2)
    go_on.set()
    loading.join()
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert load_module(TEXT) is load_module(TEXT)
