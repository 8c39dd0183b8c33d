"""Cost of a GPU backend before its kernels work: first calls, and number of compilations.

    python bench/gpu_first_calls.py [--backend cuda] [--repeat 3] [--json FILE]

--json writes every process's seconds and the counts, with commit, machine and versions.

First, in one process, calls of many lengths and batches, with every compilation counted by
Triton's listener. Then a causal soft cap, bfloat16, B2 H8 S2048 D128, forward and then backward,
each time in a process of its own, in which torch has its context of the device and has made a
backward of its own: a process's first backward with a given gradient imports sympy, and the time
of that is printed. In a *fresh* process the clock starts before anyflex and Triton are imported;
one that has them *imported* has made no call; a *running* one has made one without mods. *cold*:
the caches on disk are empty but for what that call left there; *warm*: an earlier process has made
the same calls. Medians of --repeat processes. Python's bytecode is there in all of them, as after
an installation. Exits with 1 if a limit isn't met, or a kernel is compiled twice for one class of
calls.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["CLASSES", "LIMITS", "classes_of", "faults", "main"]

KINDS = ("fresh", "imported", "running")
LIMITS = {f"{kind}, cold": 2.0 for kind in KINDS} | {
    "fresh, warm": 1.2,
    "imported, warm": 0.06,
    "running, warm": 0.06,
}
"""Limits in seconds of a first call, forward or backward."""
CLASSES: Mapping[str, Sequence[tuple[int, int, int]]] = {
    "decoding": tuple(itertools.product((1, 2, 5), (1,), (1000, 4096, 32768))),
    "training": tuple((batch, s, s) for batch in (1, 2, 3) for s in (128, 2048, 4096)),
    "training, lengths within tiles": tuple((b, s, s) for b in (1, 2, 3) for s in (65, 1000)),
    "training, up to 16 rows": tuple((b, s, s) for b in (1, 2, 3) for s in (1, 15, 16)),
    "training, 17 rows": tuple((b, 17, 17) for b in (1, 2, 3)),
}
"""(batch, queries, keys) of calls for which each kernel is compiled once."""
SHORT_ROWS = 64
"""Maximum number of query rows that take the kernels of decoding: one kernel for Hopper, in the
table one for each height of tiles."""
HEADS, MULTIPROCESSORS = 8, 132
"""Heads of the calls; multiprocessors of an H100 or an H200."""


def classes_of(backend: str) -> Mapping[str, Sequence[tuple[int, int, int]]]:
    """Return CLASSES. The kernels for Hopper have one class of short rows, and two for each of the
    others: forward has another kernel where all tiles of 64 rows run at once."""
    if backend != "cuda":
        return CLASSES
    found: dict[str, list[tuple[int, int, int]]] = {}
    for name, sizes in CLASSES.items():
        for batch, queries, keys in sizes:
            if name == "decoding":
                of = name
            elif queries <= SHORT_ROWS:
                of = f"training, up to {SHORT_ROWS} rows"
            else:
                few = batch * HEADS * -(-queries // 64) <= MULTIPROCESSORS
                of = name + ", few tiles" * few
            found.setdefault(of, []).append((batch, queries, keys))
    return found


def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 20 * torch.tanh(score / 20)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def drawn(batch: int, queries: int, keys: int, device: str, *, learns: bool) -> list[Tensor]:
    """Query, key and value."""
    return [
        torch.randn(
            batch, HEADS, length, 128, dtype=torch.bfloat16, device=device, requires_grad=learns
        )
        for length in (queries, keys, keys)
    ]


def process_of_first_calls(kind: str, backend: str, device: str) -> dict[str, float]:
    """Seconds of one process's first forward and backward."""
    tensors = drawn(2, 2048, 2048, device, learns=True)
    dout = torch.randn_like(tensors[0])
    torch.accelerator.synchronize()
    began = time.perf_counter()
    torch.zeros_like(dout, requires_grad=True).mul(2).backward(dout)
    torch.accelerator.synchronize()
    of_torch = time.perf_counter() - began

    def calls(mod: Callable[..., Tensor] | None) -> dict[str, float]:
        began = time.perf_counter()
        import anyflex

        mask = None
        if mod is not None:
            mask = anyflex.create_block_mask(causal, None, None, 2048, 2048, device=device)
        out = anyflex.flex_attention(*tensors, mod, mask, backend=backend)
        torch.accelerator.synchronize()
        between = time.perf_counter()
        out.backward(dout)
        torch.accelerator.synchronize()
        return {"forward": between - began, "backward": time.perf_counter() - between}

    if kind == "imported":
        importlib.import_module("anyflex")
        importlib.import_module("triton")
    elif kind == "running":
        calls(None)
    return {**calls(softcap), "torch's backward": of_torch}


