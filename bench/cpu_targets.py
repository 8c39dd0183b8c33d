"""The CPU backend beside everything that torch offers on a CPU, held to its targets.

    python bench/cpu_targets.py [--threads 1,2] [--rounds 7] [--group GLOB ...] [--json FILE]
                                [--without-amx] [--cpu-time] [--without-targets]

One process per thread count, 16 heads, batch 1. Each case is measured in rounds in which every
contender takes a turn (`anyflex.bench`); a row is best peer's median / ours. A group's target is
held by the geometric mean of its rows, and no row may be below 0.85 of it; a row of which a peer
that counts was neither measured nor refused has no best peer, and is printed. Exits with 1 if a
target isn't met, and with 2, before anything is measured, where no target is set, for a processor
of another kind or for any of the chosen groups. `--without-targets` measures there all the same,
and holds nothing.

A processor with AMX can be measured as one without (`--without-amx`), ours and torch's kernels
alike. Where other programs occupy the machine, `--cpu-time` counts what the calling thread spends:
for one thread, since only then it does all the work.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cpu_peers import attention_peers
from torch import Tensor

from anyflex.bench.case import BenchCase, Direction
from anyflex.bench.clock import Timed, WallClock
from anyflex.bench.contenders import chosen_contenders
from anyflex.bench.measure import measure_case
from anyflex.bench.report import make_report, table_lines

__all__ = ["GROUPS", "Group", "main"]

HEADS = 16
LENGTHS = (1024, 2048, 4096)
WIDTHS = (64, 128)
ROW_SHARE = 0.85
"""No row may be below this share of its group's target."""
WITHOUT_AMX = {
    "ANYFLEX_CPU_ISA": "avx512_bf16",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    "MKL_ENABLE_INSTRUCTIONS": "AVX512_E2",
}
"""Settings that keep a process from using AMX: our kernels, and both libraries under torch's."""
MEMORY = "memory"
"""Peer that only reads key and value, once, at this run's memory bandwidth."""
SDPA = ("torch.sdpa.flash", "torch.sdpa.dense_mask")
FLEX = ("torch.flex",)
BEST = SDPA + FLEX


@dataclass(frozen=True)
class Group:
    """Rows with one target.

    Args:
        name: pattern, type and direction.
        cases: its rows.
        peers: the peers that count; the fastest is compared.
        target: ratio that the rows' geometric mean must reach, by kind of processor: ``"amx"``,
            ``"avx512_bf16"``. A processor that isn't named has no target here.
    """

    name: str
    cases: tuple[BenchCase, ...]
    peers: tuple[str, ...]
    target: dict[str, float]


def _cases(
    pattern: str, dtype: str, direction: Direction, lengths: Sequence[int] = LENGTHS
) -> tuple[BenchCase, ...]:
    return tuple(
        _case(pattern, dtype, direction, length, width) for width in WIDTHS for length in lengths
    )


def _case(pattern: str, dtype: str, direction: Direction, length: int, width: int) -> BenchCase:
    masks, mods = {
        "full": ((), ()),
        "causal": (("causal",), ()),
        "window": (("causal_window:256",), ()),
        # Eight heads, approximately.
        "documents": ((f"random_documents:{length // 12},{length // 6}",), ()),
        "alibi": ((), ("alibi",)),
        "softcap": ((), ("softcap:20.0",)),
        "softcap + causal": (("causal",), ("softcap:20.0",)),
    }[pattern]
    shape = (1, HEADS, length, width)
    name = f"{pattern} S{length} D{width} {dtype}"
    return BenchCase(name, shape, shape, dtype, masks, mods, (direction,))


def _decode(dtype: str, length: int = 4096) -> tuple[BenchCase, ...]:
    name = f"decode B16 S{length} D128 GQA 32/8 {dtype}"
    return (BenchCase(name, (16, 32, 1, 128), (16, 8, length, 128), dtype),)


