"""Functions of a call in Metal, on lists of pairs, against torch's autograd in float64."""

from __future__ import annotations

import math
import re

import pytest
import torch
from emulator.lint import conversions, findings
from metal_values import HEADER, ModCase, exact_sums, spec_of
from soak import SOAK
from torch import Tensor

from anyflex.plugin import ModGraph, parse_graph, simplify
from anyflex.testing.mods.kit_mods import KIT_MASKS, KIT_MODS
from anyflex.testing.mods.leaves import Sizes
from anyflex.testing.mods.mask_mods import MASK_MODS
from anyflex.testing.mods.mod import Mod
from anyflex.testing.mods.operation_mods import OPERATION_MODS
from anyflex.testing.mods.score_mods import SCORE_MODS
from anyflex.tracing.trace import TracedMod, trace_mod
from anyflex_mps.mods import (
    captured_arguments,
    captured_parameters,
    mods_source,
    row_sum_count,
    total_parameters,
)
from anyflex_mps.operations import FUNCTIONS

SIZES = Sizes(2, 4, 2, 48, 80)
SCORES = {**SCORE_MODS, **KIT_MODS, **OPERATION_MODS}
MASKS = {**MASK_MODS, **KIT_MASKS}
COUNT = 700
IN_ROW = 7
"""Pairs of a row, where a thread takes a row."""


def pairs(seed: int = 5) -> dict[str, Tensor]:
    """Return pairs of a call of these sizes, with scores and gradients."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"b": 2, "h": 4, "q_idx": 48, "kv_idx": 80}
    found = {
        name: torch.randint(size, (COUNT,), generator=generator) for name, size in sizes.items()
    }
    # Some pairs lie next to the diagonal, where masks and distances change.
    near = torch.randint(-3, 4, (COUNT // 2,), generator=generator)
    found["kv_idx"][: COUNT // 2] = (found["q_idx"][: COUNT // 2] + near).clamp(0, 79)
    found["score"] = torch.randn(COUNT, generator=generator) * 2
    found["grad"] = torch.randn(COUNT, generator=generator)
    found["live"] = torch.rand(COUNT, generator=generator) < 0.8
    return found


INDICES = ("b", "h", "q_idx", "kv_idx")


def case_of(traced: TracedMod, kind: str) -> ModCase:
    graph = simplify(parse_graph(traced.text))
    learned = [i for i, tensor in enumerate(traced.captured) if tensor.requires_grad]
    return ModCase(
        pairs(),
        graph if kind == "score" else None,
        graph if kind == "mask" else None,
        [tensor.detach() for tensor in traced.captured],
        learned,
        traced.ints,
        traced.floats,
    )


def has_float64(graph: ModGraph) -> bool:
    return any(node.dtype is torch.float64 for node in graph.nodes)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_mod_keeps_what_it_keeps_in_torch(name: str) -> None:
    mod = MASKS[name].make(SIZES, torch.Generator().manual_seed(3))
    case = case_of(trace_mod(mod.function(), "mask"), "mask")
    wanted = mod.function()(*(case.inputs[each] for each in INDICES))
    _, found, _, _ = case.run()
    assert torch.equal(found, torch.as_tensor(wanted).float().expand(COUNT))


def widened(mod: Mod) -> Mod:
    """Return the mod over float64 leaves of the same values."""
    leaves = {
        name: leaf.detach().double().requires_grad_(leaf.requires_grad)
        if leaf.is_floating_point()
        else leaf
        for name, leaf in mod.leaves.items()
    }
    return mod.with_leaves(leaves)


def near(found: Tensor, wanted: Tensor) -> Tensor:
    """Return where results are torch's in float64, but for float32's rounding and, of a narrower
    type, its own."""
    rtol = max(2e-5, torch.finfo(found.dtype).eps)
    found, wanted = found.double(), wanted.detach().double()
    close = (found - wanted).abs() <= rtol * (wanted.abs() + 1)
    return close | (found == wanted) | (found.isnan() & wanted.isnan())


@pytest.mark.parametrize("name", SCORES)
def test_a_score_mod_and_its_gradients_are_torch_s(name: str) -> None:
    mod = SCORES[name].make(SIZES, torch.Generator().manual_seed(3))
    traced = trace_mod(mod.function(), "score")
    case = case_of(traced, "score")
    assert case.spec.score_graph is not None
    if has_float64(case.spec.score_graph):
        pytest.skip("Metal has no float64")
    exact = widened(mod)
    score = case.inputs["score"].double().requires_grad_()
    places = [case.inputs[each] for each in INDICES]
    value = torch.as_tensor(exact.function()(score, *places)).double().expand(COUNT)
    scores, _, slopes, totals = case.run()
    assert near(scores, value).all()

    inputs = [score, *exact.learned.values()]
    grad = case.inputs["grad"].double()
    assert near(slopes, gradients(value, inputs, grad)[0]).all()
    # Dead pairs add nothing to the captured tensors' gradients.
    wanted = gradients(value, inputs, torch.where(case.live, grad, 0.0))[1:]
    for sums in (totals, case.exact_totals()):
        found = leaf_gradients(mod, traced, case, sums)
        for name_, each, its in zip(mod.learned, found, wanted, strict=True):
            assert near(each, its).all(), name_


def leaf_gradients(mod: Mod, traced: TracedMod, case: ModCase, sums: list[Tensor]) -> list[Tensor]:
    """Return the gradients of a mod's leaves by those of the captured tensors, which are leaves or
    views of them."""
    tensors = [traced.captured[place] for place in case.learned]
    given = [total.to(tensor.dtype) for total, tensor in zip(sums, tensors, strict=True)]
    leaves = list(mod.learned.values())
    return list(torch.autograd.grad(tensors, leaves, given, retain_graph=True)) if leaves else []


def gradients(value: Tensor, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the gradients, 0 of what the value doesn't depend on."""
    if not value.requires_grad:
        return [torch.zeros_like(each) for each in inputs]
    found = torch.autograd.grad(value, inputs, grad, retain_graph=True, allow_unused=True)
    return [
        torch.zeros_like(each) if gradient is None else gradient
        for each, gradient in zip(inputs, found, strict=True)
    ]


