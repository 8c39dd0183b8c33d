"""Random mods: value and gradients equal torch's own, one scalar at a time, in float64."""

from __future__ import annotations

import re
from itertools import compress

import pytest
import torch
from torch import Tensor

from anyflex.mod_graph.evaluate import evaluate
from anyflex.mod_graph.graph import ModGraph, parse_graph
from anyflex.mod_graph.simplify import simplify
from anyflex.tracing.trace import TracedMod, trace_mod
from tests.soak import SOAK
from tests.spellings.expressions import PAIRS, STOPS, RandomMod, random_mod
from tests.spellings.surroundings import one_by_one, traced_gradients

__all__: list[str] = []

COUNT = 2000 if SOAK else 100


def gives_to_nan() -> bool:
    """Whether torch gives a gradient to a NaN that fmax drops: 2.14 does, no release before or
    after."""
    dropped = torch.tensor(float("nan"), requires_grad=True)
    (gradient,) = torch.autograd.grad(torch.fmax(dropped, torch.tensor(1.0)), dropped)
    return bool(gradient == 1)


GIVES_TO_NAN = gives_to_nan()

CLOSE = {"rtol": 1e-7, "atol": 1e-9, "equal_nan": True}


@pytest.mark.usefixtures("float64_numbers")
@pytest.mark.parametrize("seed", range(COUNT))
def test_a_random_mod(seed: int) -> None:
    mod = random_mod(seed)
    score = mod.inputs["score"].clone().requires_grad_()
    rows = [row.double() for row in one_by_one(mod.function, {**mod.inputs, "score": score})]
    wanted = torch.stack(rows).detach()
    leaves = [table.leaf for table in mod.tables if table.leaf.requires_grad]
    # Where the value is NaN or has no bound, attention ends and its gradient isn't compared.
    live = wanted.isfinite()
    learned = [row for row in compress(rows, live) if row.requires_grad]
    gradients: list[Tensor | None] = [None] * (1 + len(leaves))
    if learned:
        gradients = list(
            torch.autograd.grad(torch.stack(learned).sum(), [score, *leaves], allow_unused=True)
        )

    traced = trace_mod(mod.function, "score", torch.float64)
    raw = parse_graph(traced.text)
    constants = {f"i{i}": value for i, value in enumerate(traced.ints)}
    constants |= {f"f{i}": value for i, value in enumerate(traced.floats)}
    for graph in (raw, simplify(raw), simplify(raw.bind(constants=constants))):
        torch.testing.assert_close(
            values(graph, traced, mod), wanted, msg=lambda text: f"{mod}\n{text}", **CLOSE
        )
        if not (GIVES_TO_NAN and re.search("fmax|fmin", mod.source)):
            check_gradients(graph, traced, mod, live, leaves, gradients)


def values(graph: ModGraph, traced: TracedMod, mod: RandomMod) -> Tensor:
    (found,) = evaluate(
        graph.nodes,
        (graph.output,),
        inputs=mod.inputs,
        captured=[tensor.detach() for tensor in traced.captured],
        ints=traced.ints,
        floats=traced.floats,
    )
    return found.expand(PAIRS)


def check_gradients(
    graph: ModGraph,
    traced: TracedMod,
    mod: RandomMod,
    live: Tensor,
    leaves: list[Tensor],
    wanted: list[Tensor | None],
) -> None:
    given = {name: tensor[live] for name, tensor in mod.inputs.items()}
    found, sums, sizes = traced_gradients(traced, graph, given, torch.ones(int(live.sum())))
    expected = torch.zeros_like(found) if wanted[0] is None else wanted[0][live]
    stops = STOPS.search(mod.source) is not None
    if stops:
        expected = torch.where(expected.isnan(), found, expected)
    torch.testing.assert_close(found, expected, msg=lambda text: f"{mod}\nscore: {text}", **CLOSE)
    for leaf, gradient in zip(leaves, wanted[1:], strict=True):
        total, size = torch.zeros(leaf.shape), torch.zeros(leaf.shape)
        for i, tensor in enumerate(traced.captured):
            if i in sums:
                total += at_leaf(tensor, leaf, sums[i])
                size += at_leaf(tensor, leaf, sizes[i])
        expected = torch.zeros_like(total) if gradient is None else gradient.double()
        # torch adds up a narrow table's gradient in its own type.
        budget = 1e-9 + (1e-7 + 16 * torch.finfo(leaf.dtype).eps) * size
        close = (total - expected).abs() <= budget
        same = close | (total == expected) | (expected.isnan() & (total.isnan() | stops))
        assert same.all(), f"{mod}\n{total}\n{expected}"


def at_leaf(tensor: Tensor, leaf: Tensor, gradient: Tensor) -> Tensor:
    """A captured tensor's gradient at the leaf that owns its values; 0 if it is another's."""
    if tensor is leaf:
        return gradient
    owned = torch.zeros(leaf.numel())
    if tensor._base is leaf:
        places = torch.arange(leaf.numel()).as_strided(
            tensor.shape, tensor.stride(), tensor.storage_offset()
        )
        owned.index_put_((places.flatten(),), gradient.flatten(), accumulate=True)
    return owned.reshape(leaf.shape)
