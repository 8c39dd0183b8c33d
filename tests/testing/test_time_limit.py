"""A backend that hangs ends the run: the case is named, and the results so far are reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anyflex.cli.exit_codes import ExitCode
from anyflex.cli.main import main
from anyflex.testing.time_limit import limited

ROOT = Path(__file__).resolve().parents[2]

# The first case needs no forward.
HANGS = """
import ctypes, sys, time
from anyflex.cli.main import main
from anyflex.plugin import register
from anyflex.testing import time_limit
from tests.testing.backends import DenseKernel, wrong

time_limit.GRACE = 1.0

class Hanging(DenseKernel):
    def forward(self, call, out):
        {hang}

register("cpu.hangs", wrong(Hanging))
sys.exit(main(["conformance", "--backend", "cpu.hangs", "--case", "refusals/undeclared",
               "--case", "processes/bare", "--timeout", "1", *sys.argv[1:]]))
"""
FOR_EVER = "time.sleep(1000)"
# Such a call doesn't release the interpreter's lock: no other thread of Python runs.
WITH_THE_LOCK = "ctypes.PyDLL(None).sleep(1000)"


def run(hang: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join((str(ROOT / "core"), str(ROOT)))
    return subprocess.run(
        [sys.executable, "-c", HANGS.format(hang=hang), *arguments],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_case_that_hangs_fails_and_ends_the_run_with_a_report(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = run(FOR_EVER, "--json", str(path))
    assert done.returncode == ExitCode.CHECK_FAILED, done.stderr
    failure, summary, *_ = done.stdout.splitlines()
    assert failure.startswith("FAIL processes/bare: it has not ended within 1 s (--timeout)")
    assert failure.endswith("[anyflex conformance --backend cpu.hangs --case processes/bare]")
    assert summary.startswith("FAIL cpu.hangs of ")
    assert "in forward" in done.stderr
    report = json.loads(path.read_text(encoding="utf-8"))
    assert [row["case"] for row in report["cases"]] == ["refusals/undeclared", "processes/bare"]
    assert [row["status"] for row in report["cases"]] == ["passed", "failed"]
    assert not report["passed"]


@pytest.mark.skipif(sys.platform == "win32", reason="the test's way to hang is POSIX's sleep")
def test_native_code_that_keeps_python_from_running_ends_with_the_case_in_the_traceback() -> None:
    done = run(WITH_THE_LOCK)
    assert done.returncode == ExitCode.CHECK_FAILED, done.stderr
    assert "in forward" in done.stderr and "in processes/bare" in done.stderr


def test_what_ends_in_time_is_left_alone() -> None:
    assert limited("a name", lambda: 3, 60.0, lambda: pytest.fail("it has ended")) == 3
    assert limited("a name", lambda: 3, 0.0, lambda: pytest.fail("there is no limit")) == 3
    with pytest.raises(ZeroDivisionError):
        limited("a name", lambda: 1 // 0, 60.0, lambda: pytest.fail("it has ended"))


@pytest.mark.parametrize("seconds", ["-1", "nan", "1e9"])
def test_a_limit_that_is_none_is_wrong_usage(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["conformance", "--backend", "reference", "--timeout", seconds]
    assert main(arguments) == ExitCode.USAGE
    assert "expected 0 (none) to 1e+06 seconds" in capsys.readouterr().err
