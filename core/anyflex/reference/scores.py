"""Scores of one chunk: q k^T scaled, modified and masked, as forward and backward both need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anyflex.contract.call import Call
from anyflex.errors import ModIndexError
from anyflex.mask_structure.device_views import FULL, PARTIAL
from anyflex.reference.chunks import Chunk
from anyflex.reference.compiled_spec import Prepared
from anyflex.reference.layout import Layout, compute_type
from anyflex.tracing import vmapped_mods

__all__ = ["ChunkScores", "Scores"]


@dataclass(frozen=True, slots=True)
class ChunkScores:
    """One chunk's scores; shapes [B, Hkv, G, R, C] unless said.

    Args:
        query: the scaled rows, [B, Hkv, G, R, E].
        raw: q k^T * scale; overwritten with `modified` where it isn't kept.
        modified: after the score mod, -inf at dead pairs. Owned: may be written into.
        dead: bool, broadcastable to the shape: not visited or masked; None where no pair is.
        inputs: what graphs read, by name: 5-D indices and the raw score.
    """

    query: Tensor
    raw: Tensor
    modified: Tensor
    dead: Tensor | None
    inputs: dict[str, Tensor]


class Scores:
    """Computes chunks of one call's scores.

    Args:
        check: raise `ModIndexError` for a live pair whose captured read leaves its tensor, for
            which the host waits for the device.
    """

    def __init__(self, prepared: Prepared, call: Call, *, check: bool) -> None:
        self.call = call
        self.prepared = prepared
        self.layout = Layout(call.query, call.key)
        self.device = call.query.device
        self.dtype = compute_type(call.query.dtype)
        self.check = check
        self.query = self.layout.grouped(call.query)
        self.key = call.key.to(self.dtype)
        b, h, _, _ = call.index_offsets
        self.b = torch.arange(b, b + self.layout.batch, device=self.device)
        self.h = torch.arange(h, h + self.layout.heads, device=self.device)
        self.sinks: Tensor | None = None
        if call.sinks is not None:
            self.sinks = self.layout.grouped(call.sinks[None])[..., None, None]

    def chunk(self, chunk: Chunk, *, keep_raw: bool) -> ChunkScores:
        """Compute the scores of a chunk with at least one key.

        Args:
            keep_raw: the raw scores are needed beside the modified ones.
        """
        query = self.query[:, :, :, chunk.begin : chunk.end].to(self.dtype) * self.call.scale
        raw = self.layout.times_keys(query, chunk.take(self.key))
        inputs = self._inputs(chunk)
        live = self._live(chunk, inputs)
        inputs["score"] = raw
        modified = self._modified(chunk, raw, inputs, live)
        if keep_raw and modified.data_ptr() == raw.data_ptr():
            modified = raw.clone()
        dead = None
        if live is not None:
            dead = ~live
            modified.masked_fill_(dead, -torch.inf)
        return ChunkScores(query, raw, modified, dead, inputs)

    def add_sink(self, total: Tensor, shift: Tensor) -> Tensor:
        """Return rows' sums of ``exp(score - shift)`` with that of the sink, if there is one; 0
        of dead rows, also where the sink is NaN."""
        if self.sinks is None:
            return total
        return torch.where(total == 0, total, total + torch.exp(self.sinks - shift))

    def flat_indices(self, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Index vectors b [B], h [Hq], q_idx [R], kv_idx [C], offsets added."""
        _, _, q, kv = self.call.index_offsets
        q_idx = torch.arange(q + chunk.begin, q + chunk.end, device=self.device)
        kv_idx = chunk.kv_indices(self.device)
        return self.b, self.h, q_idx, kv_idx + kv if kv else kv_idx

    def _inputs(self, chunk: Chunk) -> dict[str, Tensor]:
        b, h, q_idx, kv_idx = self.flat_indices(chunk)
        return {
            "b": b.view(-1, 1, 1, 1, 1),
            "h": h.view(1, self.layout.kv_heads, self.layout.group, 1, 1),
            "q_idx": q_idx.view(-1, 1),
            "kv_idx": kv_idx,
        }

    def _live(self, chunk: Chunk, inputs: dict[str, Tensor]) -> Tensor | None:
        kinds = chunk.kinds
        mask = None
        if chunk.partial and self.call.mask_function is not None:
            flat = vmapped_mods.apply_mask(self.call.mask_function, self.flat_indices(chunk))
            mask = self.layout.grouped(flat)
        elif chunk.partial and self.prepared.mask is not None:
            call = self.call
            record: list[tuple[int, Tensor]] | None = [] if self.check else None
            (mask,) = self.prepared.mask(inputs, call.captured, call.ints, call.floats, record)
            for position, where in record or ():
                applied = mask if kinds is None else mask & kinds.eq(PARTIAL)
                self._raise_if_live(position, where & applied, "mask_mod", chunk)
        if mask is None:
            return None if kinds is None or not chunk.holes else kinds.ne(0)
        if kinds is None:
            return mask
        if not chunk.full:
            return mask & kinds.ne(0)
        return kinds.eq(FULL) | (mask & kinds.eq(PARTIAL))

    def _modified(
        self,
        chunk: Chunk,
        raw: Tensor,
        inputs: dict[str, Tensor],
        live: Tensor | None,
    ) -> Tensor:
        call = self.call
        if call.score_function is not None:
            flat = vmapped_mods.apply_score(
                call.score_function, self.layout.ungrouped(raw), self.flat_indices(chunk)
            )
            return self.layout.grouped(flat)
        if self.prepared.score is None:
            return raw
        record: list[tuple[int, Tensor]] | None = [] if self.check else None
        (modified,) = self.prepared.score(inputs, call.captured, call.ints, call.floats, record)
        for position, where in record or ():
            self._raise_if_live(
                position, where if live is None else where & live, "score_mod", chunk
            )
        if modified.shape != raw.shape:
            # Not in place: it may be a captured tensor, and pairs may share an element.
            modified = modified.expand(raw.shape).clone(memory_format=torch.contiguous_format)
        return modified

    def _raise_if_live(self, position: int, where: Tensor, mod: str, chunk: Chunk) -> None:
        if not bool(where.any()):
            return
        b, h, q_idx, kv_idx = self.flat_indices(chunk)
        layout = self.layout
        shape = (layout.batch, layout.kv_heads, layout.group, len(q_idx), len(kv_idx))
        found = where.expand(shape).nonzero()
        first = found[0].tolist()
        pair = (
            f"b={int(b[first[0]])}, h={int(h[first[1] * layout.group + first[2]])}, "
            f"q_idx={int(q_idx[first[3]])}, kv_idx={int(kv_idx[first[4]])}"
        )
        table = self.call.captured[position]
        raise ModIndexError(
            f"{mod} reads captured tensor {position}, shape {list(table.shape)}, outside of it at "
            f"{pair}, the first of {len(found)} live pairs",
            operation="captured[...]",
            hint="An index lies in -N..N-1: clamp it, or mask these pairs.",
        )
