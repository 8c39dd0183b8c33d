"""Exit codes, help, errors, and the command as a process."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

import anyflex
from anyflex.bench.usage_errors import NotRun, WrongUsage
from anyflex.cli import doctor
from anyflex.cli.exit_codes import ExitCode, UserFileFailed, exit_code_table
from anyflex.errors import AnyflexError, ArgumentError, BackendRefused, ModTraceError, PluginError
from anyflex.registry import environment
from tests.cli.conftest import RunCommand

CORE = Path(anyflex.__file__).parents[1]


def _process(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(CORE)},
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def test_help_lists_every_command_and_every_exit_status(command: RunCommand) -> None:
    result = command("--help")
    assert result.code == ExitCode.OK
    for name in ("doctor", "explain", "demo", "cache", "conformance", "new-plugin"):
        assert re.search(rf"^    {name}\s", result.out, flags=re.MULTILINE)
    assert exit_code_table() in result.out
    assert len({code.value for code in ExitCode}) == len(ExitCode)
    assert all(code.meaning for code in ExitCode)


def test_version_is_the_package_s(command: RunCommand) -> None:
    result = command("--version")
    assert (result.code, result.out) == (ExitCode.OK, f"anyflex {anyflex.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "usage: anyflex"),
        (("docter",), "invalid choice"),
        (("doctor", "--jsn"), "unrecognized arguments: --jsn"),
        (("demo", "--seconds", "0"), "must be a positive number, got 0"),
        (("demo", "--steps", "0"), "must be at least 1, got 0"),
        (("demo", "--device", "abacus"), "torch knows no such device type"),
        (("demo", "--seed", "99999999999999999999999"), "must be 0 to 9223372036854775807, got 9"),
        (("demo", "--seed", "-1"), "must be 0 to 9223372036854775807, got -1"),
        (("new-plugin", "x" * 300, "--device", "cpu"), "can't be written: "),
        (("conformance", "--html", "-"), "must be a file's name, got '-'"),
        (("conformance", "--expected", ""), "must be a file's name, got ''"),
        (("conformance", "--backend", "reference", "--require", ""), "--require names no set"),
        (("conformance", "--list", "--json", "-"), "--list makes no report"),
        (("conformance", "--list", "--backend", "nope"), "no such backend"),
        (
            ("conformance", "--backend", "reference", "--json", "a", "--html", "./a"),
            "--json and --html name one file, a",
        ),
        (("conformance", "--backend", "reference", "--device", "meta"), "on no meta tensors"),
        (("bench", "--list", "--json", "-"), "--list prints names, no results"),
        (("bench", "--json", "a.svg", "--plot", "a.svg"), "--json and --plot name one file"),
        (("bench", "--backend", ""), "--backend names nobody"),
        (("bench", "--device", ""), "torch knows no such device type"),
        (("bench", "--preset", ""), "there is none; known: "),
        (("bench", "--shape", "1x1x8x8", "--block-size", "0"), "--block-size 0: must be at"),
        (("bench", "--block-size", "0"), "--block-size: belongs to --shape"),
        (("bench", "--shape", "1x1x8x8", "--direction", ""), "--direction : must be of"),
        (("cache",), "ACTION"),
    ],
)
def test_wrong_usage_is_two(command: RunCommand, arguments: tuple[str, ...], says: str) -> None:
    result = command(*arguments)
    assert result.code == ExitCode.USAGE
    assert says in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BackendRefused("nobody"), ExitCode.NOT_RUN),
        (NotRun("no device"), ExitCode.NOT_RUN),
        (PluginError("broken", plugin="cpu", distribution="x 1"), ExitCode.BROKEN),
        (UserFileFailed("raised"), ExitCode.BROKEN),
        (ArgumentError("scale"), ExitCode.USAGE),
        (ModTraceError("can't be traced", operation="torch.rand"), ExitCode.USAGE),
        (WrongUsage("no such mask"), ExitCode.USAGE),
    ],
)
def test_an_error_is_one_line_and_its_code(
    command: RunCommand, monkeypatch: pytest.MonkeyPatch, error: AnyflexError, code: ExitCode
) -> None:
    def fail(args: argparse.Namespace) -> NoReturn:
        raise error

    monkeypatch.setattr(doctor, "run", fail)
    result = command("doctor")
    assert result.code == code
    assert result.err == f"anyflex doctor: {error}\n"


def test_an_error_of_several_lines_becomes_one(
    command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(args: argparse.Namespace) -> NoReturn:
        raise ArgumentError("first\n second")

    monkeypatch.setattr(doctor, "run", fail)
    assert command("doctor").err.count("\n") == 1


def test_strict_shows_the_traceback(command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: argparse.Namespace) -> NoReturn:
        raise ArgumentError("the reason")

    monkeypatch.setattr(doctor, "run", fail)
    monkeypatch.setenv("ANYFLEX_STRICT", "1")
    environment.reset()
    result = command("doctor")
    assert result.code == ExitCode.USAGE
    assert result.err.startswith("Traceback")
    assert result.err.endswith("anyflex doctor: the reason\n")


def test_a_bug_is_no_exit_code_but_a_traceback(
    command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(args: argparse.Namespace) -> NoReturn:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(doctor, "run", fail)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        command("doctor")


def test_an_interrupt_has_its_own_code(
    command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(args: argparse.Namespace) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupt)
    result = command("doctor")
    assert (result.code, result.err) == (ExitCode.INTERRUPTED, "anyflex doctor: interrupted\n")


def test_python_m_anyflex_is_the_command() -> None:
    done = _process("-m", "anyflex", "explain", "--q", "1x2x100x16", "--mask", "causal", "--json")
    assert done.returncode == ExitCode.OK, done.stderr
    assert json.loads(done.stdout)["backend"] is not None
    assert done.stderr == ""


def test_help_imports_nothing_of_the_commands_work() -> None:
    code = (
        "import sys; from anyflex.cli.main import main; main(['--help']); "
        "print([m for m in sys.modules if m.startswith(('packed_training', 'anyflex.cli.doctor_', "
        "'anyflex.reference', 'matplotlib', 'torch._dynamo', 'torch._inductor', 'triton'))])"
    )
    done = _process("-c", code)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="no closed pipes of this kind")
def test_a_reader_that_goes_away_is_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "anyflex", "cache", "info"],
        env={**os.environ, "PYTHONPATH": str(CORE)},
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (ExitCode.INTERRUPTED, "")
