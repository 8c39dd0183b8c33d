"""Output in hard cases: closed streams, full disks, narrow encodings, plugins that print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import anyflex
from anyflex.cli.exit_codes import ExitCode
from anyflex.contract.decision import Decision, Rejected
from anyflex.registry import register
from tests.cli.backends import Right
from tests.cli.conftest import RunCommand
from tests.soak import SOAK

CORE = Path(anyflex.__file__).parents[1]
EXPLAIN = ("explain", "--q", "1x2x16x16")
posix = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")


def shell(line: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``anyflex`` as ``"$@"`` of a shell's line."""
    return subprocess.run(
        ["sh", "-c", line, "sh", sys.executable, "-m", "anyflex", *arguments],
        env={**os.environ, "PYTHONPATH": str(CORE), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@posix
@pytest.mark.parametrize(
    ("closed", "arguments"),
    [
        (">&-", EXPLAIN), ("2>&-", EXPLAIN), ("2>&-", ("cache", "info")), (">&- 2>&-", EXPLAIN),
    ][: 4 if SOAK else 1],
)  # fmt: skip
def test_a_closed_stream_is_as_the_null_device(closed: str, arguments: tuple[str, ...]) -> None:
    done = shell(f'exec "$@" {closed}', *arguments)
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    assert bool(done.stdout) == (closed == "2>&-")


@posix
def test_a_kit_without_stderr_still_reports() -> None:
    done = shell(
        'exec "$@" 2>&-', "conformance", "--backend", "reference", "--case", "forward/plain"
    )
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    assert done.stdout.startswith("PASS reference")


@posix
@pytest.mark.parametrize("arguments", [(*EXPLAIN, "--json"), *([("--version",)] if SOAK else [])])
def test_a_full_disk_behind_stdout_is_no_traceback(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    # A limit of the file size, which acts like a full disk.
    done = shell(f'ulimit -f 0; exec "$@" > {tmp_path}/out', *arguments)
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.startswith("anyflex: standard output can't be written: [Errno ")
    assert done.stderr.count("\n") == 1


@posix
def test_what_an_encoding_lacks_is_written_as_its_escape(tmp_path: Path) -> None:
    path = tmp_path / "call.py"
    path.write_text("def ünï():\n    raise ValueError('Größe \\ud800')\n", encoding="utf-8")
    narrow = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = shell('exec "$@"', "new-plugin", "warp", "--device", "cpu", "--into",
                 str(tmp_path / "ü"), **narrow)  # fmt: skip
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    assert "wrote " in done.stdout and (tmp_path / "ü" / "anyflex-warp").is_dir()


def test_half_of_a_surrogate_pair_in_a_plugin_s_message_is_printed(command: RunCommand) -> None:
    class Refusing(Right):
        def probe(self) -> Decision:
            return Rejected("half \ud800 of a pair")

    register("cpu", Refusing)
    for arguments in (("doctor",), EXPLAIN):
        result = command(*arguments)
        assert result.code == ExitCode.OK
        assert "half \\ud800 of a pair" in result.out


@pytest.mark.parametrize("arguments", [("doctor",), EXPLAIN])
def test_what_a_plugin_prints_does_not_stand_in_json(
    command: RunCommand, arguments: tuple[str, ...]
) -> None:
    class Talking(Right):
        def probe(self) -> Decision:
            print("welcome to warp 3")
            return super().probe()

    register("cpu", Talking)
    result = command(*arguments, "--json")
    assert result.code == ExitCode.OK
    assert json.loads(result.out)
    assert result.err == "welcome to warp 3\n"
