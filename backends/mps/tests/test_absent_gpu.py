"""Answers on a machine without an Apple GPU: one line each, with what is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import anyflex
from anyflex.plugin import BackendRefused, Rejected, isolated, register
from anyflex_mps.backend import MpsBackend

pytestmark = pytest.mark.skipif(
    torch.backends.mps.is_available(), reason="this machine has an Apple GPU"
)
NEEDED = "torch sees no Apple GPU; it needs a Mac with Apple silicon and macOS 14 or newer"


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which `anyflex-mps` counts as installed."""
    metadata = tmp_path / "anyflex_mps-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: anyflex-mps\nVersion: 0.1.0\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[anyflex.backends.v1]\nmps = anyflex_mps.backend:MpsBackend\n"
    )
    paths = os.pathsep.join(filter(None, [str(tmp_path), *sys.path]))
    return {**os.environ, "PYTHONPATH": paths, "ANYFLEX_CACHE_DIR": str(tmp_path / "cache")}


def anyflex_command(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "anyflex", *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=120,
    )


def test_the_probe_says_what_is_needed_in_one_line() -> None:
    assert MpsBackend("mps", "mps").probe() == Rejected(NEEDED)


def test_a_call_that_forces_the_backend_is_refused_with_that_line() -> None:
    query = torch.zeros(1, 1, 16, 16)
    with isolated():
        register("mps", MpsBackend)
        with pytest.raises(BackendRefused, match="mps"):
            anyflex.flex_attention(query, query, query, backend="mps")


def test_conformance_exits_3_with_that_line(installed: dict[str, str]) -> None:
    done = anyflex_command(installed, "conformance", "--backend", "mps", "--quick")
    assert done.returncode == 3, done.stderr
    printed = (done.stdout + done.stderr).strip().splitlines()
    assert len(printed) == 1 and NEEDED in printed[0], printed


def test_doctor_lists_the_backend_with_that_line(installed: dict[str, str]) -> None:
    done = anyflex_command(installed, "doctor")
    assert NEEDED in done.stdout


def test_neither_import_nor_probe_compiles_or_loads_generators(installed: dict[str, str]) -> None:
    script = (
        "import sys; from anyflex_mps.backend import MpsBackend; MpsBackend('mps', 'mps').probe();"
        "print(sorted(name for name in sys.modules if name.startswith('anyflex_mps')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=installed
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
