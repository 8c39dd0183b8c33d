"""NVIDIA's compute-sanitizer over a few calls of each of a GPU backend's kernels.

    python bench/gpu_sanitizer.py [--backend cuda] [--tool memcheck] [--timeout 300]

The calls are `gpu_random.py`'s, so each is compared with the float64 formula as well. They run
once without the tool, which leaves their kernels in Triton's cache, and then under each of
memcheck, racecheck and synccheck, with every tensor in an allocation of its own. Exits with 1 if a
tool reports an error, a result is wrong, or the tool doesn't end in its time.

What racecheck says of words under mbarriers it says of `racecheck_control.cu` too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["CALLS", "TOOLS", "faults", "main"]

TOOLS = ("memcheck", "racecheck", "synccheck")
CALLS = (7, 8, 48, 54, 56, 64, 83, 92, 142)
"""Numbers of `gpu_random.drawn_case`: forward, backward, deterministic backward, decoding, with
and without masks, in head dims of 64 and 128."""


def command(args: argparse.Namespace) -> list[str]:
    """What runs the calls; their numbers come in by its standard input."""
    program = str(Path(__file__).with_name("gpu_random.py"))
    called = [sys.executable, program, "--serve", "--backend", args.backend, "--repeat", "1"]
    return [*called, *(["--device", args.device] if args.device else [])]


def faults(tool: str, code: int, output: str, wanted: Sequence[int]) -> list[str]:
    """A line for each fault of a run that ended with `code` and wrote a row a call."""
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    lines = [
        f"{tool}: call {row['number']}: {row['problems'][:2]}" for row in rows if row["problems"]
    ]
    missing = sorted(set(wanted) - {row["number"] for row in rows})
    if missing:
        lines.append(f"{tool}: no outcome of {missing}")
    refused = [row["number"] for row in rows if row["variant"].startswith("refused")]
    if refused:
        lines.append(f"{tool}: refused {refused}")
    if code:
        lines.append(f"{tool}: it reports errors (exit status {code})")
    return lines


def main() -> int:
    """Run, print, say whether all was clean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--device", help="default: the backend's device type")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: all three")
    parser.add_argument("--number", type=int, action="append", help="only these calls")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="where it is")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds, of each tool")
    parser.add_argument("--log", type=Path, help="a folder for what the tools print")
    args = parser.parse_args()
    numbers = args.number or list(CALLS)
    lines: list[str] = []
    for tool in (None, *(args.tool or TOOLS)):
        name = tool or "without a tool"
        before = [] if tool is None else [args.sanitizer, "--tool", tool, "--error-exitcode", "9"]
        environment = dict(os.environ)
        if tool is not None:
            # Else an access beyond a tensor is one of its neighbour in torch's own cache.
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        began = time.perf_counter()
        try:
            done = subprocess.run(
                [*before, *command(args)],
                input="".join(f"{number}\n" for number in numbers),
                capture_output=True, text=True, env=environment,
                timeout=args.timeout, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            found = [f"{name}: didn't end in {args.timeout:g} s"]
            written = "".join(_text(each) for each in (late.stdout, late.stderr))
        else:
            found = faults(name, done.returncode, done.stdout, numbers)
            written = done.stdout + done.stderr
        if args.log is not None:
            (args.log / f"{tool or 'plain'}.txt").write_text(written)
        seconds = time.perf_counter() - began
        print(f"{name}: {len(numbers)} calls, {seconds:.0f} s, {len(found)} faults", flush=True)
        lines += found
    print("\n".join(lines or ["clean"]))
    return int(bool(lines))


def _text(written: bytes | str | None) -> str:
    return written.decode(errors="replace") if isinstance(written, bytes) else written or ""


if __name__ == "__main__":
    sys.exit(main())
