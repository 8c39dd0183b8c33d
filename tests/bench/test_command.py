"""``anyflex bench``: the measured contenders, the report, and the exit. No test looks at how fast
anything was."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from anyflex.bench import measure
from anyflex.bench.case import BenchCase
from anyflex.bench.measure import Measurement
from anyflex.cli.main import main
from anyflex.plugin import Artifacts, Kernel, Spec, register
from tests.bench.conftest import Bench
from tests.cli.backends import ForwardOnly, Right, WrongBackward, WrongForward

SMALL = ("--shape", "1x2x160x8")
ONE_PEER = "torch.sdpa.flash"


def by_name(report: dict[str, Any], direction: str = "forward") -> dict[str, dict[str, Any]]:
    rows = [row for row in report["measurements"] if row["direction"] == direction]
    return {row["contender"]: row for row in rows}


def test_backends_and_peers_are_measured_side_by_side(bench: Bench) -> None:
    register("cpu.right", Right)
    code, report = bench(
        *SMALL, "--mask", "causal", "--direction", "forward,backward,both",
        "--backend", f"cpu.right,reference,{ONE_PEER}",
    )  # fmt: skip
    assert code == 0
    for direction, products in (("forward", 2), ("backward", 5), ("both", 7)):
        rows = by_name(report, direction)
        assert list(rows) == ["cpu.right", "reference", ONE_PEER]
        for row in rows.values():
            assert row["status"] == "measured" and row["first_call_s"] > 0
            assert len(row["samples_ms"]) == 3
            assert row["min_ms"] <= row["median_ms"] <= row["max_ms"]
            # 161 of 320 pairs are live; a product takes two operations a pair and dimension.
            assert row["live_share"] == 161 / 320
            assert row["flops"] == pytest.approx(products * 2 * 2 * (160 * 161 / 2) * 8)
            assert row["gflops"] == pytest.approx(row["flops"] / row["median_ms"] / 1e6)
            assert row["error"] < 1e-4
            best = rows[ONE_PEER]["median_ms"]
            assert row["ratio"] == pytest.approx(best / row["median_ms"])
        assert rows[ONE_PEER]["kind"] == "peer" and rows[ONE_PEER]["ratio"] == 1
        assert rows["cpu.right"]["kind"] == "backend"


@pytest.mark.parametrize(
    ("backend", "direction", "worst"),
    [(WrongForward, "forward", "out is off by 1.0e-03"), (WrongBackward, "backward", "dk")],
    ids=["forward", "backward"],
)
def test_what_computes_wrongly_is_reported_and_not_timed(
    backend: type[Right], direction: str, worst: str, bench: Bench
) -> None:
    register("cpu.wrong", backend)
    code, report = bench(*SMALL, "--backend", f"cpu.wrong,{ONE_PEER}", "--direction", direction)
    rows = by_name(report, direction)
    assert code == 1
    assert rows["cpu.wrong"]["status"] == "wrong" and worst in rows["cpu.wrong"]["detail"]
    assert rows["cpu.wrong"]["samples_ms"] == [] and rows["cpu.wrong"]["gflops"] is None
    assert rows[ONE_PEER]["status"] == "measured"


def test_what_raises_stops_nobody_else(bench: Bench) -> None:
    class Raising(Right):
        def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
            raise OSError("no space left on device")

    register("cpu.raising", Raising)
    code, report = bench(*SMALL, "--backend", "cpu.raising,reference")
    rows = by_name(report)
    assert code == 1
    assert rows["cpu.raising"]["status"] == "failed"
    assert "no space left on device" in rows["cpu.raising"]["detail"]
    assert rows["reference"]["status"] == "measured"


def test_a_refusal_is_no_failure_and_says_why(bench: Bench) -> None:
    register("cpu.half", ForwardOnly)
    arguments = ("--mod", "softcap:5.0", "--direction", "backward")
    code, report = bench(*SMALL, *arguments, "--backend", f"cpu.half,reference,{ONE_PEER}")
    rows = by_name(report, "backward")
    assert code == 0
    assert rows["cpu.half"]["status"] == "refused"
    assert rows["cpu.half"]["detail"] == "the gradient of q is not supported"
    assert "no score mods" in rows[ONE_PEER]["detail"]
    assert rows["reference"]["ratio"] is None
    code, report = bench(*SMALL, *arguments, "--backend", ONE_PEER)
    assert code == 3


def test_a_backend_is_measured_with_options_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, object]] = []
    compiled = Right.compile

    def compile_noting(self: Right, spec: Spec, artifacts: Artifacts) -> Kernel:
        given.append(dict(spec.options))
        return compiled(self, spec, artifacts)

    monkeypatch.setattr(Right, "compile", compile_noting)
    register("cpu.right", Right)
    code, report = bench(
        *SMALL, "--backend", f"cpu.right,{ONE_PEER}", "--option", "cpu.right={'SPLITS': 1}",
        "--option", 'cpu.right={"SPLITS": 3}', "--option", "cpu.right={'SPLITS': 2}",
        "--option", "cpu.right={'SPLITS': 1}",
    )  # fmt: skip
    rows = by_name(report)
    assert [row["contender"] for row in report["measurements"]] == list(rows) == [
        "cpu.right", "cpu.right SPLITS=1", "cpu.right SPLITS=3", "cpu.right SPLITS=2", ONE_PEER,
    ]  # fmt: skip
    assert [options.get("SPLITS") for options in given] == [None, 1, 2]
    assert all(row["kind"] == "backend" for row in list(rows.values())[:4])
    # Not one of its choices: the call reports it, and the others go on.
    failed = rows.pop("cpu.right SPLITS=3")
    assert code == 1 and failed["status"] == "failed" and "SPLITS" in failed["detail"]
    assert all(row["status"] == "measured" for row in rows.values())


def test_without_names_everybody_is_measured_but_the_reference(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "--list"]) == 0
    assert "backend reference" in capsys.readouterr().out

    class Peer(Right):
        priority = -50

    class Behind(Right):
        priority = -10

    register("cpu.right", Right)
    register("cpu.peer", Peer)
    register("cpu.behind", Behind)
    register("xpu.right", Right)
    assert main(["bench", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    names = [line.split()[1].rstrip(":") for line in listed if not line.startswith("preset")]
    assert sorted(names) == ["cpu.behind", "cpu.peer", "cpu.right", "torch.flex", ONE_PEER]
    assert any(line.startswith("peer cpu.peer: ") for line in listed)
    assert any(line.startswith("backend cpu.behind: ") for line in listed)


def test_grouped_heads_other_lengths_and_masks_that_all_hold(bench: Bench) -> None:
    code, report = bench(
        "--shape", "2x4x1x16", "--kv", "2x2x96x16", "--dtype", "bf16",
        "--mask", "random_documents:8,24", "--mask", "causal_bottom_right",
        "--mod", "alibi", "--mod", "softcap:5.0", "--backend", "reference",
    )  # fmt: skip
    (row,) = report["measurements"]
    assert code == 0 and row["status"] == "measured"
    assert row["kv_bytes"] == 2 * 2 * 2 * 96 * 16 * 2
    # The query is in the last document.
    assert 1 / 96 <= row["live_share"] <= 24 / 96


def test_the_layout_that_is_named_is_measured_and_told(bench: Bench) -> None:
    code, report = bench(
        "--shape", "1x2x40x16", "--layout", "heads_last", "--backend", "reference"
    )  # fmt: skip
    (case,), (row,) = report["cases"], report["measurements"]
    assert code == 0 and row["status"] == "measured"
    assert (case["layout"], case["name"]) == ("heads_last", "1x2x40x16 heads_last float32")


def test_the_report_says_where_and_how(bench: Bench) -> None:
    _, report = bench(*SMALL, "--backend", "reference")
    assert report["schema"] == "anyflex-bench-1"
    assert report["command"].startswith("anyflex bench --shape 1x2x160x8 --backend reference")
    assert report["machine"]["threads"] == torch.get_num_threads()
    assert report["machine"]["cpu"] and report["machine"]["device"] == "cpu"
    assert report["versions"]["torch"] == torch.__version__
    assert report["clock"] == "wall, time.perf_counter" and report["rounds"] == 3
    assert report["cases"][0]["q_shape"] == [1, 2, 160, 8]


def test_a_run_that_is_stopped_leaves_the_cases_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = measure.measure_case

    def stopped(case: BenchCase, *arguments: Any) -> Iterator[Measurement]:
        if case.q_shape[2] == 96:
            raise KeyboardInterrupt
        return whole(case, *arguments)

    monkeypatch.setattr(measure, "measure_case", stopped)
    file = tmp_path / "results.json"
    arguments = [*("--shape", "1x1x64x8"), *("--shape", "1x1x96x8"), *("--rounds", "1")]
    assert main(["bench", *arguments, "--backend", "reference", "--json", str(file)]) != 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert [case["q_shape"][2] for case in report["cases"]] == [64]
    assert [row["status"] for row in report["measurements"]] == ["measured"]
    # The folder of the file isn't published with it.
    assert report["command"].endswith("--json results.json")


def test_the_table_and_the_picture_show_each_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register("cpu.wrong", WrongForward)
    file = tmp_path / "plot.svg"
    names = f"cpu.wrong,reference,{ONE_PEER}"
    main(["bench", *SMALL, "--backend", names, "--rounds", "1", "--plot", str(file)])
    table = capsys.readouterr().out
    picture = "".join(ElementTree.parse(file).getroot().itertext())
    for name in names.split(","):
        assert name in table and name in picture
    assert "wrong: out is off by" in table and "wrong" in picture
    assert "(1.000 of the pairs)" in table


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--preset", "nothing"), 2, "--preset nothing: there is none; known: cpu-quick"),
        (("--backend", "cpu.nobody"), 2, "there is none on cpu; known: reference"),
        (("--shape", "1x2x8x8", "--mask", "nowhere"), 2, "there is no 'nowhere'"),
        (("--shape", "1x2x8x8", "--mask", "random_documents"), 2, "random_documents:200,1800"),
        (("--shape", "1x2x8x8", "--preset", "cpu"), 2, "leave out --preset"),
        (("--shape", "1x4x8x8", "--kv", "1x3x8x8"), 2, "a multiple of its heads"),
        (("--shape", "1x2x8x8", "--direction", "sideways"), 2, "forward, backward, both"),
        (("--mask", "causal"), 2, "--mask: belongs to --shape"),
        (("--case", "nothing*"), 2, "matches none of: full B1"),
        (("--clock", "graph"), 2, "CUDA graphs are of NVIDIA's GPUs; the device is cpu"),
        (("--rounds", "0"), 2, "--rounds 0: must be at least 1"),
        (("--plot", "plot.png"), 2, "the picture is SVG"),
        (("--option", "cpu"), 2, "must be KEY=VALUE, got 'cpu'"),
        (("--option", "cpu.absent={'SPLITS': 1}"), 2, "begin with a backend that is measured"),
        (("--option", "torch.sdpa.flash={'SPLITS': 1}"), 2, "measured: reference"),
        (("--option", "reference=1"), 2, "must be BACKEND={NAME: VALUE}"),
        (("--option", "reference={}"), 2, "must be BACKEND={NAME: VALUE}"),
        (("--device", "xpu"), 3, "torch sees no such device"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_usage_is_named(
    arguments: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == code
    assert message in capsys.readouterr().err
