"""Check of a contender's numbers against the dense float64 formula, before any timing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anyflex.bench.case import TF32, BenchCase, Inputs, make_inputs
from anyflex.bench.contenders import Contender
from anyflex.testing.oracle import dense_attention, dense_mask

__all__ = ["LIMITS", "Errors", "Formula", "errors_of"]

_CPU = torch.device("cpu")
LIMITS = {"float32": 1e-4, TF32: 1e-2, "float16": 1e-2, "bfloat16": 4e-2, "float64": 1e-10}
"""Largest error that passes, relative to the largest right value, by a case's dtype."""


class Formula:
    """Right results of a case: out, and where it learns dq, dk, dv and those of learned tensors.

    Args:
        case: the one that contenders are checked on.
        device: where contenders run.
        evaluated_on: where the formula is evaluated; its results are on the CPU.
    """

    def __init__(
        self, case: BenchCase, device: torch.device, evaluated_on: torch.device = _CPU
    ) -> None:
        self.inputs = make_inputs(case, device, on_host=True)
        self.wanted = self._evaluated(evaluated_on)

    def _evaluated(self, device: torch.device) -> dict[str, Tensor]:
        # The same functions, made again, with captured tensors on this device.
        inputs = make_inputs(self.inputs.case, device, on_host=True)
        query, key, value = (
            tensor.detach().double().requires_grad_(tensor.requires_grad)
            for tensor in (inputs.query, inputs.key, inputs.value)
        )
        sizes = (*inputs.case.q_shape[:3], inputs.case.kv_shape[2])
        with device:  # for the oracle's indices
            live = None if inputs.mask_mod is None else dense_mask(inputs.mask_mod, *sizes)
            out = dense_attention(query, key, value, inputs.score_mod, live).out
        found = _results(out, (query, key, value, *inputs.learned), inputs.dout.double())
        return {name: tensor.cpu() for name, tensor in found.items()}


class Errors(NamedTuple):
    """Errors of a contender; NaN where one of the two is non-finite.

    Args:
        worst: the result whose largest error is largest.
        largest: that error, relative to the largest right value.
        rms: root of the mean of squares, relative to that of the right values, of the result
            where it is largest. A largest error is one element's; this one tells which of two
            contenders rounds better.
    """

    worst: str
    largest: float
    rms: float


def errors_of(contender: Contender, formula: Formula) -> Errors:
    """Return a contender's errors. Raises whatever the contender raises."""
    inputs: Inputs = formula.inputs
    tensors = (inputs.query, inputs.key, inputs.value)
    # Contenders share the tensors: none may leave a gradient there.
    query, key, value = (t.detach().requires_grad_(t.requires_grad) for t in tensors)
    out = contender.prepare(inputs)(query, key, value)
    found = _results(out, (query, key, value, *inputs.learned), inputs.dout)
    worst = Errors("out", 0.0, 0.0)
    for name, wanted in formula.wanted.items():
        gaps = found[name].detach().cpu().double() - wanted
        largest = float(gaps.abs().amax() / wanted.abs().amax().clamp_min(1e-30))
        rms = float(gaps.square().mean().sqrt() / wanted.square().mean().sqrt().clamp_min(1e-30))
        # NaN sorts as the worst, because it compares false.
        if largest != largest:
            return Errors(name, largest, rms)
        if largest > worst.largest:
            worst = worst._replace(worst=name, largest=largest)
        worst = worst._replace(rms=max(worst.rms, rms))
    return worst


def _results(out: Tensor, leaves: Sequence[Tensor], dout: Tensor) -> dict[str, Tensor]:
    """`leaves`: query, key, value and learned tensors."""
    results = {"out": out.detach()}
    if leaves[0].requires_grad:
        gradients = torch.autograd.grad(out, leaves, dout)
        names = ["dq", "dk", "dv", *(f"d(learned {i})" for i in range(len(leaves) - 3))]
        results |= dict(zip(names, gradients, strict=True))
    return results
