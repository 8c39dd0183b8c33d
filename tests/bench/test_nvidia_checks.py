"""`scripts/nvidia_checks.sh`, with programs in the place of nvidia-smi and Python that record
their arguments: which step runs where, and the consequences of a failure."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NVIDIA_SMI = "#!/bin/sh\nseq 0 $((GPUS - 1))\n"
PYTHON = '#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES: $@"\ncase "$*" in *"$FAILS"*) exit 7;; esac\n'


def run(
    tmp_path: Path,
    *arguments: str,
    gpus: int = 2,
    visible: str | None = None,
    fails: str = "nothing",
) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """Run the script; return its result, and each step's log."""
    for name, text in (("nvidia-smi", NVIDIA_SMI), ("python", PYTHON)):
        program = tmp_path / name
        program.write_text(text)
        program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "GPUS": str(gpus),
        "FAILS": fails,
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    script = ROOT / "scripts/nvidia_checks.sh"
    done = subprocess.run(
        ["bash", script, tmp_path / "python", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=60,
    )
    return done, {log.stem: log.read_text().strip() for log in tmp_path.glob("out/*.log")}


@pytest.mark.parametrize(
    ("mode", "used"),
    [("check", {"0,1", "1,0"}), ("first-calls", {"0,1"}), ("measure", {"0,1", "1,0"})],
)
def test_two_gpus_share_the_steps_and_one_runs_them_all(
    tmp_path: Path, mode: str, used: set[str]
) -> None:
    two, shared = run(tmp_path, mode, str(tmp_path / "out"))
    one, alone = run(tmp_path, mode, str(tmp_path / "out"), gpus=1)
    assert two.returncode == one.returncode == 0
    assert shared.keys() == alone.keys()
    assert {log.partition(":")[0] for log in shared.values()} == used
    assert {log.partition(":")[0] for log in alone.values()} == {"0"}
    for log in alone.values():
        _, *words = log.split()
        if words[0] == "-m":
            assert words[1] in ("anyflex", "pytest")
        else:
            assert (ROOT / words[0]).is_file()


def test_it_keeps_to_the_gpus_that_it_may_see(tmp_path: Path) -> None:
    folder = str(tmp_path / "out")
    _, logs = run(tmp_path, "check", folder, gpus=8, visible="5,3,1")
    assert {log.partition(":")[0] for log in logs.values()} == {"5,3", "3,5"}
    _, logs = run(tmp_path, "check", folder, gpus=8, visible="GPU-6f")
    assert {log.partition(":")[0] for log in logs.values()} == {"GPU-6f"}
    done, _ = run(tmp_path, "check", folder, gpus=8, visible="")
    assert done.returncode == 3


def test_every_report_that_is_made_is_held_to_its_targets(tmp_path: Path) -> None:
    _, logs = run(tmp_path, "measure", str(tmp_path / "out"))
    targets = [log for name, log in logs.items() if name.startswith("targets")]
    made = {f"{tmp_path}/out/{name}.json" for name in logs if not name.startswith("targets")}
    assert len(made) == 9
    assert made == {word for log in targets for word in log.split() if word.endswith(".json")}


def test_a_failing_step_fails_the_whole_after_all_have_run(tmp_path: Path) -> None:
    _, whole = run(tmp_path, "check", str(tmp_path / "out"))
    done, logs = run(tmp_path, "check", str(tmp_path / "out"), fails="gpu_random")
    assert done.returncode == 1
    assert (
        logs.keys()
        == whole.keys()
        == {
            *("kit", "kit-triton", "kit-intel", "device", "random", "repeats", "sanitizer"),
            "precision",
        }
    )
    assert "random: status 7" in (tmp_path / "out/summary.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "gpus", "status", "said"),
    [
        (("check",), 2, 2, "FOLDER"),
        (("all", "out"), 2, 2, "first-calls"),
        (("check", "out"), 0, 3, "no NVIDIA GPU"),
    ],
)
def test_what_it_cannot_do_it_says(
    tmp_path: Path, arguments: tuple[str, ...], gpus: int, status: int, said: str
) -> None:
    mode, *folder = arguments
    done, logs = run(tmp_path, mode, *[str(tmp_path / each) for each in folder], gpus=gpus)
    assert done.returncode == status
    assert said in done.stderr and "set -e" not in done.stderr
    assert not logs
