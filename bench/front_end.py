"""Cost of a cached call before its kernel starts, and of a decode step's mask: a null backend, one
thread.

Usage: python bench/front_end.py [--calls N] [--rounds N] [--json FILE]

q, k, v are [1, 2, 16, 8]; the score mod is a closure made anew at each call, with one captured
tensor and one number; there is a block mask. Checks, key, lookup, allocation and autograd count.
A figure is the median of N calls; of several rounds the best counts, since another load on the
machine can only add. Exits 1 when a limit is not met: 20 us forward, 30 us with gradients
recorded, 80 us forward and backward, 150 us where the mod must be traced again; 1000 us to trace
a new mod; 20 us for the mask of a decode step: `row_slice` of a ready mask of 4096 rows and keys,
or lengths that kernels read when they run.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable

import torch
from host_time import run

import anyflex

LIMITS_US = {
    "forward": 20.0,
    "recorded": 30.0,
    "forward+backward": 80.0,
    "retrace": 150.0,
    "trace: causal mask": 1000.0,
    "trace: documents and window": 1000.0,
    "trace: softcap, learned bias, gelu": 1000.0,
    "decode: row of a causal mask": 20.0,
    "decode: the same, keys bounded": 20.0,
    "decode: row of a padded batch of 4": 20.0,
    "decode: lengths of 4 caches": 20.0,
}


def median_us(function: Callable[[], object], calls: int) -> float:
    for _ in range(200):
        function()
    times = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        function()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1000


def closure(slopes: torch.Tensor, offset: float) -> Callable[..., torch.Tensor]:
    def alibi(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return score + slopes[h] * (kv_idx - q_idx) + offset

    return alibi


def measure(calls: int) -> dict[str, float]:
    query, key, value = torch.randn(3, 1, 2, 16, 8).unbind(0)
    slopes = torch.rand(2)
    mask = anyflex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16)
    leaves = [t.clone().requires_grad_() for t in (query, key, value, slopes)]
    gradient = torch.ones_like(query)
    numbers = iter(range(10**9))

    def forward() -> torch.Tensor:
        return anyflex.flex_attention(query, key, value, closure(slopes, 3.0), mask)

    def retrace() -> torch.Tensor:
        return anyflex.flex_attention(
            query, key, value, closure(slopes, float(next(numbers))), mask
        )

    def recorded() -> torch.Tensor:
        return anyflex.flex_attention(*leaves[:3], closure(leaves[3], 3.0), mask)

    def forward_and_backward() -> object:
        return torch.autograd.grad(recorded(), leaves, gradient)

    return {
        "forward": median_us(forward, calls),
        "recorded": median_us(recorded, calls),
        "forward+backward": median_us(forward_and_backward, calls),
        "retrace": median_us(retrace, calls),
        **traces(calls // 10),
        **decode_masks(calls // 10),
        **parts(calls, query, key, value, slopes, mask),
    }


def traces(calls: int) -> dict[str, float]:
    """Tracing alone, without any cache."""
    from anyflex.tracing.trace import trace_mod

    document, bias, slopes = torch.arange(64) // 9, torch.rand(4, 127), torch.rand(4)

    def causal(b, h, q, k):  # type: ignore[no-untyped-def]
        return q >= k

    def documents(b, h, q, k):  # type: ignore[no-untyped-def]
        return (document[q] == document[k]) & (q >= k) & (q - k < 32) | (k < 4)

    def everything(s, b, h, q, k):  # type: ignore[no-untyped-def]
        capped = 30 * torch.tanh(s / 30)
        near = torch.where((q - k).abs() < 8, torch.nn.functional.gelu(capped), capped)
        return near + bias[h, q - k + 63] - slopes[h] * (q - k).abs().clamp(max=40) / 8

    return {
        "trace: causal mask": median_us(lambda: trace_mod(causal, "mask"), calls),
        "trace: documents and window": median_us(lambda: trace_mod(documents, "mask"), calls),
        "trace: softcap, learned bias, gelu": median_us(
            lambda: trace_mod(everything, "score"), calls
        ),
    }


def decode_masks(calls: int) -> dict[str, float]:
    """The mask of each step anew, for at most 3000 steps that enter a block of rows now and then:
    by a ready mask, or by lengths where each cache is a page of its own."""
    length, batch = 4096, 4
    live = torch.ones(batch, length, dtype=torch.bool)
    live[0, : length // 8] = False
    causal = anyflex.create_block_mask(anyflex.masks.causal(), None, None, length, length)
    padded = anyflex.create_block_mask(
        lambda b, h, q, k: (q >= k) & live[b, k], batch, None, length, length
    )
    table = torch.arange(batch, dtype=torch.int32).view(batch, 1)
    caches = anyflex.Packed.with_capacity(batch, 1, length, page_table=table)
    rows = itertools.cycle(range(length - 3000, length))

    def bounded() -> object:
        row = next(rows)
        return causal.row_slice(row, row + 1, kv_len=row + 1)

    def lengths() -> object:
        caches.set([1] * batch, [next(rows)] * batch)
        return caches.begin()

    return {
        "decode: row of a causal mask": median_us(
            lambda: causal.row_slice(row := next(rows), row + 1), calls
        ),
        "decode: the same, keys bounded": median_us(bounded, calls),
        "decode: row of a padded batch of 4": median_us(
            lambda: padded.row_slice(row := next(rows), row + 1), calls
        ),
        "decode: lengths of 4 caches": median_us(lengths, calls),
    }


def parts(calls, query, key, value, slopes, mask) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """The same call, piece by piece."""
    from anyflex.frontend.arguments import check_tensors
    from anyflex.frontend.aux_outputs import AuxRequest
    from anyflex.frontend.checked_call import CheckedCall
    from anyflex.frontend.eager_call import gather
    from anyflex.runtime.launch import launch_forward
    from anyflex.runtime.plan import plan_for
    from anyflex.tracing.trace_cache import traced

    aux = AuxRequest()
    cpu = torch.device("cpu")
    checked = CheckedCall(query, key, value, closure(slopes, 3.0), mask, 0.3, aux, (), None, 0)
    inputs = gather(checked)
    plan = plan_for(inputs)
    call = inputs.call

    def checks() -> None:
        check_tensors(query, key, value, False)

    return {
        "part: argument checks": median_us(checks, calls),
        "part: mod key and cached trace": median_us(
            lambda: traced(closure(slopes, 3.0), "score", torch.float32, cpu), calls
        ),
        "part: inputs (with the trace)": median_us(
            lambda: gather(checked._replace(score_mod=closure(slopes, 3.0))),
            calls,
        ),
        "part: facts and plan lookup": median_us(lambda: plan_for(inputs), calls),
        "part: allocation and null launch": median_us(lambda: launch_forward(plan, call), calls),
    }


if __name__ == "__main__":
    sys.exit(run(__doc__, measure, LIMITS_US, calls=10_000, rounds=3))
