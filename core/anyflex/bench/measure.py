"""Measurement of a case: first calls, checks, warm-up, then rounds in which all contenders take
turns."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from anyflex.bench.case import BenchCase, Direction, Inputs, make_inputs
from anyflex.bench.check import LIMITS, Formula, errors_of
from anyflex.bench.clock import Clock, Timed
from anyflex.bench.contenders import Contender
from anyflex.errors import BackendRefused
from anyflex.testing.float32_precision import products_in

__all__ = ["Measurement", "Status", "measure_case"]

Status = Literal["measured", "refused", "wrong", "failed"]

_SAMPLE_SECONDS = 0.02
"""Duration in seconds of one contender's sample in a round, unless a single call takes longer."""
_CALLS = 100
"""At most this many calls in a round."""
_WARM_CALLS = 3


@dataclass
class Measurement:
    """One contender, case and direction.

    Args:
        case, direction, contender, kind, distribution: identify the measurement.
        status: ``measured``; ``refused`` with a reason; ``wrong`` numbers, which are not timed;
            ``failed`` with an exception.
        detail: reason, exception, or which result was wrong.
        worst, error, rms_error: `Errors` of the small call; None if not checked.
        first_call_s: wall seconds of the first call, compilation included.
        calls: in each round.
        samples_ms: mean milliseconds of a call, one for each round.
        live_share: of the pairs.
        flops: of one call, live pairs only.
        kv_bytes: of key and value.
        ratio: best peer's median / this median: above 1 is faster than every peer.
    """

    case: str
    direction: Direction
    contender: str
    kind: Literal["backend", "peer"]
    distribution: str
    live_share: float
    flops: float
    kv_bytes: int
    status: Status = "measured"
    detail: str = ""
    worst: str | None = None
    error: float | None = None
    rms_error: float | None = None
    first_call_s: float | None = None
    calls: int = 0
    samples_ms: list[float] = field(default_factory=list)
    ratio: float | None = None

    @property
    def median_ms(self) -> float | None:
        """Median of the rounds."""
        return statistics.median(self.samples_ms) if self.samples_ms else None

    def to_dict(self) -> dict[str, Any]:
        """Return the row of the report."""
        row = dataclasses.asdict(self)
        # JSON has no NaN.
        for name in ("error", "rms_error"):
            if row[name] is not None and not math.isfinite(row[name]):
                row[name] = None
        median = self.median_ms
        row |= {
            "median_ms": median,
            "min_ms": min(self.samples_ms, default=None),
            "max_ms": max(self.samples_ms, default=None),
            "gflops": None if not median else self.flops / median / 1e6,
            "kv_gb_per_s": None if not median else self.kv_bytes / median / 1e6,
        }
        return row


def measure_case(
    case: BenchCase,
    contenders: Sequence[Contender],
    device: torch.device,
    clock: Clock,
    rounds: int,
    say: Callable[[str], None],
) -> Iterator[Measurement]:
    """Yield a measurement for each direction and contender, the contenders' order kept.

    Args:
        clock: of the device.
        rounds: in each, every contender is sampled once, one after the other, in another order.
        say: takes lines of progress.

    Raises:
        AnyflexError: from the functions that the case names.
    """
    for direction in case.directions:
        one = dataclasses.replace(case, directions=(direction,))
        with products_in(case.products):
            measured = _measure(one, direction, contenders, device, clock, rounds, say)
        yield from measured


def _measure(
    case: BenchCase,
    direction: Direction,
    contenders: Sequence[Contender],
    device: torch.device,
    clock: Clock,
    rounds: int,
    say: Callable[[str], None],
) -> list[Measurement]:
    inputs = make_inputs(case, device)
    formula = Formula(case.small(), device)
    flops = case.flops(direction, inputs.share)
    measurements = []
    racing: list[tuple[Measurement, Timed]] = []
    for contender in contenders:
        say(f"{case.name}, {direction}: {contender.name}")
        measured = Measurement(
            case.name,
            direction,
            contender.name,
            contender.kind,
            contender.distribution,
            inputs.share,
            flops,
            case.kv_bytes(),
        )
        measurements.append(measured)
        timed = _admitted(contender, inputs, formula, direction, clock, measured)
        if timed is not None:
            measured.calls = _calls_in_a_sample(clock, timed)
            racing.append((measured, timed))
    for number in range(rounds):
        say(f"{case.name}, {direction}: round {number + 1} of {rounds}")
        # Changes the order each round: after a slow contender, or one that draws little power,
        # clocks differ.
        for measured, timed in random.Random(number).sample(racing, len(racing)):
            measured.samples_ms.append(clock.seconds(timed, measured.calls) * 1e3)
    _compare(measurements)
    return measurements


def _admitted(
    contender: Contender,
    inputs: Inputs,
    formula: Formula,
    direction: Direction,
    clock: Clock,
    measured: Measurement,
) -> Timed | None:
    """Make the first call and check the numbers. Return what is timed, or None and say why in
    `measured`."""
    refusal = contender.refusal(inputs.case)
    if refusal is not None:
        measured.status, measured.detail = "refused", refusal
        return None
    try:
        # The measured call comes before the small check: a compiler that saw the small one first
        # would make code for both.
        timed = _timed(contender, inputs, direction)
        refusal = clock.refusal(timed)
        if refusal is not None:
            measured.status, measured.detail = "refused", refusal
            return None
        measured.first_call_s = clock.once(timed)
        measured.worst, measured.error, measured.rms_error = errors_of(contender, formula)
        timed = clock.readied(timed)
    except BackendRefused as error:
        reason = error.reasons.get(contender.name, str(error))
        measured.status, measured.detail = "refused", reason
        return None
    # A contender may raise anything, and the others are still measured. The report has the error.
    except Exception as error:  # noqa: BLE001
        measured.status = "failed"
        measured.detail = f"{type(error).__name__}: {_first_line(error)}"
        return None
    limit = LIMITS[inputs.case.dtype]
    if not measured.error <= limit:
        measured.status = "wrong"
        measured.detail = (
            f"{measured.worst} is off by {measured.error:.1e} of the largest value, allowed "
            f"{limit:.0e}"
        )
        return None
    return timed


def _timed(contender: Contender, inputs: Inputs, direction: Direction) -> Timed:
    attend = contender.prepare(inputs)
    tensors = (inputs.query, inputs.key, inputs.value)

    def learn(out: Tensor) -> tuple[Tensor, ...]:
        # Each graph is used once, because some compilers overwrite what forward has saved.
        return torch.autograd.grad(out, (*tensors, *inputs.learned), inputs.dout)

    if direction == "forward":
        return Timed(lambda _: attend(*tensors))
    if direction == "backward":
        return Timed(learn, before=lambda: attend(*tensors))
    return Timed(lambda _: learn(attend(*tensors)))


def _calls_in_a_sample(clock: Clock, timed: Timed) -> int:
    """Warm up, and return how many calls a sample has."""
    seconds = min(clock.seconds(timed, 1) for _ in range(_WARM_CALLS))
    return max(1, min(_CALLS, round(_SAMPLE_SECONDS / max(seconds, 1e-9))))


def _compare(measurements: Sequence[Measurement]) -> None:
    """Fill in the ratios: how many times as fast as the best peer."""
    peers = [m.median_ms for m in measurements if m.kind == "peer"]
    best = min((median for median in peers if median is not None), default=None)
    for measured in measurements:
        median = measured.median_ms
        if best is not None and median:
            measured.ratio = best / median


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""
