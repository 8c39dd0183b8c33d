"""Scripts of this folder, run in two processes of their own, because Triton's compiler and
interpreter settings last for a whole process. Each process runs scripts one after the other: it
imports torch and Triton once."""

from __future__ import annotations

import functools
import io
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

__all__ = ["SOAK", "printed_by"]

SOAK = os.environ.get("ANYFLEX_SOAK") == "1"
"""Whether all cases run, as in `make soak`, and not a part."""


@functools.cache
def _process(interpreted: bool) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"))


def _run(script: str, interpreted: bool) -> str:
    """Return what the script's `main` prints."""
    # Triton reads this when it is imported.
    os.environ.pop("TRITON_INTERPRET", None)
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
    sys.argv = [script]
    with redirect_stdout(io.StringIO()) as said:
        status = import_module(Path(script).stem).main()
    assert status == 0, said.getvalue()
    return said.getvalue()


def printed_by(script: str, *, interpreted: bool = False) -> list[str]:
    """Return the lines that a script prints; its `main` must return 0.

    Args:
        interpreted: whether TRITON_INTERPRET=1 is set; this process's value doesn't matter.
    """
    done = _process(interpreted).submit(_run, script, interpreted)
    return done.result(timeout=86_400 if SOAK else 900).splitlines()
