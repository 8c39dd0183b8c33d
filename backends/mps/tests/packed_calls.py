"""Calls of packed sequences, and the dense formula of each sequence in float64.

Whatever a sequence doesn't own is NaN or infinite: rows of its pages behind its keys, pages of
nobody, rows between packed keys. Table entries past a length are ids outside of the pool.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import anyflex

__all__ = ["CALLS", "PackedCall"]

Mod = Callable[..., Tensor]
_GAP = 2
"""Rows of nobody behind each sequence's packed keys."""


class _Sequence(NamedTuple):
    """A sequence alone: query [Hq, L, E], key [Hkv, S, E], value [Hkv, S, Ev]."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True, eq=False)
class PackedCall:
    """A call without gradients.

    Args:
        q_lengths, kv_lengths, slots, starts: of each sequence.
        heads: of query and key.
        dims: of key and value.
        page: rows of a page; 0 for packed keys.
        mask: mask mod, or None.
        scored: whether there is a score mod, which reads all indices.
        sinks: whether there are sinks.
        spare: padding rows behind the last sequence.
        named: whether sequences read the page table's rows of their slots.
        by_bounds: whether rows of blocks are those of an accelerator, which bounds decide.
        infinite: whether some keys and values of the second sequence aren't finite.
    """

    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    slots: tuple[int, ...]
    starts: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (20, 12)
    page: int = 0
    mask: Mod | None = None
    scored: bool = True
    sinks: bool = False
    spare: int = 0
    named: bool = True
    by_bounds: bool = True
    infinite: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0

    scale = 0.3

    @functools.cached_property
    def sequences(self) -> list[_Sequence]:
        """The sequences, each alone."""
        (heads, kv_heads), (dim, value_dim) = self.heads, self.dims
        found = []
        for rows, keys in zip(self.q_lengths, self.kv_lengths, strict=True):
            shapes = (heads, rows, dim), (kv_heads, keys, dim), (kv_heads, keys, value_dim)
            found.append(_Sequence(*(self._draw(len(found), *shape) for shape in shapes)))
        if self.infinite:
            key, value = found[1].key, found[1].value
            key[-1, 3, 2], value[0, 5, 1], value[-1, 7, 3] = torch.nan, torch.inf, torch.nan
        return found

    def _draw(self, number: int, *shape: int) -> Tensor:
        drawn = torch.Generator().manual_seed(self.seed * 1000 + number * 100 + sum(shape))
        return torch.randn(shape, generator=drawn).to(self.dtype)

    @functools.cached_property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Captured tensors: one that is indexed by slot and head, one by the key."""
        slots, keys = max(self.slots) + 1, max(self.kv_lengths) + 1
        tables = self._draw(90, slots, self.heads[0]), self._draw(91, keys)
        return tables[0].float(), tables[1].float()

    @functools.cached_property
    def sink(self) -> Tensor | None:
        """Sinks [Hq], float32."""
        return self._draw(92, self.heads[0]).float() if self.sinks else None

    @functools.cached_property
    def expected(self) -> dict[str, Tensor]:
        """Every result by its name, by the formula."""
        rows, heads = sum(self.q_lengths) + self.spare, self.heads[0]
        out = torch.zeros(rows, heads, self.dims[1], dtype=torch.float64)
        lse = torch.full((rows, heads), -torch.inf, dtype=torch.float64)
        maxima, begin = lse.clone(), 0
        for number, sequence in enumerate(self.sequences):
            end = begin + self.q_lengths[number]
            if self.kv_lengths[number]:
                out[begin:end], lse[begin:end], maxima[begin:end] = self._alone(number, sequence)
            begin = end
        return {"out": out, "lse": lse, "max_scores": maxima}

    def _alone(self, number: int, sequence: _Sequence) -> tuple[Tensor, ...]:
        query, key, value = (each.double() for each in sequence)
        ratio = self.heads[0] // self.heads[1]
        key, value = (each.repeat_interleave(ratio, 0) for each in (key, value))
        b, start = torch.tensor(self.slots[number]), self.starts[number]
        h = torch.arange(self.heads[0])[:, None, None]
        q = start + torch.arange(self.q_lengths[number])[:, None]
        k = torch.arange(self.kv_lengths[number])
        live = torch.ones(len(h), len(q), len(k), dtype=torch.bool)
        if self.mask is not None:
            live = self.mask(b, h, q, k).expand_as(live)
        # A pair that isn't live contributes nothing, though its product may be NaN.
        keys = torch.where(live[..., None], key[:, None], 0.0)
        values = torch.where(live[..., None], value[:, None], 0.0)
        scores = (query[:, :, None] * keys).sum(-1) * self.scale
        if self.scored:
            scores = self._score_mod()(scores, b, h, q, k)
        some = live.any(-1)
        lowest = scores.masked_fill(~live, -torch.inf)
        scores = lowest.masked_fill(~some[..., None], 0.0)
        lse = scores.logsumexp(-1)
        whole = lse
        if self.sink is not None:
            whole = torch.logaddexp(lse, self.sink.double()[:, None])
        weights = torch.where(live, (scores - whole[..., None]).exp(), 0.0)
        out = (weights[..., None] * values).sum(-2)
        lse = lse.masked_fill(~some, -torch.inf)
        return out.transpose(0, 1), lse.T, lowest.amax(-1).T

    def _score_mod(self) -> Mod:
        slope, position = self.tables
        return lambda s, b, h, q, k: (
            torch.tanh(s * 0.5) * 3.0 + slope[b, h] * (q - k + h) * 0.02 + position[k]
        )

    def batch(self, tensors: dict[str, Tensor]) -> anyflex.Packed:
        """Return whose rows are whose."""
        bounds = {}
        if self.by_bounds:
            bounds = {"max_q": max(self.q_lengths) + 1, "max_kv": max(self.kv_lengths) + 1}
        return anyflex.Packed(
            _int32(0, *accumulate(self.q_lengths)),
            _int32(*self.kv_lengths),
            kv_offsets=tensors.get("kv_offsets"),
            page_table=tensors.get("page_table"),
            slots=_int32(*self.slots) if self.named else None,
            q_starts=_int32(*self.starts),
            **bounds,
        )

    @functools.cached_property
    def memory(self) -> dict[str, Tensor]:
        """Query, key and value, and where a sequence's keys are, by the arguments' names."""
        rows = [sequence.query.transpose(0, 1) for sequence in self.sequences]
        spare = torch.full((self.spare, *rows[0].shape[1:]), torch.nan, dtype=self.dtype)
        found = {"query": torch.cat([*rows, spare])}
        if self.page:
            return found | self._pools()
        ends = list(accumulate(keys + _GAP for keys in self.kv_lengths))
        for name in ("key", "value"):
            parts = [getattr(sequence, name).transpose(0, 1) for sequence in self.sequences]
            whole = torch.full((ends[-1], *parts[0].shape[1:]), torch.nan, dtype=self.dtype)
            for end, part in zip(ends, parts, strict=True):
                whole[end - _GAP - part.shape[0] : end - _GAP] = part
            found[name] = whole
        return found | {"kv_offsets": _int32(0, *ends)}

    def _pools(self) -> dict[str, Tensor]:
        counts = [-(-keys // self.page) for keys in self.kv_lengths]
        pages = sum(counts) + 2
        ids = torch.randperm(pages, generator=torch.Generator().manual_seed(3)).tolist()
        # A table is a part of a wider one, and has more rows than the call has sequences.
        height = max(self.slots) + 2 if self.named else len(counts)
        whole = _int32(2**31 - 1, -1, pages).repeat(height, max(counts) + 1)
        table = whole[:, 1 : max(counts) + 3]
        pools = {}
        for name, dim in zip(("key", "value"), self.dims, strict=True):
            memory = torch.full((pages, self.page, self.heads[1], dim), torch.nan)
            memory[1::2] = torch.inf
            pools[name] = memory.to(self.dtype).transpose(1, 2)
        for number, count in enumerate(counts):
            row = table[self.slots[number] if self.named else number]
            for column in range(count):
                row[column] = ids.pop()
                begin = column * self.page
                for name, pool in pools.items():
                    part = getattr(self.sequences[number], name)[:, begin : begin + self.page]
                    pool[int(row[column]), :, : part.shape[1]] = part
        return {**pools, "page_table": table}

    def results(self) -> dict[str, Tensor]:
        """Every result by its name, by the registered backend."""
        memory = self.memory
        # No public name leads there: users can't ask for it on a CPU.
        made = importlib.import_module("anyflex.packed.row_blocks")
        blocks = made.static_row_blocks if self.by_bounds else made.row_blocks
        with patch("anyflex.packed.own_layout.row_blocks", blocks):
            out, aux = anyflex.flex_attention_packed(
                memory["query"], memory["key"], memory["value"], self.batch(memory).begin(),
                self._score_mod() if self.scored else None, self.mask,
                scale=self.scale, enable_gqa=True, sinks=self.sink, backend="mps",
                return_aux=anyflex.AuxRequest(lse=True, max_scores=True),
            )  # fmt: skip
        return {"out": out, "lse": aux.lse, "max_scores": aux.max_scores}


def _int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k <= q) & (k > q - 40 - 9 * b - 7 * h)


_SHARED = PackedCall(
    # Tails of tiles and blocks, a sequence without rows, one without keys, one of two blocks.
    q_lengths=(5, 37, 0, 3, 150),
    kv_lengths=(40, 61, 7, 0, 170),
    slots=(2, 0, 4, 5, 1),
    starts=(35, 24, 0, 3, 20),
    mask=_window,
    sinks=True,
    spare=9,
)
_DECODED = replace(
    _SHARED,
    # Keys make two splits, of which a short sequence has none in the second.
    q_lengths=(1, 5, 3),
    kv_lengths=(40, 561, 130),
    slots=(2, 0, 4),
    starts=(39, 558, 130),
    mask=lambda b, h, q, k: (k <= q) & (k % 16 != b),
)
CALLS = {
    "packed": _SHARED,
    "paged": replace(_SHARED, page=16, mask=None),
    "paged beyond finite numbers": replace(_SHARED, page=16, infinite=True),
    "packed decoding": _DECODED,
    "paged decoding": replace(_DECODED, page=16),
    "paged decoding beyond finite numbers": replace(_DECODED, page=16, infinite=True),
}
"""Calls that launch the kernels of packed sequences."""