def _groups() -> Iterator[Group]:
    forward = {
        # pattern: peers, then targets of avx512_bf16 and amx for float32 and bfloat16.
        "full": (BEST, (1.15, 1.1), (2.3, 1.3)),
        "causal": (BEST, (1.3, 1.3), (2.3, 1.3)),
        "window": (BEST, (2.0, 2.0), (4.0, 2.0)),
        "documents": (BEST, (2.0, 2.0), (4.0, 2.0)),
        "alibi": (FLEX, (2.2, 2.2), (5.0, None)),
        "softcap": (FLEX, (2.2, 2.2), (5.0, 3.0)),
    }
    for pattern, (peers, single, half) in forward.items():
        for dtype, (zen, amx) in (("float32", single), ("bfloat16", half)):
            target = {"avx512_bf16": zen}
            if amx is not None:
                target["amx"] = amx
            yield Group(
                f"{pattern} {dtype} forward", _cases(pattern, dtype, "forward"), peers, target
            )
    for pattern in ("full", "causal"):
        yield Group(
            f"{pattern} float16 forward",
            _cases(pattern, "float16", "forward"),
            SDPA,
            {"avx512_bf16": 2.5},
        )
    training = {
        "full": (SDPA, 1.5, 2.0, 1.5),
        "causal": (SDPA, 1.5, 2.0, 1.5),
        "window": (("torch.sdpa.dense_mask",), 4.0, 4.0, 4.0),
        "documents": (("torch.sdpa.dense_mask",), 4.0, 4.0, 4.0),
        "softcap + causal": (("torch.written_out",), 5.0, 5.0, 5.0),
    }
    for pattern, (peers, single, half, amx) in training.items():
        for dtype, zen in (("float32", single), ("bfloat16", half)):
            target = {"avx512_bf16": zen}
            if dtype == "bfloat16":
                target["amx"] = amx
            yield Group(
                f"{pattern} {dtype} forward + backward",
                _cases(pattern, dtype, "both", (2048,)),
                peers,
                target,
            )
    yield Group(
        "decode bfloat16",
        _decode("bfloat16"),
        ("torch.sdpa.folded",),
        {
            "avx512_bf16": 2.4,
        },
    )
    yield Group("decode float32", _decode("float32"), ("torch.sdpa.folded",), {})
    yield Group("decode bfloat16, flex", _decode("bfloat16"), FLEX, {"avx512_bf16": 12.0})

    for dtype in ("bfloat16", "float32"):
        share = {"avx512_bf16": 0.75, "amx": 0.8}
        # A GiB and more, so that nothing of it is left in a cache of some hundred MiB.
        yield Group(f"decode {dtype}, bandwidth", _decode(dtype, 16384), (MEMORY,), share)


GROUPS = tuple(_groups())


class ThreadClock(WallClock):
    """CPU time of the calling thread; other programs may have the processor in between."""

    name = "CPU time of the calling thread, time.thread_time"

    def once(self, timed: Timed) -> float:
        ready = None if timed.before is None else timed.before()
        begin = time.thread_time()
        timed.call(ready)
        return time.thread_time() - begin

    def seconds(self, timed: Timed, count: int) -> float:
        if timed.before is not None:
            return math.fsum(self.once(timed) for _ in range(count)) / count
        begin = time.thread_time()
        for _ in range(count):
            timed.call(None)
        return (time.thread_time() - begin) / count


