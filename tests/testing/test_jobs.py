"""`anyflex conformance --jobs N`: the same outcomes, whatever happens to the processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from anyflex.cli.exit_codes import ExitCode
from anyflex.cli.main import main
from anyflex.errors import ArgumentError
from anyflex.plugin import Backend, isolated, register
from anyflex.testing import kit_pool, kit_worker
from anyflex.testing.cases import every_case
from anyflex.testing.kit_pool import Pool
from anyflex.testing.runner import Outcome
from anyflex.testing.session import open_session
from tests.soak import SOAK, only_in_soak
from tests.testing import unruly_backends as unruly
from tests.testing.backends import DenseKernel, wrong

if sys.platform == "win32":
    pytest.skip("the tests' backends use signals and locks of POSIX", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
# The first case needs no forward; `unruly` is the second's backend.
FEW = ("refusals/undeclared", "processes/bare", "run_time/scale")
STARTS_PROCESSES = only_in_soak("it starts processes; other tests here show that they are used")


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with isolated():
        yield


def patterns(cases: tuple[str, ...]) -> list[str]:
    return [word for case in cases for word in ("--case", case)]


def run(
    backend: str | type[Backend], folder: Path, *arguments: str, cases: tuple[str, ...] = FEW
) -> tuple[int, dict[str, Any]]:
    """Return the exit status and the report."""
    if not isinstance(backend, str):
        register("cpu.unruly", backend)
        backend = "cpu.unruly"
    path = folder / "report.json"
    path.unlink(missing_ok=True)
    command = ["conformance", "--backend", backend, *patterns(cases), "--json", str(path)]
    code = main([*command, *arguments])
    return code, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {row["case"]: row["status"] for row in report["cases"]}


def detail(report: dict[str, Any], case: str) -> str:
    (text,) = (row["detail"] for row in report["cases"] if row["case"] == case)
    return str(text)


def test_several_processes_give_the_report_of_one(tmp_path: Path) -> None:
    cases = ("refusals/reserved", "run_time/s*", "devices/*_stream*")
    found = {}
    for jobs in ("1", "2"):
        code, report = run("reference", tmp_path, "--jobs", jobs, cases=cases)
        assert code == ExitCode.OK
        assert report.pop("jobs") == int(jobs)
        report.pop("seconds")
        for row in report["cases"]:
            row.pop("seconds")
        found[jobs] = report
    assert found["1"] == found["2"]
    assert {"passed", "skipped"} <= {row["status"] for row in found["2"]["cases"]}


@STARTS_PROCESSES
def test_failures_are_printed_as_they_come_and_reported_in_the_kits_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(unruly.FILE, str(tmp_path / "processes"))
    cases = ("forward/plain", "processes/bare")
    code, report = run(unruly.Slow, tmp_path, "--jobs", "2", cases=cases)
    assert code == ExitCode.CHECK_FAILED
    assert list(statuses(report).items()) == [
        ("forward/plain", "failed"),
        ("processes/bare", "failed"),
    ]
    out = capsys.readouterr().out
    printed = [line.split()[1] for line in out.splitlines() if line.startswith("FAIL ")]
    assert printed[:2] == ["processes/bare:", "forward/plain:"]
    # The command that repeats it needs no other process.
    assert "[anyflex conformance --backend cpu.unruly --case processes/bare]" in out
    processes = set((tmp_path / "processes").read_text(encoding="utf-8").split())
    assert len(processes) == 2 and str(os.getpid()) not in processes


@STARTS_PROCESSES
def test_expected_failures_and_what_is_required_hold_there_too(tmp_path: Path) -> None:
    path = tmp_path / "expected.txt"
    path.write_text(
        "forward/causal = it takes no masks\ndecode/plain = long ago\n", encoding="utf-8"
    )
    # It hangs in none of them.
    cases = ("forward/causal", "backward/causal", "decode/plain")
    arguments = ("--jobs", "2", "--require", "forward", "--expected", str(path))
    code, report = run(unruly.Hanging, tmp_path, *arguments, cases=cases)
    assert code == ExitCode.CHECK_FAILED
    assert statuses(report) == {
        "forward/causal": "expected",
        "backward/causal": "refused",
        "decode/plain": "unexpected",
    }


@only_in_soak("it starts processes; test_time_limit.py has cases that hang without them")
@pytest.mark.parametrize("backend", [unruly.HangingWithTheLock, unruly.Hanging])
def test_a_case_that_hangs_ends_its_process_and_the_others_go_on(
    backend: type[Backend], capfd: pytest.CaptureFixture[str]
) -> None:
    register("cpu.unruly", backend)
    # The one process that there is has to be replaced for the last case.
    with open_session("cpu.unruly") as session, Pool(session, 1, seconds=4.0) as processes:
        found = list(processes.run([every_case()[name] for name in FEW]))
    assert [outcome.status for outcome in found] == ["passed", "failed", "passed"]
    assert found[1].detail == (
        "it has not ended within 4 s (--timeout), and its process was killed: where it hangs is "
        "on stderr"
    )
    error = capfd.readouterr().err
    assert "in special" in error and "in processes/bare" in error


@STARTS_PROCESSES
def test_a_process_that_keeps_itself_from_ending_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit_pool, "GRACE", 0.5)
    code, report = run(unruly.Stubborn, tmp_path, "--jobs", "2", "--timeout", "2")
    assert code == ExitCode.CHECK_FAILED
    assert statuses(report) == {FEW[0]: "passed", FEW[2]: "passed", FEW[1]: "failed"}
    assert detail(report, "processes/bare").startswith("it has not ended within 2 s (--timeout)")


@pytest.mark.parametrize(
    ("backend", "how"),
    [(unruly.Crashing, "was killed by SIGSEGV"), (unruly.Exiting, "ended with exit status 3")][
        : 2 if SOAK else 1
    ],
)
def test_a_process_that_dies_fails_its_case_and_the_others_go_on(
    backend: type[Backend], how: str
) -> None:
    register("cpu.unruly", backend)
    with open_session("cpu.unruly") as session, Pool(session, 1) as processes:
        found = list(processes.run([every_case()[name] for name in FEW]))
    assert [outcome.status for outcome in found] == ["passed", "failed", "passed"]
    assert found[1].detail == f"its process {how}"


@STARTS_PROCESSES
def test_what_a_backend_prints_and_reads_is_nothing_to_the_run(
    capfd: pytest.CaptureFixture[str],
) -> None:
    register("cpu.unruly", unruly.Chatty)
    arguments = ["--backend", "cpu.unruly", *patterns(FEW), "--jobs", "2", "--json", "-"]
    assert main(["conformance", *arguments]) == ExitCode.OK
    captured = capfd.readouterr()
    assert json.loads(captured.out)["counts"]["passed"] == 3
    assert "garbage" in captured.err


@STARTS_PROCESSES
def test_a_process_whose_device_is_lost_runs_no_other_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = ("decode/one_key", "processes/bare")
    counts = {}
    for backend in (unruly.Telling, unruly.DeviceLosing):
        path = tmp_path / backend.__name__
        monkeypatch.setenv(unruly.FILE, str(path))
        with isolated():
            register("cpu.unruly", backend)
            with open_session("cpu.unruly") as session, Pool(session, 1) as processes:
                found = list(processes.run([every_case()[name] for name in cases]))
        assert [outcome.status for outcome in found] == ["failed"] * 2
        counts[backend] = len(set(path.read_text(encoding="utf-8").split()))
    assert counts == {unruly.Telling: 1, unruly.DeviceLosing: 2}


def test_a_device_is_lost_if_it_answers_with_an_old_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.accelerator, "synchronize", fault)
    assert kit_worker.device_lost(torch.device("cuda"))
    assert not kit_worker.device_lost(torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    assert not kit_worker.device_lost(torch.device("cuda"))


@STARTS_PROCESSES
@pytest.mark.parametrize(
    ("backend", "code", "says"),
    [
        (unruly.InOneProcess, ExitCode.NOT_RUN, "can't be used here: the abacus is in use by"),
        (unruly.DyingAtStart, ExitCode.BROKEN, "ended with exit status 5, before its first case"),
        (wrong(DenseKernel), ExitCode.USAGE, "is registered in one process only"),
    ],
)
def test_what_no_process_can_open_ends_the_run(
    backend: type[Backend],
    code: ExitCode,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(backend, tmp_path, "--jobs", "2") == (code, {})
    captured = capsys.readouterr()
    assert says in captured.err and not captured.out
    assert run("cpu.unruly", tmp_path)[0] == ExitCode.OK


def test_a_class_of_a_function_is_refused_before_a_process_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Local(unruly.Hanging):
        pass

    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process starts"))
    register("cpu.local", Local)
    with (
        open_session("cpu.local") as session,
        pytest.raises(ArgumentError, match="can't be imported by another process; let its class"),
    ):
        Pool(session, 2)


@pytest.mark.parametrize("jobs", ["0", "-1"])
def test_less_than_one_process_is_wrong_usage(
    jobs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", "--backend", "reference", "--jobs", jobs]) == ExitCode.USAGE
    assert f"--jobs {jobs}: expected at least 1" in capsys.readouterr().err


class Counted(Pool):
    """Runs nothing, and writes down how many run at once."""

    running = 0

    def _run(self, case: Any) -> Outcome:
        with self._lock:
            self.running += 1
        most = 0
        for _ in range(20):
            time.sleep(0.01)
            most = max(most, self.running)
        with self._lock:
            self.running -= 1
        return Outcome(case.name, "", "passed", str(most), 0.0, "")


def test_what_the_machine_must_be_free_for_runs_last_and_alone() -> None:
    names = ("devices/no_synchronisation", "devices/side_stream", *FEW)
    chosen = [every_case()[name] for name in names]
    with open_session("reference") as session, Counted(session, 3) as processes:
        found = list(processes.run(chosen))
    assert [outcome.case for outcome in found[3:]] == list(names[:2])
    assert [outcome.detail for outcome in found[3:]] == ["1", "1"]
    assert "3" in {outcome.detail for outcome in found[:3]}


PROGRAM = """
import signal
import sys
from anyflex.cli.main import main
from anyflex.plugin import register
from tests.testing.unruly_backends import Holding

# A shell starts what it runs in the background with this signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
register("cpu.holds", Holding)
sys.exit(main(["conformance", "--backend", "cpu.holds", "--case", "processes/bare",
               "--case", "run_time/scale", "--timeout", "0", "--jobs", "2"]))
"""


def held(path: Path) -> bool:
    import fcntl

    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def becomes(path: Path, state: bool) -> bool:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        if path.exists() and held(path) is state:
            return True
        time.sleep(0.05)
    return False


@STARTS_PROCESSES
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGKILL, -9)]
)
def test_nothing_outlives_an_interrupted_or_a_killed_run(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    path = tmp_path / "held"
    paths = os.pathsep.join((str(ROOT / "core"), str(ROOT)))
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", unruly.FILE: str(path)},
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as running:
        # If it never hangs, the test doesn't either.
        end = threading.Timer(120.0, running.kill)
        end.start()
        assert becomes(path, True)
        running.send_signal(number)
        assert running.wait(60) == status
        assert becomes(path, False)
        end.cancel()
