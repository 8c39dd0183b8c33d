"""Cost and promises of building: the border only, a budget, the reference's agreement."""

from __future__ import annotations

import inspect
import threading
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import anyflex
from anyflex.block_mask import quad_tree, structure_builder
from anyflex.block_mask.elementwise_evaluation import TracedElements
from anyflex.block_mask.mask_function import trace_mask_mod
from anyflex.block_mask.quad_tree import QuadTree
from anyflex.block_mask.undecided_blocks import Budget
from anyflex.intervals.evaluation import Domain
from anyflex.mask_structure.runs import RunList
from anyflex.testing.oracle import dense_attention
from tests.block_masks.families import Sizes, mask_mods, sizes
from tests.block_masks.test_random_masks import CHECKED, COUNT, check, dense, kinds
from tests.masks import CASES, Made
from tests.soak import SOAK

__all__: list[str] = []


def built(made: Made, block: tuple[int, int] = (128, 128)) -> tuple[QuadTree, Budget]:
    """Build without a budget and return the tree, with its counts."""
    traced, _ = trace_mask_mod(made.mask_mod)
    assert traced is not None
    elements = TracedElements(traced, torch.device("cpu"))
    batch = made.batch if "b" in elements.depends else 1
    heads = made.heads if "h" in elements.depends else 1
    budget = Budget(None)
    domain = Domain(batch, heads, (made.q_length, made.kv_length), block)
    tree = QuadTree(elements, domain, budget)
    tree.build()
    return tree, budget


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_ready_made_mask_is_decided_by_its_border(name: str) -> None:
    made = CASES[name].make(16384)
    tree, budget = built(made)
    domain = tree.domain
    rows = domain.batch * domain.heads * tree.rows
    # Ranges leave a few blocks a row; of those, a few elements a token are looked at.
    assert tree.open_blocks.count <= 5 * rows
    assert budget.looked_at <= 64 * domain.batch * domain.heads * made.q_length


@pytest.mark.parametrize(
    "name",
    "causal causal_window sliding_window sinks_and_window prefix_lm padding chunked document "
    "document_and_causal document_offsets global_and_window block_diffusion dilated".split(),
)
def test_the_commonest_masks_need_no_element_at_all(name: str) -> None:
    _, budget = built(CASES[name].make(16384))
    assert budget.looked_at == 0


def hashed(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q * 7919 + k * 104729) % 97 < 40


