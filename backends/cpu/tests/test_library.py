"""Finding and loading the library, levels by name, and the messages where it can't be loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import anyflex
from anyflex.plugin import ArgumentError, Rejected
from anyflex_cpu import library
from anyflex_cpu.backend import CpuBackend


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The library is loaded again at its next use; afterwards the level is the one before."""
    loaded = library.load()
    before = loaded.level
    monkeypatch.setattr(library, "_loaded", None)
    yield monkeypatch
    loaded.set_isa(before)


def test_the_variable_names_the_level(fresh: pytest.MonkeyPatch) -> None:
    level = library.load().available()[-1]  # without the variable it is the first
    fresh.setenv(library.ISA_VARIABLE, level)
    fresh.setattr(library, "_loaded", None)
    assert library.load().level == level
    assert level in CpuBackend("cpu", "cpu").fingerprint()


def test_a_level_that_is_none_is_refused_with_those_that_are(fresh: pytest.MonkeyPatch) -> None:
    levels = ", ".join(library.load().available())
    fresh.setenv(library.ISA_VARIABLE, "avx9")
    fresh.setattr(library, "_loaded", None)
    decision = CpuBackend("cpu", "cpu").probe()
    assert isinstance(decision, Rejected)
    named = "environment variable ANYFLEX_CPU_ISA: 'avx9' is no instruction-set level"
    assert named in decision.reason and levels in decision.reason


def test_setting_a_level_takes_one_that_runs_here() -> None:
    loaded = library.load()
    before = loaded.level
    with pytest.raises(ArgumentError, match=r"'sse' is no instruction-set level.*portable"):
        loaded.set_isa("sse")
    assert loaded.level == before
    assert loaded.available()[-1] == "portable"


def test_a_level_that_is_not_built_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = library.load()
    monkeypatch.setattr(loaded, "_left_out", lambda: b"amx_bf16,avx512_bf16")
    assert loaded.left_out() == ("amx_bf16", "avx512_bf16")
    match = (
        r"'amx_bf16' is an .* built without: its compiler doesn't know it; there are: .*portable"
    )
    with pytest.raises(ArgumentError, match=match):
        loaded.set_isa("amx_bf16")
    note = CpuBackend("cpu", "cpu").notes()[0]
    assert "built without amx_bf16, avx512_bf16, which this processor can run" in note
    assert note.endswith(
        "install a newer compiler (gcc 11 and clang 13 know all) and anyflex-cpu again"
    )


def test_without_the_library_the_probe_refuses_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(library, "find", lambda: None)
    decision = CpuBackend("cpu", "cpu").probe()
    assert isinstance(decision, Rejected)
    assert decision.reason == (
        "it was installed without its native library: there was no C++ compiler, or the build "
        "failed; install gcc (or clang) and anyflex-cpu again, with ANYFLEX_CPU_REQUIRE_LIBRARY=1 "
        "to see why a build fails"
    )
    assert CpuBackend("cpu", "cpu").notes() == []


def test_a_file_that_is_no_library_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / library.NAMES[0]).write_bytes(b"no library")
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(library, "find", lambda: tmp_path / library.NAMES[0])
    decision = CpuBackend("cpu", "cpu").probe()
    assert isinstance(decision, Rejected)
    assert "can't be loaded" in decision.reason and "install anyflex-cpu again" in decision.reason


def test_a_library_of_another_abi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI", library.ABI + 1)
    monkeypatch.setattr(library, "_loaded", None)
    decision = CpuBackend("cpu", "cpu").probe()
    assert isinstance(decision, Rejected)
    assert f"speaks ABI {library.ABI - 1} and its Python part ABI {library.ABI}" in decision.reason


def test_a_library_without_a_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = library.Library._function

    def asking(self: library.Library, name: str, *types: type) -> object:
        return plain(self, "af_of_tomorrow" if name == "af_isa" else name, *types)

    monkeypatch.setattr(library.Library, "_function", asking)
    monkeypatch.setattr(library, "_loaded", None)
    decision = CpuBackend("cpu", "cpu").probe()
    assert isinstance(decision, Rejected)
    assert "has no function af_of_tomorrow: it is of another version" in decision.reason


