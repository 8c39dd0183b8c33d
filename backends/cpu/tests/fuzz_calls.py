"""Draws one call from a number, makes it, and judges it: `python fuzz_calls.py FIRST COUNT`.

Each call is right by a dense formula, or raises the anyflex error that it should. Anything else
ends the process: a wrong result with a message, a crash by itself. The number of the running call
is written into the file that a third argument names, before each call.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

import torch
from dense import ROUNDING
from fuzz_drawing import Call, arguments_of, arriving, draw_call
from fuzz_formula import Expected, expected_of
from fuzz_paths import Paths
from fuzz_wrong import WRONGS, attempt, is_refusal
from torch import Tensor

import anyflex
from anyflex.plugin import AnyflexError, ModIndexError, register
from anyflex_cpu import library
from anyflex_cpu.backend import CpuBackend

__all__ = ["PATHS_TITLE", "Mistaken", "judge"]

STEPS = 512
"""Number of float32 roundings, of the largest value or of 1, that a result may be off. The fuzzer
looks for wrong results, the conformance kit for imprecise ones."""
STEPS_OF_SCORES = 16
"""Number of roundings of the largest score that a result may be off, where that is more: the error
of a score is the relative error of its weight."""
NARROW_STEPS = 16
"""Number of 16-bit roundings of the largest value, where a result or a factor of it has 16
bits."""

LARGE_SHARE = 0.08
"""Share of large calls among those that aren't wrong: a large one takes as long as several
others."""
PATHS_TITLE = "Ways that the right ones went:"


class Mistaken(Exception):
    """A result that differs from the formula's, an unexpected error, or a missing one."""


