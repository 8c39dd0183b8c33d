"""Random calls, right and wrong: each is right by the formula or refused, none ends the process.

ANYFLEX_FUZZED_CALLS says how many, in processes of `CHUNK` calls: a crash then names its call.
`make soak` makes 100,000. `python fuzz_calls.py N 1` makes call N again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CALLS = int(os.environ.get("ANYFLEX_FUZZED_CALLS", "400"))
CHUNK = 2000
SECONDS = 900
"""Of one process: a call that waits for ever is a failure too."""
SCRIPT = Path(__file__).parent / "fuzz_calls.py"


def made(first: int, count: int, folder: Path, script: Path = SCRIPT) -> tuple[str, str]:
    """Make calls in a process of their own; return what it counted, and what was wrong."""
    progress = folder / f"call-{first}"
    line = [sys.executable, "-X", "faulthandler", str(script), str(first), str(count)]
    environment = os.environ | {
        "ANYFLEX_CACHE_DIR": str(folder / "cache"),
        # Where tests find the packages.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    try:
        done = subprocess.run(
            [*line, str(progress)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "", f"call {progress.read_text()} doesn't end within {SECONDS} s"
    if done.returncode != 0:
        where = progress.read_text() if progress.exists() else "none"
        return "", f"call {where.strip()}, status {done.returncode}:\n{done.stderr[-4000:]}"
    return done.stdout, ""


def test_random_calls_are_right_or_refused(tmp_path: Path) -> None:
    starts = range(0, CALLS, CHUNK)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(
            pool.map(lambda first: made(first, min(CHUNK, CALLS - first), tmp_path), starts)
        )
    assert [wrong for _, wrong in outcomes if wrong] == []
    counts: dict[str, int] = {}
    for printed, _ in outcomes:
        for number, kind in re.findall(r"(\d+)  (.+)", printed):
            counts[kind] = counts.get(kind, 0) + int(number)
    print(counts)
    assert sum(counts.values()) == CALLS
    # Nothing is left out by chance, or by an error that passes for a refusal.
    assert counts["right"] > CALLS * 0.4
    assert counts["wrong, refused"] > CALLS * 0.2
    assert counts["right, with bad numbers"] > CALLS * 0.04


def test_a_crash_names_its_call(tmp_path: Path) -> None:
    program = tmp_path / "fuzz_calls.py"
    program.write_text(
        "import os, sys, ctypes\n"
        "open(sys.argv[3], 'w').write(f'{int(sys.argv[1]):12d}')\n"
        "ctypes.string_at(0)\n",
        encoding="utf-8",
    )
    printed, wrong = made(7, 1, tmp_path, program)
    assert printed == "" and re.match(r"call 7, status -\d+:", wrong), wrong
