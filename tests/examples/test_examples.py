"""Each example runs, and what it asserts holds."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import anyflex
from anyflex.plugin import isolated

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
SERVER = FOLDER / "serving.py"
"""It has an event loop and threads, so it gets a process of its own, and the fastest backend."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a file of `examples` as its reader would. One thread: the tests run two at a time."""
    paths = [str(ROOT / "core"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=FOLDER,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def skip_without_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers isn't installed; its newest needs Python 3.11")


@pytest.mark.parametrize("example", sorted({*EXAMPLES} - {SERVER}), ids=lambda path: path.stem)
def test_an_example_runs_and_its_assertions_hold(
    example: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "from transformers import" in example.read_text(encoding="utf-8"):
        skip_without_transformers()
    monkeypatch.chdir(FOLDER)
    with isolated(), warnings.catch_warnings():
        warnings.simplefilter("error", anyflex.PerformanceWarning)
        runpy.run_path(example.name, run_name="__main__")
    assert 0 < len(capsys.readouterr().out.splitlines()) <= 60


def test_the_server_gives_all_clients_what_plain_torch_computes() -> None:
    pytest.importorskip("uvicorn", reason="the extra serving is not installed")
    done = run(SERVER.name)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2] == "6 of 6 counted right, all with plain torch's probabilities"
    assert len(lines) <= 60


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_checks_its_result_against_plain_torch(example: Path) -> None:
    assert "torch.testing.assert_close(" in example.read_text(encoding="utf-8")


def test_the_demo_starts_as_a_folder_and_as_a_module(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # `tests/cli/test_demo_command.py` tests what it does then, with a smaller model.
    done = run("packed_training", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: packed_training ")
    monkeypatch.setattr(sys, "argv", ["packed_training", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("packed_training", run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out.startswith("usage: packed_training ")


def test_the_index_names_every_example_and_nothing_else() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    linked = {line.split("](")[1].split(")")[0] for line in index.splitlines() if "](" in line}
    folders = {f"{path.parent.name}/" for path in FOLDER.glob("*/__main__.py")}
    assert linked == {path.name for path in EXAMPLES} | folders
