"""A run of the kit as data, and as one HTML page."""

from __future__ import annotations

import dataclasses
import html
import json
import platform
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

import anyflex
from anyflex.errors import ArgumentError
from anyflex.plugin import CONTRACT, Capabilities
from anyflex.testing.runner import Outcome
from anyflex.testing.session import Session

__all__ = ["SCHEMA", "STATUSES", "failed_in", "html_page", "make_report"]

SCHEMA = "anyflex-conformance-1"
STATUSES = ("passed", "failed", "unexpected", "expected", "refused", "skipped")

Report = dict[str, Any]


def make_report(
    session: Session,
    outcomes: Sequence[Outcome],
    *,
    quick: bool,
    require: Collection[str],
    globs: Collection[str],
    seconds: float,
    jobs: int = 1,
) -> Report:
    """Return a run as plain data: the schema is part of the documentation."""
    counts: Counter[str] = Counter(outcome.status for outcome in outcomes)
    return {
        "schema": SCHEMA,
        "backend": session.name,
        "distribution": session.distribution,
        "device": str(session.device),
        "device_name": _device_name(session.device),
        "contract": CONTRACT,
        "anyflex": anyflex.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "quick": quick,
        "require": sorted(require),
        "patterns": list(globs),
        "capabilities": _plain(session.backend.capabilities),
        # A run in which all was refused or skipped, and no kernel ran, proves nothing.
        "passed": all(outcome.good for outcome in outcomes)
        and any(outcome.ran or outcome.status in ("passed", "expected") for outcome in outcomes),
        "jobs": jobs,
        "seconds": round(seconds, 3),
        "counts": {status: counts[status] for status in STATUSES},
        "cases": [
            {**dataclasses.asdict(outcome), "seconds": round(outcome.seconds, 4)}
            for outcome in outcomes
        ],
    }


def failed_in(path: Path) -> list[str]:
    """Return the names of the cases that failed in a report of ``--json``.

    Raises:
        ArgumentError: the file can't be read, is no report, or nothing failed in it.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} can't be read: {error}") from error
    known = isinstance(report, dict) and report.get("schema") == SCHEMA
    if not known or not isinstance(report.get("cases"), list):
        raise ArgumentError(f"{path} is no report of `anyflex conformance --json`")
    rows = report["cases"]
    names = [row["case"] for row in rows if row["status"] in ("failed", "unexpected")]
    if not names:
        raise ArgumentError(f"no case failed in {path}: leave it out to run all")
    return names


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    module = getattr(torch, device.type, None)
    name = getattr(module, "get_device_name", None)
    return str(name(device)) if callable(name) else device.type


def _plain(capabilities: Capabilities) -> dict[str, Any]:
    """The declaration in JSON's types: types by their name, sets as sorted lists."""
    return {
        field.name: _value(getattr(capabilities, field.name))
        for field in dataclasses.fields(capabilities)
    }


def _value(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(str(item).removeprefix("torch.") for item in value)
    return value


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem;
  color: #1d1f24; background: #fff; }
h1 { font-size: 1.4rem; } table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #ddd;
  vertical-align: top; }
td.status { font-weight: 600; white-space: nowrap; } code { font-size: .9em; }
.passed { color: #1a7f37; } .failed, .unexpected { color: #c11; } .expected { color: #9a6700; }
.refused, .skipped { color: #777; } .number { text-align: right; white-space: nowrap; }
@media (prefers-color-scheme: dark) { body { background: #16181d; color: #dde; }
  td, th { border-color: #333; } }
"""


def html_page(report: Report) -> str:
    """Return a report as a page without other files, failures first."""
    title = f"Conformance of {report['backend']}"
    counts = ", ".join(f"{count} {status}" for status, count in report["counts"].items() if count)
    bad = report["counts"]["failed"] or report["counts"]["unexpected"]
    outcome = "passed" if report["passed"] else "FAILED" if bad else "nothing ran"
    facts = {
        "Outcome": outcome,
        "Cases": f"{counts}, in {report['seconds']:.0f} s"
        + (f" with {report['jobs']} processes" if report["jobs"] > 1 else ""),
        "Backend": f"{report['backend']} of {report['distribution']}",
        "Device": f"{report['device']} ({report['device_name']})",
        "Versions": f"anyflex {report['anyflex']}, contract {report['contract']}, torch "
        f"{report['torch']}, Python {report['python']}, {report['platform']}",
        "Selection": ("quick subset" if report["quick"] else "all cases")
        + (f", {' '.join(report['patterns'])}" if report["patterns"] else ""),
        "Required": ", ".join(report["require"]) or "nothing",
    }
    order = {status: place for place, status in enumerate(("failed", "unexpected", "expected"))}
    rows = sorted(report["cases"], key=lambda row: order.get(row["status"], len(order)))
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_text(title)}</h1>",
        "<table>",
        *(
            f"<tr><th>{_text(key)}</th><td>{_text(value)}</td></tr>"
            for key, value in facts.items()
        ),
        "</table>",
        "<h2>Cases</h2>",
        "<table><tr><th>Case</th><th>Status</th><th>What it shows, and what came</th>"
        "<th>Seconds</th></tr>",
        *(_row(row) for row in rows),
        "</table></body></html>",
    ]
    return "\n".join(lines) + "\n"


def _row(row: dict[str, Any]) -> str:
    status = row["status"]
    what = _text(row["shows"])
    if row["detail"]:
        what += f"<br>{_text(row['detail'])}"
    if status in ("failed", "unexpected"):
        what += f"<br><code>{_text(row['command'])}</code>"
    return (
        f'<tr><td><code>{_text(row["case"])}</code></td><td class="status {status}">{status}</td>'
        f'<td>{what}</td><td class="number">{row["seconds"]:.2f}</td></tr>'
    )


def _text(value: object) -> str:
    return html.escape(str(value))