def compiled_in_each_class(backend: str, device: str) -> dict[str, dict[str, int]]:
    """How often each kernel was compiled, by class of calls."""
    import triton

    import anyflex

    found: dict[str, dict[str, int]] = {}
    for name, sizes in classes_of(backend).items():
        counted: Counter[str] = Counter()

        def note(
            *, src: Any, cache_hit: bool, counted: Counter[str] = counted, **more: Any
        ) -> None:
            counted[src.name] += not cache_hit

        triton.knobs.compilation.listener = note
        learns = name.startswith("training")
        for batch, queries, keys in sizes:
            tensors = drawn(batch, queries, keys, device, learns=learns)
            mask = None
            if learns:
                mask = anyflex.create_block_mask(causal, None, None, queries, keys, device=device)
            out = anyflex.flex_attention(*tensors, softcap, mask, backend=backend)
            if learns:
                out.backward(torch.randn_like(out))
        torch.accelerator.synchronize()
        found[name] = dict(counted)
    return found


def in_a_process(kind: str, args: argparse.Namespace, folder: str, bytecode: str) -> Any:
    """Run this program as one of its processes, with its caches in `folder`."""
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "ANYFLEX_CACHE_DIR": f"{folder}/anyflex",
        # Shared by all: without it compiling the bytecode of 480 files of sympy takes 2 s.
        "PYTHONPYCACHEPREFIX": bytecode,
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, __file__, "--process", kind, "--backend", args.backend]
    done = subprocess.run(
        [*command, "--device", args.device],
        env=environment, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def faults(
    seconds: Mapping[str, Sequence[Mapping[str, float]]],
    compiled: Mapping[str, Mapping[str, int]],
) -> list[str]:
    """Return a line for each missed limit."""
    lines = []
    for kind, limit in LIMITS.items():
        for direction in ("forward", "backward"):
            median = statistics.median(each[direction] for each in seconds[kind])
            if median > limit:
                lines.append(f"{kind}, {direction}: {median:.3f} s, at most {limit:g}")
    for name, counted in compiled.items():
        lines += [
            f"{name}: {kernel} was compiled {count} times"
            for kernel, count in counted.items()
            if count > 1
        ]
        if not counted:
            lines.append(f"{name}: nothing was compiled")
    return lines


def report_of(
    seconds: Mapping[str, Sequence[Mapping[str, float]]],
    compiled: Mapping[str, Mapping[str, int]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Return the results, with the machine and the versions: as in `anyflex bench`'s reports."""
    # Not at the top, because a fresh process imports anyflex after the clock starts.
    from anyflex.bench.machine import provenance

    return {
        "backend": args.backend,
        **provenance(torch.device(args.device)),
        "seconds": seconds,
        "compiled": compiled,
    }


def main() -> int:
    """Measure, print, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--process", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process == "classes":
        print(json.dumps(compiled_in_each_class(args.backend, args.device)))
        return 0
    if args.process is not None:
        print(json.dumps(process_of_first_calls(args.process, args.backend, args.device)))
        return 0
    seconds: dict[str, list[dict[str, float]]] = {kind: [] for kind in LIMITS}
    with tempfile.TemporaryDirectory() as bytecode:
        # Imports every module that the others do.
        with tempfile.TemporaryDirectory() as folder:
            compiled = in_a_process("classes", args, folder, bytecode)
        for _ in range(args.repeat):
            for kind in KINDS:
                with tempfile.TemporaryDirectory() as folder:
                    for state in ("cold", "warm"):
                        found = in_a_process(kind, args, folder, bytecode)
                        seconds[f"{kind}, {state}"].append(found)
    for kind, samples in seconds.items():
        for direction in ("forward", "backward"):
            times = sorted(each[direction] for each in samples)
            print(
                f"{kind:14} {direction:8} median {statistics.median(times):6.3f} s, "
                f"{times[0]:.3f} to {times[-1]:.3f}, limit {LIMITS[kind]:g}"
            )
    of_torch = [each["torch's backward"] for samples in seconds.values() for each in samples]
    print(f"torch's own first backward, in no figure above: {statistics.median(of_torch):.3f} s")
    for name, counted in compiled.items():
        each = ", ".join(f"{kernel} {count}" for kernel, count in counted.items())
        print(f"compiled for {len(classes_of(args.backend)[name])} calls, {name}: {each}")
    if args.json is not None:
        text = json.dumps(report_of(seconds, compiled, args), indent=1)
        args.json.write_text(text + "\n")
    lines = faults(seconds, compiled)
    print("\n".join(["not met:", *lines] if lines else ["all met"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
