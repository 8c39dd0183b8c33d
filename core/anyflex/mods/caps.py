"""Soft caps: scores are squeezed into an open interval by tanh."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.mods.factory_arguments import checked_bool
from anyflex.tensors.dynamo_errors import fail
from anyflex.tracing.mod_types import ScoreMod

__all__ = ["softcap"]

# tanh(x) is x * P(x * x) / Q(x * x) up to |x| = 7 and constant beyond; coefficients from the
# lowest up. Fitted by least squares whose weights follow the error until its extrema are equal.
_LIMIT = 7.0
_P0, _P1, _P2, _P3 = 0.99999569, 0.123021815, 0.00227698669, 3.92999596e-06
_Q1, _Q2, _Q3 = 0.456340305, 0.0210721719, 0.000142350535


def softcap(cap: float, approximate: bool = False) -> ScoreMod:
    """Return the score mod ``cap * tanh(score / cap)``.

    A new cap doesn't compile a new kernel for ever: it is a run-time number from its second value.

    Args:
        cap: positive and finite.
        approximate: True: tanh by a quotient of two polynomials, a division and ten
            multiplications and additions, off by at most 1.2e-6 (the result by 1.2e-6 * cap), its
            derivative by at most 1.2e-5.

    Raises:
        ArgumentTypeError: cap is no number, or approximate no bool.
        ArgumentError: cap is not positive, or not finite.

    Source: Gemma Team 2024, Gemma 2, arXiv:2408.00118; earlier for logits: Bello et al. 2016,
    arXiv:1611.09940.
    """
    if isinstance(cap, bool) or not isinstance(cap, (int, float)):
        fail("ArgumentTypeError", f"softcap: cap must be a float, got {type(cap).__name__}.")
    # Not math.isfinite, which Dynamo can't follow for a float that changes between calls.
    if not (cap > 0 and cap - cap == 0):
        fail("ArgumentError", f"softcap: cap must be positive and finite, got {cap}.")
    checked_bool("softcap: approximate", approximate)
    limit = float(cap)

    def softcap_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return limit * torch.tanh(score / limit)

    def rational_softcap_mod(
        score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Any:
        x = (score / limit).clamp(-_LIMIT, _LIMIT)
        y = x * x
        upper = x * (((_P3 * y + _P2) * y + _P1) * y + _P0)
        return limit * (upper / (((_Q3 * y + _Q2) * y + _Q1) * y + 1.0))

    return rational_softcap_mod if approximate else softcap_mod
