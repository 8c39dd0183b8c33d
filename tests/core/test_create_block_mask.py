"""create_block_mask and create_mask against the dense mask."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from anyflex.block_mask import dense_scan, elementwise_evaluation
from anyflex.block_mask.block_mask import BlockMask
from anyflex.block_mask.combine import and_masks, noop_mask, or_masks
from anyflex.block_mask.create import create_block_mask, create_mask
from anyflex.block_mask.elementwise_evaluation import TracedElements, elements_of
from anyflex.block_mask.mask_function import trace_mask_mod
from anyflex.errors import ArgumentTypeError, BlockMaskError, ModIndexError, ModTraceError
from anyflex.frontend.attention import flex_attention
from anyflex.testing.mods.leaves import Sizes
from anyflex.testing.mods.mask_mods import MASK_MODS
from tests.core.dense_blocks import block_kinds, check_kinds, dense_mask, random_case
from tests.soak import SOAK


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


@pytest.mark.parametrize("name", MASK_MODS)
def test_blocks_of_every_mask_of_the_list_are_those_of_the_dense_mask(name: str) -> None:
    rng = random.Random(name)
    for seed in range(3):
        q, kv, block = random_case(rng)
        sizes = Sizes(rng.choice((1, 2, 3)), rng.choice((1, 2, 4)), 1, q, kv)
        entry = MASK_MODS[name]
        mod = entry.make(sizes, torch.Generator().manual_seed(seed)).function()
        mask = create_block_mask(mod, sizes.batch, sizes.heads, q, kv, BLOCK_SIZE=block)
        live = dense_mask(mod, sizes.batch, sizes.heads, q, kv)
        check_kinds(mask, block_kinds(live, block))
        stored = (
            sizes.batch if entry.batched else 1,
            sizes.heads if entry.headed else 1,
        )
        assert mask.offsets.shape[:2] == stored
        assert mask.shape == (sizes.batch, sizes.heads, q, kv) and block == mask.BLOCK_SIZE
        if seed == 0:
            ours = create_mask(mod, sizes.batch, sizes.heads, q, kv)
            assert torch.equal(ours, live)


@pytest.mark.parametrize("budget", [7, *([1, 100, 5000] if SOAK else [])])
@pytest.mark.parametrize("block", [(16, 16), (16, 300), (300, 8), (1, 400), (512, 1024)])
def test_chunks_of_any_size_give_the_same_blocks(
    monkeypatch: pytest.MonkeyPatch, budget: int, block: tuple[int, int]
) -> None:
    q, kv = 37, 53
    monkeypatch.setattr(dense_scan, "_ELEMENTS", budget)
    all_live = elements_of(None, lambda b, h, q, k: b >= 0, torch.device("cpu"))
    seen = torch.zeros(2, 3, q, kv, dtype=torch.int32)
    for box, live in dense_scan.live_boxes(all_live, 2, 3, (q, kv), block[0]):
        seen[box] += live
        assert live.numel() <= max(budget, kv)
    assert bool((seen == 1).all())
    hashed = lambda b, h, q, k: (q * 3 + k * (h + 1) + b) % 17 < 12  # noqa: E731
    # Chunks are for mods that can't be traced.
    mod = lambda b, h, q, k: (torch.special.i0(q) > 0) & hashed(b, h, q, k)  # noqa: E731
    mask = create_block_mask(mod, 2, 3, q, kv, BLOCK_SIZE=block)
    assert mask.traced is None
    check_kinds(mask, block_kinds(dense_mask(hashed, 2, 3, q, kv), block))


@pytest.mark.parametrize("sizes", [(0, 1, 9, 9), (1, 0, 9, 9), (2, 2, 0, 9), (2, 2, 9, 0)])
def test_empty_masks_are_legal(sizes: tuple[int, int, int, int]) -> None:
    mod = lambda b, h, q, k: q + b + h >= k  # noqa: E731
    mask = create_block_mask(mod, *sizes, BLOCK_SIZE=4)
    assert mask.shape == sizes
    assert mask.numel() == 0 and mask.sparsity() == (0.0 if 0 in sizes else 100.0)
    check_kinds(mask, block_kinds(torch.zeros(sizes, dtype=torch.bool), (4, 4)))
    assert create_mask(mod, *sizes).shape == sizes
    assert "BlockMask" in repr(mask) and "BlockMask" in str(mask)
    assert mask.to_dense().shape == (*sizes[:2], -(-sizes[2] // 4), -(-sizes[3] // 4))


def test_a_constant_mask_is_legal() -> None:
    assert create_block_mask(lambda b, h, q, k: True, 2, 2, 9, 9).runs[0].tolist() == [0, 1, 1]
    nothing = create_block_mask(lambda b, h, q, k: False, 2, 2, 9, 9)
    assert nothing.shape == (2, 2, 9, 9) and int(nothing.offsets[-1, -1, -1]) == 0
    assert create_mask(lambda b, h, q, k: False, 2, 2, 9, 9).shape == (2, 2, 9, 9)


@pytest.mark.parametrize(
    ("mod", "stored"),
    [
        (causal, (1, 1)),
        (lambda b, h, q, k: q >= k + h, (1, 3)),
        (lambda b, h, q, k: q >= k + b, (8, 1)),
    ],
)
def test_what_the_mod_does_not_read_is_stored_once_and_reported_as_asked(
    mod: Any, stored: tuple[int, int]
) -> None:
    mask = create_block_mask(mod, 8, 3, 64, 70, BLOCK_SIZE=16)
    assert tuple(mask.offsets.shape[:2]) == stored
    again = copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), mask.to("meta")
    for same in (mask, *again):
        assert same.shape == (8, 3, 64, 70) and same.numel() == 8 * 3 * 64 * 70
    for same in again[:2]:
        assert same == mask and hash(same) == hash(mask)
    assert mask.row_slice(20, 21).shape == (8, 3, 1, 70)
    assert mask.extend(100, 90).shape == (8, 3, 90, 100)
    live = dense_mask(mod, 8, 3, 64, 70)
    visited = (block_kinds(live, (16, 16)) != 0).int()
    assert torch.equal(mask.to_dense(), visited)
    assert f"shape={(8, 3, 64, 70)}" in repr(mask)
    # A mask for 8 entries that are alike serves any number of them.
    assert create_block_mask(mod, None, None, 64, 70, BLOCK_SIZE=16)[0, 0] == mask[0, 0]


def test_a_mask_asked_for_some_batch_entries_that_are_alike_serves_others() -> None:
    mask = create_block_mask(causal, 2, 5, 40, 40, BLOCK_SIZE=16)
    query = torch.randn(3, 2, 40, 8, dtype=torch.float64)
    out = flex_attention(query, query, query, block_mask=mask, backend="reference")
    scores = (query @ query.mT * 8**-0.5).masked_fill(
        ~torch.ones(40, 40).tril().bool(), -torch.inf
    )
    torch.testing.assert_close(out, scores.softmax(-1) @ query)


def test_a_state_without_the_asked_sizes_is_read() -> None:
    mask = create_block_mask(causal, 2, 5, 40, 40, BLOCK_SIZE=16)
    state = mask.__getstate__()
    del state["asked"]
    old = BlockMask.__new__(BlockMask)
    old.__setstate__(state)
    assert old == mask and old.shape == (1, 1, 40, 40)


def test_full_blocks_may_be_listed_as_partial() -> None:
    mask = create_block_mask(causal, 1, 1, 64, 64, BLOCK_SIZE=16, separate_full_blocks=False)
    grid = mask.views().kind_rows(0, 4)
    assert torch.equal(grid[0, 0] == 2, torch.ones(4, 4).tril() > 0)


def test_options_of_torch_that_mean_nothing_here_change_nothing() -> None:
    plain = create_block_mask(causal, 1, 1, 64, 64, None, (16, 32))
    assert plain == create_block_mask(
        causal,
        1,
        1,
        64,
        64,
        device="cpu",
        BLOCK_SIZE=(16, 32),
        _compile=True,
        compute_dq_write_order=True,
        dq_kv_order=False,
    )


def test_a_score_mod_gives_a_dense_mask_by_its_infinities() -> None:
    window = lambda s, b, h, q, k: torch.where(q - k < 5, s * 2, -float("inf"))  # noqa: E731
    live = create_mask(window, 2, 3, 20, 30)
    q, k = torch.arange(20)[:, None], torch.arange(30)
    assert torch.equal(live, (q - k < 5).expand(2, 3, 20, 30))


def test_a_pure_mod_that_cannot_be_traced_is_run_through_vmap() -> None:
    table = torch.rand(40) < 0.5

    def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (torch.special.bessel_j0((q - k).float()) > 0) & table[k]

    mask = create_block_mask(mod, 2, 2, 40, 40, BLOCK_SIZE=16)
    assert mask.traced is None and mask.opaque is not None and mask.mask_mod is mod
    distance = (torch.arange(40)[:, None] - torch.arange(40)).float()
    live = (torch.special.bessel_j0(distance) > 0) & table
    check_kinds(mask, block_kinds(live.expand(2, 2, 40, 40), (16, 16)))
    assert torch.equal(create_mask(mod, 2, 2, 40, 40), live.expand(2, 2, 40, 40))


def test_building_never_holds_all_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = []
    bounds = dense_scan._block_bounds

    def watched(live: torch.Tensor, block: tuple[int, int]) -> Any:
        evaluated.append(live.numel())
        return bounds(live, block)

    monkeypatch.setattr(dense_scan, "_block_bounds", watched)
    opaque = lambda b, h, q, k: (torch.special.i0(q) > 0) & (q >= k)  # noqa: E731
    mask = create_block_mask(opaque, 1, 1, 1024, 2048)
    check_kinds(mask, block_kinds(dense_mask(causal, 1, 1, 1024, 2048), (128, 128)))
    assert max(evaluated) <= 1 << 20 and sum(evaluated) == 1024 * 2048


def test_a_live_read_outside_of_a_captured_tensor_is_named() -> None:
    short = torch.zeros(50, dtype=torch.int64)
    with pytest.raises(
        ModIndexError,
        match=r"tensor 'short' of shape \[50\].*size 50.*index is (5\d|6[0-3]) at.*q_idx \d+",
    ) as caught:
        create_block_mask(lambda b, h, q, k: short[q] == short[k], 1, 1, 64, 64)
    assert isinstance(caught.value, IndexError)
    with pytest.raises(ModIndexError, match=r"index is -(5[1-9]|6[0-4]) at"):
        create_block_mask(lambda b, h, q, k: short[k - 64] == 0, 1, 1, 64, 14)
    empty = torch.zeros(0)
    with pytest.raises(ModIndexError, match=r"\[0\]"):
        create_mask(lambda s, b, h, q, k: s + empty[q], 1, 1, 4, 4)


def test_a_read_outside_is_named_where_its_index_rounds_otherwise_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = torch.zeros(50, dtype=torch.int64)
    traced, _ = trace_mask_mod(lambda b, h, q, k: short[k] == 0, torch.device("cpu"))
    assert traced is not None
    elements = TracedElements(traced, torch.device("cpu"))

    def inside(*_: object) -> Callable[..., list[Tensor]]:
        return lambda *_: [torch.tensor(49)]

    monkeypatch.setattr(elementwise_evaluation, "Evaluator", inside)
    with pytest.raises(
        ModIndexError, match=r"'short' of shape \[50\] outside of it: at the .* kv_idx 50\."
    ):
        elements.at(0, 0, torch.tensor(0), torch.arange(60))


def test_a_dead_read_outside_of_a_captured_tensor_is_legal() -> None:
    short = torch.ones(50, dtype=torch.bool)
    mask = create_block_mask(lambda b, h, q, k: (k < 50) & short[k], 1, 1, 64, 64, BLOCK_SIZE=16)
    assert mask.sparsity() == 0.0
    last = torch.zeros(50, dtype=torch.bool)
    with pytest.raises(ModIndexError):  # dead only because of the value that was read
        create_block_mask(lambda b, h, q, k: last[k], 1, 1, 64, 64)


def test_a_negative_index_counts_from_the_end() -> None:
    table = torch.arange(64) < 10
    mod = lambda b, h, q, k: table[k - 64]  # noqa: E731
    mask = create_block_mask(mod, 1, 1, 64, 64, BLOCK_SIZE=16)
    check_kinds(mask, block_kinds(table.expand(1, 1, 64, 64), (16, 16)))


@pytest.mark.parametrize("arguments", [3, 5])
def test_a_mod_with_a_wrong_number_of_arguments_is_refused(arguments: int) -> None:
    mods = {3: lambda b, q, k: q >= k, 5: lambda s, b, h, q, k: s}
    with pytest.raises(BlockMaskError, match=rf"takes {arguments} positional.*with 4"):
        create_block_mask(mods[arguments], 1, 1, 16, 16)
    if arguments == 3:
        with pytest.raises(ModTraceError, match="takes 3"):
            create_mask(mods[3], 1, 1, 16, 16)


@pytest.mark.parametrize(
    ("mod", "message"),
    [
        (lambda b, h, q, k: q - k, "int64.*!= 0"),
        (lambda b, h, q, k: q * 0.5, "float32"),
        (lambda b, h, q, k: torch.ones(16, 3, dtype=torch.bool)[q], r"\[3\]"),
        (lambda b, h, q, k: None, "NoneType"),
    ],
)
def test_a_wrong_result_is_refused(mod: Any, message: str) -> None:
    with pytest.raises(BlockMaskError, match=message):
        create_block_mask(mod, 1, 1, 16, 16)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_tensor_that_requires_grad_gets_none_from_a_mask(compiled: bool) -> None:
    weight = torch.tensor([1.0, -1.0] * 8, requires_grad=True)
    query = torch.randn(1, 2, 16, 8, requires_grad=True)
    attend = flex_attention
    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    for read in (weight, weight * 2):
        mask = create_block_mask(lambda b, h, q, k, t=read: t[k] > 0, 1, 1, 16, 16, BLOCK_SIZE=8)
        out = attend(query, query, query, block_mask=mask)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            query, query, query, weight[None] > 0
        )
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
        (found,) = torch.autograd.grad(out.square().sum(), query)
        (gradient,) = torch.autograd.grad(wanted.square().sum(), query)
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-5)
    assert weight.grad is None
    mask = create_block_mask(lambda b, h, q, k: weight[k] > 0, 1, 1, 16, 16)
    with torch.no_grad():
        weight.neg_()
    assert torch.equal(create_mask(mask.mask_mod, 1, 1, 1, 16).view(16), weight > 0)


class Window(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.size = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k).abs() < self.size


class Bias(torch.nn.Module):
    def forward(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where(q >= k, score, -torch.inf)


def test_modules_are_mods() -> None:
    places = torch.arange(20)
    window = (places[:, None] - places).abs() < 3
    assert torch.equal(create_mask(Window(), 1, 1, 20, 20)[0, 0], window)
    assert torch.equal(create_mask(Bias(), 1, 1, 20, 20)[0, 0], window.new_ones(20, 20).tril())
    check_kinds(
        create_block_mask(Window(), 1, 1, 20, 20, BLOCK_SIZE=4),
        block_kinds(window[None, None], (4, 4)),
    )
    any_number = type("AnyNumber", (torch.nn.Module,), {"forward": lambda *indices: True})
    with pytest.raises(ModTraceError, match="takes any number of positional arguments"):
        create_mask(any_number(), 1, 1, 20, 20)
    with pytest.raises(BlockMaskError, match="mask_mod takes 5 positional arguments"):
        create_block_mask(Bias(), 1, 1, 20, 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"Q_LEN": -1}, "Q_LEN.*-1"),
        ({"KV_LEN": 16.0}, "KV_LEN.*float"),
        ({"Q_LEN": True}, "Q_LEN.*bool"),
        ({"B": 1.5}, r"B must.*1\.5.*float"),
        ({"H": "2"}, "H must.*str"),
        ({"H": 2**31}, "H must.*2147483648"),
        ({"BLOCK_SIZE": 0}, "BLOCK_SIZE.*0"),
        ({"BLOCK_SIZE": -4}, "BLOCK_SIZE.*-4"),
        ({"BLOCK_SIZE": 16.0}, "BLOCK_SIZE.*int or a pair.*float"),
        ({"BLOCK_SIZE": (16, 16, 16)}, "BLOCK_SIZE.*pair"),
        ({"device": "warp"}, "device 'warp'"),
        ({"dq_kv_order": torch.zeros(3)}, "dq_kv_order.*bool.*Tensor"),
    ],
)
def test_a_wrong_argument_is_named(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"B": 1, "H": 1, "Q_LEN": 16, "KV_LEN": 16, **changes}
    with pytest.raises(BlockMaskError, match=message):
        create_block_mask(causal, **arguments)


def test_something_that_is_no_function_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="mask_mod"):
        create_block_mask(torch.ones(4, 4), 1, 1, 4, 4)  # type: ignore[arg-type]


def test_a_mod_that_branches_is_refused_with_the_cure() -> None:
    with pytest.raises(ModTraceError, match="torch.where"):
        create_block_mask(lambda b, h, q, k: True if q > k else False, 1, 1, 8, 8)  # noqa: SIM210


def test_the_captured_tensors_are_moved_with_the_mask() -> None:
    table = torch.ones(16, dtype=torch.bool)
    mask = create_block_mask(lambda b, h, q, k: table[q] & (q >= k), 1, 1, 16, 16)
    assert mask.traced is not None and mask.traced.captured[0] is table
    meta = mask.to("meta")
    assert meta.device.type == "meta" and meta.traced is not None
    assert meta.traced.captured[0].device.type == "meta"


def test_combined_masks_are_live_where_all_or_any_are() -> None:
    window = lambda b, h, q, k: q - k < 5  # noqa: E731
    q, k = torch.arange(30)[:, None], torch.arange(30)
    both = create_mask(and_masks(causal, window), None, None, 30, 30)[0, 0]
    assert torch.equal(both, (q >= k) & (q - k < 5))
    either = create_mask(or_masks(causal, window), None, None, 30, 30)[0, 0]
    assert torch.equal(either, (q >= k) | (q - k < 5))
    assert bool(create_mask(and_masks(), 1, 1, 2, 2).all())
    assert not bool(create_mask(or_masks(), 1, 1, 2, 2).any())
    assert bool(create_mask(noop_mask, 1, 1, 2, 2).all())
    assert create_block_mask(and_masks(noop_mask, causal), 1, 1, 64, 64) is not None


@pytest.mark.parametrize("combine", [and_masks, or_masks])
def test_a_combined_mask_names_the_argument_that_is_no_function(combine: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=rf"{combine.__name__}: argument 1 .*int"):
        combine(causal, 3)


def test_the_result_is_a_block_mask_whose_runs_say_causal() -> None:
    mask = create_block_mask(causal, None, None, 256, 256)
    assert isinstance(mask, BlockMask)
    assert mask.runs.tolist() == [[0, 1, 2], [0, 1, 1], [1, 2, 2]]
    assert mask.offsets.tolist() == [[[0, 1, 3]]]
    assert mask.runs.dtype == mask.offsets.dtype == torch.int32


def test_a_captured_tensor_without_values_is_refused() -> None:
    table = torch.zeros(16, device="meta")
    with pytest.raises(BlockMaskError, match="'table'.*meta"):
        create_block_mask(lambda b, h, q, k: table[q] > 0, None, None, 16, 16)


def test_tensors_without_values_are_refused_by_name() -> None:
    with FakeTensorMode() as mode:
        fake = torch.zeros(64)
        with pytest.raises(BlockMaskError, match="under FakeTensorMode"):
            create_mask(causal, 1, 1, 64, 64)
    assert mode is not None
    with pytest.raises(BlockMaskError, match="'fake', which is a fake tensor"):
        create_block_mask(lambda b, h, q, k: fake[q] > 0, 1, 1, 64, 64)


def test_a_divisor_that_its_type_holds_as_zero_is_refused() -> None:
    table = torch.arange(64).to(torch.int8)
    with pytest.raises(ModTraceError, match="int8 divided by 65536, which is 0 in that type"):
        create_block_mask(lambda b, h, q, k: table[q] % 65536 == 0, 1, 1, 64, 64)
