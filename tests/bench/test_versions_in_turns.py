"""`bench/versions_in_turns.py`, with packages named anyflex that write a report of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = """
import json, sys
with open({log!r}, "a") as log:
    log.write({name!r} + " ")
arguments = sys.argv[1:]
assert arguments[:3] == ["bench", "--preset", "cpu-quick"], arguments
if {fails}:
    sys.exit("wrong numbers")
rows = [
    {{"case": case, "direction": "forward", "contender": "mine", "status": status, "median_ms": ms}}
    for case, status, ms in (("a", "measured", {ms}), ({second!r}, "measured", 4.0), ("c", "refused", 1.0))
]
with open(arguments[arguments.index("--json") + 1], "w") as report:
    json.dump({{"measurements": rows}}, report)
"""  # noqa: E501


def version(
    tmp_path: Path, name: str, ms: float, *, second: str = "b", fails: bool = False
) -> str:
    package = tmp_path / name / "anyflex"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    log = str(tmp_path / "log")
    text = PACKAGE.format(log=log, name=name, ms=ms, second=second, fails=fails)
    (package / "__main__.py").write_text(text)
    return f"{name}={package.parent}"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "bench/versions_in_turns.py", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_table_is_of_ratios_and_versions_change_places(tmp_path: Path) -> None:
    versions = (version(tmp_path, "old", 2.0), version(tmp_path, "new", 1.0))
    written = tmp_path / "turns.json"
    done = run(
        *versions, "--rounds", "3", "--json", str(written), "--", "--preset", "cpu-quick"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2:] == [
        "| a | forward | mine | 2.000 | 0.500 (0.500 to 0.500) |",
        "| b | forward | mine | 4.000 | 1.000 (1.000 to 1.000) |",
    ]
    assert (tmp_path / "log").read_text().split() == ["old", "new", "new", "old", "old", "new"]
    assert json.loads(written.read_text())["new"][0] == {
        "a | forward | mine": 1.0,
        "b | forward | mine": 4.0,
    }


def test_a_run_that_fails_is_named(tmp_path: Path) -> None:
    done = run(
        version(tmp_path, "old", 2.0), version(tmp_path, "new", 1.0, fails=True),
        "--", "--preset", "cpu-quick",
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("new: ") and "wrong numbers" in done.stderr


def test_versions_that_measure_other_rows_arent_compared(tmp_path: Path) -> None:
    done = run(
        version(tmp_path, "old", 2.0), version(tmp_path, "new", 1.0, second="d"),
        "--", "--preset", "cpu-quick",
    )  # fmt: skip
    assert done.returncode == 1 and "same rows" in done.stderr and not done.stdout


def test_versions_have_names_and_folders(tmp_path: Path) -> None:
    old = version(tmp_path, "old", 2.0)
    other = f"new={tmp_path}"
    for arguments in (
        (old,), (old, "new"), (old, f"={tmp_path}"), (old, "new=nowhere"), (old, other, other),
        (old, other, "--rounds", "0"),
    ):  # fmt: skip
        done = run(*arguments, "--", "--preset", "cpu-quick")
        assert done.returncode == 2, arguments
    assert not (tmp_path / "log").exists()
