"""The programs under bench/ that a GPU's results come from, where there is none."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
REPORT = BENCH / "results" / "h200_cuda.json"


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def reports() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(REPORT.read_text())
    return found


def test_a_row_is_held_to_the_fastest_peer_and_a_missing_one_fails(tmp_path: Path) -> None:
    targets = program("gpu_targets")
    rows = targets.read([REPORT])
    case = ("full B16 H16 S2048 D128 bfloat16", "forward")
    found = rows[case]
    times = {name: found[name]["median_ms"] for name in ("torch.sdpa.cudnn", "cuda.flash4")}
    wanted = min(times.values()) / found["cuda"]["median_ms"]
    assert targets.ratio(found, "cuda", targets.EVERY) == pytest.approx(wanted)
    reached, lines = targets.shortfalls(rows, "cuda")
    assert reached > 0 and not any(line.startswith(case[0] + ", forward") for line in lines)
    # As slow as half of the peer, and as not measured.
    slow = copy.deepcopy(rows)
    slow[case]["cuda"]["median_ms"] = 2 * min(times.values())
    less, lines = targets.shortfalls(slow, "cuda")
    assert less == reached - 1 and f"{case[0]}, forward: 0.50, wanted 0.95" in lines
    del slow[case]["cuda"]
    assert f"{case[0]}, forward: not measured" in targets.shortfalls(slow, "cuda")[1]


def test_every_row_of_the_preset_but_the_small_one_has_a_target() -> None:
    targets = program("gpu_targets")
    for goals in targets.GOALS.values():
        for case in targets.PRESETS["h200"]:
            for direction in case.directions:
                held = [g for g in goals if g.of(case.name) and g.direction == direction]
                assert len(held) == (0 if "S512" in case.name else 1), (case.name, direction)


def test_the_committed_table_is_of_the_committed_report() -> None:
    targets = program("gpu_targets")
    page = REPORT.with_suffix(".md").read_text()
    assert "\n".join(targets.table(targets.read([REPORT]), "cuda")) in page


def random_calls(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable, str(BENCH / "gpu_random.py"), "--backend", "reference",
            "--device", "cpu", "--repeat", "1", *arguments,
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_random_calls_of_the_reference_are_right() -> None:
    done = random_calls("--number", "1", "--number", "4", "--number", "10", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 calls, 0 failed, 0 refused" in done.stdout


def test_a_random_call_that_does_not_end_fails_the_run() -> None:
    done = random_calls("--number", "1", "--timeout", "0.1")
    assert done.returncode == 1 and "ended or hung" in done.stdout
