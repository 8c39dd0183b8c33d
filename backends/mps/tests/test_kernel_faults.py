"""Faults of the kernels' text: no barrier can be left out, and swapped indices and bounds are
found, by the emulator's race build or by wrong numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulator import SCHEDULES, KernelFault, compile_shader
from kernel_faults import BARRIERS, FAULTS, Barrier, Fault, kernel_of, places_of
from packed_calls import CALLS as PACKED_CALLS
from packed_calls import PackedCall
from small_calls import CALLS as DENSE_CALLS
from small_calls import Poisoned, SmallCall, wrong_results
from soak import SOAK

from anyflex.plugin import BackendRefused, PluginError, isolated, register
from anyflex.testing import posing
from anyflex_mps.dump import SPECS, texts_of
from anyflex_mps.shaders import CompileShader

CALLS: dict[str, SmallCall | PackedCall] = {**DENSE_CALLS, **PACKED_CALLS}
SEEDED = dict.fromkeys(
    FAULTS if SOAK else [*{fault.kernel: fault for fault in FAULTS}.values(), *FAULTS[::8]]
)
"""Swapped indices and bounds that are seeded: without `SOAK` an eighth, and one of each kernel."""


def finding(call: str, change: Callable[[str], str], schedule: str = "forward") -> object:
    """Run a call on sources that are changed before they are compiled, and return the emulator's
    report, or else the names of the results that are wrong."""

    class Changed(Poisoned):
        def compile_shader(self) -> CompileShader:
            def compiler(source: str) -> Any:
                return compile_shader(change(source), race=True, schedule=schedule)

            return compiler

    with isolated(), posing("mps"):
        register("mps", Changed)
        try:
            Changed("mps", "mps").check_gpu(torch.float32)
            return wrong_results(CALLS[call])
        except (PluginError, BackendRefused) as error:
            return _report_of(error)


def _report_of(error: BaseException) -> KernelFault:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KernelFault):
        cause = cause.__cause__
    if cause is None:
        raise error
    return cause


@functools.cache
def found_without_faults(call: str) -> tuple[object, list[str]]:
    """Return what `finding` returns for the kernels as they are, and their sources."""
    sources: list[str] = []

    def kept(source: str) -> str:
        sources.append(source)
        return source

    return finding(call, kept), sources


@pytest.mark.parametrize("call", CALLS)
def test_kernels_without_a_fault_are_right_and_unreported(call: str) -> None:
    assert found_without_faults(call)[0] == []


def test_every_barrier_of_every_kernel_is_known() -> None:
    for text in texts_of(SPECS).values():
        # test_forward_matmul.py and test_matmul_test.py take their barriers away.
        if kernel_of(text) in ("forward_matmul", "matmul_test"):
            continue
        places = places_of(text)
        assert text.count("barrier(") == len(places)
        for place in places:
            left = Barrier(kernel_of(text), place).seeded(text)
            assert left.count("barrier(") == len(places) - 1


def seeded(fault: Barrier | Fault) -> tuple[Callable[[str], str], list[str]]:
    """Return what seeds a fault into its kernel, and a list of the sources that it changes."""
    changed: list[str] = []

    def change(source: str) -> str:
        if kernel_of(source) != fault.kernel:
            return source
        new = fault.seeded(source)
        if new != source:
            changed.append(new)
        return new

    return change, changed


@pytest.mark.parametrize("barrier", BARRIERS, ids=lambda each: f"{each.call}: {each.place}")
def test_a_kernel_without_one_of_its_barriers_races(barrier: Barrier) -> None:
    number = BARRIERS.index(barrier)
    for schedule in SCHEDULES if SOAK else SCHEDULES[number % len(SCHEDULES) :][:1]:
        change, changed = seeded(barrier)
        found = finding(barrier.call, change, schedule)
        assert changed
        assert isinstance(found, KernelFault), found
        assert f"{barrier.kernel}: data race on threadgroup memory" in str(found)


def test_what_a_fault_replaces_is_in_its_kernel() -> None:
    for fault in FAULTS:
        change, changed = seeded(fault)
        for source in found_without_faults(fault.call)[1]:
            change(source)
        assert changed, fault


@pytest.mark.parametrize("fault", list(SEEDED), ids=lambda each: f"{each.kernel}: {each.name}")
def test_a_swapped_index_or_bound_is_found(fault: Fault) -> None:
    change, changed = seeded(fault)
    found = finding(fault.call, change)
    assert changed
    if isinstance(found, KernelFault):
        assert found.kernel == fault.kernel
    else:
        assert found, "all results are right"
