"""Time of compiled code that calls torch's flex attention, as it is and re-routed to anyflex.

    python bench/gpu_rerouting.py [--rounds 7] [--length 8192]

`torch.compile(flex_attention)` with torch's block masks on an NVIDIA GPU: B2 H16 D128, 4 KV heads,
bfloat16; forward alone, and with backward. Times are device events, medians of rounds before,
during and after the re-routing, each after three that compile. Exits with 1 where re-routed code
takes longer than torch's, or a result differs by more than a hundredth of the largest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import anyflex
from anyflex.bench.machine import command_of, source_commit

__all__ = ["main"]

DEVICE, WARMUPS, TOLERANCE = "cuda", 3, 0.01

Mod = Callable[..., Any]


def programs(length: int) -> dict[str, tuple[Mod | None, Mod]]:
    """Return score and mask functions by name, as users of torch write them."""
    slopes = torch.rand(16, device=DEVICE) / 16
    ids = torch.arange(length, device=DEVICE) * 6 // length

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    def alibi(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s - slopes[h] * (q - k)

    def capped(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return 30.0 * torch.tanh(s / 30.0)

    return {
        "causal": (None, causal),
        "ALiBi, causal": (alibi, causal),
        "soft cap, window 1024": (capped, lambda b, h, q, k: (q >= k) & (q - k < 1024)),
        "6 documents": (None, lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)),
    }


def compiled(
    score: Mod | None, mask: Mod, length: int, trains: bool
) -> Callable[[], list[Tensor]]:
    """Return a function of a user's compiled call, that returns out and, if it `trains`, gradients
    of q, k and v."""
    draw = torch.Generator().manual_seed(1)
    q, k, v, dout = (
        torch.randn(2, heads, length, 128, generator=draw).to(DEVICE, torch.bfloat16)
        for heads in (16, 4, 4, 16)
    )
    leaves = [tensor.requires_grad_(trains) for tensor in (q, k, v)]
    blocks = create_block_mask(mask, None, None, length, length, device=DEVICE)
    call = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def run() -> list[Tensor]:
        out = call(*leaves, score, blocks, enable_gqa=True)
        return [out, *torch.autograd.grad(out, leaves, dout)] if trains else [out]

    return run


def milliseconds(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def measured(run: Callable[[], list[Tensor]], rounds: int) -> tuple[list[Tensor], list[float]]:
    """Return the results and a time for each round."""
    results = [run() for _ in range(WARMUPS)][-1]
    return results, [milliseconds(run) for _ in range(rounds)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--length", type=int, default=8192)
    options = parser.parse_args()
    print(
        f"`{command_of('bench/gpu_rerouting.py')}`, torch {torch.__version__}, commit "
        f"{source_commit()}\n\n| Program | | re-routed, ms | torch |\n|---|---|---|---|"
    )
    failed = False
    for name, functions in programs(options.length).items():
        for trains in (False, True):
            torch.compiler.reset()
            run = compiled(*functions, options.length, trains)
            wanted, before = measured(run, options.rounds)
            anyflex.reroute_torch([DEVICE])
            try:
                found, times = measured(run, options.rounds)
            finally:
                anyflex.restore_torch()
            _, after = measured(run, options.rounds)
            error = max(
                float((one - other).abs().amax() / other.abs().amax())
                for one, other in zip(found, wanted, strict=True)
            )
            own = statistics.median(times)
            ratio = statistics.median([*before, *after]) / own
            remark = f" results differ by {error:.3f} of the largest" if error > TOLERANCE else ""
            remark += " slower than torch" if ratio < 1 else ""
            failed = failed or bool(remark)
            direction = "forward + backward" if trains else "forward"
            print(f"| {name} | {direction} | {own:.2f} | {ratio:.2f}{remark} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