LEARNED = [name for name, entry in SCORES.items() if entry.learns]


@pytest.mark.parametrize("name", LEARNED if SOAK else LEARNED[::6])
def test_sums_of_rows_add_up_to_the_gradients_of_pairs(name: str) -> None:
    mod = SCORES[name].make(SIZES, torch.Generator().manual_seed(3))
    traced = trace_mod(mod.function(), "score")
    case = case_of(traced, "score")
    assert case.spec.score_graph is not None
    if has_float64(case.spec.score_graph):
        pytest.skip("Metal has no float64")
    for each in ("b", "h", "q_idx"):
        case.inputs[each] = case.inputs[each][::IN_ROW].repeat_interleave(IN_ROW)
    rows = ModCase(
        case.inputs, case.spec.score_graph, captured=case.captured, learned=case.learned,
        ints=case.ints, floats=case.floats, in_row=IN_ROW,
    )  # fmt: skip
    _, _, _, wanted = case.run()
    for totals in (rows.run()[3], rows.exact_totals()):
        for found, its in zip(totals, wanted, strict=True):
            assert near(found, its).all()
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(COUNT // IN_ROW, generator=generator)[:, None] * IN_ROW
    again = rows.exact_totals((order + torch.arange(IN_ROW)).flatten())
    assert all(map(same_bits, again, totals))


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one.nan_to_num(), other.nan_to_num()
    )


