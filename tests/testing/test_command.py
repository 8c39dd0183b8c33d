"""`anyflex conformance`: exit codes, output, reports; and the class for pytest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from anyflex.cli.exit_codes import ExitCode
from anyflex.cli.main import main
from anyflex.errors import BackendRefused
from anyflex.plugin import Call, Outputs, isolated, register
from anyflex.testing.cases import every_case
from anyflex.testing.report import STATUSES
from tests.testing.backends import Absent, Broken, Dense, DenseKernel, wrong

ROOT = Path(__file__).resolve().parents[2]
FEW = ("--case", "processes/bare", "--case", "processes/plain", "--case", "options/*")


class Doubling(DenseKernel):
    def forward(self, call: Call, out: Outputs) -> None:
        super().forward(call, out)
        out.out.mul_(2)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with isolated():
        register("cpu.dense", Dense)
        register("cpu.double", wrong(Doubling))
        register("cpu.absent", Absent)
        register("cpu.broken", Broken)
        yield


def run(backend: str, *arguments: str) -> int:
    return main(["conformance", "--backend", backend, *arguments])


def test_a_right_backend_passes_and_the_summary_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cpu.dense", *FEW) == ExitCode.OK
    out = capsys.readouterr().out
    assert out.startswith("PASS cpu.dense of ")
    assert "2 passed, 1 refused, 3 skipped" in out
    assert "refused: processes/plain: " in out


def test_the_slowest_cases_are_told_with_their_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    run("cpu.dense", *FEW)
    assert re.search(r"^  slowest: \S+ \d+\.\d s, ", capsys.readouterr().out, flags=re.MULTILINE)


def test_fail_fast_ends_the_run_at_the_first_failure(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    first = ("--case", "processes/plain", "--case", "processes/bare", "--case", "mods/scale*")
    fast = (*first, "--fail-fast", "--json", str(path))
    assert run("cpu.double", *fast) == ExitCode.CHECK_FAILED
    report = json.loads(path.read_text())
    assert [row["status"] for row in report["cases"]].count("failed") == 1
    assert report["cases"][-1]["status"] == "failed" and not report["passed"]
    assert run("cpu.dense", *fast) == ExitCode.OK
    assert len(json.loads(path.read_text())["cases"]) > len(report["cases"])


def test_failed_from_runs_what_failed_in_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, again = tmp_path / "report.json", tmp_path / "again.json"
    assert run("cpu.double", *FEW, "--json", str(path)) == ExitCode.CHECK_FAILED
    assert run("cpu.dense", "--failed-from", str(path), "--json", str(again)) == ExitCode.OK
    assert [row["case"] for row in json.loads(again.read_text())["cases"]] == ["processes/bare"]
    capsys.readouterr()
    assert run("cpu.dense", "--failed-from", str(again)) == ExitCode.USAGE
    assert "no case failed in" in capsys.readouterr().err
    for text in ("{}", '{"schema": "anyflex-conformance-1"}'):
        again.write_text(text)
        assert run("cpu.dense", "--failed-from", str(again)) == ExitCode.USAGE
        assert "is no report of" in capsys.readouterr().err


def test_a_pattern_that_fits_nothing_does_not_stop_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("cpu.dense", *FEW, "--case", "processes/bear") == ExitCode.USAGE
    told = capsys.readouterr()
    assert told.out.startswith("PASS cpu.dense of ")
    assert "no case fits 'processes/bear'; the nearest is 'processes/bare'" in told.err
    assert run("cpu.double", *FEW, "--case", "processes/bear") == ExitCode.CHECK_FAILED


def test_a_failure_is_one_line_with_the_command_that_repeats_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("cpu.double", *FEW) == ExitCode.CHECK_FAILED
    (line,) = re.findall("^FAIL processes.*$", capsys.readouterr().out, flags=re.MULTILINE)
    command = "anyflex conformance --backend cpu.double --case processes/bare"
    assert line.startswith("FAIL processes/bare: out is ")
    assert line.endswith(f"[{command}]")
    assert main(command.split()[1:]) == ExitCode.CHECK_FAILED
    assert capsys.readouterr().out.splitlines()[0] == line


def test_what_is_required_must_be_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cpu.dense", "--require", "all", *FEW) == ExitCode.CHECK_FAILED
    assert "FAIL processes/plain: it is required and was refused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--backend", "cpu.absent"), ExitCode.NOT_RUN, "no abacus in this machine; buy one"),
        (("--backend", "cpu.broken"), ExitCode.BROKEN, "libabacus.so.3"),
        (("--backend", "cpu.nothing"), ExitCode.USAGE, "no such backend; registered are: cpu."),
        ((), ExitCode.USAGE, "--backend NAME is needed"),
        (("--backend", "cpu.dense", "--case", "nothing"), ExitCode.USAGE, "no case fits"),
        (("--backend", "cpu.dense", "--require", "fast"), ExitCode.USAGE, "no set of cases"),
        (("--backend", "cpu.dense", "--device", "abacus"), ExitCode.USAGE, "no such device type"),
        (("--backend", "cpu.dense", "--expected", "none"), ExitCode.USAGE, "can't be read"),
    ],
)
def test_exit_codes_tell_why_nothing_ran(
    arguments: tuple[str, ...], code: ExitCode, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", *arguments]) == code
    assert says in capsys.readouterr().err


class Refusing(DenseKernel):
    def forward(self, call: Call, out: Outputs) -> None:
        raise BackendRefused("not today")


def test_a_run_in_which_no_kernel_ran_is_no_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register("cpu.refusing", wrong(Refusing))
    path = tmp_path / "report.json"
    arguments = ("--case", "forward/*", "--json", str(path))
    assert run("cpu.refusing", *arguments) == ExitCode.NOT_RUN
    assert capsys.readouterr().out.startswith("NOTHING RAN cpu.refusing")
    report = json.loads(path.read_text(encoding="utf-8"))
    assert not report["passed"] and not any(row["ran"] for row in report["cases"])
    # Undeclared gradients are refused, and the rest of the same calls compared.
    assert run("cpu.dense", "--case", "mods/scale_alone", *arguments[2:]) == ExitCode.OK
    (row,) = json.loads(path.read_text(encoding="utf-8"))["cases"]
    assert (row["status"], row["ran"]) == ("refused", True)


def test_a_device_that_is_not_the_backend_s_is_wrong_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("cpu.dense", *FEW, "--device", "meta") == ExitCode.USAGE
    assert "backend cpu.dense computes on no meta tensors; give cpu" in capsys.readouterr().err


def test_expected_failures_are_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "expected.txt"
    path.write_text("processes/bare = it doubles\n", encoding="utf-8")
    assert run("cpu.double", *FEW, "--expected", str(path)) == ExitCode.OK
    assert "expected: processes/bare: it doubles: out is" in capsys.readouterr().out
    assert run("cpu.dense", *FEW, "--expected", str(path)) == ExitCode.CHECK_FAILED
    assert "UNEXPECTED processes/bare: " in capsys.readouterr().out


def test_the_json_report_has_the_documented_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    run("cpu.double", *FEW, "--json", str(path))
    report = json.loads(path.read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    for key in (*report, *report["cases"][0], *STATUSES):
        assert f"`{key}`" in text, key
    assert report["schema"] == "anyflex-conformance-1"
    assert report["counts"]["failed"] == 1 and not report["passed"]
    assert report["capabilities"]["dtypes"] == ["bfloat16", "float32"]
    capsys.readouterr()
    run("cpu.double", *FEW, "--json", "-")
    captured = capsys.readouterr()
    assert json.loads(captured.out)["counts"] == report["counts"]
    assert "FAIL processes/bare" in captured.err


class Links(HTMLParser):
    """Fails at anything that a page would load."""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        names = {"src", "href"} & {name for name, _ in attributes}
        assert tag not in ("script", "link", "img") and not names


def test_the_html_page_needs_nothing_beside_itself(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    run("cpu.double", *FEW, "--html", str(path))
    page = path.read_text(encoding="utf-8")
    Links().feed(page)
    assert "Conformance of cpu.double" in page and "FAILED" in page
    assert page.index("processes/bare") < page.index("options/unknown")
    assert "@import" not in page and "url(" not in page


def test_a_report_that_can_t_be_written_is_wrong_usage(tmp_path: Path) -> None:
    assert run("cpu.dense", *FEW, "--json", str(tmp_path / "no" / "r.json")) == ExitCode.USAGE


def test_the_cases_are_listed_without_a_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--list", "--case", "options/*"]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        name for name in every_case() if name.startswith("options/")
    ]
    both = ["--case", "options/*", "--case", "nosuch/*"]
    assert main(["conformance", "--list", *both]) == ExitCode.USAGE
    assert capsys.readouterr().out.splitlines() == lines
    not_quick = [line.split()[0] for line in lines if " quick " not in line]
    assert not_quick == ["options/together"]


SUITE = """
from anyflex.testing import Conformance
from tests.testing.backends import Absent, Dense, wrong
from tests.testing.test_command import Doubling

