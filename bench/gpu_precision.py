"""The error of a GPU's backends beside that of peers, on the same inputs.

    python bench/gpu_precision.py [--backend cuda,cuda.triton,torch.flex,...] [--count 60]

Random calls, each by its number, and then long rows: full, causal, documents, windows, ALiBi and
soft caps, head dims 16 to 256, heads that share keys, lengths that are and aren't whole blocks,
bfloat16, float16 and float32, forward and backward. Errors are roots of the mean of squares
against the dense float64 formula, which the GPU evaluates, relative to that of the right values,
of the result (out, dq, dk or dv) where it is largest. A backend's is held to the smallest of the
peers that compute the call. Exits with 1 if one is above LIMIT times it, or a backend fails, or if
for fewer than half of the calls some peer computes.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from anyflex.bench.case import BenchCase
from anyflex.bench.check import Formula, errors_of
from anyflex.bench.contenders import chosen_contenders
from anyflex.bench.machine import command_of, provenance
from anyflex.errors import BackendRefused

__all__ = ["LIMIT", "Row", "call_of", "faults", "long_rows", "main", "row_of"]

LIMIT = 1.2
SEED = 20_261_128
BACKENDS = ("cuda", "cuda.triton", "torch.flex")
MASKS: tuple[tuple[str, ...], ...] = (
    (),
    ("causal",),
    ("causal_window:100",),
    ("random_documents:100,700",),
    ("random_documents:100,700", "causal"),
    ("prefix_lm:200",),
)
MODS: tuple[tuple[str, ...], ...] = ((), (), ("alibi",), ("softcap:20",), ("softcap:20", "alibi"))
DIMS = (
    (16, 16),
    (32, 32),
    (64, 64),
    (64, 64),
    (96, 96),
    (128, 128),
    (128, 128),
    (192, 128),
    (256, 256),
)
HEADS = ((4, 4), (8, 2), (6, 2), (32, 8), (8, 1), (1, 1))
"""Query heads and KV heads."""
PAIRS = 1 << 26
"""Maximum pairs of query and key in all heads: the formula keeps more than ten times as many
float64 numbers, and several calls run at once."""


@dataclass(frozen=True)
class Row:
    """Errors of the contenders in one call.

    Args:
        number: the call's.
        case: its name.
        errors: by contender, of those that compute it.
        refused: why, of the others.
        failed: what a backend raised.
    """

    number: int
    case: str
    errors: dict[str, float]
    refused: dict[str, str]
    failed: dict[str, str]

    def of_peers(self, backends: Sequence[str]) -> float | None:
        """The smallest error of those that aren't `backends`, None where there is none."""
        return min((e for name, e in self.errors.items() if name not in backends), default=None)