def test_a_rows_sum_takes_one_atomic_addition() -> None:
    spec = spec_of(parse_graph(BY_ROW), None, [torch.zeros(3)], [0])
    by_row = mods_source(spec, "captured_gradients()", by_row=True)
    pair, row = by_row.split("void captured_row_gradients")
    assert "op_add_float(g0" not in pair and row.count("op_add_float(g0") == 1


# Sums that repeat


def exact_case(
    score: str, table: Tensor, *, grad: Tensor | None = None, q_idx: Tensor | None = None
) -> ModCase:
    inputs = pairs()
    if grad is not None:
        inputs["grad"] = grad
    if q_idx is not None:
        inputs["q_idx"] = q_idx
    inputs["live"] = torch.ones(COUNT, dtype=torch.bool)
    return ModCase(inputs, parse_graph(score), captured=[table], learned=[0])


BY_ROW = "input f32 - score;input i64 - q_idx;load f32 1 0;add f32 0,2 -;=3"
BY_NONE = "input f32 - score;load f32 - 0;mul f32 0,1 -;=2"


def scattered(case: ModCase, size: int) -> Tensor:
    """Return the gradient of a table that is read by row, in float64."""
    total = torch.zeros(size, dtype=torch.float64)
    return total.index_put_((case.inputs["q_idx"],), case.inputs["grad"].double(), True)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1.0, 1e30, 3e37])
def test_exact_sums_repeat_in_any_order_and_are_right_to_the_last_place(scale: float) -> None:
    grad = pairs()["grad"] * scale
    case = exact_case(BY_ROW, torch.zeros(48), grad=grad)
    (found,) = case.exact_totals()
    wanted = scattered(case, 48)
    error = (found.double() - wanted).abs()
    assert (error <= 2.0**-24 * wanted.abs() + 2.0**-149).all()
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        (again,) = case.exact_totals(torch.randperm(COUNT, generator=generator))
        assert torch.equal(again, found)


def test_sums_of_floats_depend_on_the_order() -> None:
    """The exact sums' test is one only if this is so."""
    case = exact_case(BY_NONE, torch.tensor(1.0))
    sums = set()
    for seed in range(4):
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(seed))
        case.inputs = {name: tensor[order] for name, tensor in case.inputs.items()}
        sums.add(case.run()[3][0].item())
    assert len(sums) > 1


@pytest.mark.parametrize("factor", [1e8, 1e15])
def test_a_large_addition_leaves_other_elements_their_digits(factor: float) -> None:
    grad = pairs()["grad"]
    grad[pairs()["q_idx"] == 9] *= factor
    case = exact_case(BY_ROW, torch.zeros(48), grad=grad)
    (found,) = case.exact_totals()
    wanted = scattered(case, 48)
    assert ((found.double() - wanted).abs() <= 2.0**-24 * wanted.abs()).all()


def test_additions_that_cancel_leave_what_float64_leaves() -> None:
    grad = torch.ones(COUNT)
    grad[1::2] = -1.0
    grad[0] = 1.0 + 2.0**-23
    case = exact_case(BY_ROW, torch.zeros(48), grad=grad, q_idx=torch.zeros(COUNT).long())
    (found,) = case.exact_totals()
    assert found[0] == 2.0**-23
    assert not found[1:].any()


def test_additions_below_the_last_bit_are_rounded_and_not_cut_off() -> None:
    """700 additions up to 1.0 leave a unit of 2^-51; those of some units add up without a bias."""
    generator = torch.Generator().manual_seed(2)
    grad = torch.rand(COUNT, generator=generator) * 5 * 2.0**-51
    grad[:2] = torch.tensor([1.0, -1.0])
    case = exact_case(BY_ROW, torch.zeros(1), grad=grad)
    (found,) = case.exact_totals()
    wanted = grad[2:].double().sum()
    assert abs(found.item() - wanted) < 0.02 * wanted


