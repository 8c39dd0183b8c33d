"""The calls that are repeated and run under sanitizers take each kernel for Hopper."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton to launch with")

from recording import OnHopper, recording

import anyflex
from anyflex.plugin import BackendRefused, isolated, register

BENCH = Path(__file__).parents[3] / "bench"


class Asked(Exception):
    """Explain has said what it is asked for."""


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCH))
    with isolated():
        register("cuda", OnHopper)
        with recording():
            yield


def variant_of(number: int) -> str:
    """What explain says of a random call, without numbers of programs and without reasons."""
    import gpu_random  # type: ignore[import-not-found]

    case = gpu_random.drawn_case(number)
    said: list[str] = []

    def ask(*args: Any, **settings: Any) -> Any:
        said.append(anyflex.explain(*args, **settings).variant)
        raise Asked

    cpu = torch.device("cpu")
    with (
        gpu_random.deterministic(gpu_random.is_deterministic(number)),
        contextlib.suppress(Asked, BackendRefused),
    ):
        gpu_random.by_backend(case, case.draw(cpu), "cuda", cpu, ask)
    without = re.sub(r" \(not .*?\)(?=$|,)", "", said[0] if said else "refused")
    return re.sub(r" programs=\d+|(?<=prefill) \d+x\d+", "", without)


@pytest.mark.usefixtures("on_hopper")
def test_each_call_takes_the_kernels_that_it_is_listed_under() -> None:
    from kernel_calls import KERNELS  # type: ignore[import-not-found]

    listed = {number: variant for variant, numbers in KERNELS.items() for number in numbers}
    assert {number: variant_of(number) for number in listed} == listed


@pytest.mark.usefixtures("on_hopper")
def test_whatever_hoppers_kernel_a_random_call_takes_some_are_listed() -> None:
    from kernel_calls import KERNELS

    def parts(variant: str) -> set[str]:
        forward, _, backward = variant.partition(", backward ")
        return {part for part in (forward, f"backward {backward}") if "hopper" in part}

    listed = set().union(*map(parts, KERNELS))
    taken = set().union(*(parts(variant_of(number)) for number in range(100)))
    assert listed == taken and len(listed) == 11
