"""Runs conformance cases on a session, and reports their outcomes."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from anyflex.errors import BackendRefused
from anyflex.testing.attention_case import AttentionCase
from anyflex.testing.case_types import Case
from anyflex.testing.checking import compare
from anyflex.testing.session import ConformanceFailure, NotApplicable, Session

__all__ = ["Outcome", "failed", "hung", "run_case", "run_cases"]

Status = Literal["passed", "refused", "skipped", "failed", "expected", "unexpected"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case.

    Args:
        case: its name.
        shows: the property that it shows.
        status: ``passed``; ``refused`` with a reason, as the declaration says; ``skipped``: it
            doesn't apply; ``failed``; ``expected``: failed, as the plugin's file of expected
            failures says; ``unexpected``: that file names it and it passed.
        detail: the failure, the refusal's reason, or why it was skipped.
        seconds: how long it took.
        command: repeats it alone.
        ran: a kernel of the backend ran here: of a refused case the call without undeclared
            gradients and auxiliary outputs was compared.
    """

    case: str
    shows: str
    status: Status
    detail: str
    seconds: float
    command: str
    ran: bool = False

    @property
    def good(self) -> bool:
        """Whether nothing has to be mended."""
        return self.status not in ("failed", "unexpected")


def run_cases(
    session: Session,
    cases: Iterable[Case],
    *,
    require: frozenset[str] = frozenset(),
    expected: Mapping[str, str] | None = None,
) -> Iterator[Outcome]:
    """Run cases one after the other, yielding each outcome as it is known.

    Args:
        session: with the backend under inspection.
        cases: what to run.
        require: sets whose cases must be accepted; ``"all"`` is every case.
        expected: case -> reason, for failures that the plugin's authors know of.
    """
    for case in cases:
        outcome = run_case(session, case, require=require)
        if expected is not None and case.name in expected:
            outcome = _against_expectation(outcome, expected[case.name])
        yield outcome


def _against_expectation(outcome: Outcome, reason: str) -> Outcome:
    if outcome.status == "failed":
        return dataclasses.replace(
            outcome, status="expected", detail=f"{reason}: {outcome.detail}"
        )
    became = "passed" if outcome.status == "passed" else f"was {outcome.status}"
    detail = (
        f"it is listed as an expected failure ({reason}) and {became}: take it out of the list"
    )
    return dataclasses.replace(outcome, status="unexpected", detail=detail)


def run_case(session: Session, case: Case, *, require: frozenset[str] = frozenset()) -> Outcome:
    """Run one case."""
    begin = time.perf_counter()
    session.journal.clear()
    status: Status = "passed"
    detail = ""
    try:
        if isinstance(case, AttentionCase):
            compare(session, case)
        else:
            case.run(session)
        session.check_journal()
    except BackendRefused as error:
        status, detail = "refused", str(error)
        if session.journal.violations:
            status, detail = "failed", "; ".join(session.journal.violations)
        elif "all" in require or case.required & require:
            status, detail = "failed", f"it is required and was refused: {error}"
    except NotApplicable as error:
        status, detail = "skipped", str(error)
    except ConformanceFailure as error:
        status, detail = "failed", str(error)
    except Exception as error:  # noqa: BLE001  whatever a backend raises is its outcome
        cause = error.__cause__ or error
        frames = traceback.extract_tb(cause.__traceback__ or error.__traceback__)
        status = "failed"
        raised = f"{type(cause).__name__}: {cause} ({frames[-1].filename}:{frames[-1].lineno})"
        detail = "; ".join([*session.journal.violations, raised])
    seconds = time.perf_counter() - begin
    command = _command(session, case, require)
    ran = bool(session.journal.forwards)
    return Outcome(case.name, case.shows, status, detail, seconds, command, ran)


def failed(
    session: Session,
    case: Case,
    detail: str,
    seconds: float,
    *,
    require: frozenset[str] = frozenset(),
) -> Outcome:
    """Return the outcome of a case that hung or ended its own process.

    No file of expected failures makes it good: in one process the cases behind it are not run.

    Args:
        session, require: as for `run_cases`.
        detail: what happened.
        seconds: how long it took.
    """
    command = _command(session, case, require)
    return Outcome(case.name, case.shows, "failed", detail, seconds, command)


def hung(seconds: float, then: str = "the run with it") -> str:
    """Describe a case that has not ended within the limit, and what ended then."""
    return (
        f"it has not ended within {seconds:g} s (--timeout), and {then}: where it hangs is on "
        "stderr"
    )


def _command(session: Session, case: Case, require: frozenset[str]) -> str:
    words = ["anyflex conformance --backend", session.name]
    if str(session.device) != session.name.partition(".")[0]:
        words += ["--device", str(session.device)]
    if require:
        words += ["--require", ",".join(sorted(require))]
    return " ".join([*words, "--case", case.name])