def in_runs(b: Any, h: Any, q: Any, k: Any) -> Any:
    # Every block is all True or all False, and only evaluating it tells which.
    return torch.sin((q // 64) * 7.1 + (k // 64) * 3.3) > 0.2


def kind_grid(mask: anyflex.BlockMask) -> Tensor:
    views = mask.views()
    return views.kind_rows(0, views.q_blocks)


def test_past_the_budget_blocks_stay_partial_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = kind_grid(anyflex.create_block_mask(in_runs, 1, 1, 1000, 900, BLOCK_SIZE=64))
    monkeypatch.setattr(structure_builder, "DEFAULT_BUDGET", 850_000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        mask = anyflex.create_block_mask(in_runs, 1, 1, 1000, 900, BLOCK_SIZE=64)
    (warning,) = caught
    assert warning.category is anyflex.PerformanceWarning
    assert warning.filename == __file__ and warning.lineno == line
    message = str(warning.message)
    assert "exact=True" in message and "sin(" in message and "q_idx // 64" in message
    found = kind_grid(mask)
    undecided = found != exact
    assert bool(undecided.any()) and not bool(undecided.all())
    assert bool((found[undecided] == 2).all())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        insisted = anyflex.create_block_mask(in_runs, 1, 1, 1000, 900, BLOCK_SIZE=64, exact=True)
    assert torch.equal(kind_grid(insisted), exact)


def test_a_mask_past_the_budget_gives_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure_builder, "DEFAULT_BUDGET", 0)
    with pytest.warns(anyflex.PerformanceWarning, match="worth 0 elements"):
        mask = anyflex.create_block_mask(in_runs, 1, 1, 130, 140, BLOCK_SIZE=64)
    q, k, v = (torch.randn(1, 1, n, 8, dtype=torch.float64) for n in (130, 140, 140))
    wanted = dense_attention(q, k, v, mask=dense(in_runs, Sizes(1, 1, 130, 140, (64, 64))))
    out = anyflex.flex_attention(q, k, v, block_mask=mask)
    torch.testing.assert_close(out, wanted.out, rtol=1e-10, atol=1e-10)


def test_a_function_that_cannot_be_traced_has_the_same_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def opaque(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (torch.special.bessel_j0((q - k).float()) > 0) & (h + b < 3)

    exact = kind_grid(anyflex.create_block_mask(opaque, 2, 3, 200, 150, BLOCK_SIZE=32))
    monkeypatch.setattr(structure_builder, "DEFAULT_BUDGET", 100_000)
    monkeypatch.setattr("anyflex.block_mask.dense_scan._ELEMENTS", 5000)
    with pytest.warns(anyflex.PerformanceWarning, match="can't be traced"):
        mask = anyflex.create_block_mask(opaque, 2, 3, 200, 150, BLOCK_SIZE=32)
    found = kind_grid(mask)
    undecided = found != exact
    assert bool(undecided.any()) and not bool(undecided.all())
    assert bool((found[undecided] == 2).all())
    insisted = anyflex.create_block_mask(opaque, 2, 3, 200, 150, BLOCK_SIZE=32, exact=True)
    assert torch.equal(kind_grid(insisted), exact)


def test_what_ranges_cannot_decide_costs_its_own_blocks_only() -> None:
    def corner(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & ((k >= 256) | hashed(b, h, q, k) | (q >= 512))

    made = Made(corner, lambda b, h, q, k: False, 1 << 16, 1 << 16)
    tree, budget = built(made)
    # q in 0..511, k in 0..255: 4 x 2 blocks, but for the corner that causality decides.
    assert tree.open_blocks.count <= 8 + tree.rows
    assert budget.looked_at <= 8 * 128 * 128


@pytest.mark.parametrize(
    "name", ["document_and_causal", *(["neighbourhood_2d", "shared_prefix"] if SOAK else [])]
)
def test_blocks_of_a_long_mask_are_those_of_their_elements(name: str) -> None:
    made = CASES[name].make(1 << (17 if SOAK else 14))
    mask = anyflex.create_block_mask(
        made.mask_mod, made.batch, made.heads, made.q_length, made.kv_length
    )
    views = mask.views()
    generator = torch.Generator().manual_seed(7)
    for row in torch.randint(views.q_blocks, (12,), generator=generator).tolist():
        grid = views.kind_rows(row, row + 1)[:, :, 0]
        q = torch.arange(row * 128, min((row + 1) * 128, made.q_length))[:, None]
        some = torch.randint(views.kv_blocks, (30,), generator=generator).tolist()
        for column in {*some, row, max(row - 1, 0)} & set(range(views.kv_blocks)):
            kv = torch.arange(column * 128, min((column + 1) * 128, made.kv_length))
            live = made.mask_mod(
                torch.arange(grid.shape[0])[:, None, None, None],
                torch.arange(grid.shape[1])[:, None, None],
                q,
                kv,
            ).expand(grid.shape[0], grid.shape[1], q.shape[0], kv.shape[0])
            wanted = kinds(live, (128, 128))[:, :, 0, 0]
            assert torch.equal(grid[:, :, column].to(torch.int8), wanted)


@settings(CHECKED, max_examples=COUNT // 4)
@given(st.data())
def test_the_reference_computes_what_the_mask_function_says(data: st.DataObject) -> None:
    of = data.draw(sizes())
    of = Sizes(of.batch, of.heads, min(of.q, 130), min(of.kv, 130), (32, 16))
    mask_mod = data.draw(mask_mods(of))
    mask = anyflex.create_block_mask(
        mask_mod, *(of.batch, of.heads, of.q, of.kv), BLOCK_SIZE=of.block
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    shapes = ((of.q, 3), (of.kv, 3), (of.kv, 2))
    q, k, v = (
        torch.randn(of.batch, of.heads, *shape, generator=generator, dtype=torch.float64)
        for shape in shapes
    )
    wanted = dense_attention(q, k, v, mask=dense(mask_mod, of))
    out = anyflex.flex_attention(q, k, v, block_mask=mask)
    torch.testing.assert_close(out, wanted.out, rtol=1e-9, atol=1e-9)


def test_building_from_many_threads_gives_the_same_mask() -> None:
    made = CASES["document_and_causal"].make(4096)
    wanted = anyflex.create_block_mask(made.mask_mod, 1, 1, made.q_length, made.kv_length)
    found: list[Any] = []

    def work() -> None:
        for _ in range(5):
            found.append(
                anyflex.create_block_mask(made.mask_mod, 1, 1, made.q_length, made.kv_length)
            )

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 30 and all(mask == wanted for mask in found)


@pytest.mark.parametrize("block", [(1, 1), (1, 500), (7, 3), (128, 1 << 20), (1 << 20, 1 << 20)])
def test_odd_block_sizes_give_the_blocks_of_the_dense_mask(block: tuple[int, int]) -> None:
    for mod in (hashed, lambda b, h, q, k: q >= k, lambda b, h, q, k: (q - k) % 3 == 0):
        mask = anyflex.create_block_mask(mod, 1, 1, 50, 60, BLOCK_SIZE=block)
        wanted = (
            kinds(dense(mod, Sizes(1, 1, 50, 60, block)), block) if max(block) < 1000 else None
        )
        if wanted is None:
            wanted = kinds(
                dense(mod, Sizes(1, 1, 50, 60, block)), (min(block[0], 50), min(block[1], 60))
            )
        assert torch.equal(kind_grid(mask), wanted)


def test_ids_of_many_rows_are_told_apart_row_by_row() -> None:
    # 60 rows of up to 128 ids: more labels than a block's set could tell apart, if rows shared.
    ids = torch.randint(0, 128, (60, 300), generator=torch.Generator().manual_seed(2))
    other = torch.randint(64, 192, (60, 300), generator=torch.Generator().manual_seed(3))
    for ours, theirs in ((ids, ids), (ids, other)):

        def mask_mod(
            b: Any, h: Any, q: Any, k: Any, ours: Any = ours, theirs: Any = theirs
        ) -> Any:
            return ours[b, q] == theirs[b, k]

        tree, budget = built(Made(mask_mod, mask_mod, 290, 300, 60), (16, 16))
        assert tree.open_blocks.count == budget.looked_at == 0
        check(mask_mod, Sizes(60, 1, 290, 300, (16, 16)))


def test_pieces_of_rows_are_merged_while_building(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes_ = (3000, 2000)
    wanted = anyflex.create_block_mask(hashed, 1, 1, *sizes_, BLOCK_SIZE=16)
    gathers = []
    merged = quad_tree.merged

    def watched(runs: RunList, columns: int) -> RunList:
        made = merged(runs, columns)
        gathers.append(made.row.numel())
        return made

    monkeypatch.setattr(quad_tree, "_PIECES", 500)
    monkeypatch.setattr(quad_tree, "_CELLS", 256)
    monkeypatch.setattr(quad_tree, "merged", watched)
    mask = anyflex.create_block_mask(hashed, 1, 1, *sizes_, BLOCK_SIZE=16)
    assert mask == wanted
    # 188 x 125 PARTIAL blocks: a few runs a row are pending, never all blocks.
    assert len(gathers) > 20 and max(gathers) < 1500


def test_memory_of_a_mask_that_nothing_decides_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.rand(1 << 17)
    monkeypatch.setattr(structure_builder, "DEFAULT_BUDGET", 1 << 26)
    mod = lambda b, h, q, k: (numbers[q] * numbers[k]) % 1000 == 5  # noqa: E731
    with (
        torch.autograd.profiler.profile(profile_memory=True) as profile,
        pytest.warns(anyflex.PerformanceWarning, match=r"numbers\[q_idx\]"),
    ):
        anyflex.create_block_mask(mod, 1, 1, 1 << 17, 1 << 17)
    now = peak = 0
    for event in profile.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    # The score matrix is 16 GiB of bools, its million blocks 24 MiB of squares.
    assert 1 << 20 < peak < 64 << 20
