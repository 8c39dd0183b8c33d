"""Results of `anyflex bench --preset h200*`, compared with the project's targets.

    python bench/gpu_targets.py REPORT.json [...] [--backend cuda] [--rates]

Reads reports that `anyflex bench --json` wrote, or lists of them, and prints a table in Markdown:
the backend's median and range, and how many times as long each peer takes. Exits with 1 if a row,
or a geometric mean, is below its target, or was not measured beside every peer that counts and
doesn't refuse it, or if the check before a row found a larger error than PRECISION times that of
flex attention's and FlashAttention-4's; and if a report is of fewer than ROUNDS rounds, of a tree
that was no commit's, or of another commit than the others. A ratio is the median of the rounds',
in each of which all have taken their turn. A row's is the lowest of the peers that count: for
`cuda.triton` and training that is torch's flex attention alone.

`--rates` prints two tables of TFLOP/s at live pairs instead, and compares nothing: of prefill and
training the rows that miss their target, with what would have reached it, and the largest rate
that each contender has on any row.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyflex.bench.presets import PRESETS

__all__ = ["GOALS", "Goal", "main"]

EVERY = ("torch.sdpa.cudnn", "torch.flex", "torch.flex.flash", "cuda.flash4")
FLEX = ("torch.flex",)
PRECISE = ("torch.flex", "torch.flex.flash", "cuda.flash4")
SHORT = {"torch.sdpa.cudnn": "cuDNN", "torch.flex.flash": "flex FLASH", "cuda.flash4": "FA4"}

PRECISION = 1.2
"""Maximum ratio of our error to that of the most precise of PRECISE: the root of the mean of
squares, in older reports the largest error."""

ROUNDS = 7
"""Minimum number of rounds of a report."""

WALL, GRAPH = ", wall", ", graph"
SMALL = "causal B1 H16 S512 D128 bfloat16"

Row = dict[str, Any]
Rows = dict[tuple[str, str], dict[str, Row]]


@dataclass(frozen=True)
class Goal:
    """Rows with one target.

    Args:
        of: whether a case's name belongs to the goal.
        direction: of the rows.
        least: ratio that every row must reach.
        mean: ratio that their geometric mean must reach, or None.
        peers: the peers that count.
        clock: suffix of the names of its cases.
        most_ms: milliseconds that no row may exceed, or None.
        gb_per_s: bandwidth at which every row must read keys and values at least, or None.
    """

    of: Callable[[str], bool]
    direction: str
    least: float
    mean: float | None = None
    peers: tuple[str, ...] = EVERY
    clock: str = ""
    most_ms: float | None = None
    gb_per_s: float | None = None

    def rows(self) -> list[tuple[str, str]]:
        """(case with its clock, direction) of each row of the preset."""
        return [
            (case.name + self.clock, self.direction)
            for case in PRESETS["h200"]
            if self.of(case.name) and self.direction in case.directions
        ]


def _plain(name: str) -> bool:
    return name.startswith(("full ", "causal ")) and "GQA" not in name and "S512" not in name


def _modded(name: str) -> bool:
    return not _plain(name) and not name.startswith("decode") and "S512" not in name


def _named(*words: str) -> Callable[[str], bool]:
    return lambda name: any(name.startswith(word) for word in words)


def _but(of: Callable[[str], bool], without: Callable[[str], bool]) -> Callable[[str], bool]:
    return lambda name: of(name) and not without(name)


_DOCUMENTS = _named("documents")
_DEAR = _named("softcap", "documents")
_TRAINED = _named("full", "causal", "alibi", "softcap", "window", "documents", "prefix")
GOALS: Mapping[str, tuple[Goal, ...]] = {
    "cuda": (
        Goal(_plain, "forward", 0.95, 1.0),
        Goal(_plain, "backward", 0.92, 0.97),
        Goal(_but(_modded, _DOCUMENTS), "forward", 1.2),
        Goal(_DOCUMENTS, "forward", 1.5),
        Goal(_modded, "backward", 1.1),
        Goal(_named("decode B16", "decode B64"), "forward", 1.0, gb_per_s=4200),
        Goal(_named("decode B1 "), "forward", 1.2, gb_per_s=3200),
        Goal(_named(SMALL), "forward", 1.0, None, FLEX, WALL, 0.045),
        # Limit of 1.2 times torch's time.
        Goal(_named(SMALL), "backward", 1 / 1.2, None, FLEX, WALL),
        # Limit of 1.1 times the fastest peer's time.
        Goal(_named(SMALL), "forward", 1 / 1.1, None, EVERY, GRAPH),
    ),
    "cuda.triton": (
        *(
            Goal(_but(_but(_TRAINED, _DEAR), lambda name: "S512" in name), way, 1.15, None, FLEX)
            for way in ("forward", "backward")
        ),
        *(Goal(_DEAR, way, 1.6, None, FLEX) for way in ("forward", "backward")),
        Goal(_named("decode"), "forward", 0.9),
    ),
}


def rows_of(reports: Iterable[Mapping[str, Any]]) -> Rows:
    """Return the rows by (case, direction), then by contender, of those that took or refused them.
    The last report with a row counts, because contenders took turns within one report only. A case
    that wasn't timed by the device's clock has the clock in its name."""
    rows: Rows = {}
    for report in reports:
        latest: Rows = {}
        for row in report["measurements"]:
            found = latest.setdefault((row["case"] + clock_of(report), row["direction"]), {})
            if row["median_ms"] or row["status"] == "refused":
                found[row["contender"]] = row
        rows |= latest
    return rows


def reports_of(paths: Sequence[Path]) -> list[Mapping[str, Any]]:
    """Return all reports of some files."""
    found: list[Mapping[str, Any]] = []
    for path in paths:
        read = json.loads(path.read_text())
        found += read if isinstance(read, list) else [read]
    return found


def doubts(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each report that has fewer than ROUNDS rounds, or isn't of the same
    commit's tree."""
    lines = []
    for report in reports:
        name = f"{report['preset'] or 'cases'} by {report['clock']}"
        if report["rounds"] < ROUNDS:
            lines.append(f"{name}: {report['rounds']} rounds, wanted {ROUNDS}")
        if report["commit"] is None or report["commit"].endswith("+changes"):
            lines.append(f"{name}: of no commit's tree: {report['commit']}")
    commits = {str(report["commit"]) for report in reports}
    if len(commits) > 1:
        lines.append(f"reports of several commits: {', '.join(sorted(commits))}")
    return lines


