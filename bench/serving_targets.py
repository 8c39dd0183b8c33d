"""Packed and paged attention on one GPU beside its peers, compared with the project's targets.

    python bench/serving_targets.py [--group NAME ...] [--contenders NAMES] [--json FILE]
    python bench/serving_targets.py --read FILE

Contenders take turns: in each of ROUNDS rounds each replays a CUDA graph of one forward pass of
LAYERS layers, after the L2 cache was flushed. Times are those of a layer, a pass's beginning
included; what peers plan on the host comes before the pass and isn't in them. Ratios are medians
of the rounds' ratios. Each contender's result is compared with the formula in float64 on three
sequences first. Prints a table in Markdown, and exits with 1 if a row misses its target, if a
result is wrong, or if `cuda` doesn't take a row. Each group runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from anyflex.bench.machine import command_of, provenance

__all__ = ["TARGETS", "main"]

ROUNDS, LAYERS, EAGER_CALLS = 15, 32, 20
MOST_ERROR = {"": 0.01, "int8": 0.05, "fp8_e4m3": 0.2}
"""Maximum error of a result, by storage."""
TARGETS = {
    "uniform": 1.0,
    "ragged": 1.0,
    "mixed": 1.0,
    "mods": 1.2,
    "quantised": 1.0,
    "packed": 1.0,
}
"""How many times as long the fastest peer must take."""
OF_DENSE = {16: 0.92, 64: 0.97, 256: 0.97}
"""Least ratio of dense decoding's time to that of pages, by the rows of a page."""
OURS = "cuda", "cuda.triton", "cuda, dense"
OF_UNIFORM, OF_PLAIN = 0.9, 1.6
"""Least ratio of ragged decoding's bandwidth to that of uniform lengths; of int8 rows a second to
those of bfloat16."""


