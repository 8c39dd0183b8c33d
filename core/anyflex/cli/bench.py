"""``anyflex bench``: backends and peers side by side, in one run."""

from __future__ import annotations

import argparse
import functools
import json
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyflex.bench.usage_errors import WrongUsage
from anyflex.cli.exit_codes import ExitCode
from anyflex.cli.explain import DTYPES, kernel_option, shape
from anyflex.cli.file_argument import check_different, write_text
from anyflex.process.progress_line import ProgressLine

if TYPE_CHECKING:
    from anyflex.bench.case import BenchCase, Direction
    from anyflex.bench.measure import Measurement
    from anyflex.testing.attention_case import Layout

__all__ = ["add_parser", "run"]

_MADE = ("shape", "kv", "dtype", "mask", "mod", "direction", "block_size", "layout")
_LAYOUTS = ("dense", "heads_last")
_SHAPE = functools.partial(shape, least=1)
_DEFAULT = "cpu-quick"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``bench``."""
    parser = subparsers.add_parser(
        "bench",
        help="measure backends and peers side by side",
        description=(
            "Measures every usable backend, torch's scaled dot product attention where the "
            "pattern allows it, and torch's own flex attention, in one run: rounds in which each "
            "takes its turn, medians and ranges, how many times as fast as the best peer. First "
            "calls, which compile, are reported apart. Before that each one's numbers are "
            "compared with a dense float64 formula: what is wrong isn't timed. Fails (1) if a "
            "backend's numbers are wrong, or it raises an exception."
        ),
    )
    parser.add_argument("--preset", metavar="NAME", help="a list of cases; --list prints them")
    parser.add_argument(
        "--backend",
        metavar="NAMES",
        help="backends and peers to measure, comma-separated (default: all; --list prints them)",
    )
    parser.add_argument(
        "--option",
        type=kernel_option,
        action="append",
        default=[],
        metavar="BACKEND={NAME: VALUE}",
        help="measure this backend with these kernel_options too, for example "
        '\'cpu={"mods": "interpreter"}\'; may be repeated',
    )
    parser.add_argument("--device", default=None, help="default: cpu, or the preset's")
    parser.add_argument(
        "--case", metavar="GLOB", action="append", default=[], help="only these of the preset"
    )
    parser.add_argument(
        "--shape",
        type=_SHAPE,
        action="append",
        metavar="BxHxLxE",
        help="of query, instead of a preset; may be repeated",
    )
    parser.add_argument("--kv", type=_SHAPE, metavar="BxHxSxE", help="of key and value")
    parser.add_argument(
        "--dtype",
        choices=(*DTYPES, *DTYPES.values(), "tf32"),
        help="tf32 is float32 where torch allows products to be rounded to it",
    )
    parser.add_argument(
        "--mask",
        action="append",
        help="as `anyflex explain` has it, or random_documents:200,1800; may be repeated",
    )
    parser.add_argument("--mod", action="append", help="as `anyflex explain` has it")
    parser.add_argument(
        "--direction",
        metavar="NAMES",
        help="of forward, backward and both, comma-separated (default: forward)",
    )
    parser.add_argument("--block-size", type=int, help="of the block mask (default: 128)")
    parser.add_argument(
        "--layout",
        choices=_LAYOUTS,
        help="of query, key and value in memory: as the shape says (default), or BxLxHxE, as "
        "models project them",
    )
    parser.add_argument("--rounds", type=int, default=7, help="default: 7")
    parser.add_argument(
        "--clock",
        choices=("device", "wall", "graph"),
        default="device",
        help="on accelerators: time on the device (default), of calls back to back on the host, "
        "or on the device of a CUDA graph of one call",
    )
    parser.add_argument("--json", metavar="FILE", help="write the results; - for standard output")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="write a picture, FILE.svg")
    parser.add_argument(
        "--list", action="store_true", help="print presets, backends and peers; measure nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Measure. Progress goes to stderr, the table to stdout."""
    from anyflex.bench.clock import clock_of
    from anyflex.bench.contenders import chosen_contenders
    from anyflex.bench.measure import measure_case
    from anyflex.bench.plot import svg_plot
    from anyflex.bench.report import make_report, table_lines
    from anyflex.cli.device_argument import present_device

    if args.rounds < 1:
        raise WrongUsage(f"--rounds {args.rounds}: must be at least 1")
    if args.list and args.json is not None:
        raise WrongUsage("--list prints names, no results: leave out --json")
    if args.plot is not None and args.plot.suffix != ".svg":
        raise WrongUsage(f"--plot {args.plot}: the picture is SVG; name it *.svg")
    check_different(json=args.json, plot=args.plot)
    cases = _cases(args)
    # A preset for one device has the device in its name.
    of_preset = "cuda" if (args.preset or "").startswith("h200") else "cpu"
    device = present_device(of_preset if args.device is None else args.device)
    if args.clock == "graph" and device.type != "cuda":
        raise WrongUsage(
            f"--clock graph: CUDA graphs are of NVIDIA's GPUs; the device is {device}"
        )
    contenders = chosen_contenders(device, _names(args.backend), args.option)
    if args.list:
        from anyflex.bench.presets import PRESETS

        lines = [f"preset {name}: {len(listed)} cases" for name, listed in PRESETS.items()]
        lines += [f"{each.kind} {each.name}: {each.distribution}" for each in contenders]
        print("\n".join(lines))
        return ExitCode.OK

    # Progress costs time while something is timed, so it is shown on a terminal only.
    progress = ProgressLine(sys.stderr, math.inf)
    clock = clock_of(device, args.clock)
    begin = time.perf_counter()
    measurements: list[Measurement] = []

    def report_of(measured: Sequence[BenchCase]) -> dict[str, Any]:
        return make_report(
            measured,
            measurements,
            device,
            clock=clock.name,
            command=shlex.join(["anyflex", *map(_without_folder, args.given)]),
            preset=args.preset if args.shape is None else None,
            rounds=args.rounds,
            seconds=time.perf_counter() - begin,
        )

    for count, case in enumerate(cases, start=1):
        measurements += measure_case(case, contenders, device, clock, args.rounds, progress.show)
        if args.json not in (None, "-"):
            # An interrupted run still writes its results so far.
            write_text(Path(args.json), json.dumps(report_of(cases[:count]), indent=1) + "\n")
    progress.clear()
    report = report_of(cases)
    if args.json == "-":
        print(json.dumps(report, indent=1), file=args.out)
    else:
        print("\n".join(table_lines(report)))
    if args.plot is not None:
        write_text(args.plot, svg_plot(report))
    return _verdict(report)