def clock_of(report: Mapping[str, Any]) -> str:
    """Return the suffix of a case's name: the clock, unless it is the device's around calls."""
    if "graph" in report["clock"]:
        return GRAPH
    return WALL if report["clock"].startswith("wall") else ""


def ratio(found: Mapping[str, Row], backend: str, peers: Sequence[str]) -> float | None:
    """How many times as long the fastest of the peers takes, or None."""
    rounds = of_rounds(found, backend, peers)
    return statistics.median(rounds) if rounds else None


def of_rounds(found: Mapping[str, Row], backend: str, peers: Sequence[str]) -> list[float]:
    """How many times as long the fastest of the peers takes, in each round."""
    mine = found[backend]["samples_ms"] if backend in found else None
    theirs = [found[peer]["samples_ms"] for peer in peers if peer in found]
    each = [
        [time / own for time, own in zip(times, mine, strict=True)]
        for times in theirs
        if times and mine
    ]
    return min(each, key=statistics.median, default=[])


def counted(case: str, direction: str, backend: str) -> tuple[str, ...]:
    """Return the peers that count for a row; all, where it has no target."""
    for goal in GOALS[backend]:
        if (case, direction) in goal.rows():
            return goal.peers
    return EVERY


def table(rows: Rows, backend: str) -> list[str]:
    """Return the table in Markdown."""
    peers = [peer for peer in EVERY if any(peer in found for found in rows.values())]
    names = [SHORT.get(peer, peer) for peer in peers]
    if backend == "cuda" and any("cuda.triton" in found for found in rows.values()):
        peers.append("cuda.triton")
        names.append("`cuda.triton`")
    names = ["case", "direction", f"`{backend}`, ms", "range", *names]
    names.append("the lowest that counts, of rounds")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for (case, direction), found in rows.items():
        mine = found.get(backend)
        if mine is None or not mine["median_ms"]:
            continue
        ratios = [ratio(found, backend, [peer]) for peer in peers]
        rounds = of_rounds(found, backend, counted(case, direction, backend))
        cells = [
            case.replace(" bfloat16", ""),
            direction,
            f"{mine['median_ms']:.3f}",
            f"{mine['min_ms']:.3f} to {mine['max_ms']:.3f}",
            *("" if value is None else f"{value:.2f}" for value in ratios),
            f"{min(rounds):.2f} to {max(rounds):.2f}" if rounds else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def shortfalls(rows: Rows, backend: str) -> tuple[int, list[str]]:
    """(rows that reach their target, a line for each that doesn't)."""
    reached, lines = 0, []
    for goal in GOALS[backend]:
        ratios = []
        for case, direction in goal.rows():
            name = f"{case}, {direction}"
            found = rows.get((case, direction), {})
            value = ratio(found, backend, goal.peers)
            if value is None:
                lines.append(f"{name}: not measured")
                continue
            ratios.append(value)
            mine = found[backend]
            median, rate = mine["median_ms"], mine["kv_gb_per_s"]
            lines += [f"{name}: {text}" for text in imprecision(found, backend)]
            absent = [SHORT.get(peer, peer) for peer in goal.peers if peer not in found]
            short = []
            if absent:
                short.append(f"{value:.3f} without {', '.join(absent)}: not measured")
            elif value < goal.least:
                short.append(f"{value:.3f}, wanted {goal.least:.2f}")
            if goal.most_ms is not None and median > goal.most_ms:
                short.append(f"{median:.3f} ms, wanted {goal.most_ms:g}")
            if goal.gb_per_s is not None and rate < goal.gb_per_s:
                short.append(f"{rate:.0f} GB/s, wanted {goal.gb_per_s:g}")
            lines += [f"{name}: {text}" for text in short]
            reached += not short
        if goal.mean is not None and ratios:
            mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
            verdict = "reached" if mean >= goal.mean else "short of"
            line = f"geometric mean of {len(ratios)} rows {goal.direction}: {mean:.3f}"
            lines += [f"{line}, wanted {goal.mean:g}"] if verdict == "short of" else []
    return reached, lines


def missed_table(rows: Rows, backend: str) -> list[str]:
    """Return in Markdown the rows of prefill and training that miss their ratio, in TFLOP/s of
    live pairs. The target is the fastest peer's median rate times the ratio wanted; the rounds'
    ratios decide whether a row misses, as in `shortfalls`."""
    names = ["case", "direction", f"`{backend}`", "the fastest peer", "", "of rounds"]
    names += ["times wanted", "wanted"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for goal in GOALS[backend]:
        # Decoding has targets in bytes, the small call in microseconds.
        if goal.clock or goal.gb_per_s is not None:
            continue
        for case, direction in goal.rows():
            found = rows.get((case, direction), {})
            value = ratio(found, backend, goal.peers)
            if value is None or value >= goal.least:
                continue
            rates = {peer: _tflops(found[peer]) for peer in goal.peers if _timed(found, peer)}
            fastest = max(rates, key=rates.__getitem__)
            cells = [
                case.replace(" bfloat16", ""),
                direction,
                f"{_tflops(found[backend]):.0f}",
                SHORT.get(fastest, fastest),
                f"{rates[fastest]:.0f}",
                f"{value:.2f}",
                f"{goal.least:.2f}",
                f"{rates[fastest] * goal.least:.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def fastest_table(rows: Rows, backend: str) -> list[str]:
    """Return in Markdown the largest TFLOP/s of live pairs of each contender, by direction, with
    the row that it was measured on."""
    there = {name for found in rows.values() for name in found}
    names = [name for name in (backend, *EVERY) if name in there]
    head = ["direction", *(SHORT.get(name, f"`{name}`") for name in names)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for direction in ("forward", "backward"):
        cells = [direction]
        for name in names:
            rates = {
                case: _tflops(found[name])
                for (case, way), found in rows.items()
                if way == direction and _timed(found, name)
            }
            if not rates:  # it was there for decoding alone
                cells.append("")
                continue
            case = max(rates, key=rates.__getitem__)
            cells.append(f"{rates[case]:.0f}: {case.replace(' bfloat16', '')}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _timed(found: Mapping[str, Row], contender: str) -> bool:
    return contender in found and bool(found[contender]["median_ms"])


def _tflops(row: Row) -> float:
    """Rate of the median."""
    return float(row["gflops"]) / 1e3


def imprecision(found: Mapping[str, Row], backend: str) -> list[str]:
    """Return the faults of the backend's error, which the check of the row found, beside the
    peers'."""
    of = "rms_error" if found[backend].get("rms_error") is not None else "error"
    errors = {name: row[of] for name, row in found.items() if row.get(of) is not None}
    theirs = [errors[peer] for peer in PRECISE if peer in errors]
    mine = errors[backend]
    if not theirs or mine <= PRECISION * min(theirs):
        return []
    return [f"an error of {mine:.2g}, and the most precise peer's is {min(theirs):.2g}"]


def main() -> int:
    """Print, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--backend", choices=sorted(GOALS), default="cuda")
    parser.add_argument("--rates", action="store_true", help="what rows do, and what is wanted")
    args = parser.parse_args()
    reports = reports_of(args.reports)
    rows = rows_of(reports)
    if args.rates:
        missed = missed_table(rows, args.backend)
        # A report of peers alone has no row of the backend's.
        lines = [*missed, ""] if missed[2:] else []
        print("\n".join([*lines, *fastest_table(rows, args.backend)]))
        return 0
    print("\n".join(table(rows, args.backend)))
    reached, lines = shortfalls(rows, args.backend)
    lines += doubts(reports)
    print(f"\n{reached} rows reach their target; what doesn't:" if lines else "\nall reached")
    print("\n".join(lines))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
