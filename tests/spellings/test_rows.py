"""Rows of captured tensors have torch's values and gradients, eagerly and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.errors import ModIndexError, ModTraceError
from anyflex.mod_graph.evaluate import evaluate
from anyflex.mod_graph.graph import parse_graph
from anyflex.tracing.trace import TracedMod, trace_mod
from anyflex.tracing.trace_cache import traced
from tests.soak import SOAK
from tests.spellings.surroundings import (
    Pairs,
    function_of,
    one_by_one,
    pairs,
    tables,
    traced_gradients,
)

__all__: list[str] = []

FLOATS = """
(w2[q] * w2[k]).sum(-1)
s + (w2[q] * w2[k]).sum()
torch.dot(w2[q], w2[k]) * s
w2[q] @ w2[k] + s
torch.inner(p[q], p[k])
(p[q] - p[k]).square().sum(-1).sqrt()
torch.sum((p[q] - p[k]) ** 2, dim=-1)
(p[q] - p[k]).norm() * s
torch.linalg.norm(p[q] - p[k])
torch.linalg.vector_norm(p[q], dim=-1)
torch.norm(p[q] - p[k], dim=-1, keepdim=True).squeeze(-1)
p[q].mean() + torch.prod(p[k], -1)
p[q].amax(-1) - torch.amin(p[k])
p[q].max() + torch.min(p[k])
torch.maximum(p[q], p[k]).sum()
torch.where(p[q] > p[k], p[q], s).sum()
torch.where(condition=p[q] > 0, input=p[q], other=p[k]).sum()
torch.clamp(p[q], min=-0.5, max=0.5).prod()
p[q][0] * s + p[k][-1]
p[q, :2].sum() + p[k, 1:][0]
p[q, ::2].sum()
(p[q][:, None] * p[k][None, :]).sum((0, 1))
(p[q].unsqueeze(-1) * p[k]).sum(-1).amax()
(v * s).sum()
(s * v).exp().sum().log()
torch.tanh(v * s).mean()
sum(v * s)
sum(x * i for i, x in enumerate(p[q]))
torch.stack([s, w[q], w[k]]).sum()
torch.stack([p[q], p[k]], -1).prod(-1).sum()
torch.stack([p[q], p[k]])[1].sum()
torch.cat([p[q], p[k]]).square().sum()
torch.cat((p[q], s.unsqueeze(0))).mean()
p[q].view(3, 1).expand(3, 2).reshape(-1).sum()
p[q].flatten().reshape(1, 3)[0, 2] * s
w.gather(0, k)
torch.gather(w2[q], 0, k) + torch.gather(w2[q], -1, q)
torch.take(w, k) + w2.take(q * 16 + k)
w2[q].take(k)
w.index_select(0, k).sum() + w2.index_select(0, q)[0, 3]
F.embedding(k, w2)[q] + F.embedding(q, p).sum(-1)
w2[q][ids[k]].sum() + w[ids[q]].mean() + w2[k, ids[q]][1]
w2[q].select(0, 3) + w2[..., k].select(0, q)
torch.stack([s, s + 1, s + 2])[k % 3]
p[k] @ v[:3] * s
s if v.numel() == 4 and len(p[q]) == 3 and p[q].shape == (3,) else None
s * (v.ndim + p[q].dim() + p[q].size(0) + p[q].numel())
s + v[1].item() * 2 + float(v[2]) + v.tolist()[0]
s.float() + (h16[q] * h16[k]).sum() * 0.5 + h16[q].mean()
(torch.nn.functional.relu(p[q]) + torch.sigmoid(p[k])).sum()
(-p[q]).abs().sum() + (1 - p[k]).sum() + (2.0 / (p[q] ** 2 + 1)).sum()
p[q].new_zeros(()) if False else p[q].to(torch.float64).sum().float()
""".strip().splitlines()

OTHERS = """
(ids[q] == k.unsqueeze(-1)).any(-1)
(ids[q] == k).any()
torch.any(ids[q][:, None] == ids[k][None, :])
torch.stack([q > 1, k > 1, q >= k]).all()
torch.isin(k, ids[q])
torch.isin(k, v.long(), invert=True)
torch.isin(ids[q], ids[k]).sum()
~torch.isin(elements=k, test_elements=torch.tensor([1, 5, 9]))
(ids[q] != ids[k]).all(0)
ids[q].sum() + ids[k].prod()
ids[q].amax() - ids[k].amin()
torch.count_nonzero(ids[q] > 7)
(ids[q] > 7).sum(-1)
torch.bucketize(s, edges)
torch.bucketize(s, edges, right=True)
torch.searchsorted(edges, s, side='left') - torch.searchsorted(edges, s, side='right')
torch.searchsorted(edges, w[q], right=True)
torch.bucketize(k, ends, right=True) == torch.bucketize(q, ends, right=True)
torch.bucketize(k, ends, out_int32=True)
torch.searchsorted(ends2[q % 2], k)
torch.bucketize(w2[q], edges).sum()
torch.bucketize(s, v[:0]) + torch.bucketize(s, v[:1]) + torch.bucketize(s, ends[:2].float())
torch.bucketize(s.unsqueeze(0), edges)[0]
(p[q] > 0).any() & (p[k] > 0).all()
""".strip().splitlines()


def captured_tensors(dtype: torch.dtype, learned: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(11)

    def floats(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return values.requires_grad_(learned)

    half = torch.float16 if dtype is torch.float32 else dtype
    edges = torch.linspace(-3, 3, 1000).to(dtype)
    edges[100:140] = edges[100]
    edges[500] = 0.5
    return {
        **tables(dtype, learned=learned),
        "p": floats(16, 3),
        "v": torch.tensor([0.5, 3.0, -1.0, 7.0], dtype=dtype).requires_grad_(learned),
        "h16": floats(16, 4).detach().to(half).requires_grad_(learned),
        "ids": torch.randint(0, 16, (16, 4), generator=generator),
        "edges": edges.sort().values,
        "ends": torch.tensor([0, 3, 3, 7, 12, 15, 16]),
        "ends2": torch.tensor([[1, 4, 9, 12], [0, 0, 8, 14]]),
    }


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def values(expression: str, captured: dict[str, Any], given: Pairs) -> Tensor:
    function = function_of(expression, captured)
    return computed(
        trace_mod(lambda *operands: function(*operands) * 1.0, "score", given["score"].dtype),
        given,
    )


def computed(traced: TracedMod, given: Pairs) -> Tensor:
    graph = parse_graph(traced.text)
    (found,) = evaluate(
        graph.nodes,
        (graph.output,),
        inputs=given,
        captured=[tensor.detach() for tensor in traced.captured],
        ints=traced.ints,
        floats=traced.floats,
    )
    return found.expand(len(given["score"]))


@pytest.mark.parametrize("expression", [*FLOATS, *OTHERS])
def test_the_value_is_torchs(expression: str) -> None:
    captured, given = captured_tensors(torch.float32), pairs(torch.float32)
    wanted = torch.stack(one_by_one(function_of(expression, captured), given))
    found = values(expression, captured, given)
    close = {"rtol": 1e-3, "atol": 1e-3} if "h16" in expression else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found.float(), wanted.float(), equal_nan=True, **close)


@pytest.mark.usefixtures("float64_numbers")
@pytest.mark.parametrize("expression", FLOATS)
def test_the_gradient_is_autograds(expression: str) -> None:
    captured, given = captured_tensors(torch.float64, learned=True), pairs(torch.float64)
    some = given["score"].isfinite()
    given = {name: value[some] for name, value in given.items()}
    score = given["score"].clone().requires_grad_()
    expression = expression.replace(".float()", ".double()")
    rows = torch.stack(one_by_one(function_of(expression, captured), {**given, "score": score}))
    weights = torch.linspace(0.5, 1.5, len(rows), dtype=torch.float64)
    leaves = [tensor for tensor in captured.values() if getattr(tensor, "requires_grad", False)]
    wanted = torch.autograd.grad((rows * weights).sum(), [score, *leaves], allow_unused=True)
    traced = trace_mod(function_of(expression, captured), "score", torch.float64)
    found, sums, _ = traced_gradients(traced, parse_graph(traced.text), given, weights)
    pairs_of = [(found, score, wanted[0])]
    for leaf, gradient in zip(leaves, wanted[1:], strict=True):
        total = torch.zeros_like(leaf)
        for i, tensor in enumerate(traced.captured):
            if i in sums:
                (part,) = torch.autograd.grad(tensor, leaf, sums[i], allow_unused=True)
                total = total if part is None else total + part
        pairs_of.append((total, leaf, gradient))
    for mine, leaf, gradient in pairs_of:
        torch.testing.assert_close(
            mine,
            torch.zeros_like(leaf) if gradient is None else gradient,
            rtol=1e-9,
            atol=1e-10,
            equal_nan=True,
        )


COMPILED = [
    expression
    for expression in (*FLOATS, *OTHERS)
    # torch's own compiler refuses both.
    if ".item()" not in expression
    and "@ w2" not in expression
    and (SOAK or ("w2" not in expression and "edges" not in expression))
]


@pytest.mark.parametrize("first", range(12) if SOAK else (5,))
def test_a_compiled_trace_has_the_eager_ones_values(first: int) -> None:
    captured, given = captured_tensors(torch.float32, learned=True), pairs(torch.float32)
    expressions = COMPILED[first::12]
    mods = [function_of(f"({expression}) * 1.0", captured) for expression in expressions]

    def traces(x: Tensor) -> tuple[Tensor, list[Any]]:
        traced = [trace_mod(mod, "score") for mod in mods]
        return x + 1.0, [(each.text, each.captured, each.ints, each.floats) for each in traced]

    _, found = torch.compile(traces, backend="eager", fullgraph=True)(torch.ones(1))
    for expression, (text, tensors, ints, floats) in zip(expressions, found, strict=True):
        mine = computed(TracedMod(text, tensors, ints, floats, []), given)
        assert torch.equal(mine.nan_to_num(), values(expression, captured, given).nan_to_num())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_call_with_rows_has_the_values_and_gradients_of_the_formula(
    backend: str, compiled: bool
) -> None:
    generator = torch.Generator().manual_seed(2)
    rotary = torch.randn(24, 8, generator=generator, requires_grad=True)
    latent = torch.randn(24, 8, generator=generator, requires_grad=True)
    query, key, value = (
        torch.randn(1, 2, 24, 16, generator=generator).requires_grad_() for _ in range(3)
    )

    def decoupled(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + 0.3 * torch.dot(rotary[q], latent[k])

    attend = anyflex.flex_attention
    if compiled:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    out = attend(query, key, value, decoupled, backend=backend)
    scores = query.double() @ key.double().mT / 4 + 0.3 * rotary.double() @ latent.double().mT
    wanted = scores.softmax(-1) @ value.double()
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    leaves = (query, key, value, rotary, latent)
    found = torch.autograd.grad(out.square().sum(), leaves)
    for mine, its in zip(found, torch.autograd.grad(wanted.square().sum(), leaves), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)


ON_TABLES: list[tuple[Any, Any]] = [
    (
        lambda score, b, h, q, k, t: score + (t[q] * t[k]).sum(-1),
        lambda t, q, k: (t[q] * t[k]).sum(-1),
    ),
    (
        lambda score, b, h, q, k, t: score + torch.dot(t[q], t[k]),
        lambda t, q, k: (t[q] * t[k]).sum(-1),
    ),
    (
        lambda score, b, h, q, k, t: score + torch.take(t, q * 3 + k % 3),
        lambda t, q, k: t.view(-1)[q * 3 + k % 3],
    ),
    (
        lambda score, b, h, q, k, t: score + torch.searchsorted(t[0], t[q][1]),
        lambda t, q, k: (t[0] < t[q][..., 1:2]).sum(-1),
    ),
    (lambda score, b, h, q, k, t: (t[:2] == score).sum() + t[q].amax(), None),
    (lambda score, b, h, q, k, t: score + torch.isin(k, t.long()) + len(t[q]), None),
]


@pytest.mark.parametrize(("mod", "bias"), ON_TABLES)
def test_a_row_follows_the_shape_that_its_tensor_has(mod: Any, bias: Any) -> None:
    q, k = torch.arange(6)[:, None], torch.arange(6)
    query = torch.randn(1, 1, 6, 8)
    kept = []
    for width in (3, 5, 3):
        table = torch.randn(6, width).sort(-1).values

        def of_table(score: Any, b: Any, h: Any, q: Any, k: Any, t: Tensor = table) -> Any:
            return mod(score, b, h, q, k, t)

        found = traced(of_table, "score", torch.float32, torch.device("cpu"))
        kept.append((found.text, found.ints))
        anew = trace_mod(of_table, "score")
        assert kept[-1] == (anew.text, anew.ints)
        if bias is not None:
            out = anyflex.flex_attention(query, query, query, of_table, backend="reference")
            weights = (query @ query.mT * 8**-0.5 + bias(table, q, k)).softmax(-1)
            torch.testing.assert_close(out, weights @ query)
    assert kept[0] != kept[1] and kept[0] == kept[2]


def test_a_search_of_a_long_row_is_a_few_reads() -> None:
    boundaries = torch.arange(0, 1 << 20, 4)
    mod = lambda s, b, h, q, k: s + torch.bucketize(k, boundaries)  # noqa: E731
    text = trace_mod(mod, "score").text
    assert text.count("load") <= 19


def test_a_number_that_is_read_in_a_mod_is_read_anew_at_each_call() -> None:
    bound = torch.tensor(2.0)
    query = torch.randn(1, 1, 6, 8)

    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * bound.item()

    for value in (2.0, -1.0):
        bound.fill_(value)
        out = anyflex.flex_attention(query, query, query, mod, backend="reference")
        torch.testing.assert_close(out, (query @ query.mT * 8**-0.5 * value).softmax(-1) @ query)


def test_longer_rows_run_on_the_reference() -> None:
    table = torch.randn(6, 65)
    query = torch.randn(1, 1, 6, 8)
    wanted = (query @ query.mT * 8**-0.5 + table @ table.mT).softmax(-1) @ query
    for mod in (
        lambda s, b, h, q, k: s + (table[q] * table[k]).sum(-1),
        lambda s, b, h, q, k: s + torch.dot(table[q], table[k]),
    ):
        with pytest.warns(anyflex.PerformanceWarning, match="at most 64 elements"):
            out = anyflex.flex_attention(query, query, query, mod)
        torch.testing.assert_close(out, wanted)
    near = torch.rand(2, 9).argsort(-1)
    with pytest.warns(anyflex.PerformanceWarning, match=r"Tensor\.argmax"):
        mask = anyflex.create_block_mask(
            lambda b, h, q, k: (near[b] == k).int().argmax() == near[b, 0], 2, 1, 9, 9
        )
        anyflex.flex_attention(*torch.randn(3, 2, 1, 9, 8).unbind(0), block_mask=mask)


@pytest.mark.parametrize(
    ("expression", "error", "message"),
    [
        ("s + (p[q] + w2[k]).sum()", ModTraceError, r"shapes \[3\] and \[16\].* broadcast"),
        ("s + (p[q] * 2)[3]", ModIndexError, "index 3 of a row .* size 3"),
        ("s + p[q][0, 0]", ModIndexError, "2 indices for the 1 dimensions left"),
        ("s + (p[q] + 1)[0, 0]", ModIndexError, "2 indices for a row of 1 dimensions"),
        ("s + torch.dot(p[q], v)", ModTraceError, r"rows of shapes \[3\] and \[4\]"),
        ("s + w2.take(w2[q])", ModTraceError, "gathering"),
        ("s + p[q].view(2).sum()", ModTraceError, r"shape \[3\] as one of shape \[2\]"),
        ("s + ids[q].mean()", ModTraceError, "mean of integers"),
        ("s if p[q].any() else s", ModTraceError, "branch"),
        ("p[q].add_(1).sum()", ModTraceError, "in place"),
        ("s + p[q:].sum()", ModTraceError, "slice of a captured tensor from or to a symbol"),
        ("s + w2[p[q] > 0].sum()", ModTraceError, r"row of shape \[3\].* scalar is needed"),
    ],
)
def test_what_a_row_can_not_do_is_refused(
    expression: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        trace_mod(function_of(expression, captured_tensors(torch.float32)), "score")