def test_the_number_of_additions_may_exceed_32_bits() -> None:
    """2^33 additions up to 1.0 leave a unit of 2^-27."""
    bits = torch.tensor(1.0).view(torch.int32).item()
    words = torch.tensor([[5, 0, bits, 0, 2], [0, -3, bits, 0, 2]], dtype=torch.int32)
    assert exact_sums(words).tolist() == [5 * 2.0**-27, -3 * 2.0 ** (32 - 27)]


def test_non_finite_additions_reach_their_own_elements_alone() -> None:
    grad = pairs()["grad"]
    rows = pairs()["q_idx"]
    grad[(rows == 7).nonzero()[0]] = math.inf
    grad[(rows == 8).nonzero()[0]] = -math.inf
    grad[(rows == 9).nonzero()[0]] = math.nan
    case = exact_case(BY_ROW, torch.zeros(48), grad=grad)
    for (found,) in (case.run()[3], case.exact_totals()):
        assert found[7] == math.inf
        assert found[8] == -math.inf
        assert found[9].isnan()
        others = [row for row in range(48) if row not in (7, 8, 9)]
        wanted = scattered(case, 48)
        assert near(found[others], wanted[others]).all()


def test_the_halves_of_a_sum_carry() -> None:
    """Equal additions fill the low half again and again, in both signs."""
    for sign in (1.0, -1.0):
        grad = torch.full((COUNT,), sign * 16777215.0)
        case = exact_case(BY_ROW, torch.zeros(1), grad=grad)
        (found,) = case.exact_totals()
        assert found.item() == torch.tensor(sign * 16777215.0 * COUNT).item()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_a_table_without_elements_gets_no_additions(shape: tuple[int, ...]) -> None:
    text = {
        1: "input f32 - score;input i64 - q_idx;load f32 1 0;mul f32 0,2 -;=3",
        2: "input f32 - score;input i64 - q_idx;load f32 1,1 0;mul f32 0,2 -;=3",
    }[len(shape)]
    case = exact_case(text, torch.zeros(shape))
    scores, _, slopes, totals = case.run()
    assert not scores.any() and not slopes.any()
    assert [each.shape for each in (*totals, *case.exact_totals())] == [shape, shape]


# Text


def broken_rules(source: str) -> list[str]:
    return [str(each) for each in (*findings(source), *conversions(source))]


def test_functions_keep_the_rules_of_metal_source() -> None:
    kernel = "kernel void plain(device float* out [[buffer(0)]]) { out[0] = 1.0f; }\n"
    assert broken_rules("\n".join([HEADER, *FUNCTIONS.values(), kernel])) == []


@pytest.mark.parametrize("name", [*SCORES, *MASKS] if SOAK else [*SCORES, *MASKS][::10])
def test_mods_keep_the_rules_of_metal_source(name: str) -> None:
    kind, entries = ("score", SCORES) if name in SCORES else ("mask", MASKS)
    mod = entries[name].make(SIZES, torch.Generator().manual_seed(3))
    case = case_of(trace_mod(mod.function(), kind), kind)
    if case.spec.score_graph is not None and has_float64(case.spec.score_graph):
        pytest.skip("Metal has no float64")
    assert broken_rules(case.source("floats")) == []
    if case.learned:
        assert broken_rules(case.source("integers")) == []


def test_a_mod_that_adds_has_no_backward_and_plain_calls_have_no_mods() -> None:
    case = ModCase(pairs(), parse_graph(BY_ROW), captured=[torch.zeros(3)])
    source = case.source("floats")
    assert "float score_mod(" in source and "score_mod_backward" not in source
    assert "mask_mod" not in source and "captured_gradients" not in source
    assert mods_source(spec_of(), "") == ""


