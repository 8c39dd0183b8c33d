"""``anyflex demo``: three steps through the whole example, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from anyflex.cli import demo
from anyflex.cli.exit_codes import ExitCode
from anyflex.registry import register
from packed_training import run as demo_run
from packed_training.gradient_check import GradientCheck
from packed_training.model import ModelSize
from tests.cli.backends import WrongBackward
from tests.cli.conftest import RunCommand

SHORT = ("demo", "--steps", "3", "--sample", "4")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller model: the same code in a tenth of the time."""

    def small(settings: demo_run.DemoSettings) -> demo_run.DemoSettings:
        return dataclasses.replace(settings, size=ModelSize(2, 2, 8, 16), rows=2, length=64)

    whole: Any = demo_run.run_demo
    monkeypatch.setattr(
        demo_run, "run_demo", lambda settings, report: whole(small(settings), report)
    )


def test_it_trains_and_says_what_it_found(command: RunCommand) -> None:
    result = command(*SHORT)
    assert result.code == ExitCode.OK, result.out
    assert "backend reference" in result.out
    assert "3 steps, 384 tokens" in result.out
    assert "nats a byte on held-out documents: PASS" in result.out
    assert "against a dense float64 formula" in result.out
    assert "held-out loss before: 5.5" in result.err


def test_json_is_all_of_stdout(command: RunCommand) -> None:
    result = command(*SHORT, "--json", "--seed", "3", "--backend", "reference")
    facts = json.loads(result.out)
    assert facts["passed"] is True
    assert facts["backend"] == "reference"
    assert facts["steps"] == len(facts["losses"]) == 3
    assert facts["loss_after"] < facts["loss_before"]
    assert facts["tokens_per_second"] > 0
    assert facts["gradient_check"]["error"] <= facts["gradient_check"]["limit"]
    assert facts["text"].startswith("def ")


def test_bfloat16_trains_under_autocast(command: RunCommand) -> None:
    facts = json.loads(command(*SHORT, "--json", "--dtype", "bfloat16").out)
    assert facts["passed"] is True
    assert facts["gradient_check"]["limit"] >= 1e-2


def test_wrong_gradients_fail(command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = GradientCheck(parameters=1, worst="qkv", error=0.5, limit=1e-5, passed=False)
    monkeypatch.setattr(demo_run, "check_gradients", lambda *_: wrong)
    result = command(*SHORT)
    assert result.code == ExitCode.CHECK_FAILED
    assert "worst qkv: relative error 5.0e-01, allowed 1.0e-05: FAIL" in result.out


def test_a_loss_that_does_not_fall_fails(
    command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_run, "held_out_loss", lambda *_: 5.0)
    result = command(*SHORT)
    assert result.code == ExitCode.CHECK_FAILED
    assert "FAIL, it did not fall" in result.out


def test_a_backend_with_wrong_gradients_is_found(command: RunCommand) -> None:
    class Wrong(WrongBackward):
        def change_grads(self, grads: Any) -> object:
            return grads.dq.mul_(1.01)

    register("cpu.wrong", Wrong)
    result = command(*SHORT, "--backend", "cpu.wrong")
    assert result.code == ExitCode.CHECK_FAILED
    assert "backend cpu.wrong" in result.out
    assert "FAIL" in result.out


def test_pictures_of_the_mask_and_the_loss_are_written(
    command: RunCommand, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the extra demo is not installed")
    facts = json.loads(command(*SHORT, "--json", "--plots", str(tmp_path / "new")).out)
    assert facts["pictures"] == [
        str(tmp_path / "new" / name) for name in ("block_mask.png", "loss.png")
    ]
    for path in facts["pictures"]:
        assert Path(path).read_bytes().startswith(b"\x89PNG")


def test_pictures_need_matplotlib(
    command: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("packed_training.command.plotting_available", lambda: False)
    result = command(*SHORT, "--plots", str(tmp_path))
    assert result.code == ExitCode.NOT_RUN
    assert 'pip install ".[demo]"' in result.err


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_pictures_go_into_a_folder(
    place: str, command: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("packed_training.command.plotting_available", lambda: True)
    (tmp_path / "file").write_text("taken")
    result = command(*SHORT, "--plots", str(tmp_path / place))
    assert result.code == ExitCode.USAGE
    assert "--plots must be a folder, or be free for one: " in result.err
    assert str(tmp_path / place) in result.err and "model:" not in result.err


def test_a_machine_without_sources_is_not_run(
    command: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    result = command(*SHORT)
    assert result.code == ExitCode.NOT_RUN
    assert "holds 0 bytes" in result.err


def test_an_absent_device_is_not_run(command: RunCommand) -> None:
    result = command(*SHORT, "--device", "hpu")
    assert result.code == ExitCode.NOT_RUN
    assert "anyflex demo: --device hpu is not on this machine: " in result.err


def test_a_backend_of_another_name_is_wrong_usage(command: RunCommand) -> None:
    result = command(*SHORT, "--backend", "referense")
    assert result.code == ExitCode.USAGE
    assert "did you mean 'reference'" in result.err


def test_help_is_the_example_s(command: RunCommand) -> None:
    result = command("demo", "--help")
    assert result.code == ExitCode.OK
    assert result.out.startswith("usage: anyflex demo ") and "--plots DIR" in result.out


def test_an_installation_without_the_examples_says_where_they_are(
    command: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "site-packages/anyflex/cli/demo.py"))
    result = command(*SHORT)
    assert result.code == ExitCode.USAGE
    assert "anyflex demo: the demo is one of the examples, which a checkout" in result.err
    assert "python examples/packed_training" in result.err
