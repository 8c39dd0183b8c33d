"""Answers on a machine without an Apple GPU: one line each, with what is needed."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys

import pytest
import torch

import anyflex
from anyflex.plugin import BackendRefused, Rejected, isolated, register
from anyflex_mps.backend import MpsBackend

pytestmark = pytest.mark.skipif(
    torch.backends.mps.is_available(), reason="this machine has an Apple GPU"
)
NEEDED = "torch sees no Apple GPU; it needs a Mac with Apple silicon and macOS 14 or newer"


def status_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    """Run ``python -m anyflex`` in this process; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["anyflex", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("anyflex", run_name="__main__")
    return ended.value.code


def test_the_probe_says_what_is_needed_in_one_line() -> None:
    assert MpsBackend("mps", "mps").probe() == Rejected(NEEDED)


def test_a_call_that_forces_the_backend_is_refused_with_that_line() -> None:
    query = torch.zeros(1, 1, 16, 16)
    with isolated():
        register("mps", MpsBackend)
        with pytest.raises(BackendRefused, match="mps"):
            anyflex.flex_attention(query, query, query, backend="mps")


def test_conformance_exits_3_with_that_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(monkeypatch, "conformance", "--backend", "mps", "--quick") == 3
    said = capsys.readouterr()
    printed = (said.out + said.err).strip().splitlines()
    assert len(printed) == 1 and NEEDED in printed[0], printed


def test_doctor_lists_the_backend_with_that_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status_of(monkeypatch, "doctor")
    assert NEEDED in capsys.readouterr().out


def test_neither_import_nor_probe_compiles_or_loads_generators() -> None:
    script = (
        "import sys; from anyflex_mps.backend import MpsBackend; MpsBackend('mps', 'mps').probe();"
        "print(sorted(name for name in sys.modules if name.startswith('anyflex_mps')))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == str(
        [
            "anyflex_mps",
            "anyflex_mps.backend",
            "anyflex_mps.options",
            "anyflex_mps.refusals",
            "anyflex_mps.targets",
        ]
    )
