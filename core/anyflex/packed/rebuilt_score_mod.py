"""A score mod made from its traced form."""

from __future__ import annotations

from torch import Tensor

from anyflex.block_mask.mask_function import read_within
from anyflex.mod_graph.evaluate import evaluate
from anyflex.mod_graph.graph import parse_graph
from anyflex.tracing.trace import TracedMod

__all__ = ["RebuiltScoreMod"]


class RebuiltScoreMod:
    """Computes what the user's function did, as `RebuiltMaskMod` does for mask mods."""

    def __init__(self, traced: TracedMod) -> None:
        self.traced = traced

    def __call__(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        graph = parse_graph(self.traced.text)
        return evaluate(
            graph.nodes,
            (graph.output,),
            inputs={"score": score, "b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx},
            captured=self.traced.captured,
            ints=self.traced.ints,
            floats=self.traced.floats,
            read=read_within,
        )[0]