def measure(group: str, names: list[str]) -> list[dict[str, Any]]:
    """Return a report for each row of a group."""
    import serving_peers
    from serving_rows import ROWS, problem, sample_error

    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def captured(begin: serving_peers.Begin) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                begin()()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer = begin()
            for _ in range(LAYERS):
                layer()
        return graph

    def replayed_us(graph: torch.cuda.CUDAGraph) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) * 1e3 / LAYERS

    def host_us(begin: serving_peers.Begin) -> tuple[float, float]:
        """(a pass's beginning with its first layer, one more layer)."""
        firsts, layers = [], []
        for _ in range(EAGER_CALLS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            layer = begin()
            layer()
            middle = time.perf_counter()
            layer()
            firsts.append(middle - began)
            layers.append(time.perf_counter() - middle)
        return statistics.median(firsts) * 1e6, statistics.median(layers) * 1e6

    reports = []
    for row in ROWS:
        if row.group != group:
            continue
        given = problem(row)
        report: dict[str, Any] = {
            "row": row.name, "group": row.group, "heads": row.heads, "dim": row.dim,
            "page": row.page, "mod": row.mod, "storage": row.storage, "bytes": row.read_bytes,
            "contenders": {}, "refused": {},
        }  # fmt: skip
        graphs: dict[str, Any] = {}
        for name in names:
            try:
                begin = serving_peers.CONTENDERS[name](given)
                error = sample_error(given, begin()())
                # A captured graph reads tensors that the contender alone may hold.
                graphs[name] = captured(begin), begin
                first, layer = host_us(begin)
                report["contenders"][name] = {
                    "error": error, "first_us": first, "host_us": layer,
                }  # fmt: skip
            except serving_peers.Refused as refusal:
                report["refused"][name] = f"refused: {refusal}"
            except Exception as failure:  # noqa: BLE001  (told; the others go on)
                report["refused"][name] = f"{type(failure).__name__}: {str(failure)[:300]}"
        for graph, _ in graphs.values():
            replayed_us(graph)
        rounds = [
            {name: replayed_us(graph) for name, (graph, _) in graphs.items()}
            for _ in range(ROUNDS)
        ]
        for name, found in report["contenders"].items():
            found["us"] = statistics.median(each[name] for each in rounds)
            if "cuda" in graphs:
                found["ratio"] = statistics.median(each[name] / each["cuda"] for each in rounds)
        reports.append(report)
        print(line(report), file=sys.stderr, flush=True)
        del graphs, given
        torch.cuda.empty_cache()
    return reports


def failed(group: str, why: str) -> dict[str, Any]:
    """Return a report of a group that wasn't measured."""
    report = dict.fromkeys(("dim", "page", "bytes"), 0) | dict.fromkeys(("mod", "storage"), "")
    names = {"row": group, "group": group, "heads": [0, 0]}
    return report | names | {"contenders": {}, "refused": {"cuda": why}}


def ratio(report: dict[str, Any], peer: str) -> float | None:
    """How many times as long a contender takes as `cuda`, the median of the rounds."""
    found: float | None = report["contenders"].get(peer, {}).get("ratio")
    return found


def fastest_peer(report: dict[str, Any]) -> tuple[str, float] | None:
    """Return the fastest contender that isn't ours, and its ratio."""
    ratios = {name: ratio(report, name) for name in report["contenders"] if name not in OURS}
    known = {name: value for name, value in ratios.items() if value is not None}
    return min(known.items(), key=lambda each: each[1]) if known else None


def line(report: dict[str, Any]) -> str:
    """Return a row of the table."""
    cells = [
        f"{report['row']} {report['mod']}{report['storage']}".strip(),
        "/".join(map(str, [*report["heads"], report["dim"]])),
        str(report["page"] or "packed"),
    ]
    for name, found in report["contenders"].items():
        us = found["us"]
        rate = report["bytes"] / us / 1e3
        cells.append(f"{name} {us:.1f} us, {rate:.0f} GB/s, host {found['host_us']:.0f}")
    for name, why in report["refused"].items():
        if not why.startswith("refused"):
            cells.append(f"{name}: {why}")
    return f"| {' | '.join(cells)} |"


def table(reports: list[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for each in reports for name in each["contenders"]))
    head = ["row", "heads/dim", "page", "`cuda`, us", "GB/s", "error", "host, us", "first, us"]
    head += [name for name in names if name != "cuda"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for report in reports:
        own = report["contenders"].get("cuda")
        cells = [f"{report['row']} {report['mod']}{report['storage']}".strip()]
        cells += [
            "/".join(map(str, [*report["heads"], report["dim"]])),
            str(report["page"] or "-"),
        ]
        if own is None:
            cells += [""] * 5
        else:
            us = own["us"]
            cells += [f"{us:.1f}", f"{report['bytes'] / us / 1e3:.0f}", f"{own['error']:.1g}"]
            cells += [f"{own['host_us']:.0f}", f"{own['first_us']:.0f}"]
        for name in names:
            if name != "cuda":
                value = ratio(report, name)
                cells.append("" if value is None else f"{value:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def shortfalls(reports: list[dict[str, Any]]) -> list[str]:
    """Return a line for each target that is missed."""
    lines = []
    rates: dict[tuple[Any, ...], float] = {}
    for report in reports:
        name = f"{report['row']} {report['mod']}{report['storage']}, page {report['page']}"
        own = report["contenders"].get("cuda")
        if own is None:
            lines.append(f"{name}: cuda: {report['refused'].get('cuda', 'not run')}")
            continue
        if own["error"] > MOST_ERROR[report["storage"]]:
            lines.append(f"{name}: an error of {own['error']:.2g}")
        us = own["us"]
        rate = report["bytes"] / us
        kind = tuple(report["heads"]), report["dim"], report["page"]
        if report["group"] == "uniform":
            rates[kind] = max(rates.get(kind, 0.0), rate)
        peer = fastest_peer(report)
        if peer is not None and peer[1] < TARGETS[report["group"]]:
            wanted = TARGETS[report["group"]]
            lines.append(f"{name}: {peer[1]:.2f} of {peer[0]}'s time, wanted {wanted:.2f}")
        dense = ratio(report, "cuda, dense")
        if dense is not None and dense < OF_DENSE[report["page"]]:
            lines.append(f"{name}: {dense:.3f} of dense, wanted {OF_DENSE[report['page']]}")
        if report["group"] == "ragged" and kind in rates and rate < OF_UNIFORM * rates[kind]:
            lines.append(f"{name}: {rate / rates[kind]:.2f} of the uniform rate")
        if report["storage"] == "int8":
            plain = [
                each for each in reports
                if (each["row"], each["mod"], each["storage"], each["page"], tuple(each["heads"]))
                == (report["row"], "", "", report["page"], tuple(report["heads"]))
                and "cuda" in each["contenders"]
            ]  # fmt: skip
            if plain:
                gain = plain[0]["contenders"]["cuda"]["us"] / us
                if gain < OF_PLAIN:
                    lines.append(f"{name}: {gain:.2f} of bfloat16's rows a second, wanted 1.6")
    return lines


def main() -> int:
    """Measure, or read; print and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--group", action="append", choices=sorted(TARGETS))
    parser.add_argument("--contenders", help="names, separated by semicolons (default: all)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read is not None:
        reports = json.loads(args.read.read_text())["rows"]
    elif args.alone:
        import serving_peers

        names = args.contenders.split(";") if args.contenders else list(serving_peers.CONTENDERS)
        args.json.write_text(json.dumps(measure(args.group[0], names)))
        return 0
    else:
        reports = []
        for group in args.group or TARGETS:
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                command = [sys.executable, __file__, "--alone", "--group", group]
                command += ["--json", file.name]
                command += [] if args.contenders is None else ["--contenders", args.contenders]
                ended = subprocess.run(command, check=False).returncode
                if ended:
                    reports.append(failed(group, f"its process ended with {ended}"))
                    continue
                reports += json.loads(Path(file.name).read_text())
        if args.json is not None:
            found = provenance(torch.device("cuda")) | {
                "command": command_of("bench/serving_targets.py"), "rounds": ROUNDS,
                "layers": LAYERS, "rows": reports,
            }  # fmt: skip
            args.json.write_text(json.dumps(found, indent=1))
    print("\n".join(table(reports)))
    missed = shortfalls(reports)
    print("\nwhat misses its target:" if missed else "\nall reached")
    print("\n".join(missed))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