class TestRight(Conformance):
    backend = "cpu.dense"
    backend_class = Dense
    cases = ("processes/bare", "processes/plain", "options/unknown")

class TestDoubling(TestRight):
    backend_class = wrong(Doubling)

class TestKnown(TestDoubling):
    expected = "expected.txt"

class TestStale(TestRight):
    expected = "expected.txt"

class TestAbsent(TestRight):
    backend_class = Absent
"""


def test_the_class_makes_a_test_of_every_case(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE, encoding="utf-8")
    (tmp_path / "expected.txt").write_text("processes/bare = it doubles\n", encoding="utf-8")
    paths = os.pathsep.join((str(ROOT / "core"), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "test_suite.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    for line in (
        "PASSED test_suite.py::TestRight::test_case[processes/bare]",
        "PASSED test_suite.py::TestRight::test_case[options/unknown]",
        "FAILED test_suite.py::TestDoubling::test_case[processes/bare]",
        "XFAIL test_suite.py::TestKnown::test_case[processes/bare]",
        "FAILED test_suite.py::TestStale::test_case[processes/bare]",
        "refused: backend='cpu.dense' is refused. cpu.dense: a score mod is not supported",
        "not run: backend 'cpu.dense' can't be used here: no abacus",
    ):
        assert line in done.stdout, done.stdout
    assert "2 failed, 5 passed, 7 skipped, 1 xfailed" in done.stdout


def test_the_kit_is_imported_without_pytest() -> None:
    program = (
        "import sys; import anyflex.testing.conformance; "
        "from anyflex.testing import Conformance; assert 'pytest' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT / "core")},
        check=True,
        timeout=120,
    )
