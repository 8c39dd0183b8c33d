"""Random calls of the sizes that a GPU's tiles have, held to the dense float64 formula.

    python bench/gpu_random.py --backend cuda [--count 500] [--first 0] [--jobs 16]
                               [--repeat 20] [--option fast_tanh=true] [--dtype tf32]
                               [--head-dims 99,100,50x36] [--json FILE]
    python bench/gpu_random.py --each-kernel --repeat 1000

The conformance kit's own comparison and budgets, at lengths of up to 900 in head dims of up to
256, with every mod of the kit's lists. Their types are bfloat16 and float16, or what `--dtype`
names: tf32 is float32 where torch allows its products in TF32. Their head dims are DIMS, or what
`--head-dims` names, in turns: D, or one of queries and keys and one of values. Numbers from a
million on are no random calls but a preset's rows, shrunk (`preset_calls.py`). Fresh memory holds
NaN. Each forward, and each backward under deterministic algorithms, is repeated and must give the
same bits; what else is repeated must stay within the budgets. Every call runs in one of `--jobs`
processes; one that doesn't end within `--timeout` seconds is killed and counts as failed. Exits
with 1 if a call is wrong, fails, hangs or differs between repetitions, if more than one in twenty
is refused, or if of a hundred calls on `cuda` or more fewer than a third take Hopper's, unless
`--dtype` or `--head-dims` is given.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import queue
import random
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import preset_calls
import torch
from kernel_calls import OF_EACH_KERNEL
from torch import Tensor

import anyflex
from anyflex.bench.case import TF32
from anyflex.errors import BackendRefused
from anyflex.testing.attention_case import AttentionCase, Drawn, Layout
from anyflex.testing.comparison import Budgets, by_backend, by_oracle, mismatches
from anyflex.testing.mods import MASK_MODS, SCORE_MODS

__all__ = ["case_of", "drawn_case", "main"]

SEED = 20261122
PAIRS = 1_500_000
"""Maximum number of pairs: the formula takes seconds for such a call."""
MOST_REFUSED = 0.05
LEAST_HOPPER = 1 / 3
"""Minimum share of calls on `cuda` that Hopper's kernels take, which these runs are about: 0.75 of
the first 500."""
DTYPES = ("bfloat16", "float16", "float32", TF32)
DIMS = (
    *[(128, 128)] * 4, *[(64, 64)] * 4, (96, 96), (80, 80), (40, 40), (128, 64), (64, 128),
    (72, 56), (256, 256), (192, 128), (160, 160),
)  # fmt: skip
BLOCKS = (
    *[(128, 128)] * 5, (256, 128), (128, 256), (384, 128), (64, 64), (128, 64), (64, 128),
    (512, 512),
)  # fmt: skip
HEADS = ((1, 2), (2, 2), (4, 1), (8, 1), (3, 1), (1, 1), (2, 1))
"""(query heads per KV head, KV heads)."""
MANY_HEADS = ((1, 32), (4, 8), (2, 16), (8, 4))
"""Heads of every third call: more tiles than a GPU has multiprocessors, for which it may have
other kernels."""
LEARNING: tuple[set[str], ...] = ({"q", "k", "v"},) * 6 + ({"k", "v"}, {"q"}, set(), set())


def case_of(
    number: int, dtype: str | None = None, head_dims: Sequence[tuple[int, int]] = ()
) -> AttentionCase:
    """The call of this number, with one of DTYPES or its own, and head dims of `head_dims` or its
    own."""
    if number >= preset_calls.FIRST:
        case = preset_calls.preset_call(number)
    else:
        case = drawn_case(number)
    if head_dims:
        dim, value_dim = head_dims[number % len(head_dims)]
        case = dataclasses.replace(case, head_dim=dim, value_head_dim=value_dim)
    if dtype is None:
        return case
    if dtype == TF32:
        return dataclasses.replace(case, dtype=torch.float32, products="high")
    return dataclasses.replace(case, dtype=getattr(torch, dtype))


def drawn_case(number: int) -> AttentionCase:
    """The random call of this number; always the same."""
    draw = random.Random(SEED + number)
    group, kv_heads = draw.choice(HEADS)
    batch = draw.choice((1, 1, 2))
    q_length, kv_length = (_length(draw) for _ in range(2))
    if draw.random() < 0.1:
        q_length = draw.choice((1, 2, 5, 16))
    if number % 3 == 0:
        group, kv_heads = MANY_HEADS[number // 3 % len(MANY_HEADS)]
        kv_length = max(65, min(kv_length, PAIRS // (batch * group * kv_heads * q_length)))
    while batch * group * kv_heads * q_length * kv_length > PAIRS:
        q_length, kv_length = max(q_length // 2, 1), max(kv_length * 3 // 4, 1)
    score = draw.choice(sorted(SCORE_MODS)) if draw.random() < 0.6 else None
    mask = draw.choice(sorted(MASK_MODS)) if draw.random() < 0.75 else None
    learning = draw.choice(LEARNING)
    if score is not None and SCORE_MODS[score].learns and draw.random() < 0.5:
        learning = learning | {"captured"}
    dims = draw.choice(DIMS)
    dlse = bool(learning) and draw.random() < 0.3
    return AttentionCase(
        name=f"random/{number}",
        shows="a random call",
        batch=batch,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        q_length=q_length,
        kv_length=kv_length,
        head_dim=dims[0],
        value_head_dim=dims[1],
        kv_batch=draw.choice((1, batch, batch)),
        dtype=draw.choice((torch.bfloat16, torch.bfloat16, torch.float16)),
        score_mod=score,
        mask_mod=mask,
        block_size=draw.choice(BLOCKS),
        scale=0.25 if score == "big_scores" else draw.choice((None, None, None, 0.1, -0.05)),
        gradients=frozenset(learning),
        aux=frozenset({"lse"} if dlse else ()) | draw.choice(
            (frozenset(), frozenset({"lse"}), frozenset({"lse", "max_scores"}))
        ),
        dlse=dlse,
        of_sums=draw.random() < 0.1,
        layout=draw.choice(get_args(Layout)) if draw.random() < 0.25 else "dense",
        seed=number,
    )  # fmt: skip


def _length(draw: random.Random) -> int:
    return 128 * draw.randint(1, 5) if draw.random() < 0.4 else draw.randint(65, 900)


def is_deterministic(number: int) -> bool:
    """Every fourth random call runs under torch's deterministic algorithms. No row of a preset
    does: backward would be another kernel's."""
    return number < preset_calls.FIRST and number % 4 == 3


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Turn torch's deterministic algorithms on in the body."""
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def poison(device: torch.device) -> None:
    """Let the memory that is handed out next hold NaN."""
    for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24):
        blocks = [torch.full((size // 4,), torch.nan, device=device) for _ in range(4)]
        del blocks


def outcome_of(
    number: int, case: AttentionCase, device: torch.device, args: argparse.Namespace
) -> dict[str, Any]:
    """Run one call, compare, repeat. Returns the fields of a line of the report."""
    backend, options = args.backend, dict(args.option)
    row: dict[str, Any] = {"number": number, "problems": [], "variant": ""}
    try:
        with deterministic(is_deterministic(number)):
            drawn = case.draw(device)
            attention = functools.partial(
                anyflex.flex_attention, kernel_options={backend: options}
            )
            row["variant"] = _variant(case, drawn, backend, device, options)
            poison(device)
            found = by_backend(case, drawn, backend, device, attention)
            budgets = by_oracle(case, drawn)
            row["problems"] = mismatches(found, budgets, case, drawn)
            row["problems"] += _changes(
                case, drawn, backend, device, attention, found, budgets, args.repeat
            )
    except BackendRefused as error:
        row["variant"] = f"refused: {error.reasons.get(backend, error)}"
    # Any other exception is the call's outcome.
    except Exception as error:  # noqa: BLE001
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:600]
        row["problems"] = [
            f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"
        ]
    return row


def _variant(
    case: AttentionCase,
    drawn: Drawn,
    backend: str,
    device: torch.device,
    options: Mapping[str, Any],
) -> str:
    said: list[str] = []

    def ask(*args: Any, **settings: Any) -> Any:
        said.append(anyflex.explain(*args, **settings).variant)
        return anyflex.flex_attention(*args, **settings)

    by_backend(
        case,
        drawn,
        backend,
        device,
        functools.partial(ask, kernel_options={backend: dict(options)}),
    )
    return said[0]


def _changes(
    case: AttentionCase,
    drawn: Drawn,
    backend: str,
    device: torch.device,
    attention: Callable[..., Any],
    found: Mapping[str, Tensor],
    budgets: Budgets,
    repeat: int,
) -> list[str]:
    """Return the results with other bits in a repetition, or, where sums need not repeat, those
    that differ by more than two results within the budgets."""
    outputs = {"out", "lse", "max_scores"}
    exact = set(found) if torch.are_deterministic_algorithms_enabled() else outputs & set(found)
    apart = {
        name: (2 * budgets.allowed[name]).to(device, torch.float32)
        for name in sorted(set(found) - exact)
    }
    for _ in range(repeat):
        again = by_backend(case, drawn, backend, device, attention)
        for name in sorted(exact):
            if not torch.equal(_bits(found[name]), _bits(again[name])):
                return [f"{name} has other bits in a repetition"]
        for name, most in apart.items():
            if not _is_near(found[name].float(), again[name].float(), most):
                return [f"{name} is another in a repetition"]
    return []


def _is_near(first: Tensor, second: Tensor, most: Tensor) -> bool:
    alike = (first == second) | (first.isnan() & second.isnan())
    return bool((alike | ((first - second).abs() <= most)).all())


def _bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def serve(args: argparse.Namespace) -> None:
    """Run as a worker: a number per line comes in, an outcome per line goes out."""
    torch.set_num_threads(1)
    device = torch.device(args.device or args.backend.partition(".")[0])
    out = sys.stdout
    # Prints of compilers and mods must not be mixed into the answers.
    sys.stdout = sys.stderr
    for line in sys.stdin:
        case = case_of(int(line), args.dtype, args.head_dims)
        row = outcome_of(int(line), case, device, args)
        print(json.dumps(row), file=out, flush=True)


class Worker:
    """One process that takes a number at a time."""

    def __init__(self, command: Sequence[str], timeout: float) -> None:
        self._command = command
        self._timeout = timeout
        self._process: subprocess.Popen[str] | None = None

    def run(self, number: int) -> dict[str, Any]:
        """Return the outcome of a call."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(self._timeout, process.kill)
        timer.start()
        try:
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            row: dict[str, Any] = json.loads(line)
            # After a fault of the device no result of the process is right.
            if any("CUDA error" in problem for problem in row["problems"]):
                self.close()
            return row
        self.close()
        problem = f"ended or hung (code {process.returncode}, limit {self._timeout:g} s)"
        return {"number": number, "problems": [problem], "variant": ""}

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


def _head_dims(text: str) -> list[tuple[int, int]]:
    pairs = [dims.partition("x") for dims in text.split(",")]
    return [(int(dim), int(value_dim or dim)) for dim, _, value_dim in pairs]


def main() -> int:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--device", help="default: the backend's device type")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--number", type=int, action="append", help="only these; may be repeated")
    parser.add_argument("--each-kernel", action="store_true", help="those of kernel_calls.py")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--option", type=_option, action="append", default=[], help="NAME=JSON")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 and float16")
    parser.add_argument("--head-dims", type=_head_dims, default=(), help="D or DxE, by commas")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return 0
    if args.each_kernel and (args.number or args.backend != "cuda"):
        parser.error("--each-kernel is of cuda's kernels, and without --number")
    chosen = args.number or (list(OF_EACH_KERNEL) if args.each_kernel else [])
    numbers = chosen or list(range(args.first, args.first + args.count))
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in numbers:
        waiting.put(number)
    rows: list[dict[str, Any]] = []
    told = threading.Lock()
    command = [sys.executable, __file__, "--serve", *sys.argv[1:]]

    def work() -> None:
        worker = Worker(command, args.timeout)
        with contextlib.suppress(queue.Empty):
            while True:
                row = worker.run(waiting.get_nowait())
                if row["problems"]:
                    case = case_of(row["number"], args.dtype, args.head_dims)
                    row["case"] = repr(case)
                with told:
                    rows.append(row)
                    if row["problems"]:
                        print(f"FAIL {row['number']} [{row['variant']}] {row['problems'][:3]}")
                        print(f"     {row['case']}", flush=True)
                    if args.json is not None:
                        # An interrupted run keeps its results.
                        text = json.dumps(sorted(rows, key=_number), indent=0)
                        args.json.write_text(text + "\n")
        worker.close()

    threads = [threading.Thread(target=work) for _ in range(min(args.jobs, len(numbers)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = sum(bool(row["problems"]) for row in rows)
    kinds = Counter(_kind(row["variant"]) for row in rows)
    for kind, count in kinds.most_common():
        print(f"{count:4} {kind}")
    refused = sum(row["variant"].startswith("refused") for row in rows)
    print(f"{len(rows)} calls, {failed} failed, {refused} refused")
    hopper = sum("hopper" in row["variant"] for row in rows)
    least = 0.0 if args.backend != "cuda" or args.dtype or args.head_dims else LEAST_HOPPER
    few = len(rows) >= 100 and hopper < len(rows) * least
    if few:
        print(f"only {hopper} calls took Hopper's kernels")
    too_many = refused > len(rows) * MOST_REFUSED
    return int(failed > 0 or few or too_many or len(rows) < len(numbers))


def _number(row: Mapping[str, Any]) -> int:
    return int(row["number"])


def _kind(variant: str) -> str:
    """The kind of kernels, without their tiles; or the reason for none."""
    if variant.startswith("refused"):
        return variant
    forward, _, backward = variant.partition(", backward ")
    words = [forward.split(" ")[0] or "none"]
    if backward:
        words.append(f"backward {backward.split(' ')[0].rstrip(',')}")
    return ", ".join(words)


if __name__ == "__main__":
    sys.exit(main())
