"""The conformance kit's quick subset on kernels that run in the emulator's race build.

The order of threads is drawn by the case's name: a case that failed fails again in the same way.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from conftest import KEPT
from emulated_backend import SCHEDULE, Emulated, drawn_schedule
from emulator import compile_shader

from anyflex.testing import Conformance
from anyflex_mps.text import TYPES


def test_kernels_run_in_the_order_that_the_variable_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = """#include <metal_stdlib>
using namespace metal;
kernel void turns(
    device uint* out [[buffer(0)]], device atomic_uint* count [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  out[i] = atomic_fetch_add_explicit(count, 1u, memory_order_relaxed);
}
"""
    turns = Emulated("mps", "mps").compile_shader()(source).turns
    for order, first in (("forward", 0), ("reverse", 31), ("greedy-reverse", 31)):
        monkeypatch.setenv(SCHEDULE, order)
        out, count = torch.zeros(2, 32, dtype=torch.int32)
        turns(out, count[:1], threads=32, group_size=32)
        assert out[0] == first


class TestEmulated(Conformance):
    backend = "mps"
    backend_class = Emulated
    device = "cpu"
    require = ("forward", "backward", "decode")
    quick = True

    @pytest.fixture(autouse=True)
    def schedule(self, conformance_case: str, monkeypatch: pytest.MonkeyPatch) -> None:
        # A variable: the processes that a case starts inherit it.
        monkeypatch.setenv(SCHEDULE, drawn_schedule(conformance_case))
        monkeypatch.setattr("emulated_backend.compile_shader", kept)
        RAN.add(f"test_case[{conformance_case}]")


RAN: set[str] = set()
"""Cases that began."""
COMPILED: set[tuple[str, str]] = set()
"""Kernels that were compiled, each with a type of its tensors."""


def kept(source: str, **how: Any) -> Any:
    """Compile a source, and keep what it has."""
    names = re.findall(r"kernel void (\w+)\(", source)
    names += re.findall(r"(captured_gradients|op_add_float|op_add_exactly)\(", source)
    COMPILED.update(
        (name, each)
        for name in names
        for each in re.findall(r"device const (float|half|bfloat)\* key", source)
    )
    return compile_shader(source, **how)


def test_what_ran_has_each_kernel_and_dtype() -> None:
    if not RAN >= KEPT:
        pytest.skip("a part of the cases ran")
    for name in ("forward", "decode", "keys", "queries"):
        assert {(name, type_) for type_ in TYPES.values()} <= COMPILED
    functions = ("captured_gradients", "op_add_float", "op_add_exactly")
    assert {(name, "float") for name in functions} <= COMPILED
