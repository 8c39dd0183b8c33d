"""Draws one call from a number, makes it, and judges it: `python fuzz_calls.py FIRST COUNT`.

Each call is right by a dense formula, or raises the error of anyflex's that it should. Anything
else ends the process: a wrong result with a message, a crash by itself. The number under way is
written into the file that a third argument names, before each call.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import warnings
from collections import Counter
from importlib.metadata import entry_points

import torch
from dense import ROUNDING
from fuzz_drawing import Call, arguments_of, arriving, draw_call
from fuzz_formula import expected_of
from fuzz_wrong import WRONGS, attempt, is_refusal
from torch import Tensor

import anyflex
from anyflex.plugin import AnyflexError, ModIndexError, register
from anyflex_cpu import library
from anyflex_cpu.backend import CpuBackend

__all__ = ["Mistaken", "judge"]

STEPS = {torch.float32: 512, torch.bfloat16: 16, torch.float16: 16}
"""Roundings of the largest value that a result may be away: this looks for what is wrong, the
conformance kit for what is imprecise."""
SUMS = 8
"""Times that for gradients of tables: sums over hundreds of pairs, which may cancel."""


class Mistaken(Exception):
    """A result that the formula doesn't give, or an error that shouldn't be, or none."""


def results_of(call: Call, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Make the call: out, lse where it is asked for, and gradients."""
    arguments, leaves = arguments_of(call)
    found = attempt(arguments)
    out, lse = (found[0], found[1].lse) if call.aux else (found, None)
    dout, dlse = arriving(call, out, out[..., 0] if lse is None else lse, seed)
    gradients: list[Tensor] = []
    if leaves and out.requires_grad:
        outputs, arrive = ([out], [dout]) if lse is None else ([out, lse], [dout, dlse])
        gradients = list(torch.autograd.grad(outputs, leaves, arrive, allow_unused=True))
        gradients = [
            torch.zeros_like(leaf) if each is None else each
            for leaf, each in zip(leaves, gradients, strict=True)
        ]
    return [out] if lse is None else [out, lse], gradients


def judge(seed: int) -> str:
    """Make call number `seed`; return what kind it was.

    Raises Mistaken.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(draw.choice([1, 1, 2, 4]))
    loaded = library.load()
    loaded.set_isa(draw.choice([loaded.available()[0], *loaded.available()]))
    call = draw_call(draw)
    if draw.random() < 0.3:
        return judge_wrong(draw, call)
    expected = expected_of(call, seed)
    try:
        results, gradients = results_of(call, seed)
    except AnyflexError as error:
        if (expected.must_fail or expected.may_fail) and is_refusal(error, (ModIndexError,)):
            return "reads outside"
        raise Mistaken(f"{error!r} for {call}") from error
    if expected.must_fail:
        raise Mistaken(f"a live pair reads outside, and no error says so: {call}")
    wanted = [*expected.results[: len(results)], *expected.gradients]
    judged = [*expected.judged[: len(results)], *expected.judged[2:]]
    found = [*results, *gradients]
    if len(found) != len(wanted):
        raise Mistaken(f"{len(gradients)} gradients of {len(expected.gradients)} for {call}")
    for place, (one, other, where) in enumerate(zip(found, wanted, judged, strict=True)):
        of_inputs = len(results) + len(call.learned & call.inputs.keys())
        slack = 1 if place < of_inputs else SUMS
        compare(one, other, where, call, f"result {place}", slack)
    if draw.random() < 0.05:
        judge_twice(call, seed, found)
    return "right, with bad numbers" if call.spoilt else "right"


def compare(
    found: Tensor, wanted: Tensor, judged: Tensor, call: Call, name: str, slack: int
) -> None:
    dtype = call.inputs["query"].dtype
    if found.shape != wanted.shape:
        raise Mistaken(f"{name} has shape {found.shape} instead of {wanted.shape}: {call}")
    zero = torch.zeros((), dtype=torch.float64)
    found_dtype = torch.float32 if found.dtype is torch.float64 else found.dtype
    judged = judged & wanted.isfinite()
    found, wanted = (torch.where(judged, each.detach().double(), zero) for each in (found, wanted))
    if not found.numel():
        return
    # A table's gradient has its type.
    steps = max(STEPS[each] * ROUNDING[each] for each in (dtype, found_dtype))
    limit = slack * steps * max(1.0, float(wanted.abs().max()))
    worst = float((found - wanted).abs().max())
    if not worst <= limit:
        raise Mistaken(f"{name} is off by {worst}, allowed {limit}: {call}")


def judge_twice(call: Call, seed: int, wanted: list[Tensor]) -> None:
    """Two Python threads make the call at once: same bits."""
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
    # Some masks take longer to make than they could: not what this is about.
    warnings.simplefilter("ignore", anyflex.PerformanceWarning)
    file = os.open(progress, os.O_WRONLY | os.O_CREAT) if progress else None
    kinds: Counter[str] = Counter()
    for seed in range(first, first + count):
        if file is not None:
            os.pwrite(file, f"{seed:12d}".encode(), 0)
        kinds[judge(seed)] += 1
    for kind, number in sorted(kinds.items()):
        print(f"{number:6d}  {kind}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
