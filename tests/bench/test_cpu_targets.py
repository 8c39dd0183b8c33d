"""How bench/cpu_targets.py holds a report to its targets."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("cpu_targets")


def rows_of(group: Any, direction: str, ours: float, theirs: float) -> list[dict[str, Any]]:
    return [
        {"case": case.name, "direction": direction, "contender": name, "median_ms": time}
        for case in group.cases
        for name, time in (("cpu", ours), (group.peers[0], theirs))
    ]


def test_forward_and_backward_of_one_name_are_held_apart(targets: ModuleType) -> None:
    groups = {group.name: group for group in targets.GROUPS}
    forward, both = groups["full bfloat16 forward"], groups["full bfloat16 forward + backward"]
    assert {case.name for case in both.cases} <= {case.name for case in forward.cases}
    rows = [*rows_of(forward, "forward", 1.0, 3.0), *rows_of(both, "both", 1.0, 1.5)]
    assert targets._verdict(forward, "avx512_bf16", rows)["mean"] == pytest.approx(3.0)
    verdict = targets._verdict(both, "avx512_bf16", rows)
    assert verdict["mean"] == pytest.approx(1.5) and verdict["met"] is False


def test_a_row_below_its_share_of_the_target_or_without_a_time_misses_it(
    targets: ModuleType,
) -> None:
    (group,) = (group for group in targets.GROUPS if group.name == "full float32 forward")
    rows = rows_of(group, "forward", 1.0, 1.5)
    assert targets._verdict(group, "avx512_bf16", rows)["met"] is True
    rows[0]["median_ms"] = 1.6
    assert targets._verdict(group, "avx512_bf16", rows)["met"] is False
    rows[0]["median_ms"] = None
    assert targets._verdict(group, "avx512_bf16", rows)["met"] is False
    # Which is told from where a processor has no target.
    assert targets._verdict(group, "other", rows)["met"] is None
