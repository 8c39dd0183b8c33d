"""Kernels that `anyflex-mps dump-shaders` writes: all that calls launch, and in Metal's rules."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from emulated_backend import Emulated
from emulator.compiling import check_types
from emulator.lint import conversions, findings
from emulator.metal_source import as_cpp, kernels_of
from soak import SOAK
from torch import Tensor

import anyflex
from anyflex.plugin import OPERATIONS, Artifacts, Kernel, Spec, isolated, register
from anyflex.testing import posing
from anyflex_mps.command import main
from anyflex_mps.dump import COMMANDS, METAL_4, SPECS, texts_of
from anyflex_mps.inventory import shaders_of
from anyflex_mps.mods import mods_source
from anyflex_mps.operations import FUNCTIONS
from anyflex_mps.shaders import CompileShader

UNIFORM = {"barrier-in-branch", "early-return"}
"""Rules that kernels may break: their conditions are the same in a whole threadgroup. The emulator
reports a barrier that only some threads reach."""

TEXTS = texts_of(SPECS)
CHECKED = list(TEXTS) if SOAK else list(TEXTS)[::12]


@pytest.mark.parametrize("name", CHECKED)
def test_each_text_keeps_the_rules_of_source(name: str) -> None:
    assert [found for found in findings(TEXTS[name]) if found.rule not in UNIFORM] == []
    assert conversions(TEXTS[name]) == []


@pytest.mark.parametrize("name", CHECKED)
def test_each_text_compiles_with_real_address_spaces(name: str) -> None:
    text = TEXTS[name]
    check_types(as_cpp(text, kernels_of(text)))


def test_a_text_that_does_not_compile_would_be_found() -> None:
    text = TEXTS["plain-float-64x64-0-forward.metal"]
    wrong = text.replace("threadgroup float* into", "device float* into")
    assert wrong != text
    with pytest.raises(SyntaxError):
        check_types(as_cpp(wrong, kernels_of(wrong)))


def test_every_operation_of_mods_is_written() -> None:
    reached = {
        node.operation
        for spec in SPECS.values()
        for graph in (spec.score_graph, spec.mask_graph)
        if graph is not None
        for node in graph.nodes
    }
    # Only derivatives make it, and it is its operand's text.
    assert set(OPERATIONS) - reached <= {"detach"}


def test_every_device_function_is_written() -> None:
    """No function of `operations` is left that Apple's compiler wouldn't see."""
    everything = "".join(TEXTS.values())
    missing = {name for name in FUNCTIONS if f" {name}(" not in everything}
    assert missing == set()


def test_specs_are_taken_and_cover_dtypes_and_kernels() -> None:
    backend = Emulated("mps", "mps")
    for name, spec in SPECS.items():
        assert backend.supports(spec) == backend.supports(SPECS["plain-float-64x64"]), name
    names = {shader.name for spec in SPECS.values() for shader in shaders_of(spec)}
    assert names == {
        "forward", "forward_matmul", "decode", "combine", "rows", "keys", "queries", "totals"
    }  # fmt: skip
    assert mods_source(SPECS["learned-half-80x48"], "score_mod()")


def test_a_text_declares_only_buffers_that_it_reads_and_functions_that_it_calls() -> None:
    for name, text in TEXTS.items():
        words = Counter(re.findall(r"\w+", text))
        declared = re.findall(r"(\w+) \[\[buffer\(", text)
        declared += re.findall(r"^static inline [^(]* (\w+)\(", text, re.MULTILINE)
        assert [each for each in declared if words[each] == 1] == [], name
    spec = replace(SPECS["learned-half-64x64"], q_class="short")
    buffers = {shader.name: shader.buffers for shader in shaders_of(spec)}
    assert buffers["combine"] == ("partial_out", "partial_sums", "out", "rest", "tops", "lse", "P")
    assert buffers["rows"] == ("rows", "delta", "lse", "P")
    assert buffers["forward"][-4:] == ("t0", "t1", "P", "F")


def test_equal_texts_are_written_once() -> None:
    assert len(set(TEXTS.values())) == len(TEXTS)
    assert texts_of({}).keys() == {
        f"self_test-{type_}.metal" for type_ in ("float", "half", "bfloat")
    }


def test_texts_in_metal_4_are_those_that_multiply_tensors() -> None:
    apart = {name for name in TEXTS if name.startswith(f"{METAL_4}/")}
    assert apart == {name for name, text in TEXTS.items() if "matmul2d" in text}
    assert f"{METAL_4}/mpp-wide-bfloat-256x256-0-forward_matmul.metal" in apart
    assert f"{METAL_4}/mpp-masked-bfloat-256x256-self_test.metal" in apart


class Recorded(Emulated):
    """Backend that keeps the texts which calls launch, and the specs of the calls."""

    launched: ClassVar[set[str]] = set()
    specs: ClassVar[list[Spec]] = []

    def compile_shader(self) -> CompileShader:
        compiler = super().compile_shader()

        def recorder(source: str) -> Any:
            if "kernel void self_test(" not in source:
                self.launched.add(source)
            return compiler(source)

        return recorder

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        self.specs.append(spec)
        return super().compile(spec, artifacts)


@pytest.fixture
def recorded() -> Iterator[type[Recorded]]:
    Recorded.launched, Recorded.specs = set(), []
    with isolated():
        register("mps", Recorded)
        yield Recorded


def made(heads: int, length: int, *, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    tensor = torch.randn(1, heads, length, 16, generator=generator)
    return tensor.requires_grad_(grad)


def _learned(grad: bool) -> Callable[..., Tensor]:
    table = torch.zeros(4, requires_grad=grad)

    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + table[(q + k) % 4]

    return mod


CALLS: dict[str, Callable[[], Any]] = {
    "long": lambda: anyflex.flex_attention(made(2, 70), made(2, 70), made(2, 70), backend="mps"),
    "only keys": lambda: anyflex.flex_attention(
        made(2, 70, grad=False), made(2, 70), made(2, 70, grad=False), backend="mps"
    ),
    "only values": lambda: anyflex.flex_attention(
        made(2, 70, grad=False), made(2, 70, grad=False), made(2, 70), backend="mps"
    ),
    "one row": lambda: anyflex.flex_attention(made(4, 1), made(4, 90), made(4, 90), backend="mps"),
    "heads share keys": lambda: anyflex.flex_attention(
        made(4, 5), made(1, 90), made(1, 90), backend="mps", enable_gqa=True
    ),
    "many rows of heads": lambda: anyflex.flex_attention(
        made(4, 33), made(1, 90), made(1, 90), backend="mps", enable_gqa=True
    ),
    "learned": lambda: anyflex.flex_attention(
        made(1, 70), made(1, 70), made(1, 70), score_mod=_learned(True), backend="mps"
    ),
    "learned alone": lambda: anyflex.flex_attention(
        *[made(1, 70, grad=False)] * 3, score_mod=_learned(True), backend="mps"
    ),
    "lse": lambda: anyflex.flex_attention(
        made(1, 70), made(1, 70), made(1, 70), return_lse=True, backend="mps"
    )[1],
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_what_calls_launch_is_among_a_specs_kernels(
    call: str, deterministic: bool, recorded: type[Recorded]
) -> None:
    torch.use_deterministic_algorithms(deterministic)
    try:
        with posing("mps", arch="apple9"):
            CALLS[call]().square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    foreseen = {shader.text for spec in recorded.specs for shader in shaders_of(spec)}
    assert len(recorded.launched) > 1
    assert recorded.launched <= foreseen


def test_the_command_writes_the_texts_and_says_how_to_check_them(tmp_path: Path) -> None:
    folder = tmp_path / "some shaders"
    done = subprocess.run(
        [sys.executable, "-m", "anyflex_mps.command", "dump-shaders", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    files = {str(file.relative_to(folder)): file for file in folder.rglob("*.metal")}
    assert {name: file.read_text() for name, file in files.items()} == TEXTS
    first, *commands = done.stdout.splitlines()
    assert first.startswith(f"{len(TEXTS)} kernels written to {folder}. ")
    assert commands == [
        f"  find '{folder / part}' -maxdepth 1 -name '*.metal' -print0 | xargs -0 -n 1 {command}"
        for part, command in COMMANDS.items()
    ]


def test_a_folder_that_holds_something_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.metal").touch()
    assert main(["dump-shaders", str(tmp_path)]) == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "old.metal"]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"anyflex-mps dump-shaders: {tmp_path} isn't empty; name a new folder\n"


def test_a_folder_that_is_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["dump-shaders", str(tmp_path / "file")]) == 2
    assert "File exists" in capsys.readouterr().err