class ReadingClock(WallClock):
    """Another clock that, after each sample, times torch's reading operations too, because other
    programs' use of the memory changes it by half within seconds."""

    def __init__(self, clock: WallClock, data: Tensor) -> None:
        super().__init__(clock.device)
        self.clock, self.name = clock, clock.name
        halves, rows, vector = data.view(2, -1), data.view(-1, 1 << 12), data[: 1 << 12]
        wide = data.view(1 << 12, -1)
        operations: list[Callable[[Any], Tensor]] = [
            lambda _: data.sum(),
            lambda _: torch.dot(halves[0], halves[1]),
            lambda _: torch.mv(rows, vector),
            lambda _: wide.amax(1),
        ]
        self.bytes = data.numel() * data.element_size()
        self.reads = [(Timed(operation), list[float]()) for operation in operations]

    def once(self, timed: Timed) -> float:
        return self.clock.once(timed)

    def seconds(self, timed: Timed, count: int) -> float:
        found = self.clock.seconds(timed, count)
        for operation, seconds in self.reads:
            seconds.append(self.clock.seconds(operation, 1))
        return found

    def bandwidth(self) -> float:
        """Return the bytes per second of the operation that was the fastest in the median."""
        return self.bytes / min(statistics.median(seconds) for _, seconds in self.reads)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if a target isn't met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", default="1,2", help="default: 1,2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--group", action="append", default=[], metavar="GLOB")
    parser.add_argument("--length", type=int, action="append", help="only these lengths")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--without-amx",
        action="store_true",
        help="switch AMX off for ours and for torch's kernels, take the targets of avx512_bf16",
    )
    parser.add_argument("--cpu-time", action="store_true", help="of the calling thread; 1 thread")
    parser.add_argument(
        "--without-targets",
        action="store_true",
        help="measure where no target is set, and pass whatever is found there",
    )
    parser.add_argument("--one-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    groups = [
        group
        for group in GROUPS
        if not args.group or any(fnmatch.fnmatchcase(group.name, glob) for glob in args.group)
    ]
    if args.length:
        groups = [_of_lengths(group, args.length) for group in groups]
    if not any(group.cases for group in groups):
        parser.error("no case is left: see GROUPS")
    if args.cpu_time and args.threads != "1":
        parser.error("--cpu-time needs --threads 1: other threads' time would not count")
    if args.one_process:
        return _measure(groups, args)
    kind = kind_of_targets(args.without_amx)
    if not args.without_targets and not any(kind in group.target for group in groups):
        kinds = ", ".join(sorted({each for group in GROUPS for each in group.target}))
        parser.error(
            f"none of these groups has a target for processors of kind {kind!r} (kinds with "
            f"targets: {kinds}), so that nothing could fail; --without-targets measures them"
        )
    failed = False
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        for threads in args.threads.split(","):
            path = Path(folder) / f"{threads}.json"
            one = argparse.Namespace(**{**vars(args), "threads": threads})
            command = [sys.executable, __file__, "--one-process", *_selection(one)]
            command += ["--json", str(path)]
            environment = {**os.environ, "OMP_NUM_THREADS": threads}
            # Inductor writes the number of threads into flex attention's code, and finds it again
            # on disk for another number: buffers of one thread, used by 16, break the heap.
            cache = Path(tempfile.gettempdir(), f"anyflex-bench-inductor-{threads}-threads")
            environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
            if args.without_amx:
                environment |= WITHOUT_AMX
            status = subprocess.run(command, check=False, env=environment).returncode
            failed |= status != 0
            if path.exists():
                reports.append(json.loads(path.read_text()))
    for verdict in _scaling(reports):
        failed |= verdict["met"] is False
        print("  " + _line(verdict))
        reports[-1]["targets"].append(verdict)
    if args.json is not None:
        args.json.write_text(json.dumps(reports, indent=1) + "\n")
    return int(failed)


def _selection(args: argparse.Namespace) -> list[str]:
    """The arguments that choose what is measured, and how."""
    words = ["--threads", args.threads, "--rounds", str(args.rounds)]
    for name, given in (("--group", args.group), ("--length", args.length or [])):
        words += [part for each in given for part in (name, str(each))]
    for name in ("cpu_time", "without_amx"):
        words += ["--" + name.replace("_", "-")] * getattr(args, name)
    return words


