"""The kit's own mods: every operation of the mod graph is in one of them."""

from __future__ import annotations

import torch

from anyflex.mod_graph.graph import parse_graph
from anyflex.mod_graph.operations import OPERATIONS
from anyflex.testing.mods import SCORE_MODS, Sizes
from anyflex.testing.mods.operation_mods import OPERATION_MODS
from anyflex.tracing.trace import trace_mod

SIZES = Sizes(batch=1, heads=1, group=1, q_length=5, kv_length=7)


def test_every_operation_is_in_some_mod() -> None:
    found = set()
    generator = torch.Generator().manual_seed(0)
    for entry in (*OPERATION_MODS.values(), *SCORE_MODS.values()):
        text = trace_mod(entry.make(SIZES, generator).function(), "score").text
        found |= {node.operation for node in parse_graph(text).nodes}
    assert set(OPERATIONS) - found == set()
