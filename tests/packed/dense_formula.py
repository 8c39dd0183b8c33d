"""Attention over packed sequences by the dense formula in float64, sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Sequence", "dense_formula"]


class Sequence(NamedTuple):
    """Rows of one sequence: of queries, and of the packed keys that it reads."""

    rows: slice
    start: int
    slot: int
    keys: Tensor


def dense_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: list[Sequence],
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out [T, Hq, Ev] and lse [T, Hq] of float64 tensors, differentiable."""
    total, heads, dim = query.shape
    group = heads // key.shape[1]
    out: dict[int, Tensor] = {}
    lse: dict[int, Tensor] = {}
    for rows, start, slot, keys in sequences:
        count = rows.stop - rows.start
        if count == 0 or len(keys) == 0:
            continue
        q = query[rows].transpose(0, 1)
        k, v = (t[keys].repeat_interleave(group, 1).transpose(0, 1) for t in (key, value))
        scores = q @ k.transpose(1, 2) * dim**-0.5
        at = (
            torch.tensor(slot),
            torch.arange(heads)[:, None, None],
            torch.arange(start, start + count)[None, :, None],
            torch.arange(len(keys))[None, None, :],
        )
        if score_mod is not None:
            scores = score_mod(scores, *at)
        if mask_mod is not None:
            scores = torch.where(mask_mod(*at), scores, -torch.inf)
        found = torch.logsumexp(scores, -1)
        total_lse = found if sinks is None else torch.logaddexp(found, sinks[:, None])
        weights = torch.exp(scores - torch.where(found.isneginf(), 0.0, total_lse)[..., None])
        for i, row in enumerate(range(rows.start, rows.stop)):
            out[row] = (weights @ v)[:, i]
            lse[row] = found[:, i]
    outs = [out.get(row, query.new_zeros(heads, value.shape[-1])) for row in range(total)]
    lses = [lse.get(row, query.new_full((heads,), -torch.inf)) for row in range(total)]
    if total == 0:
        return query.new_zeros(0, heads, value.shape[-1]), query.new_zeros(0, heads)
    return torch.stack(outs), torch.stack(lses)