def _scaling(reports: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the speed-up of the last report's threads over the first's one, full and causal
    prefill; the targets are for 16 threads."""
    if len(reports) < 2 or reports[0]["machine"]["threads"] != 1:
        return
    one, many = (
        {
            row["case"]: row
            for row in report["measurements"]
            if row["contender"] == "cpu" and row["direction"] == "forward"
        }
        for report in (reports[0], reports[-1])
    )
    threads = reports[-1]["machine"]["threads"]
    for dtype, target in (("float32", 12.0), ("bfloat16", 9.0)):
        ratios = {
            case: row["median_ms"] / many[case]["median_ms"]
            for case, row in one.items()
            if case.startswith(("full ", "causal ")) and case.endswith(dtype)
            if row["median_ms"] and many[case]["median_ms"]
        }
        if ratios:
            mean = statistics.geometric_mean(ratios.values())
            yield {
                "group": f"{dtype} prefill, threads 1 to {threads}",
                "peers": [],
                "target": target if threads == 16 else None,
                "mean": mean,
                "least": min(ratios.values()),
                "rows": ratios,
                "met": mean >= target if threads == 16 else None,
            }


def _of_lengths(group: Group, lengths: Sequence[int]) -> Group:
    kept = tuple(case for case in group.cases if case.kv_shape[2] in lengths)
    return dataclasses.replace(group, cases=kept)


def _measure(groups: Sequence[Group], args: argparse.Namespace) -> int:
    torch.set_num_threads(int(args.threads))
    device = torch.device("cpu")
    known = [*chosen_contenders(device, ["cpu", *FLEX, "torch.sdpa.flash"]), *attention_peers()]
    # A case may be in several groups and is measured once.
    peers_of: dict[BenchCase, set[str]] = {}
    for group in groups:
        for case in group.cases:
            peers_of.setdefault(case, set()).update(group.peers)
    clock = ThreadClock(device) if args.cpu_time else WallClock(device)
    kind = kind_of_targets(args.without_amx)
    begin = time.perf_counter()
    measurements = []
    reading = []
    for case, peers in peers_of.items():
        contenders = [each for each in known if each.kind == "backend" or each.name in peers]
        beside = ReadingClock(clock, torch.ones(1 << 28)) if MEMORY in peers else clock
        measurements += measure_case(case, contenders, device, beside, args.rounds, _say)
        if isinstance(beside, ReadingClock):
            median = case.kv_bytes() / beside.bandwidth() * 1e3
            reading.append(
                {
                    "case": case.name,
                    "contender": MEMORY,
                    "status": "measured",
                    "median_ms": median,
                }
            )
    report = make_report(
        list(peers_of),
        measurements,
        device,
        clock=clock.name,
        command=shlex.join(["python", "bench/cpu_targets.py", *_selection(args)]),
        preset=None,
        rounds=args.rounds,
        seconds=time.perf_counter() - begin,
    )
    report["reading"] = reading
    rows = [*report["measurements"], *reading]
    verdicts = [_verdict(group, kind, rows) for group in groups if group.cases]
    report["targets"] = verdicts
    print("\n".join(table_lines(report)))
    for row in reading:
        print(f"\n{row['case']}: reading key and value takes {row['median_ms']:.1f} ms")
    said = " with AMX switched off for both sides" if args.without_amx else ""
    print(f"\n{processor()}{said}, threads {args.threads}, {clock.name}:")
    print("x best peer, geometric mean and least row")
    for verdict in verdicts:
        print("\n    ".join(["  " + _line(verdict), *verdict["missing"]]))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(verdict["met"] is False for verdict in verdicts))


def _say(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text[:79]}")


def processor() -> str:
    """Return the kind of processor that targets are stated for, or "other"."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if "amx_bf16" in flags:
        return "amx"
    return "avx512_bf16" if "avx512_bf16" in flags else "other"


def kind_of_targets(without_amx: bool) -> str:
    """Return the kind whose targets hold: `processor`, or what it is with its AMX switched off."""
    kind = processor()
    return "avx512_bf16" if without_amx and kind == "amx" else kind


def _verdict(group: Group, kind: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the group's ratios, and whether they hold its target; None where it has none."""
    target = group.target.get(kind)
    ratios: dict[str, float | None] = {}
    missing = []
    for case in group.cases:
        # The cases of forward alone, and of forward and backward, have one name.
        of_case = [
            row
            for row in rows
            if row["case"] == case.name and row.get("direction", "forward") in case.directions
        ]
        ours = [row["median_ms"] for row in of_case if row["contender"] == "cpu"]
        theirs = [
            row["median_ms"]
            for row in of_case
            if row["contender"] in group.peers and row["median_ms"]
        ]
        ratios[case.name] = min(theirs) / ours[0] if ours and ours[0] and theirs else None
        # A peer that failed might have been the fastest.
        came = {row["contender"]: row["status"] for row in of_case}
        for name in ("cpu", *group.peers):
            if came.get(name) not in ("measured", "refused"):
                missing.append(f"{case.name}: {name}: {came.get(name, 'not there')}")
                ratios[case.name] = None
    found = [ratio for ratio in ratios.values() if ratio is not None]
    mean = math.exp(math.fsum(map(math.log, found)) / len(found)) if found else None
    met = None
    if target is not None:
        met = (
            mean is not None
            and len(found) == len(ratios)
            and mean >= target
            and min(found) >= ROW_SHARE * target
        )
    return {
        "group": group.name,
        "peers": list(group.peers),
        "target": target,
        "mean": mean,
        "least": min(found, default=None),
        "rows": ratios,
        "missing": missing,
        "met": met,
    }


def _line(verdict: dict[str, Any]) -> str:
    figures = [
        "   -" if verdict[name] is None else f"{verdict[name]:6.2f}"
        for name in ("mean", "least", "target")
    ]
    said = {True: "met", False: "NOT MET", None: "no target"}[verdict["met"]]
    return f"{verdict['group']:40} {figures[0]} {figures[1]}  (target {figures[2]}) {said}"


if __name__ == "__main__":
    sys.exit(main())
