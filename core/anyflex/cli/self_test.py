"""A tiny forward and backward on one backend and device, against a dense float64 formula."""

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

__all__ = ["SLOW_S", "SelfTest", "self_test"]

SLOW_S = 5.0
"""Seconds from which ``doctor`` tells how long a step takes."""

# Long enough not to be decoding, with a tail behind the last whole block of any size.
_LENGTH = 83
_BLOCK = 64

# Limits relative to the largest element. bf16 has 8 bits of mantissa, fp16 11, fp32 24.
_LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2, torch.float64: 1e-10}


@dataclass(frozen=True)
class SelfTest:
    """Outcome of a self-test.

    Args:
        device: torch's name of it.
        dtype: ``"float32"``.
        what: ``"forward and backward"``, ``"forward"`` where the backend refuses gradients, and
            ``", without mods"`` where it refuses mods and block masks.
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
    name: str, distribution: str, capabilities: Capabilities, device_type: str
) -> SelfTest:
    """Run the self-test on the backend `name`. Never raises for a fault of the backend.

    Args:
        distribution: of the backend, for messages.
        device_type: where the tensors are: the reference takes any.
    """
    dtype = _dtype(capabilities)
    short = str(dtype).removeprefix("torch.")
    head_dim = declared_head_dim(capabilities, 64)
    limit = _LIMITS[dtype]
    problem = what = ""
    for mods, backward in ((True, True), (True, False), (False, True), (False, False)):
        what = ("forward and backward" if backward else "forward") + (
            "" if mods else ", without mods"
        )
        try:
            with plugin_code(name, distribution, "the self-test", may_refuse=True):
                error = _error(name, dtype, head_dim, device_type, mods, backward)
        except BackendRefused as refusal:
            problem = first_line(refusal)
        except AnyflexError as raised:
            text, lines = first_line(raised), traceback_lines(raised.__cause__)
            return SelfTest(device_type, short, what, False, None, limit, text, lines)
        else:
            # NaN compares false, so it fails here.
            return SelfTest(device_type, short, what, error <= limit, error, limit, "")
    return SelfTest(device_type, short, what, None, None, limit, problem)


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
    name: str, dtype: torch.dtype, head_dim: int, device_type: str, mods: bool, backward: bool
) -> float:
    """Return the largest difference of one call from the formula, relative to the largest right
    value."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, _LENGTH, head_dim)
    *inputs, dout = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    score_mod = _distance if mods else None
    exact = [x.double().requires_grad_(backward) for x in inputs]
    live = dense_mask(_causal, *shape[:3], _LENGTH) if mods else None
    query, key, value = exact
    right = dense_attention(query, key, value, score_mod, live).out
    wanted = _results(right, exact, dout.double())
    on_device = [x.to(device_type).requires_grad_(backward) for x in inputs]
    mask = None
    if mods:
        mask = anyflex.create_block_mask(
            _causal, None, None, _LENGTH, _LENGTH, device=device_type, BLOCK_SIZE=_BLOCK
        )
    query, key, value = on_device
    out = anyflex.flex_attention(query, key, value, score_mod, mask, backend=name)
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
