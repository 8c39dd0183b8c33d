"""Programs under bench/ that produce a GPU's results, on a machine without one."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import itertools
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import anyflex
from anyflex.bench.machine import machine_facts, source_commit, version_facts
from tests.soak import SOAK, only_in_soak

BENCH = Path(__file__).parents[2] / "bench"
CASE = "full B16 H16 S2048 D128 bfloat16"


@pytest.fixture(autouse=True)
def _beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs import each other, as programs of one folder do."""
    monkeypatch.syspath_prepend(str(BENCH))


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def report() -> dict[str, Any]:
    """A report of one row, beside every peer: those take 2, 3, 4 and 1.5 times as long."""
    times = {"cuda": 1.0, "torch.sdpa.cudnn": 2.0, "torch.flex": 3.0}
    times |= {"torch.flex.flash": 4.0, "cuda.flash4": 1.5}
    rows = [
        {
            "case": CASE, "direction": "forward", "contender": name, "status": "measured",
            "median_ms": ms, "min_ms": 0.9 * ms, "max_ms": 1.1 * ms, "samples_ms": [ms] * 7,
            "gflops": 6e5 / ms, "kv_gb_per_s": 1.0, "error": 2e-3, "rms_error": 1e-3,
        }
        for name, ms in times.items()
    ]  # fmt: skip
    return {"clock": "device events around each call", "measurements": rows}


