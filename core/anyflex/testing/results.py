"""Results of an attention implementation for one call, gradients included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Forward", "Results", "gradients"]


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
