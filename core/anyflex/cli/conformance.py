"""``anyflex conformance``: hold a backend to the contract."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from anyflex.bench.usage_errors import WrongUsage
from anyflex.cli.exit_codes import ExitCode
from anyflex.cli.file_argument import check_different, file_argument, write_text
from anyflex.process.progress_line import ProgressLine

if TYPE_CHECKING:
    import torch

    from anyflex.testing.case_types import Case
    from anyflex.testing.runner import Outcome

__all__ = ["add_parser", "run"]

_TIMEOUT = 300.0
_LONGEST = 1e6
"""Maximum seconds of a limit, eleven days. Timers don't take more everywhere, so it is wrong
usage."""
_SLOWEST = 3
"""Number of cases whose seconds the summary tells; the reports have those of all."""
_DETAIL = 500
"""Maximum characters of a failure's line: a compiler may have printed a hundred thousand."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``conformance``."""
    parser = subparsers.add_parser(
        "conformance",
        help="hold a backend to the contract, case by case",
        description=(
            "Runs the conformance kit: calls are compared with a dense float64 formula within "
            "budgets that follow from the data, and what a backend declares, refuses and promises "
            "is tried. A declared capability must pass, an undeclared one must be refused with a "
            "reason. Fails (1) if a case fails, or passes and is listed as an expected failure."
        ),
    )
    parser.add_argument("--backend", metavar="NAME", help="a registered name: cpu.mine, reference")
    parser.add_argument(
        "--device",
        help="where tensors are (default: the name's device type); with cpu for a backend of "
        "another device CPU tensors stand in for its own",
    )
    parser.add_argument(
        "--require",
        metavar="SETS",
        help="cases that must be accepted: forward, backward, decode (comma-separated), or all",
    )
    parser.add_argument("--quick", action="store_true", help="the subset for each change")
    parser.add_argument(
        "--case",
        metavar="GLOB",
        action="append",
        default=[],
        help="only cases of this name or pattern; may be given more than once",
    )
    parser.add_argument(
        "--failed-from",
        metavar="FILE",
        type=file_argument,
        help="only cases that failed in this report of --json, and those of --case",
    )
    parser.add_argument(
        "--fail-fast", action="store_true", help="end the run at the first case that fails"
    )
    parser.add_argument("--json", metavar="FILE", help="write the report; - for standard output")
    parser.add_argument(
        "--html", metavar="FILE", type=file_argument, help="write the report as a page"
    )
    parser.add_argument(
        "--expected",
        metavar="FILE",
        type=file_argument,
        help="expected failures, `case = reason` a line; one that passes fails the run",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=_TIMEOUT,
        help=f"for one case, 0 for none (default: {_TIMEOUT:g}): a case that takes longer fails "
        "and ends the run, as what hangs can't be stopped; with --jobs it ends its own process, "
        "and the others go on",
    )
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        default=1,
        help="processes that run cases at once, each with the memory that one run needs "
        "(default: 1, this one)",
    )
    parser.add_argument("--list", action="store_true", help="print the cases, and run none")


def run(args: argparse.Namespace) -> int:
    """Run the cases. Progress goes to stderr, failures and the summary to stdout."""
    from anyflex.registry import backend_table
    from anyflex.testing.cases import every_case
    from anyflex.testing.expected import read_expected
    from anyflex.testing.kit_pool import Pool
    from anyflex.testing.report import failed_in, make_report
    from anyflex.testing.runner import failed, hung, run_cases
    from anyflex.testing.selection import requirements, select
    from anyflex.testing.session import open_session
    from anyflex.testing.time_limit import limited

    cases = every_case()
    globs = args.case + ([] if args.failed_from is None else failed_in(args.failed_from))
    unmatched: list[str] = []
    chosen = select(cases, quick=args.quick, globs=globs, unmatched=unmatched)
    for missing in unmatched:
        print(missing, file=sys.stderr)
    if args.backend is not None and backend_table.current().get(args.backend) is None:
        known = ", ".join(backend_table.current().names())
        raise WrongUsage(f"--backend {args.backend}: no such backend; registered are: {known}")
    if args.list and (args.json is not None or args.html is not None):
        raise WrongUsage("--list makes no report: leave out --json and --html")
    if args.list:
        print("\n".join(_listed(chosen)))
        return ExitCode.USAGE if unmatched else ExitCode.OK
    if args.backend is None:
        raise WrongUsage("--backend NAME is needed; `anyflex doctor` lists the names")
    if not 0 <= args.timeout <= _LONGEST:
        raise WrongUsage(f"--timeout {args.timeout:g}: expected 0 (none) to {_LONGEST:g} seconds")
    if args.jobs < 1:
        raise WrongUsage(f"--jobs {args.jobs}: expected at least 1; 1 is this process alone")
    check_different(json=args.json, html=args.html, expected=args.expected)
    names = [name for name in (args.require or "").split(",") if name]
    if args.require is not None and not names:
        raise WrongUsage("--require names no set of cases; leave it out to require none")
    require = requirements(names)
    expected = None if args.expected is None else read_expected(args.expected, cases)
    device = None if args.device is None else _device(args.device, args.backend)
    # Where the report itself is the output, failures must not be mixed into it.
    told = sys.stderr if args.json == "-" else sys.stdout
    begin = time.perf_counter()
    outcomes: list[Outcome] = []
    places = {case.name: place for place, case in enumerate(chosen)}
    with open_session(args.backend, device) as session:
        progress = ProgressLine(sys.stderr)

        def show() -> None:
            bad = sum(not outcome.good for outcome in outcomes)
            following = chosen[min(len(outcomes), len(chosen) - 1)].name
            now = f"now {following}" if args.jobs == 1 else f"{args.jobs} at once"
            progress.show(f"{len(outcomes)}/{len(chosen)} cases, {bad} failed, {now}")

        show()

        def enter(outcome: Outcome) -> None:
            outcomes.append(outcome)
            if not outcome.good:
                progress.clear()
                print(_failure(outcome), file=told, flush=True)

        def report() -> ExitCode:
            progress.clear()
            seconds = time.perf_counter() - begin
            made = make_report(
                session,
                sorted(outcomes, key=lambda outcome: places[outcome.case]),
                quick=args.quick,
                require=require,
                globs=globs,
                seconds=seconds,
                jobs=args.jobs,
            )
            return _reported(made, args, told)

        def outcome_of(case: Case) -> Outcome:
            def attempt() -> Outcome:
                return next(run_cases(session, [case], require=require, expected=expected))

            def expire() -> None:
                enter(failed(session, case, hung(args.timeout), args.timeout, require=require))
                report()

            return limited(case.name, attempt, args.timeout, expire)

        with ExitStack() as stack:
            if args.jobs == 1:
                found: Iterator[Outcome] = map(outcome_of, chosen)
            else:
                pool = Pool(
                    session, args.jobs, require=require, expected=expected, seconds=args.timeout
                )
                found = stack.enter_context(pool).run(chosen)
            for outcome in found:
                enter(outcome)
                show()
                if args.fail_fast and not outcome.good:
                    break
        return report() or (ExitCode.USAGE if unmatched else ExitCode.OK)


