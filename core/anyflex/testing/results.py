"""Results of an attention implementation for one call, gradients included, and their
comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Forward", "Results", "differences", "gradients"]


@dataclass(frozen=True)
class Forward:
    """Outputs of one call: out [B, Hq, L, Ev], lse and max_scores [B, Hq, L] or None."""

    out: Tensor
    lse: Tensor | None = None
    max_scores: Tensor | None = None


@dataclass(frozen=True)
class Results:
    """Outputs and gradients by name: ``dq``, ``dk``, ``dv``, and each learned leaf's name."""

    forward: Forward
    grads: Mapping[str, Tensor] = field(default_factory=dict)

    def named(self) -> dict[str, Tensor]:
        """Every tensor, by name."""
        outputs = {
            name: tensor.detach()
            for name, tensor in vars(self.forward).items()
            if tensor is not None
        }
        return {**outputs, **self.grads}


def gradients(
    forward: Forward,
    inputs: Mapping[str, Tensor],
    dout: Tensor | None,
    dlse: Tensor | None,
    *,
    missing_is_zero: bool,
) -> dict[str, Tensor]:
    """Gradients of sum(out * dout) + sum(lse * dlse) with respect to `inputs`.

    Args:
        dout, dlse: None where no gradient arrives.
        missing_is_zero: an input that the outputs don't depend on has gradient 0; else autograd's
            None is an error of the implementation under test.
    """
    outputs: list[Tensor] = []
    weights: list[Tensor] = []
    if dout is not None:
        outputs.append(forward.out)
        weights.append(dout)
    if dlse is not None:
        assert forward.lse is not None
        outputs.append(forward.lse)
        weights.append(dlse)
    if not any(output.requires_grad for output in outputs):
        assert missing_is_zero, "no output carries a gradient"
        return {name: torch.zeros_like(tensor) for name, tensor in inputs.items()}
    pairs = [(o, w) for o, w in zip(outputs, weights, strict=True) if o.requires_grad]
    grads = torch.autograd.grad(
        [o for o, _ in pairs],
        list(inputs.values()),
        [w for _, w in pairs],
        allow_unused=True,
    )
    named = {}
    for (name, tensor), grad in zip(inputs.items(), grads, strict=True):
        if grad is None:
            assert missing_is_zero, f"the gradient of {name} is missing"
            grad = torch.zeros_like(tensor)
        named[name] = grad
    return named


def differences(
    found: Results,
    wanted: Results,
    *,
    tolerance: float = 1e-10,
    may_be_nan: Sequence[str] = (),
) -> list[str]:
    """Return a line for each tensor that breaks |a - b| <= tolerance * max(1, max|b|).

    NaN and infinities must be at the same positions. Where `wanted` is finite, a tensor named in
    `may_be_nan` may be NaN.
    """
    lines = []
    ours, theirs = found.named(), wanted.named()
    for name in theirs:
        if name not in ours:
            lines.append(f"{name}: missing")
            continue
        a, b = ours[name], theirs[name]
        if a.shape != b.shape:
            lines.append(f"{name}: shape {tuple(a.shape)}, wanted {tuple(b.shape)}")
            continue
        line = _difference(a.double(), b.double(), tolerance, name in may_be_nan)
        if line:
            lines.append(f"{name}: {line}")
    return lines


def _difference(a: Tensor, b: Tensor, tolerance: float, may_be_nan: bool) -> str:
    if may_be_nan:
        a, b = (torch.where(a.isnan(), a, x) for x in (a, b))
    finite = b.isfinite()
    strange = ~finite & ~((a == b) | (a.isnan() & b.isnan()))
    strange |= finite & ~a.isfinite()
    if strange.any():
        at = tuple(strange.nonzero()[0].tolist())
        return f"{int(strange.sum())} elements not finite alike, first {at}: {a[at]} for {b[at]}"
    if not finite.any():
        return ""
    gap = (a - b).abs()[finite].max().item()
    bound = tolerance * max(1.0, b[finite].abs().max().item())
    return f"off by {gap:.3g}, allowed {bound:.3g}" if not gap <= bound else ""
