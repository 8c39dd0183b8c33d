"""Records of compiles have every entry of the table, and a worse kernel is noticed."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from table_entries import TOOL, entries

from anyflex_triton.configs import Target

PAGE = TOOL.parent / "results" / "triton_compiles.md"
VERSIONS = ("3.6.0", "3.9.0")
"""Versions of Triton with records in the repository."""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOL.parent))
    return importlib.import_module("triton_compiles")


@pytest.fixture
def record(tool: Any) -> ModuleType:
    return importlib.import_module("compiles_record")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_entry_is_recorded_and_forward_spills_nothing(
    version: str, tool: Any, record: Any
) -> None:
    spilled = record.recorded(version)
    names = [dict(zip(record.ENTRY, entry, strict=True)) for entry in spilled]
    found = {
        f"{one['target']} {one['dtype']} {one['dim']} {one['kernel']} {one['tiles']} "
        f"warps={one['warps']} stages={one['stages']}"
        for one in names
    }
    for target in tool.RECORDED:
        # Rows that TMA doesn't load use this config, and their head dim isn't recorded:
        # `test_every_entry_compiles_and_fits` compiles it.
        unrecorded = {"hopper bfloat16 64 forward 64x64 warps=4 stages=3"}
        assert entries(target) - found == (unrecorded if target == "hopper" else set())
    forward = [
        bytes_
        for one, bytes_ in zip(names, spilled.values(), strict=True)
        if one["kernel"] == "forward" and int(one["dim"]) <= tool.UNSPILLED_DIM
    ]
    assert forward and not any(forward)


def test_targets_that_nothing_is_recorded_of_are_those_without_a_compiler(tool: Any) -> None:
    assert set(get_args(Target)) - set(tool.RECORDED) == {"xpu", "interpreter"}


def kernel(pattern: str, spilled: int = 0, dim: int = 64) -> dict[str, Any]:
    """Return the result of compiling one of the kernels for dK and dV."""
    loop = {"instructions": 440, "products": 12, "spills": spilled // 4}
    return {
        "target": "hopper", "dtype": "bfloat16", "dim": dim, "kernel": "keys",
        "pattern": pattern, "tiles": "64x64", "warps": 4, "stages": 3, "shared": 67584,
        "registers": 210, "spilled": spilled, "spills": spilled // 4, "loops": (loop,),
        "products": 24, "waits": 3, "loads": 0, "own": 0,
    }  # fmt: skip


def test_more_spills_than_recorded_are_a_fault(tool: Any, record: Any) -> None:
    same = tool.Compiled(**kernel("causal", 48))
    before = {record.entry_of(kernel("causal")): 48}
    assert list(same.worse(before)) == []
    assert list(replace(same, registers=same.registers + 1).worse(before)) == []
    (fault,) = replace(same, spilled=52).worse(before)
    assert "spills 52 bytes, recorded were 48" in fault
    (fault,) = replace(same, tiles="8x8").worse(before)
    assert "was not recorded" in fault


def test_a_part_replaces_its_own_kernels_alone(
    record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path / "compiles.md")
    monkeypatch.setattr(record, "SAMPLES", tmp_path / "samples")
    patterns = ("plain", "causal", "documents", "alibi")

    def kept() -> tuple[int, dict[str, int]]:
        found = record.Table.read(record.RESULTS.read_text())
        spills = {entry[4]: count for entry, count in record.recorded("9.9").items()}
        return len(found.runs["9.9"]), spills

    record.record("9.9", [kernel(name) for name in patterns], 1.0, whole=True)
    record.record("9.9", [kernel("causal", 48), kernel("relative")], 1.0, whole=False)
    assert kept() == (2, {"plain": 0, "causal": 48, "documents": 0, "alibi": 0, "relative": 0})
    record.record("9.10", [kernel("plain", 8)], 1.0, whole=True)
    assert record.Table.read(record.RESULTS.read_text()).versions == ["9.9", "9.10"]
    record.record("9.9", [kernel("plain"), kernel("causal", 4)], 1.0, whole=True)
    assert kept() == (1, {"plain": 0, "causal": 4})
    assert list(record.recorded("9.10").values()) == [8]
    assert {path.name for path in (tmp_path / "samples").iterdir()} == {
        "triton_compiles_9.9.json",
        "triton_compiles_9.10.json",
    }


def test_the_committed_page_is_what_the_recorder_writes(record: Any) -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = record.Table.read(text)
    assert tuple(table.versions) == VERSIONS
    table.order()
    assert table.written() == text
