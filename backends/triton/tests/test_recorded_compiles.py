"""What is recorded of compiles has every entry of the table, and a worse kernel is noticed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from table_entries import TOOL, entries

from anyflex_triton.configs import Target

RESULTS: Mapping[str, Any] = json.loads(
    (TOOL.parent / "results" / "triton_compiles.json").read_text()
)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOL.parent))
    return importlib.import_module("triton_compiles")


@pytest.mark.parametrize("version", RESULTS)
def test_every_entry_is_recorded_and_forward_spills_nothing(version: str, tool: Any) -> None:
    for target in tool.RECORDED:
        found = {
            f"{one['target']} {one['dtype']} {one['dim']} {one['kernel']} {one['tiles']} "
            f"warps={one['warps']} stages={one['stages']}"
            for one in RESULTS[version]["kernels"]
        }
        # What rows have that TMA doesn't load, whose head dim isn't recorded:
        # `test_every_entry_compiles_and_fits` compiles it.
        unrecorded = {"hopper bfloat16 64 forward 64x64 warps=4 stages=3"}
        assert entries(target) - found == (unrecorded if target == "hopper" else set())
    faults = [
        fault for one in RESULTS[version]["kernels"] for fault in tool.Compiled(**one).faults()
    ]
    assert faults == []


def test_targets_that_nothing_is_recorded_of_are_those_without_a_compiler(tool: Any) -> None:
    assert set(get_args(Target)) - set(tool.RECORDED) == {"xpu", "interpreter"}


def test_more_spills_than_recorded_are_a_fault(tool: Any) -> None:
    version = next(iter(RESULTS))
    before = importlib.import_module("compiles_record").recorded(version)
    same = tool.Compiled(**RESULTS[version]["kernels"][1])
    assert list(same.worse(before)) == []
    assert list(replace(same, registers=same.registers + 1).worse(before)) == []
    (fault,) = replace(same, spilled=same.spilled + 4).worse(before)
    assert f"recorded were {same.spilled}" in fault
    (fault,) = replace(same, tiles="8x8").worse(before)
    assert "was not recorded" in fault


def test_a_part_replaces_its_own_kernels_alone(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = importlib.import_module("compiles_record")
    monkeypatch.setattr(record, "RESULTS", tmp_path / "compiles.json")
    kernels = RESULTS[next(iter(RESULTS))]["kernels"]

    def kept() -> tuple[int, list[int]]:
        found = json.loads(record.RESULTS.read_text())["9.9"]
        return len(found["runs"]), [one["spilled"] for one in found["kernels"]]

    record.record("9.9", kernels[:4], 1.0, whole=True)
    record.record("9.9", [{**kernels[1], "spilled": 999}, kernels[4]], 1.0, whole=False)
    runs, spilled = kept()
    assert (runs, len(spilled), spilled.count(999)) == (2, 5, 1)
    record.record("9.9", kernels[:2], 1.0, whole=True)
    assert kept() == (1, [one["spilled"] for one in kernels[:2]])