def test_parameters_name_each_captured_tensor_by_its_stored_type() -> None:
    captured = [torch.zeros(2), torch.zeros(2).half(), torch.zeros(2).bfloat16()]
    captured += [torch.zeros(2, dtype=dtype) for dtype in (torch.bool, torch.uint8, torch.int8)]
    captured += [torch.zeros(2, dtype=dtype) for dtype in (torch.int16, torch.int32, torch.int64)]
    spec = spec_of(captured=captured, learned=[1, 2])
    types = "float half bfloat uchar uchar char short int long".split()
    tables = "".join(f", device const {type_}* t{i}" for i, type_ in enumerate(types))
    assert captured_parameters(spec) == f"{tables}, constant long* P, constant float* F"
    assert captured_arguments(spec) == ", t0, t1, t2, t3, t4, t5, t6, t7, t8, P, F"
    assert total_parameters(spec) == ", device atomic_float* g1, device atomic_float* g2"
    assert total_parameters(spec, "bounds") == ", device atomic_uint* s1, device atomic_uint* s2"
    assert total_parameters(spec, "integers").count(", device atomic_") == 4


@pytest.mark.parametrize(
    ("name", "of_rows"), [("scalar_learned", 1), ("dense_bias", 0), ("key_norm_gqa", 0)]
)
def test_additions_whose_place_no_key_decides_are_summed_by_row(name: str, of_rows: int) -> None:
    mod = SCORES[name].make(SIZES, torch.Generator().manual_seed(3))
    spec = case_of(trace_mod(mod.function(), "score"), "score").spec
    assert row_sum_count(spec) == of_rows


@pytest.mark.parametrize("divisor", ["number f32 - f0", "load f32 0 0", "const f32 - 30.0"])
def test_scores_are_multiplied_by_the_reciprocal_of_a_tiles_number(divisor: str) -> None:
    graph = parse_graph(f"input i64 - h;{divisor};input f32 - score;truediv f32 2,1 -;=3")
    captured = [torch.full((4,), 30.0)]
    text = mods_source(spec_of(graph, None, captured, []), "score_mod()")
    assert re.search(r"(v\d+) = 1\.0f / \w+;\n.* = score \* \1;", text)
    case = ModCase(pairs(), graph, captured=captured, floats=[30.0])
    found, *_ = case.run()
    wanted = case.inputs["score"].double() / 30.0
    torch.testing.assert_close(found.double(), wanted, atol=0.0, rtol=2e-7)


def test_quotients_of_indices_are_exact_where_a_step_follows() -> None:
    number = "input i64 - q_idx;cast f32 0 -;number f32 - f0;truediv f32 1,2 -;floor f32 3 -;"
    graph = parse_graph(
        f"{number}input f32 - score;const f32 - 0.0;mul f32 5,6 -;add f32 4,7 -;=8"
    )
    assert "1.0f /" not in mods_source(spec_of(graph), "score_mod()")
    for divisor in (3.0, 7.0, 11.0, 13.0):
        case = ModCase(pairs(), graph, floats=[divisor])
        found, *_ = case.run()
        assert torch.equal(found, (case.inputs["q_idx"] / divisor).floor())


@pytest.mark.parametrize("step", ["floor f32 2 -", "cast i32 2 -;cast f32 3 -"])
@pytest.mark.parametrize("divisor", [41.0, 47.0, 49.0])
def test_quotients_of_scores_are_exact_where_a_step_follows(step: str, divisor: float) -> None:
    last = 2 + len(step.split(";"))
    graph = parse_graph(f"input f32 - score;number f32 - f0;truediv f32 0,1 -;{step};={last}")
    case = ModCase(pairs(), graph, floats=[divisor])
    case.inputs["score"] = (torch.arange(len(case.inputs["score"])) % 9) * divisor
    found, *_ = case.run()
    assert torch.equal(found, torch.arange(len(found)) % 9 * 1.0)


def test_a_score_is_divided_by_what_differs_within_a_tile() -> None:
    graph = parse_graph("input f32 - score;input i64 - kv_idx;load f32 1 0;truediv f32 0,2 -;=3")
    assert "1.0f /" not in mods_source(spec_of(graph, None, [torch.ones(80)], []), "score_mod()")
