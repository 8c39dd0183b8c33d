"""Which integers of a mod graph fit 32 bits: kernels compute those in int32, the others in int64.

``q_idx * KV_LEN + kv_idx`` leaves int32 at 46k tokens; computed there it would be wrong silently.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anyflex.intervals.analysis import Analysis
from anyflex.intervals.evaluation import Domain
from anyflex.mod_graph.graph import ModGraph

__all__ = ["int32_nodes"]


def int32_nodes(graph: ModGraph, captured: Sequence[Tensor], domain: Domain) -> frozenset[int]:
    """Return the positions of integer nodes that are proven to fit int32 wherever the mod runs.

    Args:
        graph: of a score or mask mod, its numbers bound to constants.
        captured: what its loads count into, on the CPU.
        domain: where the mod runs; indices are inside it.
    """
    limits = torch.iinfo(torch.int32)
    analysis = Analysis(graph, captured, domain)
    ranges = ((position, analysis.range(position)) for position in range(len(graph.nodes)))
    return frozenset(
        position
        for position, found in ranges
        if found is not None and limits.min <= found.low and found.high <= limits.max
    )
