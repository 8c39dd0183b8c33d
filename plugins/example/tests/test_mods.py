"""The table covers every operation, and its text computes what it should."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from anyflex_example.mods import TORCH, Pairs, load_source, write_function, write_source

from anyflex.plugin import CapturedFacts, Node, Spec, parse_graph
from anyflex.testing import check_lowering


def test_the_table_lacks_no_operation() -> None:
    assert TORCH.problems() == []


def computed(nodes: Sequence[Node], wanted: Sequence[int], **given: Any) -> list[torch.Tensor]:
    """The nodes' values by the backend's own source."""
    (position,) = wanted
    call: Any = SimpleNamespace(query=torch.empty(0), **given)
    source = f"import torch\nfrom math import inf, nan\n{write_function('f', nodes, position)}"
    return [load_source(source)["f"](Pairs(call, given["inputs"], check=False))]


def test_every_operation_of_every_type_computes_what_torch_does() -> None:
    check_lowering(computed)


def test_a_mod_becomes_the_source_of_two_functions() -> None:
    # score + table[h], whose table learns
    graph = parse_graph("input f32 - score;input i64 - h;load f32 1 0;add f32 0,2 -;=3")
    spec = Spec(
        "cpu",
        "",
        torch.float32,
        16,
        16,
        score_graph=graph,
        captured=(CapturedFacts(torch.float32, 1, True),),
        gradients=("q",),
    )
    forward, backward = write_source(spec).split("\n\n\n")[1:]
    assert forward.splitlines() == [
        "def score_mod(pairs):",
        "    v0 = pairs.input('score', torch.float32)",
        "    v1 = pairs.input('h', torch.int64)",
        "    v2 = pairs.load(0, v1)",
        "    v3 = torch.add(v0, v2)",
        "    return v3",
    ]
    assert backward.splitlines()[-1] == "    return v1, [(0, (v0, ), v1)]"
