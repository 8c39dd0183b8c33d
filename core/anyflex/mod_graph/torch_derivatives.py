"""Derivatives and clamps that depend on the release of torch: one table of rules and releases.

A mod means the same as in the torch that runs, so these follow it in graphs, in the derivatives of
graphs, and through these in every backend. Kernels are cached under `IN_FORCE`.
"""

from __future__ import annotations

import torch

from anyflex.tensors.torch_versions import release

__all__ = [
    "IN_FORCE",
    "clamp_halves_at_tensors",
    "clamp_stops_at_numbers",
    "fmax_halves_at_ties",
    "integer_clamp_saturates",
]

_SINCE = {
    # x.clamp(0, 1) at a bound: 0, before 1.
    "clamp stops at numbers": (2, 14),
    # x.clamp(low, high) by tensors: at a bound x and the bound get 0.5 each, before x had 1. A NaN
    # gets 1, before 0; where the bounds are equal the replaced value gets a gradient, before none.
    "clamp halves at tensors": (2, 14),
    # torch.fmax and fmin at a tie: 0.5 each, before the first had 1.
    "fmax halves at ties": (2, 14),
    # uint8.clamp(max=300) is the identity and uint8.clamp(max=-1) an error; before, bounds
    # wrapped, and those beyond twice the type were errors.
    "integer clamp saturates": (2, 15),
}
"""Rule -> first release of torch that has it."""

_FOLLOWED = [rule for rule, since in _SINCE.items() if since <= release(torch.__version__)]

IN_FORCE = "; ".join(_FOLLOWED)
"""Rules that hold in this process. A kernel that was made under other rules computes other
results."""

clamp_stops_at_numbers = "clamp stops at numbers" in _FOLLOWED
clamp_halves_at_tensors = "clamp halves at tensors" in _FOLLOWED
fmax_halves_at_ties = "fmax halves at ties" in _FOLLOWED
integer_clamp_saturates = "integer clamp saturates" in _FOLLOWED