def test_a_row_is_held_to_the_fastest_peer_and_a_missing_one_fails(tmp_path: Path) -> None:
    targets = program("gpu_targets")
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report()))
    rows = targets.rows_of(targets.reports_of([path]))
    case = (CASE, "forward")
    found = rows[case]
    for peer in ("torch.flex", "torch.flex.flash"):
        found.pop(peer, None)
    # The best peer of the third round isn't that of the medians: the rounds' ratios count.
    mine = found["cuda"]["samples_ms"] = [1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    found["cuda.flash4"]["samples_ms"] = [1.2, 1.3, 2.2, 1.0, 1.0, 1.1, 1.3]
    found["torch.sdpa.cudnn"]["samples_ms"] = [1.5] * 7
    wanted = 1.1
    assert targets.ratio(found, "cuda", targets.EVERY) == pytest.approx(wanted)
    name = f"{case[0]}, forward"
    lines = targets.shortfalls(rows, "cuda")[1]
    absent = "torch.flex, flex FLASH: not measured"
    assert f"{name}: {wanted:.3f} without {absent}" in lines
    for peer in ("torch.flex", "torch.flex.flash"):
        refusal = {"median_ms": None, "samples_ms": [], "status": "refused"}
        found[peer] = found["cuda.flash4"] | refusal
    reached, lines = targets.shortfalls(rows, "cuda")
    assert reached > 0 and not any(line.startswith(name) for line in lines)
    # As slow as half of the peer, and as not measured.
    slow = copy.deepcopy(rows)
    slow[case]["cuda"]["samples_ms"] = [2 * time for time in mine]
    less, lines = targets.shortfalls(slow, "cuda")
    assert less == reached - 1 and f"{name}: 0.550, wanted 0.95" in lines
    del slow[case]["cuda"]
    assert f"{name}: not measured" in targets.shortfalls(slow, "cuda")[1]
    # Less precise than the first peer, though not than cuDNN; in a report without the mean of
    # squares.
    rough = copy.deepcopy(rows)
    for contender in rough[case].values():
        contender.pop("rms_error", None)
    error = 1.3 * found["cuda.flash4"]["error"]
    rough[case]["cuda"]["error"] = rough[case]["torch.sdpa.cudnn"]["error"] = error
    (line,) = [each for each in targets.shortfalls(rough, "cuda")[1] if each.startswith(name)]
    assert "an error of" in line
    # The mean of squares decides, where a report has it.
    for contender in rough[case].values():
        contender["rms_error"] = 1e-3
    assert not [each for each in targets.shortfalls(rough, "cuda")[1] if each.startswith(name)]
    rough[case]["cuda"]["rms_error"] = 1.3e-3
    (line,) = [each for each in targets.shortfalls(rough, "cuda")[1] if each.startswith(name)]
    assert "an error of 0.0013" in line


def test_reports_are_of_one_commit_and_of_seven_rounds() -> None:
    targets = program("gpu_targets")
    report = {"preset": "h200-small", "clock": "wall", "rounds": 7, "commit": "c102e98"}
    assert targets.doubts([report] * 2) == []
    assert targets.doubts([report | {"rounds": 6}]) == ["h200-small by wall: 6 rounds, wanted 7"]
    for commit in (None, "c102e98+changes"):
        assert targets.doubts([report | {"commit": commit}]) == [
            f"h200-small by wall: of no commit's tree: {commit}"
        ]
    assert targets.doubts([report, report | {"commit": "4df5295"}]) == [
        "reports of several commits: 4df5295, c102e98"
    ]


def test_decoding_is_held_to_a_rate() -> None:
    targets = program("gpu_targets")
    case = "decode B1 S32768 D128 GQA 32/8"
    row = {
        "median_ms": 0.1, "samples_ms": [0.1], "error": 0.0, "status": "measured",
        "kv_gb_per_s": 3100.0,
    }  # fmt: skip
    found = {name: {**row, "samples_ms": [0.2]} for name in targets.EVERY} | {"cuda": row}
    lines = targets.shortfalls({(case, "forward"): found}, "cuda")[1]
    assert f"{case}, forward: 3100 GB/s, wanted 3200" in lines
    # Both misses are reported.
    found["torch.flex"] = {**row, "samples_ms": [0.05]}
    lines = targets.shortfalls({(case, "forward"): found}, "cuda")[1]
    for text in ("3100 GB/s, wanted 3200", "0.500, wanted 1.20"):
        assert f"{case}, forward: {text}" in lines
    found["torch.flex"] = {**row, "samples_ms": [0.2]}
    row["kv_gb_per_s"] = 3300.0
    lines = targets.shortfalls({(case, "forward"): found}, "cuda")[1]
    assert not [line for line in lines if line.startswith(case)]


def test_every_row_of_the_preset_but_the_small_one_has_a_target_of_the_device_s_clock() -> None:
    targets = program("gpu_targets")
    for goals in targets.GOALS.values():
        for case in targets.PRESETS["h200"]:
            for direction in case.directions:
                held = [g for g in goals if g.of(case.name) and g.direction == direction]
                held = [goal for goal in held if not goal.clock]
                assert len(held) == (0 if "S512" in case.name else 1), (case.name, direction)


def test_the_small_call_is_held_by_the_host_s_clock_and_by_a_graph_s(tmp_path: Path) -> None:
    targets = program("gpu_targets")
    small = [case.name for case in targets.PRESETS["h200-small"]]
    assert small == [targets.SMALL]

    def lines_of(wall: float, graph: float, backward: float = 0.4) -> list[str]:
        """Where torch's take 0.1 ms by the host, 0.35 backward, and the best peer's graph 0.01."""
        host = "wall, time.perf_counter"
        reports = []
        for clock, direction, mine, peer, other in (
            (host, "forward", wall, "torch.flex", 0.1),
            (host, "backward", backward, "torch.flex", 0.35),
            (
                "device events around a CUDA graph of one call",
                "forward",
                graph,
                "cuda.flash4",
                0.01,
            ),
        ):
            times = {"cuda": mine} | dict.fromkeys(targets.EVERY, 10 * other) | {peer: other}
            rows = [
                {
                    "case": targets.SMALL, "direction": direction, "contender": name,
                    "median_ms": ms, "samples_ms": [ms], "status": "measured", "error": 0.0,
                    "kv_gb_per_s": 1.0,
                }
                for name, ms in times.items()
            ]  # fmt: skip
            reports.append({"clock": clock, "measurements": rows})
        path = tmp_path / "report.json"
        path.write_text(json.dumps(reports))
        rows_by_case = targets.rows_of(targets.reports_of([path]))
        found = targets.shortfalls(rows_by_case, "cuda")[1]
        return [line for line in found if line.startswith(targets.SMALL)]

    assert lines_of(0.044, 0.0109) == []
    assert lines_of(0.046, 0.0109) == [f"{targets.SMALL}, wall, forward: 0.046 ms, wanted 0.045"]
    assert lines_of(0.2, 0.0109) == [
        f"{targets.SMALL}, wall, forward: {short}"
        for short in ("0.500, wanted 1.00", "0.200 ms, wanted 0.045")
    ]
    assert lines_of(0.04, 0.0112) == [f"{targets.SMALL}, graph, forward: 0.893, wanted 0.91"]
    assert lines_of(0.04, 0.01, 0.43) == [f"{targets.SMALL}, wall, backward: 0.814, wanted 0.83"]


def test_strangers_rows_are_held_to_the_fastest_peer_and_biases_to_their_plain_call() -> None:
    strangers = program("stranger_targets")

    def row(ms: float) -> dict[str, Any]:
        return {"median_ms": ms, "samples_ms": [ms], "status": "measured"}

    rows = {
        (case.name, direction): {"cuda": row(1.0), "torch.flex": row(1.3), "cuda.flash4": row(1.2)}
        for case in strangers.PRESETS["h200-strangers"]
        for direction in case.directions
    }
    assert strangers.missed(rows) == []
    for of, contender, ms, text in (
        ((strangers.CAUSAL, "backward"), "cuda.flash4", 0.9, "0.90 of FA4's speed, wanted 1"),
        (
            (strangers.IMAGE, "forward"),
            "torch.flex",
            1.1,
            "1.10 of torch.flex's speed, wanted 1.2",
        ),
    ):
        slow = rows | {of: rows[of] | {contender: row(ms)}}
        assert strangers.missed(slow) == [f"{of[0]}, {of[1]}: {text}"]
    of = strangers.CAUSAL, "forward"
    (line,) = strangers.missed(rows | {of: rows[of] | {"cuda": row(0.6)}})
    assert line == f"{strangers.LEARNED}, forward: 1.67 times without a bias, wanted 1.5"
    del rows[of]
    assert strangers.missed(rows) == [f"{strangers.CAUSAL}, forward: not measured beside a peer"]


def test_the_table_has_the_backend_s_times_and_each_peer_s_ratio() -> None:
    targets = program("gpu_targets")
    lines = targets.table(targets.rows_of([report()]), "cuda")
    assert lines[0] == (
        "| case | direction | `cuda`, ms | range | cuDNN | torch.flex | flex FLASH | FA4 "
        "| the lowest that counts, of rounds |"
    )
    name = CASE.replace(" bfloat16", "")
    assert lines[2:] == [
        f"| {name} | forward | 1.000 | 0.900 to 1.100 | 2.00 | 3.00 | 4.00 | 1.50 | 1.50 to 1.50 |"
    ]


def test_the_largest_rates_have_their_rows() -> None:
    targets = program("gpu_targets")
    lines = targets.fastest_table(targets.rows_of([report()]), "cuda")
    name = CASE.replace(" bfloat16", "")
    rates = (600, 300, 200, 150, 400)
    assert lines[2] == f"| forward | {' | '.join(f'{rate}: {name}' for rate in rates)} |"


def test_what_a_missed_row_would_take_is_the_fastest_peer_s_rate_times_its_target() -> None:
    targets = program("gpu_targets")
    case = "window B4 H16 S8192 D128 bfloat16"

    def row(gflops: float) -> dict[str, Any]:
        ms = 1e6 / gflops
        return {"median_ms": ms, "samples_ms": [ms], "gflops": gflops, "status": "measured"}

    found = {name: row(2e5) for name in targets.EVERY} | {"cuda": row(3.3e5)}
    found["cuda.flash4"] = row(3e5)
    found["torch.sdpa.cudnn"] |= {"median_ms": None, "samples_ms": [], "status": "refused"}
    rows = {(case, "forward"): found}
    (line,) = targets.missed_table(rows, "cuda")[2:]
    name = case.replace(" bfloat16", "")
    assert line == f"| {name} | forward | 330 | FA4 | 300 | 1.10 | 1.20 | 360 |"
    # Not a row that reaches its target.
    assert not targets.missed_table({(case, "backward"): found}, "cuda")[2:]


def random_calls(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable, str(BENCH / "gpu_random.py"), "--backend", "reference",
            "--device", "cpu", "--repeat", "1", *arguments,
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_random_calls_of_the_reference_are_right() -> None:
    done = random_calls("--number", "4", "--number", "10", "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 calls, 0 failed, 0 refused" in done.stdout


def test_random_calls_have_the_type_that_is_named() -> None:
    random = program("gpu_random")
    for number in (1, 1000024):
        rounded = random.case_of(number, "tf32")
        assert (rounded.dtype, rounded.products) == (torch.float32, "high")
        whole = random.case_of(number, "float32")
        assert (whole.dtype, whole.products) == (torch.float32, "highest")
        assert random.case_of(number).dtype in (torch.bfloat16, torch.float16)


def test_random_calls_have_the_head_dims_that_are_named() -> None:
    random = program("gpu_random")
    dims = ((99, 99), (50, 36))
    drawn = [random.case_of(number, None, dims) for number in (4, 5)]
    assert [(case.head_dim, case.value_head_dim) for case in drawn] == [(99, 99), (50, 36)]
    assert drawn[0] == dataclasses.replace(random.case_of(4), head_dim=99, value_head_dim=99)
    if not SOAK:
        return
    done = random_calls(
        "--number", "4", "--number", "5", "--head-dims", "99,50x36", "--dtype", "tf32"
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 calls, 0 failed, 0 refused" in done.stdout


@only_in_soak("it computes some more calls than the test above")
def test_shrunk_rows_of_a_preset_are_right_of_the_reference() -> None:
    done = random_calls("--number", "1000020", "--number", "1000024", "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 calls, 0 failed, 0 refused" in done.stdout


def test_a_gradient_that_a_repetition_has_otherwise_is_told() -> None:
    random = program("gpu_random")
    case, cpu = random.case_of(1000024), torch.device("cpu")
    case = dataclasses.replace(case, heads=1, kv_heads=1, q_length=64, kv_length=64)
    drawn = case.draw(cpu)
    found = random.by_backend(case, drawn, "reference", cpu)
    budgets = random.by_oracle(case, drawn)

    def doubled(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any,
                **settings: Any) -> Any:  # fmt: skip
        """An outcome with the same bits, and with twice value's gradient."""
        return anyflex.flex_attention(query, key, 2 * value - value.detach(), *args, **settings)

    for attention, wanted in (
        (anyflex.flex_attention, []),
        (doubled, ["dv is another in a repetition"]),
    ):
        changes = random._changes(case, drawn, "reference", cpu, attention, found, budgets, 1)
        assert changes == wanted


def test_a_random_call_that_does_not_end_fails_the_run() -> None:
    done = random_calls("--number", "1", "--timeout", "0.1")
    assert done.returncode == 1 and "ended or hung" in done.stdout


def test_a_first_call_above_its_limit_and_a_second_compile_fail() -> None:
    calls = program("gpu_first_calls")
    fast = {kind: [{"forward": 0.01, "backward": 0.02}] * 3 for kind in calls.LIMITS}
    once = {name: {"forward_kernel": 1} for name in calls.CLASSES}
    assert calls.faults(fast, once) == []
    slow = {**fast, "running, warm": [{"forward": 0.07, "backward": 0.02}] * 3}
    assert calls.faults(slow, once) == ["running, warm, forward: 0.070 s, at most 0.06"]
    assert calls.faults(fast, {**once, "decoding": {"sums": 2}}) == [
        "decoding: sums was compiled 2 times"
    ]
    assert calls.faults(fast, {**once, "training": {}}) == ["training: nothing was compiled"]


def test_first_calls_are_written_with_commit_machine_and_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = program("gpu_first_calls")
    file = tmp_path / "first_calls.json"
    fast = {"forward": 0.01, "backward": 0.02, "torch's backward": 0.3}
    once = {name: {"forward_kernel": 1} for name in calls.CLASSES}

    def found(kind: str, *others: Any) -> Any:
        return once if kind == "classes" else fast

    monkeypatch.setattr(calls, "in_a_process", found)
    arguments = ["--backend", "cuda.triton", "--device", "cpu", "--repeat", "2"]
    monkeypatch.setattr(sys, "argv", ["gpu_first_calls.py", *arguments, "--json", str(file)])
    assert calls.main() == 0
    report = json.loads(file.read_text())
    assert report["seconds"] == {kind: [fast] * 2 for kind in calls.LIMITS}
    assert report["compiled"] == once and report["backend"] == "cuda.triton"
    assert report["commit"] == source_commit() and report["date"].endswith("+00:00")
    assert report["machine"] == json.loads(json.dumps(machine_facts(torch.device("cpu"))))
    assert report["versions"] == version_facts()


def test_hoppers_classes_are_of_all_calls() -> None:
    calls = program("gpu_first_calls")
    assert calls.classes_of("cuda.triton") is calls.CLASSES
    hoppers = calls.classes_of("cuda")
    assert sorted(itertools.chain(*hoppers.values())) == sorted(
        itertools.chain(*calls.CLASSES.values())
    )
    assert hoppers["decoding"] == list(calls.CLASSES["decoding"])
    assert {queries for _, queries, _ in hoppers["training, up to 64 rows"]} == {1, 15, 16, 17}
    assert (1, 1000, 1000) in hoppers["training, lengths within tiles, few tiles"]
    assert (2, 1000, 1000) in hoppers["training, lengths within tiles"]
    assert "decoding, few tiles" not in hoppers


def test_what_a_sanitizer_finds_and_what_it_leaves_out_fails() -> None:
    sanitizer = program("gpu_sanitizer")
    clean = json.dumps({"number": 7, "problems": [], "variant": "hopper 128x128"})
    wrong = json.dumps({"number": 8, "problems": ["out is off"], "variant": "hopper 128x128"})
    assert sanitizer.faults("memcheck", 0, f"========= memcheck\n{clean}\n", [7]) == []
    assert sanitizer.faults("memcheck", 9, clean, [7]) == [
        "memcheck: it reports errors (exit status 9)"
    ]
    assert sanitizer.faults("racecheck", 0, f"{clean}\n{wrong}\n", [7, 8, 9]) == [
        "racecheck: call 8: ['out is off']",
        "racecheck: no outcome of [9]",
    ]


def race(first: str, second: str) -> str:
    """As racecheck reports it."""
    return (
        f"========= Error: Race reported between Write access at forward_kernel+0xb10 in {first}\n"
        f"=========     and Read access at forward_kernel+0xe10 in {second} [64 hazards]\n"
    )


def test_races_of_words_and_of_what_warps_are_handed_are_no_faults() -> None:
    sanitizer = program("gpu_sanitizer")
    words = race("/x/anyflex_cuda/smem_mailbox.py:24", "/x/anyflex_cuda/smem_mailbox.py:31")
    assert sanitizer.hazard_faults(words) == []
    assert sanitizer.excused(words) == [
        "racecheck: a race between smem_mailbox.py:24 and smem_mailbox.py:31"
    ]
    other = race("/x/smem_mailbox.py:24", "/x/write_softmax_stats.py:3")
    assert sanitizer.hazard_faults(words + other) == [
        "racecheck: a race between smem_mailbox.py:24 and write_softmax_stats.py:3"
    ]
    assert sanitizer.hazard_faults("========= RACECHECK SUMMARY: 0 hazards") is None
    assert sanitizer.hazard_faults(words + race("forward_kernel", "forward_kernel")) is None
    assert sanitizer.faults("racecheck", 9, words, []) == []
    assert sanitizer.faults("racecheck", 1, words, []) == [
        "racecheck: it reports errors (exit status 1)"
    ]


@pytest.mark.skipif(find_spec("anyflex_cuda") is None, reason="anyflex-cuda is not installed")
def test_what_warps_are_handed_is_known_by_its_lines() -> None:
    sanitizer = program("gpu_sanitizer")
    source = BENCH.parent / "backends/cuda/src/anyflex_cuda/hopper_forward.py"
    lines = source.read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "gl.warp_specialize(" in text)
    handed, other = f"{source}:{line + 1}", f"{source}:{line - 20}"
    kernel = next(i for i, text in enumerate(lines, 1) if "def forward_kernel(" in text)
    assert sanitizer.hazard_faults(race(handed, handed)) == []
    condition = next(i for i, text in enumerate(lines, 1) if "if CONSUMERS == 1:" in text)
    for line_handed in (kernel, condition):
        assert sanitizer.hazard_faults(race(handed, f"{source}:{line_handed}")) == []
    # Compilers may have lost the line of the word itself where a consumer reads it.
    asked = [i for i, text in enumerate(lines, 1) if "= said_of_step(" in text]
    spoken = source.with_name("smem_mailbox.py")
    assert all(
        sanitizer.hazard_faults(race(f"{spoken}:18", f"{source}:{line}")) == [] for line in asked
    )
    assert len(asked) == 2 and sanitizer.hazard_faults(race(f"{source}:{kernel}", other)) != []
    assert sanitizer.hazard_faults(race(handed, other)) == [
        f"racecheck: a race between {source.name}:{line - 20} and {source.name}:{line + 1}"
    ]


@pytest.mark.skipif(find_spec("anyflex_cuda") is None, reason="anyflex-cuda is not installed")
def test_what_one_consumer_places_for_the_other_has_a_control_of_its_own() -> None:
    sanitizer = program("gpu_sanitizer")
    source = BENCH.parent / "backends/cuda/src/anyflex_cuda/hopper_wide_backward.py"
    lines = source.read_text().splitlines()
    placed, taken = (
        next(i for i, text in enumerate(lines, 1) if f"factors.index(slot).{done}" in text)
        for done in ("store", "load")
    )
    report = race(f"{source}:{placed}", f"{source}:{taken}")
    assert sanitizer.hazard_faults(report) == []
    assert sanitizer.controls(report) == {"arrive"}
    words = race("/x/anyflex_cuda/smem_mailbox.py:24", "/x/anyflex_cuda/smem_mailbox.py:31")
    assert sanitizer.controls(report + words) == {"arrive", ""}
    assert sanitizer.hazard_faults(race(f"{source}:{placed}", f"{source}:{placed - 8}")) != []


def test_a_control_of_which_a_sanitizer_says_nothing_excuses_nothing(tmp_path: Path) -> None:
    sanitizer = program("gpu_sanitizer")
    nvcc, tool = tmp_path / "nvcc", tmp_path / "tool"
    nvcc.write_text("#!/bin/sh\nexit 0\n")
    for status, said, excused in (
        (9, race("control.cu:48", "control.cu:40"), True),
        (0, "", False),
    ):
        tool.write_text(f"#!/bin/sh\ncat <<'end'\n{said}end\nexit {status}\n")
        for each in (nvcc, tool):
            each.chmod(0o755)
        assert (sanitizer.control_fault(str(tool), str(nvcc), 60.0, "") is None) == excused
    missing = sanitizer.control_fault(str(tool), str(tmp_path / "no compiler"), 60.0, "")
    assert missing is not None and "can't be built" in missing


@only_in_soak("it computes the same calls four times")
def test_a_sanitizer_runs_over_calls_that_were_right_without_it(tmp_path: Path) -> None:
    """A sanitizer that runs its command and changes nothing, and one that finds something."""
    tool = tmp_path / "tool"
    for status in (0, 9):
        tool.write_text(f'#!/bin/sh\nshift 4\n"$@"\nexit {status}\n')
        tool.chmod(0o755)
        done = subprocess.run(
            [
                sys.executable, str(BENCH / "gpu_sanitizer.py"), "--backend", "reference",
                "--device", "cpu", "--sanitizer", str(tool), "--tool", "memcheck",
                "--number", "7", "--log", str(tmp_path),
            ],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == bool(status), done.stdout + done.stderr
        assert "without a tool: 1 calls" in done.stdout
        assert ("it reports errors" in done.stdout) == bool(status)
        assert '"number": 7' in (tmp_path / "memcheck.txt").read_text()


def test_tables_that_learn_are_held_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    learning = program("learning_tables")
    monkeypatch.setattr(learning, "BATCH", 1)
    monkeypatch.setattr(learning, "HEADS", 2)
    gradients = learning.Case.gradients

    def halved(case: Any, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = gradients(case, out)
        return (*found[:3], found[3] * next(factors))

    cpu = torch.device("cpu")
    for name in learning.TABLES:
        assert learning.error_of(name, "reference", 64, cpu) == 0.0, name
        with monkeypatch.context() as changed:
            changed.setattr(learning.Case, "gradients", halved)
            # The first error is the contender's.
            factors = iter((0.5, 1.0))
            assert learning.error_of(name, "reference", 64, cpu) == pytest.approx(0.5), name
    assert learning.WRONG < 0.5


def test_launchers_are_compared_by_their_medians() -> None:
    launchers = program("launchers")
    times = {
        "c": [{"forward": 20.0}, {"forward": 24.0}, {"forward": 90.0}],
        "triton": [{"forward": 36.0}, {"forward": 30.0}, {"forward": 10.0}],
    }
    assert launchers.saved(times) == {"forward": (24.0, 30.0)}
