"""Forward's rescaling in a warp: its instructions, run on registers that the compiler may
assign."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("triton", reason="triton is not installed")

from anyflex_cuda import skip_unit_rescale

LANES, COUNT = 32, 8
ONE = "0f3F800000"
FIRST, SECOND = (0, 1, 4, 5), (2, 3, 6, 7)
"""Indices of a thread's elements in each of its two rows."""
Values = npt.NDArray[np.float32]


def places_of(constraints: Sequence[str]) -> list[int]:
    """Return a register for each operand, shared as much as constraints allow: outputs may share
    registers with the last inputs, unless they are early clobbers."""
    found: list[int] = []
    for number, constraint in enumerate(constraints):
        assert re.fullmatch(r"=&?f|f|\d+", constraint)
        alone = len(constraints) - 1 - number if constraint == "=f" else number
        found.append(found[int(constraint)] if constraint.isdigit() else alone)
    return found


def run_warp(text: str, constraints: Sequence[str], given: Sequence[Values]) -> Values:
    """Run the instructions with inputs `given`. Return the outputs [operands, LANES]."""
    places = places_of(constraints)
    outputs = sum(each.startswith("=") for each in constraints)
    memory = np.full((len(constraints), LANES), np.nan, np.float32)
    for place, values in zip(places[outputs:], given, strict=True):
        memory[place] = values

    def at(word: str) -> int:
        return places[int(word[1:])]

    grown = np.zeros(LANES, bool)
    for line in text.splitlines():
        match line.replace(";", "").replace(",", "").split():
            case ["{", ".reg", ".pred", "grown"] | ["SAME:", "}"]:
                pass
            case ["setp.neu.f32", "grown", factor, number] if number == ONE:
                grown = memory[at(factor)] != 1
            case ["setp.neu.or.f32", "grown", factor, number, "grown"] if number == ONE:
                grown = (memory[at(factor)] != 1) | grown
            case ["vote.sync.any.pred", "grown", "grown", "0xffffffff"]:
                grown = np.full(LANES, grown.any())
            case ["@!grown", "bra.uni", "SAME"]:
                assert grown.all() == grown.any(), "the lanes of a warp jump together"
                if not grown.any():
                    break
            case ["mul.f32", target, first, second]:
                memory[at(target)] = memory[at(first)] * memory[at(second)]
            case words:
                raise AssertionError(f"an instruction that isn't known here: {words}")
    return memory[places[:outputs]]


@pytest.mark.parametrize("rows", [(), (FIRST,), (SECOND,), (FIRST, SECOND)])
@pytest.mark.parametrize("factor", [0.25, 0.0, np.nan])
def test_sums_are_rescaled_if_any_row_of_the_warp_has_grown(
    rows: tuple[tuple[int, ...], ...], factor: float
) -> None:
    random = np.random.default_rng(len(rows))
    sums = random.normal(size=(COUNT, LANES)).astype(np.float32)
    factors = np.ones((COUNT, LANES), np.float32)
    for lane, row in enumerate(rows, start=17):
        # Change the factor of one thread only.
        factors[list(row), lane] = factor
    constraints = skip_unit_rescale.operands.fn(COUNT).split(",")
    found = run_warp(skip_unit_rescale.instructions.fn(COUNT), constraints, [*sums, *factors])
    assert found.tobytes() == (sums * factors).tobytes()
