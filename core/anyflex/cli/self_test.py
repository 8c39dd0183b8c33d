"""Tiny calls on one backend and device, against a dense float64 formula."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import anyflex
from anyflex.contract.capabilities import Capabilities
from anyflex.errors import AnyflexError, BackendRefused
from anyflex.registry.doctor_report import traceback_lines
from anyflex.registry.plugin_errors import first_line, plugin_code
from anyflex.testing.attention_case import declared_head_dim
from anyflex.testing.oracle import dense_attention, dense_mask

__all__ = ["ATTEMPTS", "SLOW_S", "Attempt", "SelfTest", "self_test"]

SLOW_S = 5.0
"""Seconds from which ``doctor`` tells how long a step takes."""

# Long enough not to be decoding, with a tail behind the last whole block of any size.
_LENGTH = 83
_BLOCK = 64

# Limits relative to the largest element. bf16 has 8 bits of mantissa, fp16 11, fp32 24.
_LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2, torch.float64: 1e-10}


@dataclass(frozen=True)
class Attempt:
    """A call of a self-test, of two query heads and as many KV heads unless it says otherwise.

    Args:
        what: the call in words.
        mods: with a score mod and a block mask.
        backward: with the gradients of q, k and v.
        decoding: one query row, four query heads a KV head, a scale that isn't the default; what
            kernels for one row get wrong is seen in no other call.
    """

    what: str
    mods: bool = False
    backward: bool = False
    decoding: bool = False


ATTEMPTS = (
    (
        Attempt("forward and backward", mods=True, backward=True),
        Attempt("forward", mods=True),
        Attempt("forward and backward, without mods", backward=True),
        Attempt("forward, without mods"),
    ),
    (Attempt("decoding with GQA and a scale", decoding=True),),
)
"""Attempts of each self-test: the first that isn't refused counts."""


@dataclass(frozen=True)
class SelfTest:
    """Outcome of a self-test.

    Args:
        device: torch's name of it.
        dtype: ``"float32"``.
        what: the attempt that was not refused, or the last one.
        passed: the numbers are right; None where the backend refuses all of that, which is no
            failure.
        error, limit: largest difference relative to the largest right value, and what is allowed;
            None if no numbers came.
        problem: the error, or "".
        traceback: lines of what a plugin raised.
        seconds: how long it took; told where it is long.
    """

    device: str
    dtype: str
    what: str
    passed: bool | None
    error: float | None
    limit: float
    problem: str
    traceback: tuple[str, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        what = f"self-test on {self.device}, {self.dtype}, {self.what}"
        slow = f" after {self.seconds:.0f} s" if self.seconds >= SLOW_S else ""
        if self.error is None:
            return f"{what}: {'not run' if self.passed is None else 'FAIL'}{slow}, {self.problem}"
        verdict = "PASS" if self.passed else "FAIL"
        return f"{what}: {verdict}{slow} (error {self.error:.1e}, allowed {self.limit:.0e})"


def self_test(
    name: str,
    distribution: str,
    capabilities: Capabilities,
    device_type: str,
    attempts: tuple[Attempt, ...],
) -> SelfTest:
    """Run a self-test on the backend `name`. Never raises for a fault of the backend.

    Args:
        distribution: of the backend, for messages.
        device_type: where the tensors are: the reference takes any.
        attempts: one of `ATTEMPTS`.
    """
    dtype = _dtype(capabilities)
    short = str(dtype).removeprefix("torch.")
    head_dim = declared_head_dim(capabilities, 64)
    limit = _LIMITS[dtype]
    problem = ""
    for attempt in attempts:
        try:
            with plugin_code(name, distribution, "the self-test", may_refuse=True):
                error = _error(name, dtype, head_dim, device_type, attempt)
        except BackendRefused as refusal:
            problem = first_line(refusal)
        except AnyflexError as raised:
            text, lines = first_line(raised), traceback_lines(raised.__cause__)
            return SelfTest(device_type, short, attempt.what, False, None, limit, text, lines)
        else:
            # NaN compares false, so it fails here.
            right = error <= limit
            return SelfTest(device_type, short, attempt.what, right, error, limit, "")
    return SelfTest(device_type, short, attempts[-1].what, None, None, limit, problem)


def _dtype(capabilities: Capabilities) -> torch.dtype:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if dtype in capabilities.dtypes:
            return dtype
    return torch.float32


def _causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def _distance(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score - 0.125 * (h + 1) * (q_idx - kv_idx)


def _error(
    name: str, dtype: torch.dtype, head_dim: int, device_type: str, attempt: Attempt
) -> float:
    """Return the largest difference of one call from the formula, relative to the largest right
    value."""
    generator = torch.Generator().manual_seed(0)
    long, short = (1, 2, _LENGTH, head_dim), (1, 8, 1, head_dim)
    shape = short if attempt.decoding else long
    *inputs, dout = (
        torch.randn(size, generator=generator).to(dtype) for size in (shape, long, long, shape)
    )
    score_mod = _distance if attempt.mods else None
    scale = 2.5 * head_dim**-0.5 if attempt.decoding else None
    exact = [x.double().requires_grad_(attempt.backward) for x in inputs]
    live = dense_mask(_causal, *shape[:3], _LENGTH) if attempt.mods else None
    query, key, value = exact
    right = dense_attention(query, key, value, score_mod, live, scale).out
    wanted = _results(right, exact, dout.double())
    on_device = [x.to(device_type).requires_grad_(attempt.backward) for x in inputs]
    mask = None
    if attempt.mods:
        mask = anyflex.create_block_mask(
            _causal, None, None, _LENGTH, _LENGTH, device=device_type, BLOCK_SIZE=_BLOCK
        )
    query, key, value = on_device
    out = anyflex.flex_attention(
        query, key, value, score_mod, mask, scale, attempt.decoding, backend=name
    )
    assert isinstance(out, Tensor)
    found = _results(out, on_device, dout.to(device_type))
    errors = [
        (result.detach().cpu().double() - true).abs().max() / true.abs().max()
        for result, true in zip(found, wanted, strict=True)
    ]
    return float(torch.stack(errors).max())


def _results(out: Tensor, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    """Return out and, where the inputs need gradients, dq, dk, dv."""
    if not out.requires_grad:
        return [out]
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]