def test_the_fingerprint_names_what_compiled_mods_depend_on() -> None:
    text = CpuBackend("cpu", "cpu").fingerprint()
    assert f"ABI {library.ABI}" in text and library.load().level in text and "llvmlite" in text


def test_what_it_does_not_do_is_refused_with_the_reason() -> None:
    wide = torch.zeros(1, 1, 8, 513)
    with pytest.raises(anyflex.BackendRefused, match="head dim E = 513 is not supported"):
        anyflex.flex_attention(wide, wide, wide, backend="cpu")
    double = torch.zeros(1, 1, 8, 8, dtype=torch.float64)
    with pytest.raises(anyflex.BackendRefused, match="dtype float64 is not supported"):
        anyflex.flex_attention(double, double, double, backend="cpu")


@pytest.mark.parametrize(
    ("version", "reason"),
    [(None, "no llvmlite"), ("0.44.1", "llvmlite 0.44.1 is older than 0.45")],
)
def test_without_a_usable_llvmlite_mods_are_interpreted_and_it_says_so(
    monkeypatch: pytest.MonkeyPatch, version: str | None, reason: str
) -> None:
    from anyflex_cpu import programs

    monkeypatch.setattr(programs, "llvmlite_version", lambda: version)
    assert f"mods interpreted ({reason})" in CpuBackend("cpu", "cpu").fingerprint()
    query = torch.zeros(1, 1, 8, 8)

    def triple(score: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
        return score * 3 + (0 if version is None else 1)

    with pytest.raises(anyflex.BackendRefused, match=f"mods='jit' needs llvmlite.*{reason}"):
        anyflex.flex_attention(
            query,
            query,
            query,
            lambda score, b, h, q, k: triple(score, b),
            backend="cpu",
            kernel_options={"cpu": {"mods": "jit"}},
        )
    said = anyflex.explain(
        query, query, query, lambda score, b, h, q, k: triple(score) - 5, backend="cpu"
    )
    assert "mods interpreted" in said.variant


WITHOUT_LLVM = """
import logging, torch, anyflex
from importlib.metadata import entry_points
from anyflex.plugin import register
from anyflex_cpu.backend import CpuBackend
if not any(point.name == "cpu" for point in entry_points(group="anyflex.backends.v1")):
    register("cpu", CpuBackend)
logging.basicConfig(format="%(message)s")
q = torch.randn(1, 1, 8, 8)
double = lambda score, b, h, q, k: score * 2
triple = lambda score, b, h, q, k: score * 3
# Before it may stand that levels aren't built.
*_, note = CpuBackend("cpu", "cpu").notes()
print(note)
print(anyflex.explain(q, q, q, double).variant)
out = anyflex.flex_attention(q, q, q, double)
anyflex.flex_attention(q, q, q, triple)
torch.testing.assert_close(out, anyflex.flex_attention(q, q, q, double, backend="reference"))
try:
    anyflex.flex_attention(
        q, q, q, double, backend="cpu", kernel_options={"cpu": {"mods": "jit"}}
    )
except anyflex.BackendRefused as refusal:
    print(refusal)
"""


def test_an_llvmlite_that_cannot_be_loaded_leaves_mods_to_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("llvmlite", reason="its metadata counts")
    package = tmp_path / "llvmlite"
    package.mkdir()
    (package / "__init__.py").touch()
    error = "Could not find/load shared object file 'libllvmlite.so'"
    (package / "binding.py").write_text(f"raise OSError({error!r} + chr(10) + 'Error was: ...')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LLVM],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    note, variant, refusal = done.stdout.splitlines()[:3]
    reason = f"can't be loaded: OSError: {error}"
    assert note.startswith("mods are interpreted: llvmlite ") and reason in note
    assert "mods interpreted (llvmlite " in variant and reason in variant
    assert "option mods='jit' needs llvmlite" in refusal and reason in refusal
    warnings = [line for line in done.stderr.splitlines() if "interprets mods" in line]
    assert len(warnings) == 1 and reason in warnings[0]