def _device(text: str, backend: str) -> torch.device:
    """Return the device, if the backend's device type covers it: the backend refuses all other
    calls, which would prove nothing."""
    from anyflex.cli.device_argument import present_device
    from anyflex.registry import backend_table

    device = present_device(text)
    entry = backend_table.current().get(backend)
    own = "cpu" if entry is None or entry.device_type == "*" else entry.device_type
    anywhere = entry is not None and entry.device_type == "*"
    if device.type == "meta" or not (anywhere or device.type in (own, "cpu")):
        others = "" if own == "cpu" else ", or cpu, where CPU tensors stand in for its own"
        raise WrongUsage(
            f"--device {text}: backend {backend} computes on no {device.type} tensors; give "
            f"{own}{others}"
        )
    return device


def _reported(report: dict[str, Any], args: argparse.Namespace, told: TextIO) -> ExitCode:
    """Write the report where it is asked for, print the summary, and return the exit status."""
    from anyflex.testing.report import html_page

    if args.json == "-":
        print(json.dumps(report, indent=2), file=args.out, flush=True)
    elif args.json is not None:
        write_text(Path(args.json), json.dumps(report, indent=2) + "\n")
    if args.html is not None:
        write_text(args.html, html_page(report))
    print("\n".join(_summary(report)), file=told)
    return _verdict(report)[0]


def _verdict(report: dict[str, Any]) -> tuple[ExitCode, str]:
    if report["passed"]:
        return ExitCode.OK, "PASS"
    counts = report["counts"]
    if counts["failed"] or counts["unexpected"]:
        return ExitCode.CHECK_FAILED, "FAIL"
    return ExitCode.NOT_RUN, "NOTHING RAN"


def _listed(cases: Sequence[Case]) -> list[str]:
    width = max(len(case.name) for case in cases)
    return [
        f"{case.name:<{width}}  {'quick' if case.quick else '     '}  {case.shows}"
        for case in cases
    ]


def _failure(outcome: Outcome) -> str:
    detail = " ".join(outcome.detail.split())
    if len(detail) > _DETAIL:
        detail = f"{detail[:_DETAIL]} ... (cut; --json FILE has all)"
    label = "FAIL" if outcome.status == "failed" else "UNEXPECTED"
    return f"{label} {outcome.case}: {detail} [{outcome.command}]"


def _summary(report: dict[str, Any]) -> list[str]:
    counts = ", ".join(f"{count} {status}" for status, count in report["counts"].items() if count)
    _, verdict = _verdict(report)
    lines = [
        f"{verdict} {report['backend']} of {report['distribution']} on {report['device']}: "
        f"{counts}; {report['seconds']:.0f} s"
    ]
    rows = sorted(report["cases"], key=lambda row: -row["seconds"])[:_SLOWEST]
    slowest = ", ".join(f"{row['case']} {row['seconds']:.1f} s" for row in rows)
    lines.append(f"  slowest: {slowest}")
    for status in ("refused", "skipped", "expected"):
        details: dict[str, list[str]] = {}
        for row in report["cases"]:
            if row["status"] == status:
                detail = " ".join(row["detail"].split())[:_DETAIL]
                details.setdefault(detail, []).append(row["case"])
        for detail, names in details.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"  {status}: {names[0]}{more}: {detail}")
    return lines
