"""Comparison of two implementations' results within one tolerance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anyflex.testing.results import Results

__all__ = ["differences"]


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