def _names(text: str | None) -> list[str]:
    names = [name for name in (text or "").split(",") if name]
    if text is not None and not names:
        raise WrongUsage("--backend names nobody; leave it out to measure all")
    return names


def _verdict(report: dict[str, Any]) -> ExitCode:
    rows = report["measurements"]
    if any(row["kind"] == "backend" and row["status"] in ("wrong", "failed") for row in rows):
        return ExitCode.CHECK_FAILED
    measured = any(row["status"] == "measured" for row in rows)
    return ExitCode.OK if measured else ExitCode.NOT_RUN


def _cases(args: argparse.Namespace) -> Sequence[BenchCase]:
    import fnmatch

    from anyflex.bench.presets import PRESETS

    if args.shape is not None:
        if args.preset is not None or args.case:
            raise WrongUsage("--shape makes cases of its own: leave out --preset and --case")
        return [_made_case(args, shape) for shape in args.shape]
    given = [f"--{name.replace('_', '-')}" for name in _MADE if getattr(args, name) is not None]
    if given:
        raise WrongUsage(f"{', '.join(given)}: belongs to --shape; a preset says it itself")
    args.preset = _DEFAULT if args.preset is None else args.preset
    if args.preset not in PRESETS:
        raise WrongUsage(f"--preset {args.preset}: there is none; known: {', '.join(PRESETS)}")
    cases = [
        case
        for case in PRESETS[args.preset]
        if not args.case or any(fnmatch.fnmatchcase(case.name, glob) for glob in args.case)
    ]
    if not cases:
        names = "; ".join(case.name for case in PRESETS[args.preset])
        raise WrongUsage(f"--case {' '.join(args.case)}: matches none of: {names}")
    return cases


def _made_case(args: argparse.Namespace, shape: tuple[int, int, int, int]) -> BenchCase:
    from anyflex.bench.case import BenchCase

    kv = args.kv or shape
    if kv[0] != shape[0] or kv[3] != shape[3] or shape[1] % kv[1]:
        raise WrongUsage(
            f"--kv {'x'.join(map(str, kv))}: batch and head dim must be query's, and query's "
            f"heads a multiple of its heads; query is {'x'.join(map(str, shape))}"
        )
    dtype = DTYPES.get(args.dtype, args.dtype) or "float32"
    masks, mods = tuple(args.mask or ()), tuple(args.mod or ())
    size = 128 if args.block_size is None else args.block_size
    if size < 1:
        raise WrongUsage(f"--block-size {size}: must be at least 1")
    parts = ["x".join(map(str, shape))]
    parts += [f"kv {'x'.join(map(str, kv))}"] if kv != shape else []
    directions = _directions("forward" if args.direction is None else args.direction)
    layout: Layout = args.layout or "dense"
    parts += [] if layout == "dense" else [layout]
    name = " ".join([*parts, dtype, *masks, *mods])
    return BenchCase(name, shape, kv, dtype, masks, mods, directions, size, layout=layout)


def _directions(text: str) -> tuple[Direction, ...]:
    from anyflex.bench.case import DIRECTIONS

    wanted = [name for name in text.split(",") if name]
    unknown = [name for name in wanted if name not in DIRECTIONS]
    if unknown or not wanted:
        raise WrongUsage(f"--direction {text}: must be of {', '.join(DIRECTIONS)}")
    return tuple(name for name in DIRECTIONS if name in wanted)


def _without_folder(argument: str) -> str:
    """Return the argument without its folder: results are published, and the user's folders are
    private."""
    return Path(argument).name if Path(argument).is_absolute() else argument