def results_of(call: Call, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Make the call: out, lse and max_scores where they are asked for, and gradients."""
    arguments, leaves = arguments_of(call)
    found = attempt(arguments)
    results = [found[0], found[1].lse, found[1].max_scores] if call.aux else [found]
    out = results[0]
    lse = results[1] if call.aux else out[..., 0]
    dout, dlse = arriving(call, out, lse, seed)
    gradients: list[Tensor] = []
    if leaves and out.requires_grad:
        outputs, arrive = ([out, lse], [dout, dlse]) if call.aux else ([out], [dout])
        gradients = list(torch.autograd.grad(outputs, leaves, arrive, allow_unused=True))
        gradients = [
            torch.zeros_like(leaf) if each is None else each
            for leaf, each in zip(leaves, gradients, strict=True)
        ]
    return results, gradients


def judge(seed: int) -> str:
    """Make call number `seed`; return what kind it was.

    Raises Mistaken.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    threads = draw.choice([1, 1, 2, 4])
    torch.set_num_threads(threads)
    loaded = library.load()
    levels = [loaded.available()[0], *loaded.available()]
    # The draws that follow are the same whatever levels a processor has.
    loaded.set_isa(levels[int(draw.random() * len(levels))])
    if draw.random() < 0.3:
        return judge_wrong(draw, draw_call(draw))
    call = draw_call(draw, large=draw.random() < LARGE_SHARE)
    # The formula's own work isn't worth waking threads.
    torch.set_num_threads(1)
    expected = expected_of(call, seed)
    torch.set_num_threads(threads)
    try:
        results, gradients = results_of(call, seed)
    except AnyflexError as error:
        if (expected.must_fail or expected.may_fail) and is_refusal(error, (ModIndexError,)):
            return "reads outside"
        raise Mistaken(f"{error!r} for {call}") from error
    if expected.must_fail:
        raise Mistaken(f"a live pair reads outside, and no error says so: {call}")
    compare_all(results, gradients, expected, call)
    if draw.random() < 0.05:
        judge_twice(call, seed, [*results, *gradients])
    return "right, with non-finite inputs" if call.nonfinite else "right"


def compare_all(
    results: list[Tensor], gradients: list[Tensor], expected: Expected, call: Call
) -> None:
    if len(gradients) != len(expected.gradients):
        raise Mistaken(f"{len(gradients)} gradients of {len(expected.gradients)} for {call}")
    dtype = call.inputs["query"].dtype
    for place, found in enumerate(results):
        wanted, judged = expected.results[place], expected.judged[place]
        # lse and max_scores are float32, whatever the inputs are.
        limit = Limit(expected.largest_score, (found.dtype,))
        compare(found, wanted, judged, call, ("out", "lse", "max_scores")[place], limit)
    for place, found in enumerate(gradients):
        wanted, judged = expected.gradients[place], expected.judged[3 + place]
        # A table's gradient has the table's type.
        limit = Limit(expected.largest_score, (dtype, found.dtype))
        parts = functools.partial(expected.parts, place)
        compare(found, wanted, judged, call, f"gradient {place}", limit, parts)


@dataclass(frozen=True)
class Limit:
    """Largest error that a result may have.

    Args:
        score: the largest one.
        types: that the result, or an operand of it, is rounded to.
    """

    score: float
    types: tuple[torch.dtype, ...]

    def of(self, largest: float) -> float:
        wide = max(STEPS, STEPS_OF_SCORES * self.score) * ROUNDING[torch.float32]
        narrow = max(ROUNDING.get(dtype, 0.0) for dtype in self.types)
        return max(wide * max(1.0, largest), NARROW_STEPS * narrow * largest)


def compare(
    found: Tensor,
    wanted: Tensor,
    judged: Tensor,
    call: Call,
    name: str,
    limit: Limit,
    parts: Callable[[], Tensor] | None = None,
) -> None:
    """`parts` returns what the result would be if its parts didn't cancel."""
    if found.shape != wanted.shape:
        raise Mistaken(f"{name} has shape {found.shape} instead of {wanted.shape}: {call}")
    if not found.numel():
        return
    zero = torch.zeros((), dtype=torch.float64)
    if bool((judged & wanted.isinf() & (found != wanted)).any()):
        raise Mistaken(f"{name} isn't infinite where it should be: {call}")
    judged = judged & wanted.isfinite()
    found, wanted = (torch.where(judged, each.detach().double(), zero) for each in (found, wanted))
    worst = float((found - wanted).abs().max())
    largest = float(wanted.abs().max())
    if not worst <= limit.of(largest) and parts is not None:
        largest = max(largest, float(parts().abs().max()))
    if not worst <= limit.of(largest):
        raise Mistaken(f"{name} is off by {worst}, allowed {limit.of(largest)}: {call}")


def judge_twice(call: Call, seed: int, wanted: list[Tensor]) -> None:
    """Make the call from two Python threads at once: both give the same bits."""
    found: list[list[Tensor]] = []

    def make() -> None:
        results, gradients = results_of(call, seed)
        found.append([*results, *gradients])

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found:
        for one, other in zip(each, wanted, strict=True):
            if not torch.equal(one.nan_to_num(), other.nan_to_num()):
                raise Mistaken(f"other bits from two Python threads: {call}")
    if len(found) != 2:
        raise Mistaken(f"an error in one of two Python threads: {call}")


def judge_wrong(draw: random.Random, call: Call) -> str:
    name = draw.choice(list(WRONGS))
    wrong = WRONGS[name]
    try:
        arguments, _ = arguments_of(call)
    except AnyflexError as error:
        if is_refusal(error, (ModIndexError,)):
            return "reads outside"
        raise Mistaken(f"{error!r} for {call}") from error
    try:
        wrong.change(draw, arguments)
        attempt(arguments)
    except AnyflexError as error:
        if is_refusal(error, wrong.errors):
            return "wrong, refused"
        raise Mistaken(f"{name} is refused with {error!r}: {call}") from error
    raise Mistaken(f"{name} is not refused: {call}")


def main(first: int, count: int, progress: str | None) -> None:
    if not any(point.name == "cpu" for point in entry_points(group="anyflex.backends.v1")):
        register("cpu", CpuBackend)
    # Ignores the warning that a mask could be built faster, which isn't tested here.
    warnings.simplefilter("ignore", anyflex.PerformanceWarning)
    file = os.open(progress, os.O_WRONLY | os.O_CREAT) if progress else None
    kinds: Counter[str] = Counter()
    reached: Counter[str] = Counter()
    paths = Paths(library.load())
    for seed in range(first, first + count):
        if file is not None:
            os.pwrite(file, f"{seed:12d}".encode(), 0)
        paths.taken.clear()
        kind = judge(seed)
        kinds[kind] += 1
        if kind.startswith("right"):
            reached.update(paths.taken)
    print_counts(kinds)
    print(PATHS_TITLE)
    print_counts(reached)


def print_counts(counts: Counter[str]) -> None:
    for name, number in sorted(counts.items()):
        print(f"{number:6d}  {name}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
