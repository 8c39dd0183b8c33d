"""NVIDIA's compute-sanitizer over a few calls of each of a GPU backend's kernels.

    python bench/gpu_sanitizer.py [--backend cuda] [--tool memcheck] [--timeout 900]

The calls are those of `kernel_calls.py`, random ones and presets' rows, each of which is compared
with the float64 formula as well. They run once without the tool, which leaves their kernels in
Triton's cache, and then under each of memcheck, racecheck and synccheck, with every tensor in an
allocation of its own. Exits with 1 if a tool reports an error, a result is wrong, or the tool
doesn't end in its time.

racecheck doesn't follow what mbarriers hand from one thread to many. Hazards of three kinds are no
errors, as long as it says the same of `racecheck_control.cu`, rings that are right, which is built
by --nvcc and run too: both accesses are of words that `smem_mailbox.py` says or reads; or of what
Triton hands to the warps of `gl.warp_specialize`, which it puts at that call, at the kernel's name
or at a condition around the call; or of what one consumer of `hopper_wide_backward.py` places for
the other, `factors`, by named barriers, of which the control has a ring of its own. They are
printed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from kernel_calls import OF_EACH_KERNEL

__all__ = ["TOOLS", "control_fault", "controls", "excused", "faults", "hazard_faults", "main"]

_Place = tuple[str, int]
"""Name of a file, and a line."""
_Pair = tuple[_Place, _Place]
TOOLS = ("memcheck", "racecheck", "synccheck")
REPORTED = 9
"""Exit status of a tool that has reported an error."""
WIDE = "hopper_wide_backward.py"
CONTROL = Path(__file__).with_name("racecheck_control.cu")
_HAZARD = re.compile(r"Race reported between(.*)\n=+ +and (.*)")
_PLACE = re.compile(r"([\w.-]+\.(?:py|cu|h)):(\d+)")


def command(args: argparse.Namespace) -> list[str]:
    """Command that runs the calls; it reads their numbers from standard input."""
    program = str(Path(__file__).with_name("gpu_random.py"))
    called = [sys.executable, program, "--serve", "--backend", args.backend, "--repeat", "1"]
    return [*called, *(["--device", args.device] if args.device else [])]


def faults(tool: str, code: int, output: str, wanted: Sequence[int]) -> list[str]:
    """Return a line for each fault of a run that ended with `code` and wrote a row a call."""
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
    hazards = hazard_faults(output) if tool == "racecheck" and code == REPORTED else None
    if hazards is not None:
        lines += hazards
    elif code:
        lines.append(f"{tool}: it reports errors (exit status {code})")
    return lines


def hazard_faults(output: str) -> list[str] | None:
    """Return a line for each pair of places between which racecheck reports a race that isn't one
    of the three kinds; None where it reports no race, or one without its places."""
    pairs = _races(output)
    return None if pairs is None else _told(pair for pair in pairs if not _is_excused(pair))


def excused(output: str) -> list[str]:
    """Return a line for each pair of places of one of the three kinds."""
    return _told(pair for pair in _races(output) or () if _is_excused(pair))


def _races(output: str) -> set[_Pair] | None:
    """Pairs of places, or None as in `hazard_faults`."""
    hazards = _HAZARD.findall(output)
    pairs = set()
    for accesses in hazards:
        first, second = map(_PLACE.search, accesses)
        if first is None or second is None:
            return None
        pairs.add(((first[1], int(first[2])), (second[1], int(second[2]))))
    return pairs if hazards and len(hazards) == output.count("Race reported between") else None


def _told(pairs: Iterable[_Pair]) -> list[str]:
    ordered = {tuple(sorted(pair)) for pair in pairs}
    return [
        "racecheck: a race between " + " and ".join(f"{name}:{line}" for name, line in pair)
        for pair in sorted(ordered)
    ]


def _is_excused(pair: _Pair) -> bool:
    return any(all(map(kind, pair)) for kind in (_is_word, _is_handed_over, _is_placed))


def controls(output: str) -> set[str]:
    """Return the arguments of the control, one for each kind of race that is no error: "" or
    "arrive"."""
    excused_pairs = [pair for pair in _races(output) or () if _is_excused(pair)]
    found = {"arrive" if all(map(_is_placed, pair)) else "" for pair in excused_pairs}
    # One of the words goes from consumer to consumer by such a barrier.
    wide = WIDE in output and any(all(map(_is_word, pair)) for pair in excused_pairs)
    return found | ({"arrive"} if wide else set())


def _is_word(place: _Place) -> bool:
    name, line = place
    # Where a compiler has merged two reads, only the call that they were made for is known.
    return name == "smem_mailbox.py" or any(
        _calls(node, "said", "said_of_step") and line in _lines(node) for node in _nodes(name)
    )


def _is_handed_over(place: _Place) -> bool:
    name, line = place
    for node in _nodes(name):
        if _calls(node, "warp_specialize") and line in _lines(node):
            return True
        # The kernel, or a condition that it is compiled for.
        if isinstance(node, (ast.FunctionDef, ast.If)) and line == node.lineno:
            return any(_calls(inner, "warp_specialize") for inner in ast.walk(node))
    return False


def _is_placed(place: _Place) -> bool:
    name, line = place
    return name == WIDE and any(
        _calls(node, "load", "store")
        and line in _lines(node)
        and any(getattr(inner, "attr", "") == "factors" for inner in ast.walk(node))
        for node in _nodes(name)
    )


def _calls(node: ast.AST, *names: str) -> bool:
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return called in names


def _lines(node: ast.AST) -> range:
    assert isinstance(node, ast.Call)
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


@lru_cache
def _nodes(name: str) -> list[ast.AST]:
    """Return the nodes of a file of anyflex_cuda, none if there is no file of that name."""
    found = importlib.util.find_spec("anyflex_cuda")
    folders = [] if found is None else found.submodule_search_locations or []
    paths = [path for folder in folders if (path := Path(folder, name)).is_file()]
    return [
        node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]


def control_fault(sanitizer: str, nvcc: str, timeout: float, argument: str) -> str | None:
    """Return why the control doesn't excuse racecheck's hazards, or None where it does.

    Args:
        argument: of `controls`.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "control")
        try:
            subprocess.run(
                [nvcc, "-arch=sm_90a", "-lineinfo", "-o", program, CONTROL],
                capture_output=True, text=True, timeout=timeout, check=True,
            )  # fmt: skip
            done = subprocess.run(
                [sanitizer, "--tool", "racecheck", "--error-exitcode", str(REPORTED), program,
                 *filter(None, [argument])],
                capture_output=True, text=True, timeout=timeout, check=False,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            return f"racecheck: its control can't be built or run: {error}"
    if done.returncode != REPORTED or not _HAZARD.search(done.stdout + done.stderr):
        called = f"its control {argument}".rstrip()
        return (
            f"racecheck: it reports nothing of {called}, so what it reports of such places counts"
        )
    return None


def main() -> int:
    """Run and print; return 0 if all was clean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--device", help="default: the backend's device type")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: all three")
    parser.add_argument("--number", type=int, action="append", help="only these calls")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="where it is")
    parser.add_argument("--nvcc", default="nvcc", help="what builds racecheck's control")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds, of each tool")
    parser.add_argument("--log", type=Path, help="a folder for what the tools print")
    args = parser.parse_args()
    numbers = args.number or list(OF_EACH_KERNEL)
    lines: list[str] = []
    for tool in (None, *(args.tool or TOOLS)):
        name = tool or "without a tool"
        exits = ["--error-exitcode", str(REPORTED)]
        before = [] if tool is None else [args.sanitizer, "--tool", tool, *exits]
        environment = dict(os.environ)
        if tool is not None:
            # Without it, an access beyond a tensor reaches its neighbour in torch's own cache.
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
            written = done.stdout + done.stderr
            found = faults(name, done.returncode, written, numbers)
            if tool == "racecheck" and done.returncode == REPORTED:
                for argument in sorted(controls(written)):
                    fault = control_fault(args.sanitizer, args.nvcc, args.timeout, argument)
                    found += [] if fault is None else [fault]
                print("\n".join(f"no error: {line}" for line in excused(written)), flush=True)
        if args.log is not None:
            args.log.mkdir(parents=True, exist_ok=True)
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
