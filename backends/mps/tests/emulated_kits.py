"""Whole conformance kit in the emulator, once for each schedule, build and numeric variant.

    python backends/mps/tests/emulated_kits.py [--variant NAME]... [--jobs 2, or what else
    `anyflex conformance` takes]

Runs every variant even if one fails, says which did, and fails if one did.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from emulated_backend import Emulated
from emulator import SCHEDULES, Numerics, compile_shader, missing_compiler

from anyflex_mps.shaders import CompileShader

__all__ = ["NAME", "VARIANTS", "EmulatedVariant", "Variant", "main"]

NAME = "mps.emulated"
CHOICE = "METAL_EMULATOR_VARIANT"
"""Environment variable by which the kit's processes learn the variant."""


class Variant(NamedTuple):
    """One way to run every kernel.

    Args:
        race: whether it is the race build, which checks races and bounds exactly.
        schedule: order in which threads run.
        numerics: what Apple's GPU may compute otherwise.
    """

    race: bool
    schedule: str = "forward"
    numerics: Numerics = Numerics()


VARIANTS = {
    **{f"races-{schedule}": Variant(True, schedule) for schedule in SCHEDULES},
    **{f"plain-{schedule}": Variant(False, schedule) for schedule in SCHEDULES},
    "denormals-flushed": Variant(False, numerics=Numerics(flush_denormals=True)),
    "contracted": Variant(False, numerics=Numerics(contract=True)),
    "inexact-1": Variant(False, numerics=Numerics(ulps=1)),
    "inexact-4": Variant(False, numerics=Numerics(ulps=4)),
    "sums-reversed": Variant(False, numerics=Numerics(reversed_sums=True)),
}


class EmulatedVariant(Emulated):
    """Backend whose kernels run as the environment's variant says."""

    def compile_shader(self) -> CompileShader:
        return partial(compile_shader, **VARIANTS[os.environ[CHOICE]]._asdict())

    def check_gpu(self, dtype: torch.dtype) -> None:
        """Accept every variant: the self test would refuse the arithmetic that some are about."""


def _run_kit(variant: str, arguments: list[str]) -> int:
    """Run the kit with `EmulatedVariant` registered, as an installed plugin is."""
    with tempfile.TemporaryDirectory() as folder:
        facts = Path(folder, "emulated_mps-0.0.0.dist-info")
        facts.mkdir()
        facts.joinpath("METADATA").write_text(
            "Metadata-Version: 2.1\nName: emulated-mps\nVersion: 0.0.0\n"
        )
        facts.joinpath("entry_points.txt").write_text(
            f"[anyflex.backends.v1]\n{NAME} = {Path(__file__).stem}:{EmulatedVariant.__name__}\n"
        )
        path = [folder, str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), CHOICE: variant}
        command = [sys.executable, "-m", "anyflex", "conformance", "--backend", NAME]
        command += ["--device", "cpu", "--require", "forward,backward,decode", *arguments]
        return subprocess.run(command, env=environment, check=False).returncode


def main() -> int:
    """Run the kits and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--variant", action="append", choices=list(VARIANTS))
    chosen, arguments = parser.parse_known_args()
    reason = missing_compiler()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 3
    failed = []
    for variant in chosen.variant or VARIANTS:
        print(f"== {variant}", flush=True)
        began = time.monotonic()
        status = _run_kit(variant, arguments)
        print(f"== {variant}: status {status}, {time.monotonic() - began:.0f} s", flush=True)
        if status:
            failed.append(variant)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
