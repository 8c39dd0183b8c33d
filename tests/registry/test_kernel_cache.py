"""Live kernels: compiled once, by one thread, kept for a while."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import pytest
import torch

from anyflex.errors import (
    AnyflexError,
    ArgumentError,
    GraphCaptureError,
    PerformanceWarning,
    PluginError,
)
from anyflex.registry import register, reset
from anyflex.registry.forced_backends import use_backend
from anyflex.runtime import kernel_cache
from anyflex.runtime.compiled_kernel import CompiledKernel
from anyflex.runtime.kernel_cache import kernel_for
from tests.registry.stubs import make_spec, make_stub

__all__: list[str] = []


def together(count: int, function: Any) -> list[Any]:
    """Run `function` in threads that start at once; return results and errors."""
    barrier = threading.Barrier(count)
    results: list[Any] = []

    def work() -> None:
        barrier.wait()
        try:
            results.append(function())
        except AnyflexError as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == count
    return results


def ask() -> CompiledKernel:
    return kernel_for(make_spec(), (), None, ())


def test_a_spec_is_compiled_once_however_it_is_asked_for() -> None:
    stub = make_stub()
    register("cpu", stub)
    first = ask()
    with use_backend("cpu"):
        second = kernel_for(make_spec(), ("cpu",), None, ())
    third = kernel_for(make_spec(), ("cpu",), "cpu", ())
    assert first.kernel is second.kernel is third.kernel
    assert stub.compiled == [make_spec()]


def test_sixteen_threads_compile_a_spec_once() -> None:
    stub = make_stub(compile_seconds=0.1)
    register("cpu", stub)
    kernels = [compiled.kernel for compiled in together(16, ask)]
    assert len(stub.compiled) == 1
    assert len(set(map(id, kernels))) == 1


def test_different_specs_compile_at_the_same_time() -> None:
    inside = threading.Barrier(2, timeout=20)
    stub = make_stub()
    plain = stub.compile

    def compile_and_meet(self: Any, spec: Any, artifacts: Any) -> Any:
        inside.wait()
        return plain(self, spec, artifacts)

    stub.compile = compile_and_meet  # type: ignore[method-assign]
    register("cpu", stub)
    sizes = iter((16, 32))
    lock = threading.Lock()

    def ask_another() -> CompiledKernel:
        with lock:
            size = next(sizes)
        return kernel_for(make_spec(head_dim=size), (), None, ())

    assert all(isinstance(result, CompiledKernel) for result in together(2, ask_another))


def test_a_compile_that_fails_releases_those_who_wait_with_the_same_error() -> None:
    stub = make_stub(compile_seconds=0.2, raises={"compile": RuntimeError("ptxas failed")})
    register("cpu", stub)
    errors = together(8, lambda: kernel_for(make_spec(), ("cpu",), "cpu", ()))
    assert {type(error) for error in errors} == {PluginError}
    assert len({str(error) for error in errors}) == 1
    assert len({id(error) for error in errors}) == 8


def test_an_argument_error_of_a_compile_reaches_those_who_wait() -> None:
    stub = make_stub(compile_seconds=0.2, raises={"compile": ArgumentError("odd window")})
    register("cpu", stub)
    assert {str(error) for error in together(4, ask)} == {"odd window"}


def test_an_interrupted_compile_lets_the_next_one_try() -> None:
    register("cpu", make_stub(compile_seconds=0.1))
    backend = ask().backend
    calls: list[int] = []

    def compile_once_interrupted(spec: Any, artifacts: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            waiting.wait(20)
            raise KeyboardInterrupt
        return type(backend).compile(backend, spec, artifacts)

    backend.compile = compile_once_interrupted  # type: ignore[method-assign]
    waiting = threading.Event()
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(kernel_for(make_spec(head_dim=8), (), None, ()))
        except KeyboardInterrupt as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    waiting.set()
    for thread in threads:
        thread.join(30)
    assert {type(result) for result in results} == {KeyboardInterrupt, CompiledKernel}


def test_a_compile_that_asks_for_its_own_spec_is_an_error_not_a_hang() -> None:
    stub = make_stub()

    def ask_for_itself(self: Any, spec: Any, artifacts: Any) -> Any:
        return kernel_for(spec, ("cpu",), "cpu", ()).kernel

    stub.compile = ask_for_itself  # type: ignore[method-assign]
    register("cpu", stub)
    with pytest.raises(PluginError, match="calls anyflex for the spec that it compiles"):
        kernel_for(make_spec(), ("cpu",), "cpu", ())


def test_a_kernel_is_not_compiled_inside_a_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = make_stub()
    register("cuda", stub)
    kernel_for(make_spec("cuda"), (), None, ())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel_for(make_spec("cuda"), ("cuda",), "cuda", ())
    with pytest.raises(GraphCaptureError, match="backend cuda would have to compile.*once"):
        kernel_for(make_spec("cuda", head_dim=32), (), None, ())
    register("cpu", make_stub())
    ask()
    assert len(stub.compiled) == 1


def test_live_kernels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "KERNELS", 2)
    kernel_cache.forget()
    stub = make_stub()
    register("cpu", stub)
    for size in (1, 2, 1, 3):  # 1 is used again, and 2 is evicted
        kernel_for(make_spec(head_dim=size), (), None, ())
    assert len(kernel_cache._kernels) == 2
    kernel_for(make_spec(head_dim=3), ("cpu",), "cpu", ())
    kernel_for(make_spec(head_dim=1), ("cpu",), "cpu", ())
    assert len(stub.compiled) == 3
    kernel_for(make_spec(head_dim=2), ("cpu",), "cpu", ())
    assert len(stub.compiled) == 4


def test_threads_that_find_a_live_kernel_do_not_compile_it_again() -> None:
    stub = make_stub()
    register("cpu", stub)
    first = ask().kernel
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        found = together(8, lambda: {id(ask().kernel) for _ in range(200)})
    finally:
        sys.setswitchinterval(interval)
    assert set().union(*found) == {id(first)}
    assert len(stub.compiled) == 1 and not kernel_cache._compiling


def test_a_compile_that_fails_leaves_no_lock() -> None:
    register("cpu", make_stub(raises={"compile": RuntimeError("ptxas failed")}))
    with pytest.raises(PluginError):
        kernel_for(make_spec(), ("cpu",), "cpu", ())
    assert not kernel_cache._compiling


def test_a_fingerprint_that_is_no_text_is_the_plugins_fault() -> None:
    stub = make_stub()
    stub.fingerprint = lambda self: None  # type: ignore[method-assign, assignment, return-value]
    register("cpu", stub)
    with pytest.raises(PluginError, match=r"fingerprint\(\) must return a str, got None"):
        kernel_for(make_spec(), ("cpu",), "cpu", ())
    with pytest.warns(PerformanceWarning, match=r"fingerprint\(\) must return a str"):
        assert ask().backend.name == "reference"


def test_a_reset_forgets_registrations_and_kernels() -> None:
    stub = make_stub()
    register("cpu", stub)
    ask()
    reset()
    assert len(kernel_cache._kernels) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_made_during_a_compile_does_not_wait_for_it() -> None:
    started = threading.Event()
    release = threading.Event()
    stub = make_stub()
    plain = stub.compile

    def slow(self: Any, spec: Any, artifacts: Any) -> Any:
        started.set()
        release.wait(30)
        return plain(self, spec, artifacts)

    stub.compile = slow  # type: ignore[method-assign]
    register("cpu", stub)
    thread = threading.Thread(target=ask)
    thread.start()
    started.wait(20)
    child = os.fork()
    if child == 0:
        release.set()
        os._exit(0 if ask().backend.name == "cpu" else 1)
    release.set()
    thread.join(30)
    assert os.waitpid(child, 0)[1] == 0
