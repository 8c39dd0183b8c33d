"""Whether a contender's numbers are right, by the dense float64 formula: before any timing."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.bench.case import BenchCase, Inputs, make_inputs
from anyflex.bench.contenders import Contender
from anyflex.testing.oracle import dense_attention, dense_mask

__all__ = ["LIMITS", "Formula", "worst_error"]

LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2, torch.float64: 1e-10}
"""Largest error that passes, relative to the largest right value, by dtype."""


class Formula:
    """What is right for a case's small form: out, and where it learns dq, dk and dv.

    Args:
        case: the one that is measured.
        device: that contenders run on; the formula is evaluated on the CPU.
    """

    def __init__(self, case: BenchCase, device: torch.device) -> None:
        self.inputs = make_inputs(case.small(), device)
        self.wanted = self._evaluated()

    def _evaluated(self) -> dict[str, Tensor]:
        # The same functions, made again, with captured tensors on the CPU.
        inputs = make_inputs(self.inputs.case, torch.device("cpu"))
        query, key, value = (
            tensor.detach().double().requires_grad_(tensor.requires_grad)
            for tensor in (inputs.query, inputs.key, inputs.value)
        )
        sizes = (*inputs.case.q_shape[:3], inputs.case.kv_shape[2])
        live = None if inputs.mask_mod is None else dense_mask(inputs.mask_mod, *sizes)
        out = dense_attention(query, key, value, inputs.score_mod, live).out
        return _results(out, (query, key, value), inputs.dout.double())


def worst_error(contender: Contender, formula: Formula) -> tuple[str, float]:
    """Return the result that is worst, and its error relative to the largest right value; NaN
    where one of the two is not finite. Raises whatever the contender raises."""
    inputs: Inputs = formula.inputs
    tensors = (inputs.query, inputs.key, inputs.value)
    # Contenders share the tensors: none may leave a gradient there.
    query, key, value = (t.detach().requires_grad_(t.requires_grad) for t in tensors)
    leaves = (query, key, value)
    found = _results(contender.prepare(inputs)(*leaves), leaves, inputs.dout)
    worst, error = "out", 0.0
    for name, wanted in formula.wanted.items():
        gap = (found[name].detach().cpu().double() - wanted).abs().amax()
        relative = float(gap / wanted.abs().amax().clamp_min(1e-30))
        # NaN is the worst: it compares with nothing.
        if not relative <= error:
            worst, error = name, relative
            if relative != relative:
                break
    return worst, error


def _results(
    out: Tensor, leaves: tuple[Tensor, Tensor, Tensor], dout: Tensor
) -> dict[str, Tensor]:
    results = {"out": out.detach()}
    if leaves[0].requires_grad:
        gradients = torch.autograd.grad(out, leaves, dout)
        results |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    return results
