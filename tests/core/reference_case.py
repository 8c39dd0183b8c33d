"""One call of the reference kernel, put together by hand: no front end, no block-mask builder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyflex.contract.call import Call, GradInputs, Grads, Outputs, Saved
from anyflex.contract.spec import CapturedFacts, Spec
from anyflex.mask_structure.device_views import FULL, PARTIAL, MaskViews
from anyflex.mod_graph.graph import ModGraph, parse_graph
from anyflex.reference.backend import ReferenceBackend
from anyflex.tracing.trace import TracedMod, trace_mod
from anyflex.tracing.vmapped_mods import read_tensors

__all__ = ["ReferenceCase", "views_of", "wide"]


class NoArtifacts:
    """The reference keeps nothing."""

    def get(self, name: str) -> bytes | None:
        return None

    def put(self, name: str, data: bytes) -> None:
        raise AssertionError("the reference wrote an artifact")


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def views_of(kinds: Tensor, lengths: tuple[int, int], block: tuple[int, int]) -> MaskViews:
    """Views of a structure given as kinds [B', H', Qb, Kb] of 0, FULL, PARTIAL."""
    batch, heads, rows, _ = kinds.shape
    runs: list[list[int]] = []
    offsets = torch.zeros(batch, heads, rows + 1, dtype=torch.int32)
    for b in range(batch):
        for h in range(heads):
            offsets[b, h, 0] = len(runs)
            for r in range(rows):
                for c, kind in enumerate(kinds[b, h, r].tolist()):
                    if kind and r_open(runs, int(offsets[b, h, r]), c, kind):
                        runs[-1][1] = c + 1
                    elif kind:
                        runs.append([c, c + 1, kind])
                offsets[b, h, r + 1] = len(runs)
    packed = torch.tensor(runs, dtype=torch.int32).view(-1, 3)
    return MaskViews(offsets, packed, *lengths, block)


def r_open(runs: list[list[int]], first: int, column: int, kind: int) -> bool:
    """Whether the last run belongs to this row and goes on at `column`."""
    return len(runs) > first and runs[-1][1] == column and runs[-1][2] == kind


@dataclass
class ReferenceCase:
    """Tensors, mods and structure of one call.

    Args:
        kinds: [B', H', Qb, Kb] of 0, FULL, PARTIAL, or None for no block mask.
        vmap: don't trace the score mod: run it through vmap.
        leaves: what the mod's captured tensors are views of, where they need a gradient; None
            for the captured tensors themselves.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    kinds: Tensor | None = None
    block: tuple[int, int] = (16, 16)
    scale: float | None = None
    vmap: bool = False
    leaves: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        dtype = self.query.dtype
        captured: list[Tensor] = []
        ints: list[int] = []
        floats: list[float] = []
        score = None
        if self.score_mod is not None and not self.vmap:
            score = self._bound(
                trace_mod(self.score_mod, "score", wide(dtype)), captured, ints, floats
            )
        if self.vmap:
            captured += read_tensors(self.score_mod, torch.device("cpu"))
        mask = None
        if self.mask_mod is not None:
            mask = self._bound(trace_mod(self.mask_mod, "mask"), captured, ints, floats)
        views = None
        q, k, v = self.query, self.key, self.value
        if self.kinds is not None:
            views = views_of(self.kinds, (q.shape[2], k.shape[2]), self.block)
        self.spec = Spec(
            device_type="cpu",
            arch="",
            dtype=dtype,
            head_dim=q.shape[3],
            value_head_dim=v.shape[3],
            gqa_ratio=q.shape[1] // k.shape[1],
            kv_broadcast=k.shape[0] != q.shape[0],
            score_graph=score,
            mask_graph=mask,
            mask_kind="none" if views is None else "runs",
            block_size=(0, 0) if views is None else self.block,
            captured=tuple(CapturedFacts(t.dtype, t.dim(), t.requires_grad) for t in captured),
            aux=("lse", "max_scores"),
            needs_lse=True,
            gradients=("q", "k", "v"),
            dlse=True,
            determinism="off",
            fp32_precision="highest",
            q_class="long",
            alignment=("strided",) * 3,
            index_width=64,
            opaque=self.vmap,
        )
        self.call = Call(
            q.detach(),
            k.detach(),
            v.detach(),
            views,
            tuple(captured),
            tuple(ints),
            tuple(floats),
            1 / math.sqrt(q.shape[3]) if self.scale is None else self.scale,
            self.score_mod if self.vmap else None,
        )
        backend = ReferenceBackend("reference", "cpu")
        assert type(backend.supports(self.spec)).__name__ == "Accepted", backend.supports(
            self.spec
        )
        self.kernel = backend.compile(self.spec, NoArtifacts())

    @staticmethod
    def _bound(
        traced: TracedMod, captured: list[Tensor], ints: list[int], floats: list[float]
    ) -> ModGraph:
        graph = parse_graph(traced.text).bind(
            shift_captured=len(captured), shift_ints=len(ints), shift_floats=len(floats)
        )
        captured += traced.captured
        ints += traced.ints
        floats += traced.floats
        return graph

    def forward(self) -> Outputs:
        """Run forward into outputs filled with NaN."""
        q = self.query
        shape = (*q.shape[:3], self.value.shape[3])
        out = Outputs(
            torch.full(shape, math.nan, dtype=q.dtype),
            torch.full(q.shape[:3], math.nan, dtype=wide(q.dtype)),
            torch.full(q.shape[:3], math.nan, dtype=wide(q.dtype)),
        )
        self.kernel.forward(self.call, out)
        return out

    def backward(
        self,
        out: Outputs,
        dout: Tensor,
        dlse: Tensor | None = None,
        delta: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Grads:
        """Run backward into gradients filled with NaN."""
        grads = Grads(
            *(
                torch.full(t.shape, math.nan, dtype=t.dtype)
                for t in (self.query, self.key, self.value)
            ),
            captured=tuple(
                torch.zeros(t.shape, dtype=wide(t.dtype) if t.is_floating_point() else None)
                if t.requires_grad
                else None
                for t in self.call.captured
            ),
        )
        assert out.lse is not None
        saved = Saved(out.out, out.lse if lse is None else lse)
        self.kernel.backward(self.call, saved, GradInputs(dout, dlse, delta), grads)
        return grads

    def learned(self) -> Sequence[Tensor]:
        """Captured tensors that require grad."""
        return [t for t in self.call.captured if t.requires_grad]

    def live(self) -> Tensor:
        """Bool [B, Hq, L, S] by structure and mask function: the definition, densely."""
        batch, heads, rows, _ = self.query.shape
        columns = self.key.shape[2]
        shape = (batch, heads, rows, columns)
        if self.kinds is None:
            return torch.ones(shape, dtype=torch.bool)
        row_block = torch.arange(rows) // self.block[0]
        column_block = torch.arange(columns) // self.block[1]
        kind = self.kinds[:, :, row_block][:, :, :, column_block].expand(shape)
        if self.mask_mod is None:
            return kind != 0
        indices = [
            torch.arange(size).view([-1 if d == i else 1 for d in range(4)])
            for i, size in enumerate(shape)
        ]
        masked = self.mask_mod(*indices).expand(shape)
        return (kind == FULL) | ((kind == PARTIAL) & masked)
