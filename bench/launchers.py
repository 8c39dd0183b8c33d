"""Host time of a small cached call with the launcher in C and with Triton's own.

    python bench/launchers.py [--backend cuda] [--rounds 5] [--json FILE]

Calls are bfloat16, B1 H2 D64 on an NVIDIA GPU: forward of 128 rows under a causal mask, the same
with its backward, and decoding of one row by 4096 keys. Each launcher has processes of its own,
which take turns and change their order each round. A process's figure is the median of chunks of
calls without synchronization within, after a warm-up; a launcher's is the median of its processes.
Prints microseconds and the share that the launcher in C saves. Exits with 1 if a launcher that was
asked for wasn't used: the one in C is for Triton 3.6.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["main", "saved"]

LAUNCHERS = ("c", "triton")
WARM_UP, CHUNKS, CALLS = 200, 40, 100
"""Calls before the clock starts, measured chunks, and calls of a chunk."""


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def drawn(rows: int, *, learns: bool = False) -> Tensor:
    return torch.randn(1, 2, rows, 64, dtype=torch.bfloat16, device="cuda", requires_grad=learns)


def cases(backend: str) -> dict[str, Callable[[], object]]:
    """Return the calls by name."""
    import anyflex

    q, k, v = (drawn(128) for _ in range(3))
    leaves = [drawn(128, learns=True) for _ in range(3)]
    dout = drawn(128)
    row, keys, values = drawn(1), drawn(4096), drawn(4096)
    mask = anyflex.create_block_mask(causal, None, None, 128, 128, device="cuda")

    def forward() -> object:
        return anyflex.flex_attention(q, k, v, None, mask, backend=backend)

    def training() -> object:
        out = anyflex.flex_attention(*leaves, None, mask, backend=backend)
        return torch.autograd.grad(out, leaves, dout)

    def decoding() -> object:
        return anyflex.flex_attention(row, keys, values, backend=backend)

    return {"forward": forward, "forward and backward": training, "decoding": decoding}


def microseconds(call: Callable[[], object]) -> float:
    """Return the median time of a call over chunks."""
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(CHUNKS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - began) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def process_of(launcher: str, backend: str) -> dict[str, float]:
    """Measure in this process with one launcher.

    Raises:
        RuntimeError: the other one was used.
    """
    from anyflex_triton import nvidia_launch

    if launcher == "triton":
        nvidia_launch.IS_KNOWN = False
    found = {name: microseconds(call) for name, call in cases(backend).items()}
    used = any(isinstance(each, nvidia_launch.Launcher) for each in gc.get_objects())
    if used != (launcher == "c"):
        raise RuntimeError(f"kernels weren't launched by the launcher {launcher}")
    return found


def saved(times: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, tuple[float, float]]:
    """Return each case's medians in microseconds: of the launcher in C, of Triton's.

    Args:
        times: a launcher's processes -> a case's microseconds.
    """
    names = times["c"][0]
    return {
        name: (
            statistics.median(each[name] for each in times["c"]),
            statistics.median(each[name] for each in times["triton"]),
        )
        for name in names
    }


def main() -> int:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--process", choices=LAUNCHERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process is not None:
        print(json.dumps(process_of(args.process, args.backend)))
        return 0
    times: dict[str, list[dict[str, float]]] = {launcher: [] for launcher in LAUNCHERS}
    for turn in range(args.rounds):
        for launcher in LAUNCHERS if turn % 2 == 0 else LAUNCHERS[::-1]:
            done = subprocess.run(
                [sys.executable, __file__, "--process", launcher, "--backend", args.backend],
                stdout=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                return 1
            times[launcher].append(json.loads(done.stdout.splitlines()[-1]))
    for name, (ours, tritons) in saved(times).items():
        print(
            f"{name:22} launcher in C {ours:6.1f} us, Triton's {tritons:6.1f} us, "
            f"saves {1 - ours / tritons:.1%}"
        )
    if args.json is not None:
        args.json.write_text(json.dumps(times, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
