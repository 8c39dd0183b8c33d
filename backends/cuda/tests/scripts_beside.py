"""Scripts of this folder, run in processes of their own, because Triton's compiler and interpreter
settings last for a whole process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["SOAK", "printed_by"]

SOAK = os.environ.get("ANYFLEX_SOAK") == "1"
"""Whether all cases run, as in `make soak`, and not a part."""


def printed_by(script: str, *, interpreted: bool = False) -> list[str]:
    """Return the lines that a script prints; it must exit with 0.

    Args:
        interpreted: whether TRITON_INTERPRET=1 is set; this process's value doesn't matter.
    """
    here = Path(__file__).parent
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, sys.path), str(here)])
    done = subprocess.run(
        [sys.executable, str(here / script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout.splitlines()
