"""Errors of compiling and launching: typed, with the compiler's message and the kept source."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_backend import Emulated
from emulator import compile_shader

import anyflex
from anyflex.plugin import Call, PluginError, Spec, isolated, register
from anyflex.testing import posing
from anyflex_mps.forward import forward_shader
from anyflex_mps.launch import launch
from anyflex_mps.shaders import CompileShader, Shaders
from anyflex_mps.spec_shaders import SpecShaders

SPEC = Spec("mps", "apple9", torch.float32, 16, 16)
SHADER = forward_shader(SPEC)


def query() -> torch.Tensor:
    return torch.randn(1, 1, 80, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with isolated():
        yield tmp_path


class Refusing(Emulated):
    """Backend whose compiler refuses all but the self test."""

    def compile_shader(self) -> CompileShader:
        def compiler(source: str) -> Any:
            if "kernel void self_test(" in source:
                return compile_shader(source)
            raise SyntaxError("program_source:7:3: error: use of undeclared identifier\n  x = y;")

        return compiler


class Narrow(Emulated):
    """Backend of a GPU that runs few threads of a kernel with many registers."""

    def compile_shader(self) -> CompileShader:
        def compiler(source: str) -> Any:
            library = compile_shader(source)
            if "kernel void forward(" not in source:
                return library
            return SimpleNamespace(forward=SimpleNamespace(max_threads_per_threadgroup=96))

        return compiler


def source_of(message: str) -> str:
    found = re.search(r"kept at (\S+?\.metal)[;.]", message)
    assert found is not None, message
    return Path(found[1]).read_text()


@pytest.mark.parametrize("error", [SyntaxError, RuntimeError])
def test_the_compilers_message_comes_with_the_kept_source(error: type[Exception]) -> None:
    def compiler(source: str) -> Any:
        raise error("line 7: no such name\nand more")

    with pytest.raises(RuntimeError) as raised:
        Shaders(compiler).kernel(SHADER)
    message = str(raised.value)
    assert "refuses the kernel 'forward'" in message
    assert message.endswith("It says: line 7: no such name and more")
    assert source_of(message) == SHADER.text
    assert isinstance(raised.value.__cause__, error)


def test_a_refused_source_is_compiled_and_kept_once(kept: Path) -> None:
    compiled = []

    def compiler(source: str) -> Any:
        compiled.append(source)
        raise SyntaxError("no")

    messages = set()
    for shaders in (Shaders(compiler), Shaders(compiler)):
        for _ in range(3):
            with pytest.raises(RuntimeError) as raised:
                shaders.kernel(SHADER)
            messages.add(str(raised.value))
    # Two specs that have the same kernel name the same file.
    assert len(messages) == 1 and len(compiled) == 2
    (file,) = kept.iterdir()
    assert file.read_text() == SHADER.text


def test_a_call_raises_a_typed_error_with_message_path_and_cure() -> None:
    register("mps", Refusing)
    with posing("mps", arch="apple9"), pytest.raises(PluginError) as raised:
        anyflex.flex_attention(query(), query(), query(), backend="mps")
    message = str(raised.value)
    assert "its kernel for mps float32 E=16 Ev=16" in message
    assert "It says: program_source:7:3: error: use of undeclared identifier x = y;" in message
    assert "set ANYFLEX_DISABLE=mps, or force backend='reference'" in message
    assert "kernel void forward(" in source_of(message)


def test_a_kernel_that_the_gpu_runs_with_fewer_threads_is_a_typed_error() -> None:
    register("mps", Narrow)
    with posing("mps", arch="apple9"), pytest.raises(PluginError) as raised:
        anyflex.flex_attention(query(), query(), query(), backend="mps")
    message = str(raised.value)
    assert "at most 96 threads of the kernel 'forward'" in message
    assert "which needs 128: it takes too many registers" in message
    assert "kernel void forward(" in source_of(message)


def test_threads_that_just_suffice_are_enough() -> None:
    kernel = SimpleNamespace(max_threads_per_threadgroup=SHADER.threads)
    assert Shaders(lambda source: SimpleNamespace(forward=kernel)).kernel(SHADER) is kernel


def test_threads_that_launch_at_once_compile_a_source_once() -> None:
    compiled, kernel = [], SimpleNamespace(max_threads_per_threadgroup=SHADER.threads)
    both = threading.Barrier(2, timeout=1)

    def compiler(source: str) -> Any:
        compiled.append(source)
        # A second thread would meet the first one here.
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait()
        return SimpleNamespace(forward=kernel)

    shaders, found = Shaders(compiler), []
    threads = [
        threading.Thread(target=lambda: found.append(shaders.kernel(SHADER))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == [SHADER.text] and found == [kernel] * 4


def made_by(compiler: CompileShader) -> SpecShaders:
    return SpecShaders(SPEC, Shaders(compiler), 8)


@pytest.mark.parametrize("missing", ["value", "out"])
@pytest.mark.parametrize("how", ["absent", "none"])
def test_a_launch_without_an_argument_is_an_error(missing: str, how: str) -> None:
    call = Call(query(), query(), query(), None, (), (), (), 0.25)
    tensors: dict[str, torch.Tensor | None] = {
        "query": call.query, "key": call.key, "value": call.value, "out": torch.empty_like(query())
    }  # fmt: skip
    if how == "none":
        tensors[missing] = None
    else:
        del tensors[missing]
    with pytest.raises(RuntimeError, match=f"kernel 'forward' lacks arguments: {missing}$"):
        launch(made_by(compile_shader), SHADER, call, (3, 1, 1), tensors, {})


def test_a_launch_of_no_groups_compiles_nothing() -> None:
    def compiler(source: str) -> Any:
        raise AssertionError("compiled")

    call = Call(query(), query(), query(), None, (), (), (), 0.25)
    launch(made_by(compiler), SHADER, call, (0, 1, 1), {}, {})