def call_of(number: int) -> BenchCase:
    """The random call of this number, always the same."""
    draw = random.Random(SEED + number)
    heads, kv_heads = draw.choice(HEADS)
    batch = draw.choice((1, 2))
    length = draw.choice(
        (draw.randint(1, 300), draw.randint(300, 2500), 128 * draw.randint(1, 16))
    )
    length = min(length, math.isqrt(PAIRS // (batch * heads)))
    dim, value_dim = draw.choice(DIMS)
    dtype = draw.choice(("bfloat16", "bfloat16", "float16", "float32"))
    return _case(
        f"random {number}", (batch, heads, kv_heads), length, (dim, value_dim), dtype,
        draw.choice(MASKS), draw.choice(MODS),
    )  # fmt: skip


def long_rows() -> list[BenchCase]:
    """Calls of 4096 tokens."""
    return [
        _case("long", (1, 4, 2), 4096, (dim, dim), dtype, masks, mods)
        for dim, dtype in (
            (64, "bfloat16"),
            (128, "bfloat16"),
            (128, "float16"),
            (256, "bfloat16"),
        )
        for masks, mods in (((), ()), (("causal",), ()), (("causal",), ("softcap:20",)))
    ]


def _case(
    name: str,
    heads: tuple[int, int, int],
    length: int,
    dims: tuple[int, int],
    dtype: str,
    masks: tuple[str, ...],
    mods: tuple[str, ...],
) -> BenchCase:
    batch, of_query, of_key = heads
    told = "+".join((*masks, *mods)) or "full"
    return BenchCase(
        f"{name}: {told} B{batch} H{of_query}/{of_key} S{length} D{dims[0]}/{dims[1]} {dtype}",
        (batch, of_query, length, dims[0]),
        (batch, of_key, length, dims[0]),
        dtype,
        masks,
        mods,
        ("forward", "backward"),
        value_head_dim=dims[1],
    )


def row_of(number: int, case: BenchCase, names: Sequence[str], device: torch.device) -> Row:
    """Compare the contenders of these names on a call."""
    formula = Formula(case, device, evaluated_on=device)
    row = Row(number, case.name, {}, {}, {})
    for contender in chosen_contenders(device, names):
        refusal = contender.refusal(case)
        try:
            if refusal is None:
                row.errors[contender.name] = errors_of(contender, formula).rms
        except BackendRefused as error:
            refusal = str(error)
        except Exception as error:  # noqa: BLE001  # a peer's may be anything
            told = f"{type(error).__name__}: {error}".splitlines()[0]
            if contender.kind == "backend":
                row.failed[contender.name] = told
            else:
                refusal = told
        if refusal is not None:
            row.refused[contender.name] = refusal
    return row


def faults(rows: Iterable[Row], backends: Sequence[str]) -> list[str]:
    """Return a line for each backend's error that is too large, and each that failed."""
    lines = []
    compared = count = 0
    for row in rows:
        count += 1
        lines += [f"{row.case}: {name} failed: {told}" for name, told in row.failed.items()]
        theirs = row.of_peers(backends)
        if theirs is None:
            continue
        compared += 1
        for name in backends:
            mine = row.errors.get(name, 0.0)
            # NaN sorts as the worst, because it compares false.
            if not mine <= LIMIT * theirs:
                lines.append(f"{row.case}: {name} is off by {mine:.3g}, a peer by {theirs:.3g}")
    if 2 * compared < count:
        lines.append(f"a peer computes {compared} of {count} calls, fewer than half")
    return lines


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default=",".join(BACKENDS), help="names, as anyflex bench's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--count", type=int, default=60, help="random calls")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--no-long-rows", action="store_true")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(words)
    device = torch.device(args.device)
    names = args.backend.split(",")
    backends = [each.name for each in chosen_contenders(device, names) if each.kind == "backend"]
    calls = [(number, call_of(number)) for number in range(args.first, args.first + args.count)]
    if not args.no_long_rows:
        calls += list(enumerate(long_rows(), start=1_000_000))
    rows = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, context) as pool:
        waiting = [pool.submit(row_of, *call, names, device) for call in calls]
        for done in as_completed(waiting):
            row = done.result()
            rows.append(row)
            told = [f"{name} {error:.2e}" for name, error in row.errors.items()]
            told += [f"{name} refused" for name in row.refused]
            print(f"{row.case}: {', '.join(told)}", flush=True)
    rows.sort(key=lambda row: row.number)
    for name in backends:
        ratios = [
            row.errors[name] / theirs
            for row in rows
            if name in row.errors and (theirs := row.of_peers(backends))
        ]
        if ratios:
            middle = statistics.median(ratios)
            print(f"{name}: {len(ratios)} calls, error by a peer's median {middle:.3f}, "
                  f"largest {max(ratios):.3f}")  # fmt: skip
    if args.json is not None:
        report = {
            "command": command_of("bench/gpu_precision.py", words),
            **provenance(device),
            "rows": [asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    lines = faults(rows, backends)
    print("\n".join(lines or [f"no error above {LIMIT} of a peer's"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
