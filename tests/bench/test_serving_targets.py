"""Misses of the serving benches' targets, and the rows that they measure."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from anyflex.plugin import Rejected, register

BENCH = Path(__file__).parents[2] / "bench"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


targets, rows = loaded("serving_targets"), loaded("serving_rows")
cpu = loaded("serving_cpu_targets")


def report(group: str, page: int = 64, storage: str = "", **us: float) -> dict[str, Any]:
    found = {
        name.replace("_", ", "): {
            "us": value, "ratio": value / us.get("cuda", value), "error": 0.001, "host_us": 9,
            "first_us": 9,
        }
        for name, value in us.items()
    }  # fmt: skip
    return {
        "row": "decode", "group": group, "heads": [32, 8], "dim": 128, "page": page, "mod": "",
        "storage": storage, "bytes": 1000, "contenders": found, "refused": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reports", "missed"),
    [
        ([report("uniform", cuda=100, cuda_dense=98, FA3=101)], []),
        ([report("uniform", cuda=100, FA3=99)], ["0.99 of FA3's time"]),
        ([report("mods", cuda=100, FA3=119, FA4=150)], ["1.19 of FA3's time"]),
        ([report("mods", cuda=100, FA3=121)], []),
        ([report("uniform", cuda=100, cuda_dense=96)], ["0.960 of dense"]),
        ([report("uniform", 16, cuda=100, cuda_dense=93)], []),
        ([report("uniform", 16, cuda=100, cuda_dense=91)], ["0.910 of dense"]),
        ([report("uniform", cuda=100), report("ragged", cuda=112)], ["0.89 of the uniform rate"]),
        ([report("uniform", cuda=100), report("ragged", cuda=110)], []),
        ([report("uniform", cuda=100), report("quantised", 64, "int8", cuda=64)], ["1.56 of"]),
        ([report("uniform", cuda=100), report("quantised", 64, "int8", cuda=62)], []),
        ([report("uniform", FA3=100)], ["cuda: not run"]),
        ([targets.failed("mods", "its process ended with 1")], ["its process ended with 1"]),
    ],
)
def test_a_miss_is_told(reports: list[dict[str, Any]], missed: list[str]) -> None:
    lines = targets.shortfalls(reports)
    assert len(lines) == len(missed), lines
    assert all(part in line for part, line in zip(missed, lines, strict=True)), lines
    assert len(targets.table(reports)) == len(reports) + 2


def test_a_wrong_result_is_a_miss() -> None:
    wrong = report("uniform", cuda=100)
    wrong["contenders"]["cuda"]["error"] = 0.02
    assert targets.shortfalls([wrong]) == ["decode , page 64: an error of 0.02"]


def test_each_group_has_rows_and_a_target() -> None:
    assert {row.group for row in rows.ROWS} == set(targets.TARGETS)
    names = [(row.name, row.heads, row.dim, row.page, row.mod, row.storage) for row in rows.ROWS]
    assert len(set(names)) == len(names)
    assert {row.page for row in rows.ROWS} - {0} == set(targets.OF_DENSE)


@pytest.mark.parametrize(
    ("peer", "us", "missed"),
    [("dense", 96, 0), ("dense", 94, 1), ("vLLM", 201, 0), ("vLLM", 199, 1), ("plain", 159, 1)],
)
def test_a_miss_on_a_cpu_is_told(peer: str, us: float, missed: int) -> None:
    found = {"row": "1 x 8", "storage": "", "us": {"pages": [100.0], peer: [us]}, "errors": {}}
    assert len(cpu.shortfalls([found])) == missed
    wrong = {**found, "errors": {"pages": 0.1}}
    assert len(cpu.shortfalls([wrong])) == missed + 1


def test_a_row_on_a_cpu_is_measured_and_right() -> None:
    kind = pytest.importorskip("anyflex_cpu.backend").CpuBackend
    if isinstance(kind("cpu", "cpu").probe(), Rejected):
        pytest.skip("the CPU backend's library isn't built")
    register("cpu", kind)
    short = dataclasses.replace(cpu.ROWS[0], lengths=((1, 40), (1, 40)))
    stored = dataclasses.replace(short, storage="int8")
    for row in (short, stored):
        found = cpu.measure(row, torch.float32, 2, with_vllm=False)
        assert cpu.shortfalls([{**found, "us": {"pages": [1.0]}}]) == []
        assert len(found["us"]["pages"]) == 2
