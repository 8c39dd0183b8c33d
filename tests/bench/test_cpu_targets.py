"""bench/cpu_targets.py holds a report to its targets."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("cpu_targets")


def rows_of(group: Any, direction: str, ours: float, theirs: float) -> list[dict[str, Any]]:
    return [
        {
            "case": case.name,
            "direction": direction,
            "contender": name,
            "status": "measured",
            "median_ms": time,
        }
        for case in group.cases
        for name, time in (("cpu", ours), *((peer, theirs) for peer in group.peers))
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
    # A processor without a target has another verdict: None.
    assert targets._verdict(group, "other", rows)["met"] is None


def test_a_peer_that_failed_is_not_left_out(targets: ModuleType) -> None:
    (group,) = (group for group in targets.GROUPS if group.name == "full float32 forward")
    rows = rows_of(group, "forward", 1.0, 1.5)
    flex = next(row for row in rows if row["contender"] == "torch.flex")
    flex |= {"status": "refused", "median_ms": None}
    assert targets._verdict(group, "avx512_bf16", rows)["met"] is True
    for status in ("failed", "wrong"):
        flex["status"] = status
        verdict = targets._verdict(group, "avx512_bf16", rows)
        assert verdict["met"] is False
        assert verdict["missing"] == [f"{group.cases[0].name}: torch.flex: {status}"]
    rows.remove(flex)
    assert targets._verdict(group, "avx512_bf16", rows)["missing"] == [
        f"{group.cases[0].name}: torch.flex: not there"
    ]


def test_memory_is_read_beside_each_sample_and_its_fastest_operation_counts(
    targets: ModuleType,
) -> None:
    class Scripted(targets.WallClock):
        """A sample of the case takes 5 s, reads 4, 2, 3, 6 s, and all twice as long next time."""

        def __init__(self) -> None:
            super().__init__(torch.device("cpu"))
            self.times = iter([5.0, 4.0, 2.0, 3.0, 6.0, 10.0, 8.0, 4.0, 6.0, 12.0])

        def seconds(self, timed: Any, count: int) -> float:
            timed.call(None)
            return next(self.times)

    clock = targets.ReadingClock(Scripted(), torch.ones(1 << 13))
    case = targets.Timed(lambda _: None)
    assert [clock.seconds(case, 3), clock.seconds(case, 3)] == [5.0, 10.0]
    assert clock.bandwidth() == pytest.approx((1 << 15) / 3.0)


@pytest.fixture
def measured(targets: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would have measured."""
    commands: list[list[str]] = []

    def note(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(targets.subprocess, "run", note)
    return commands


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("other", []),
        # Switching off an absent AMX doesn't give it the targets of another kind either.
        ("other", ["--without-amx"]),
        ("amx", ["--group", "decode float32", "--group", "decode bfloat16"]),
    ],
)
def test_where_no_target_is_set_it_says_so_and_fails(
    targets: ModuleType,
    measured: list[list[str]],
    kind: str,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(targets, "processor", lambda: kind)
    with pytest.raises(SystemExit) as ended:
        targets.main(arguments)
    assert ended.value.code == 2 and measured == []
    said = capsys.readouterr().err
    assert f"has a target for processors of kind '{kind}'" in said
    assert "--without-targets" in said
    assert targets.main([*arguments, "--without-targets"]) == 0
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("kind", "arguments", "found"),
    [
        ("amx", [], "amx"),
        ("amx", ["--without-amx"], "avx512_bf16"),
        ("avx512_bf16", ["--without-amx"], "avx512_bf16"),
    ],
)
def test_a_processor_with_targets_is_measured(
    targets: ModuleType,
    measured: list[list[str]],
    kind: str,
    arguments: list[str],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(targets, "processor", lambda: kind)
    assert targets.kind_of_targets(bool(arguments)) == found
    assert targets.main(arguments) == 0 and len(measured) == 2
