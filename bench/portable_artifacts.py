"""First calls of a second machine, which has loaded what the first one saved.

    python bench/portable_artifacts.py [--backends cuda,cuda.triton] [--limit 0.2] [--json FILE]

A causal soft cap, forward and backward, of each backend, in fresh processes with empty caches of
anyflex, Triton and Inductor: *cold*; *own*, after `anyflex.load_artifacts`; *torch*, after
`torch.compiler.load_cache_artifacts`. The last two have no C compiler. The clock starts when all
that the first machine imported is imported, and when torch has its context of the device and has
made a backward of its own.

Counts Triton's compiles by its listener, C compiles by the compiler's runs, and the artifacts that
were not there before the call. Exits with 1 if *own* or *torch* compile anything or take longer
than --limit seconds, or if *cold* compiles nothing, so that nothing was shown.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["faults", "main"]

STATES = ("cold", "own", "torch")
_OURS = ("anyflex", "triton", "torch", "sympy", "llvmlite")
"""Packages that are imported before the clock starts."""


def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 20 * torch.tanh(score / 20)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def first_call(state: str, backend: str, folder: Path) -> dict[str, Any]:
    """Time one process's first call. With the state ``save`` it saves for the others."""
    import anyflex
    from anyflex.runtime.disk_cache import store

    device = backend.partition(".")[0]
    compiled: list[str] = []
    if device != "cpu":
        import triton

        def note(*, src: Any, cache_hit: bool, **more: Any) -> None:
            if not cache_hit:
                compiled.append(src.name)

        triton.knobs.compilation.listener = note
    shape, dtype = ((2, 8, 1024, 128), torch.bfloat16)
    if device == "cpu":
        shape, dtype = ((1, 4, 256, 64), torch.float32)
    query, key, value = (
        torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3)
    )
    dout = torch.randn_like(query)
    mask = anyflex.create_block_mask(causal, None, None, shape[2], shape[2], device=device)
    torch.zeros_like(dout, requires_grad=True).mul(2).backward(dout)
    if state != "save":
        for name in json.loads((folder / "modules.json").read_text()):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    if state == "own":
        anyflex.load_artifacts(folder / "own.zip")
    elif state == "torch":
        torch.compiler.load_cache_artifacts((folder / "torch.bin").read_bytes())

    def files() -> set[tuple[str, int]]:
        return {(str(item.path), item.path.stat().st_mtime_ns) for item in store().items()}

    before = files()

    def call() -> None:
        out = anyflex.flex_attention(query, key, value, softcap, mask, backend=backend)
        assert isinstance(out, Tensor)
        out.backward(dout)
        if device != "cpu":
            torch.accelerator.synchronize()

    began = time.perf_counter()
    call()
    seconds = time.perf_counter() - began
    if state == "save":
        names = [name for name in sys.modules if name.partition(".")[0].startswith(_OURS)]
        made = [name for name in names if name.startswith("anyflex_triton_mods_")]
        (folder / "modules.json").write_text(json.dumps(sorted(set(names) - set(made))))
        torch.compile(call)()
        anyflex.save_artifacts(folder / "own.zip")
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None, "torch's bundle is empty"
        (folder / "torch.bin").write_bytes(saved[0])
    return {
        "milliseconds": round(seconds * 1e3, 1),
        "triton_compiles": compiled,
        "new_artifacts": len(files() - before),
    }


def in_a_process(state: str, backend: str, folder: Path, interpreter: str) -> dict[str, Any]:
    """Run this program with empty caches, and count what it compiles in C."""
    with tempfile.TemporaryDirectory() as caches:
        compiles = Path(caches, "compiles")
        compiles.touch()
        environment = {
            **os.environ,
            "ANYFLEX_CACHE_DIR": f"{caches}/anyflex",
            "TRITON_CACHE_DIR": f"{caches}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
        }
        real = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang")
        end = f'exec {real} "$@"' if state in ("save", "cold") and real else "exit 1"
        counting = Path(caches, "counting-cc")
        counting.write_text(f"#!/bin/sh\necho run >> {compiles}\n{end}\n")
        counting.chmod(0o755)
        environment["CC"] = str(counting)
        if state in ("own", "torch"):
            # No compiler on PATH or in the variables.
            environment["PATH"] = caches
        command = [interpreter, __file__, "--process", state, "--backends", backend]
        done = subprocess.run(
            [*command, "--folder", str(folder)],
            env=environment, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return {**found, "c_compiles": len(compiles.read_text().splitlines())}


def faults(backend: str, rows: Mapping[str, Mapping[str, Any]], limit: float) -> list[str]:
    """Return a line for each missed requirement."""
    lines = []
    for state in ("own", "torch"):
        row = rows[state]
        for what in ("triton_compiles", "c_compiles", "new_artifacts"):
            if row[what]:
                lines.append(f"{backend}, {state}: {what} {row[what]}, must be none")
        if row["milliseconds"] > limit * 1e3:
            lines.append(f"{backend}, {state}: {row['milliseconds']} ms, at most {limit * 1e3:g}")
    if not rows["cold"]["new_artifacts"]:
        lines.append(f"{backend}, cold: nothing was compiled, so nothing is shown")
    return lines


def main() -> int:
    """Measure, print, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda,cuda.triton" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--backends", default=default, help=f"default: {default}")
    parser.add_argument("--limit", type=float, default=0.2, help="seconds (default: 0.2)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--process", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process is not None:
        print(json.dumps(first_call(args.process, args.backends, args.folder)))
        return 0
    table: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    print(f"{'backend':12} {'state':6} {'ms':>8} {'Triton':>7} {'C':>3} {'new artifacts':>14}")
    for backend in args.backends.split(","):
        rows = table[backend] = {}
        with tempfile.TemporaryDirectory() as folder:
            in_a_process("save", backend, Path(folder), sys.executable)
            for state in STATES:
                row = rows[state] = in_a_process(state, backend, Path(folder), sys.executable)
                print(
                    f"{backend:12} {state:6} {row['milliseconds']:8} "
                    f"{len(row['triton_compiles']):7} {row['c_compiles']:3} "
                    f"{row['new_artifacts']:14}",
                    flush=True,
                )
        lines += faults(backend, rows, args.limit)
    if args.json is not None:
        from anyflex.bench.machine import provenance

        device = torch.device(args.backends.partition(",")[0].partition(".")[0])
        report = {**provenance(device), "limit": args.limit, "first_calls": table}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
