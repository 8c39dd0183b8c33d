"""flex_attention_packed against the dense formula: lengths, packed keys and pages, gradients."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex
from tests.packed.dense_formula import Sequence, dense_formula

__all__: list[str] = []

LSE = anyflex.AuxRequest(lse=True)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def drawn(rows: int, heads: int, dim: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, heads, dim, generator=generator, dtype=torch.float64)


def sequences(
    q_lengths: list[int],
    kv_lengths: list[int],
    slots: list[int] | None = None,
    starts: list[int] | None = None,
) -> list[Sequence]:
    q_ends, kv_ends = offsets(q_lengths).tolist(), offsets(kv_lengths).tolist()
    return [
        Sequence(
            slice(q_ends[i], q_ends[i + 1]),
            kv - q if starts is None else starts[i],
            i if slots is None else slots[i],
            torch.arange(kv_ends[i], kv_ends[i + 1]),
        )
        for i, (q, kv) in enumerate(zip(q_lengths, kv_lengths, strict=True))
    ]


SLOPES = drawn(8, 4, 1, 9)[..., 0]
LIMITS = torch.tensor([3, 0, 9, 1, 30, 2, 7, 11])


def slope(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - SLOPES[b, h] * (q_idx - kv_idx)


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & ((q_idx - kv_idx < 3 * b + 5) | (kv_idx < LIMITS[b]))


LENGTHS = [
    ([5, 0, 1, 30, 17], [5, 7, 20, 30, 0]),
    ([1, 1, 1], [1, 129, 64]),
    ([200, 3], [200, 140]),
    ([4, 9], [2, 3]),  # more queries than keys: the first positions are negative
    ([0, 0], [0, 3]),
    ([], []),
]


@pytest.mark.parametrize(("q_lengths", "kv_lengths"), LENGTHS)
@pytest.mark.parametrize("spare", [0, 3])
def test_each_sequence_has_what_it_has_alone(
    q_lengths: list[int], kv_lengths: list[int], spare: int
) -> None:
    q = drawn(sum(q_lengths) + spare, 4, 16, 1)
    k, v = drawn(sum(kv_lengths) + spare, 2, 16, 2), drawn(sum(kv_lengths) + spare, 2, 8, 3)
    slots = [(3 * i + 2) % 7 for i in range(len(q_lengths))]
    step = anyflex.Packed(
        offsets(q_lengths), kv_offsets=offsets(kv_lengths), slots=int32(*slots)
    ).begin()
    out, aux = anyflex.flex_attention_packed(
        q, k, v, step, slope, window, enable_gqa=True, return_aux=LSE, backend="reference"
    )
    wanted, lse = dense_formula(q, k, v, sequences(q_lengths, kv_lengths, slots), slope, window)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(aux.lse, lse, rtol=0, atol=1e-12)


def paged(
    packed: Tensor, lengths: list[int], page: int, table: Tensor, pages: int, fill: float
) -> Tensor:
    """Return a pool whose other rows all are `fill`."""
    pool = packed.new_full((pages, packed.shape[1], page, packed.shape[2]), fill)
    ends = offsets(lengths).tolist()
    for i, length in enumerate(lengths):
        for row in range(length):
            pool[table[i, row // page], :, row % page] = packed[ends[i] + row]
    return pool


@pytest.mark.parametrize("page", [1, 7, 16])
@pytest.mark.parametrize("fill", [torch.nan, torch.inf])
def test_pages_give_what_packed_keys_give_whatever_stale_rows_hold(page: int, fill: float) -> None:
    q_lengths, kv_lengths = [5, 0, 1, 30], [5, 7, 20, 33]
    q, k, v = drawn(36, 4, 16, 1), drawn(65, 2, 16, 2), drawn(65, 2, 8, 3)
    width = -(-33 // page) + 1
    order = torch.randperm(4 * width, generator=torch.Generator().manual_seed(0))
    table = order.view(4, width).to(torch.int32)
    pools = [paged(t, kv_lengths, page, table, 4 * width, fill) for t in (k, v)]
    for i, length in enumerate(kv_lengths):
        table[i, -(-length // page) :] = 2**31 - 1  # never followed
    # Sequences come in another order than the table's rows, which are those of slots.
    order_of_rows = [2, 0, 3, 1]
    step = anyflex.Packed(
        offsets([q_lengths[i] for i in order_of_rows]),
        int32(*[kv_lengths[i] for i in order_of_rows]),
        page_table=table,
        slots=int32(*order_of_rows),
    ).begin()
    rows = q.split(q_lengths)
    out, aux = anyflex.flex_attention_packed(
        torch.cat([rows[i] for i in order_of_rows]),
        *pools,
        step,
        slope,
        window,
        enable_gqa=True,
        return_aux=LSE,
        backend="reference",
    )
    wanted, lse = dense_formula(q, k, v, sequences(q_lengths, kv_lengths), slope, window)
    for found, whole in ((out, wanted), (aux.lse, lse)):
        parts = whole.split(q_lengths)
        expected = torch.cat([parts[i] for i in order_of_rows])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_page_id_outside_of_the_pool_raises_and_past_a_length_does_not() -> None:
    table = torch.tensor([[0, 5]], dtype=torch.int32)
    pool = torch.randn(2, 1, 4, 8)
    query = torch.randn(1, 1, 8)
    for length, fails in ((4, False), (5, True)):
        step = anyflex.Packed(int32(0, 1), int32(length), page_table=table).begin()
        if fails:
            with pytest.raises(anyflex.ModIndexError, match="page 5 .* pages 0 to 1"):
                anyflex.flex_attention_packed(query, pool, pool, step)
        else:
            anyflex.flex_attention_packed(query, pool, pool, step)


def test_gradients_are_those_that_sequences_have_alone() -> None:
    q_lengths, kv_lengths = [5, 0, 4, 21], [5, 4, 11, 21]
    leaves = [drawn(30, 4, 16, 1), drawn(41, 2, 16, 2), drawn(41, 2, 16, 3), drawn(4, 4, 1, 4)]
    q, k, v, slopes = (leaf.requires_grad_() for leaf in leaves)

    def learned(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - slopes[b, h, 0] * (q_idx - kv_idx)

    step = anyflex.Packed(offsets(q_lengths), kv_offsets=offsets(kv_lengths)).begin()
    out, aux = anyflex.flex_attention_packed(
        q, k, v, step, learned, window, enable_gqa=True, return_aux=LSE, backend="reference"
    )
    wanted, lse = dense_formula(q, k, v, sequences(q_lengths, kv_lengths), learned, window)
    weight, lse_weight = drawn(30, 4, 16, 5), drawn(30, 4, 1, 6)[..., 0]
    found, expected = (
        torch.autograd.grad(
            (o * weight).sum() + torch.where(each.isneginf(), 0.0, each * lse_weight).sum(),
            (q, k, v, slopes),
        )
        for o, each in ((out, aux.lse), (wanted, lse))
    )
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


def test_sinks_take_their_part_once_and_learn() -> None:
    q_lengths = [3, 6]
    q, k, v = drawn(10, 4, 8, 1), drawn(9, 4, 8, 2), drawn(9, 4, 8, 3)
    sinks = torch.tensor([0.3, -1.0, 2.0, -torch.inf], dtype=torch.float64, requires_grad=True)
    step = anyflex.Packed(offsets(q_lengths), kv_offsets=offsets(q_lengths)).begin()
    out, aux = anyflex.flex_attention_packed(
        q, k, v, step, None, window, sinks=sinks, return_aux=LSE, backend="reference"
    )
    wanted, lse = dense_formula(q, k, v, sequences(q_lengths, q_lengths), None, window, sinks)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(aux.lse, lse, rtol=0, atol=1e-12)
    weight = drawn(10, 4, 8, 5)
    (found,) = torch.autograd.grad((out * weight).sum(), sinks)
    (expected,) = torch.autograd.grad((wanted * weight).sum(), sinks)
    torch.testing.assert_close(found[:3], expected[:3], rtol=0, atol=1e-12)
    assert found[3] == 0


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("scales", ["tensor", "head", "token"])
@pytest.mark.parametrize("pages", [False, True])
def test_stored_numbers_are_multiplied_by_their_scales(
    stored: torch.dtype, scales: str, pages: bool
) -> None:
    lengths = [3, 8]
    q = drawn(11, 4, 8, 1)
    packed = [(drawn(11, 2, 8, seed) * 40).round().clamp(-127, 127).to(stored) for seed in (2, 3)]
    shape = {"tensor": (), "head": (2,), "token": (11, 2)}[scales]
    multipliers = [
        torch.rand(shape, generator=torch.Generator().manual_seed(s)) / 20 for s in (4, 5)
    ]
    wide = [
        t.double() * (m[:, None] if scales == "head" else m[..., None] if m.dim() else m)
        for t, m in zip(packed, multipliers, strict=True)
    ]
    wanted, _ = dense_formula(q, *wide, sequences(lengths, lengths), slope, window)
    given: list[Tensor] = packed
    if pages:
        table = int32(3, 1, 0, 2).view(2, 2)
        given = [paged(t.double(), lengths, 4, table, 4, 0.0).to(stored) for t in packed]
        if scales == "token":
            multipliers = [
                paged(m.double()[..., None], lengths, 4, table, 4, torch.nan)[..., 0].float()
                for m in multipliers
            ]
        batch = anyflex.Packed(offsets(lengths), int32(*lengths), page_table=table)
    else:
        batch = anyflex.Packed(offsets(lengths))
    k_scale, v_scale = multipliers
    out = anyflex.flex_attention_packed(
        q,
        *given,
        batch.begin(),
        slope,
        window,
        k_scale=k_scale,
        v_scale=v_scale,
        enable_gqa=True,
        backend="reference",
    )
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)


def test_out_is_written_and_returned() -> None:
    q = torch.randn(5, 2, 8)
    out = torch.full_like(q, torch.nan)
    step = anyflex.Packed(int32(0, 5)).begin()
    returned = anyflex.flex_attention_packed(q, q, q, step, out=out)
    assert returned is out
    torch.testing.assert_close(out, anyflex.flex_attention_packed(q, q, q, step))


def test_results_are_written_to_out_without_a_copy_where_nothing_reads_it() -> None:
    q, k, v = torch.randn(3, 7, 4, 16).unbind()
    wide = torch.randn(7, 3, 4, 16)
    step = anyflex.Packed(int32(0, 3, 7)).begin()

    def copies(query: Tensor, out: Tensor) -> int:
        wanted = anyflex.flex_attention_packed(query, k, v, step, backend="cpu")
        before = out._version
        with torch.profiler.profile() as found:
            anyflex.flex_attention_packed(query, k, v, step, out=out, backend="cpu")
        assert torch.equal(out, wanted) and out._version > before
        return sum(event.name == "aten::copy_" for event in found.events())

    assert copies(q, torch.full_like(q, torch.nan)) == 0
    assert copies(wide[:, 0], torch.full_like(q, torch.nan)) == 0
    assert copies(wide[:, 0], wide[:, 1]) == 1  # query's memory, and not contiguous
    assert copies(q.clone(), q.new_full((7, 4, 32), torch.nan)[..., ::2]) == 1
    memory = torch.full((q.numel() + 1,), torch.nan)
    assert copies(q, memory[1:].view_as(q)) == 1  # an address that kernels don't take
    own = q.clone()
    assert copies(own, own) == 1
    # One buffer of numpy's, in two storages.
    numpy = pytest.importorskip("numpy")
    buffer = numpy.zeros(2 * q.numel(), dtype=numpy.float32)
    query, late = (
        torch.from_numpy(buffer[first : first + q.numel()]).view_as(q) for first in (0, 64)
    )
    assert copies(query.copy_(q), late) == 1


def test_one_graph_serves_all_lengths() -> None:
    def call(q: Tensor, k: Tensor, step: anyflex.Step) -> Tensor:
        found = anyflex.flex_attention_packed(q, k, k, step, slope, window, backend="reference")
        assert isinstance(found, Tensor)
        return found

    graphs: list[Any] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(call, fullgraph=True, backend=compiler)
    for lengths in ([3, 9], [4, 10], [7, 2]):
        q, k = drawn(sum(lengths), 4, 16, 1), drawn(sum(lengths), 4, 16, 2)
        found = compiled(q, k, anyflex.Packed(offsets(lengths)).begin())
        wanted, _ = dense_formula(q, k, k, sequences(lengths, lengths), slope, window)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    # One for the first lengths, and one for all others.
    assert len(graphs) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_that_share_a_mask_look_for_its_blocks_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anyflex.packed import core_layout, own_layout

    built = []

    def counted(original: Any) -> Any:
        return lambda *given, **named: built.append(1) or original(*given, **named)

    # float64 has no kernel that takes packed sequences as they are.
    monkeypatch.setattr(core_layout, "create_block_mask", counted(core_layout.create_block_mask))
    monkeypatch.setattr(own_layout, "block_kinds", counted(own_layout.block_kinds))
    q = torch.randn(9, 4, 8, dtype=dtype)
    step = anyflex.Packed(int32(0, 4, 9)).begin()

    def call(limit: int) -> None:
        anyflex.flex_attention_packed(q, q, q, step, mask_mod=lambda b, h, i, j: i - j < limit)

    for _ in range(2):
        call(5)
    once = len(built)
    assert once == 1
    call(5)
    assert len(built) == once
    call(6)
    assert len(built) == 2 * once


def test_a_batch_with_capacity_is_filled_step_by_step() -> None:
    table = torch.arange(8, dtype=torch.int32).view(4, 2)
    pool = drawn(8, 2, 4 * 8, 1).view(8, 2, 4, 8)
    batch = anyflex.Packed.with_capacity(3, max_q=4, max_kv=8, page_table=table)
    for q_lengths, kv_lengths, slots in (([2, 1], [5, 8], [3, 0]), ([4], [4], [1]), ([], [], [])):
        batch.set(q_lengths, kv_lengths, slots)
        query = drawn(6, 2, 8, 2)
        out = anyflex.flex_attention_packed(
            query, pool, pool, batch.begin(), slope, window, backend="reference"
        )
        keys = pool.transpose(1, 2).reshape(32, 2, 8)
        ends = offsets(q_lengths).tolist()
        parts = [
            Sequence(
                slice(ends[i], ends[i + 1]), kv - q, slot, torch.arange(8 * slot, 8 * slot + kv)
            )
            for i, (q, kv, slot) in enumerate(zip(q_lengths, kv_lengths, slots, strict=True))
        ]
        wanted, _ = dense_formula(query, keys, keys, parts, slope, window)
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)


def test_parts_of_the_keys_merge() -> None:
    q_lengths, kv_lengths = [5, 4], [30, 9]
    q, k, v = drawn(12, 4, 16, 1), drawn(39, 4, 16, 2), drawn(39, 4, 16, 3)
    step = anyflex.Packed(offsets(q_lengths), kv_offsets=offsets(kv_lengths)).begin()

    def half(near: bool) -> Any:
        return lambda b, h, i, j: window(b, h, i, j) & ((j >= 16) == near)

    parts = []
    for near in (False, True):
        out, aux = anyflex.flex_attention_packed(
            q, k, v, step, slope, half(near), return_aux=LSE, backend="reference"
        )
        parts += [out, aux.lse]
    out, lse = anyflex.merge_attention(*parts)
    wanted = dense_formula(q, k, v, sequences(q_lengths, kv_lengths), slope, window)
    torch.testing.assert_close((out, lse), wanted, rtol=0, atol=1e-12)
