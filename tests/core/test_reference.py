"""The reference kernel against a dense float64 formula with plain autograd."""

from __future__ import annotations

import math

import pytest
import torch

from anyflex.errors import ModIndexError
from anyflex.mask_structure.device_views import FULL, PARTIAL
from anyflex.reference import backward, chunks, nonfinite_products
from anyflex.testing.mods.leaves import Sizes
from anyflex.testing.mods.score_mods import SCORE_MODS
from anyflex.testing.oracle import dense_attention
from anyflex.testing.results import Forward, Results, gradients
from tests.core.reference_case import ReferenceCase
from tests.oracles.differences import differences

F64 = torch.float64


def inputs(
    batch=2, heads=4, group=2, rows=37, columns=53, dim=8, value_dim=8, kv_batch=None, seed=0
):
    g = torch.Generator().manual_seed(seed)
    kv_batch = batch if kv_batch is None else kv_batch
    shapes = (
        (batch, heads, rows, dim),
        (kv_batch, heads // group, columns, dim),
        (kv_batch, heads // group, columns, value_dim),
    )
    return tuple(torch.randn(shape, generator=g, dtype=F64) for shape in shapes)


def random_kinds(batch, heads, rows, columns, block, seed=0, kinds=(0, 0, FULL, PARTIAL)):
    g = torch.Generator().manual_seed(seed)
    shape = (batch, heads, -(-rows // block[0]), -(-columns // block[1]))
    return torch.tensor(kinds)[torch.randint(len(kinds), shape, generator=g)]


def causal(b, h, q, k):
    return q >= k


def causal_kinds(rows, columns, block):
    first_row = torch.arange(-(-rows // block[0])).view(-1, 1) * block[0]
    first_column = torch.arange(-(-columns // block[1])).view(1, -1) * block[1]
    some = first_row + block[0] - 1 >= first_column
    all_ = first_row >= first_column + block[1] - 1
    return torch.where(all_, FULL, torch.where(some, PARTIAL, 0))[None, None]


def compared(case, *, dlse=True, tolerance=1e-10, **options):
    """Compare forward and backward with the dense formula; return (outputs, gradients)."""
    out = case.forward()
    g = torch.Generator().manual_seed(99)
    dout = torch.randn(out.out.shape, generator=g, dtype=F64)
    dlse = torch.randn(out.lse.shape, generator=g, dtype=F64) if dlse else None
    grads = case.backward(out, dout, dlse)
    q, k, v = (t.detach().double().requires_grad_() for t in (case.query, case.key, case.value))
    forward = dense_attention(q, k, v, case.score_mod, case.live(), case.scale)
    learned = (
        {f"t{i}": t for i, t in enumerate(case.learned())} if case.leaves is None else case.leaves
    )
    wanted = {"dq": q, "dk": k, "dv": v, **learned}
    expected = Results(forward, gradients(forward, wanted, dout, dlse, missing_is_zero=True))
    ours = {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
    if learned:
        # The mod may have captured views of the leaves.
        tables = [
            t.to(c.dtype)
            for t, c in zip(grads.captured, case.call.captured, strict=True)
            if t is not None
        ]
        chained = torch.autograd.grad(case.learned(), list(learned.values()), tables)
        ours.update(zip(learned, chained, strict=True))
    found = Results(Forward(out.out, out.lse, out.max_scores), ours)
    assert differences(found, expected, tolerance=tolerance, **options) == []
    return out, grads


@pytest.fixture(params=["one chunk", "small chunks"])
def chunked(request, monkeypatch):
    """Run a test also with chunks that end inside blocks."""
    if request.param == "small chunks":
        monkeypatch.setattr(chunks, "ELEMENTS", 2 * 4 * 53 * 7)


SIZES = [(1, 1), (1, 200), (128, 128), (129, 257), (30, 77), (300, 77), (0, 5), (5, 0)]


@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("masked", [False, True])
def test_lengths(rows, columns, masked):
    q, k, v = inputs(rows=rows, columns=columns)
    kinds = causal_kinds(rows, columns, (16, 16)) if masked else None
    compared(ReferenceCase(q, k, v, None, causal if masked else None, kinds))


@pytest.mark.parametrize("group", [1, 2, 3, 6])
@pytest.mark.parametrize("kv_batch", [1, 3])
def test_groups_and_a_shared_kv_batch(group, kv_batch, chunked):
    q, k, v = inputs(batch=3, heads=6, group=group, kv_batch=kv_batch, rows=29, columns=31)
    kinds = random_kinds(3, 6, 29, 31, (16, 16))
    compared(ReferenceCase(q, k, v, lambda s, b, h, q, k: s * (1 + h) + b, causal, kinds))


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("block", [(16, 16), (32, 8), (5, 7), (64, 64), (1 << 20, 1 << 20)])
def test_structure_wins_over_the_mask_function(batch, heads, block, chunked):
    q, k, v = inputs()
    kinds = random_kinds(batch, heads, 37, 53, block, seed=block[0])
    compared(ReferenceCase(q, k, v, None, causal, kinds, block))


def test_partial_blocks_without_a_mask_function_are_live():
    q, k, v = inputs()
    compared(ReferenceCase(q, k, v, None, None, random_kinds(1, 4, 37, 53, (16, 16))))


@pytest.mark.parametrize("only", [0, FULL, PARTIAL])
def test_masks_of_one_kind(only, chunked):
    q, k, v = inputs()
    kinds = torch.full((1, 1, 3, 4), only)
    out, grads = compared(ReferenceCase(q, k, v, None, lambda b, h, q, k: k > q, kinds))
    if only == 0:
        assert not out.out.any() and (out.lse == -math.inf).all()
        assert not grads.dq.any() and not grads.dk.any() and not grads.dv.any()


def test_far_apart_blocks_are_gathered(monkeypatch):
    q, k, v = inputs(rows=64, columns=300)
    kinds = torch.zeros(1, 1, 4, 19, dtype=torch.long)
    kinds[..., 0], kinds[..., 18], kinds[..., 2, 9] = PARTIAL, FULL, PARTIAL
    compared(ReferenceCase(q, k, v, None, causal, kinds))
    taken = []
    real = chunks.Chunk.take
    monkeypatch.setattr(
        chunks.Chunk, "take", lambda self, t: taken.append(self.width) or real(self, t)
    )
    ReferenceCase(q, k, v, None, causal, kinds).forward()
    assert max(taken) <= 48


def test_value_head_dim_differs_and_scale_is_applied_before_the_mod():
    q, k, v = inputs(dim=5, value_dim=11)
    compared(ReferenceCase(q, k, v, lambda s, b, h, q, k: s * s, scale=0.37))


def test_any_strides_are_read_in_place(chunked):
    g = torch.Generator().manual_seed(3)
    q = torch.randn(2, 37, 4, 16, generator=g, dtype=F64).transpose(1, 2)[..., ::2]
    k = torch.randn(1, 1, 53, 8, generator=g, dtype=F64).expand(2, 2, 53, 8)
    v = torch.randn(53, 8, 2, 2, generator=g, dtype=F64).permute(2, 3, 0, 1)
    compared(ReferenceCase(q, k, v, None, causal, causal_kinds(37, 53, (16, 16))))


# torch's autograd sums a bf16 table's gradient in bf16, so it is no oracle for it.
SMOOTH = sorted(n for n, entry in SCORE_MODS.items() if entry.smooth and n != "bf16_table")
ODD = sorted(n for n, entry in SCORE_MODS.items() if not entry.smooth)


def case_of(name, masked, rows=37, columns=29, kv_batch=2, **options):
    q, k, v = inputs(rows=rows, columns=columns, kv_batch=kv_batch)
    sizes = Sizes(2, 4, 2, rows, columns)
    mod = SCORE_MODS[name].make(sizes, torch.Generator().manual_seed(7), F64)
    kinds = causal_kinds(rows, columns, (16, 16)) if masked else None
    return ReferenceCase(q, k, v, mod.function(), causal if masked else None, kinds, **options)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", SMOOTH)
def test_every_score_mod_of_the_list(name, masked):
    compared(case_of(name, masked))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ODD)
def test_mods_whose_point_is_a_nan(name, masked):
    compared(case_of(name, masked))


@pytest.mark.parametrize("masked", [False, True])
def test_a_bf16_tables_gradient_is_summed_in_float32(masked):
    case = case_of("bf16_table", masked)
    (w16,) = case.learned()
    w64 = w16.detach().double().requires_grad_()
    out = case.forward()
    (got,) = case.backward(out, torch.ones_like(out.out), torch.ones_like(out.lse)).captured
    forward = dense_attention(
        case.query, case.key, case.value, SCORE_MODS["bf16_table"].builder(w64), case.live()
    )
    (expected,) = torch.autograd.grad(forward.out.sum() + forward.lse.sum(), w64)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["alibi_learned", "gate", "t5_buckets", "nan_one_pair"])
def test_mods_in_small_chunks(name, monkeypatch):
    monkeypatch.setattr(chunks, "ELEMENTS", 2 * 4 * 29 * 3)
    compared(case_of(name, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types_accumulate_in_float32(dtype):
    q, k, v = (t.to(dtype) for t in inputs(rows=64, columns=96))
    slope = torch.tensor([0.1, -0.2, 0.05, 0.3], requires_grad=True)
    case = ReferenceCase(
        q,
        k,
        v,
        lambda s, b, h, q, k: s + slope[h] * (k - q),
        causal,
        causal_kinds(64, 96, (16, 16)),
    )
    out = case.forward()
    assert out.out.dtype is dtype and out.lse.dtype is torch.float32
    double = dense_attention(
        q.double(), k.double(), v.double(), case.score_mod, case.live(), case.scale
    )
    # lse was never rounded to the inputs' type, and out was once.
    torch.testing.assert_close(out.lse.double(), double.lse, rtol=1e-5, atol=1e-5)
    bound = 1e-5 if dtype is torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(out.out.double(), double.out, rtol=bound, atol=bound / 4)
    grads = case.backward(out, torch.ones_like(out.out), torch.ones_like(out.lse))
    assert grads.dq.dtype is dtype and grads.captured[0].dtype is torch.float32
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    forward = dense_attention(*leaves, case.score_mod, case.live(), case.scale)
    expected = torch.autograd.grad(forward.out.sum() + forward.lse.sum(), [*leaves, slope])
    for got, want in zip((grads.dq, grads.dk, grads.dv, grads.captured[0]), expected, strict=True):
        want = want.double()
        gap = (got.double() - want).abs().max() / want.abs().max()
        assert gap < 4 * max(bound, 1e-5)


def test_without_dlse_and_with_delta_and_lse_from_outside():
    q, k, v = inputs()
    case = ReferenceCase(q, k, v, lambda s, b, h, q, k: s + 0.1 * h)
    out, grads = compared(case, dlse=False)
    g = torch.Generator().manual_seed(99)
    dout = torch.randn(out.out.shape, generator=g, dtype=F64)
    given = case.backward(out, dout, delta=(dout * out.out).sum(-1))
    torch.testing.assert_close(given.dq, grads.dq)


def test_two_halves_of_the_keys_with_the_joint_lse_give_the_whole_gradient():
    q, k, v = inputs(columns=64)
    whole = ReferenceCase(q, k, v)
    out = whole.forward()
    dout = torch.randn(out.out.shape, dtype=F64, generator=torch.Generator().manual_seed(5))
    delta = (dout * out.out).sum(-1)
    expected = whole.backward(out, dout)
    halves = []
    for part in (slice(0, 32), slice(32, 64)):
        half = ReferenceCase(q, k[:, :, part], v[:, :, part])
        halves.append(half.backward(out, dout, delta=delta, lse=out.lse))
    torch.testing.assert_close(halves[0].dq + halves[1].dq, expected.dq)
    torch.testing.assert_close(torch.cat([h.dk for h in halves], 2), expected.dk)
    torch.testing.assert_close(torch.cat([h.dv for h in halves], 2), expected.dv)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_at_dead_pairs_reaches_nothing(poison, chunked):
    # Keys from 20 on and rows below 8 take part in no live pair; rows of different liveness meet
    # in one chunk.
    def mask(b, h, q, k):
        return (k < 20) & (q >= 8) & (k <= q)

    kinds = torch.full((1, 1, 3, 4), PARTIAL)
    q, k, v = inputs()
    clean = ReferenceCase(q, k, v, None, mask, kinds)
    out, grads = compared(clean)
    nonfinite = [t.clone() for t in (q, k, v)]
    nonfinite[0][:, :, :8] = poison
    nonfinite[1][:, :, 20:] = poison
    nonfinite[2][:, :, 20:] = poison
    case = ReferenceCase(*nonfinite, None, mask, kinds)
    again = case.forward()
    for got, want in (
        (again.out, out.out),
        (again.lse, out.lse),
        (again.max_scores, out.max_scores),
    ):
        torch.testing.assert_close(got, want)
    g = torch.Generator().manual_seed(99)
    dout = torch.randn(out.out.shape, generator=g, dtype=F64)
    dlse = torch.randn(out.lse.shape, generator=g, dtype=F64)
    dout[:, :, :8], dlse[:, :, :8] = poison, poison
    regrads = case.backward(again, dout, dlse)
    for got, want in zip(
        (regrads.dq, regrads.dk, regrads.dv), (grads.dq, grads.dk, grads.dv), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_a_live_value_that_is_not_finite_reaches_only_rows_that_see_it():
    def mask(b, h, q, k):
        return k <= q

    q, k, v = inputs(rows=16, columns=16)
    v[0, 0, 10, 3], v[0, 0, 12, 4] = math.nan, math.inf
    v[0, 0, 13, 4] = -math.inf
    out = ReferenceCase(q, k, v, None, mask, torch.full((1, 1, 1, 1), PARTIAL)).forward().out
    assert out[0, :2, 10:, 3].isnan().all() and out[0, :2, :10].isfinite().all()
    assert (out[0, :2, 12, 4] == math.inf).all() and out[0, :2, 13:, 4].isnan().all()
    assert out[0, 2:].isfinite().all() and out[1].isfinite().all()


def test_scores_that_are_nan_where_dead_do_not_matter():
    def mod(s, b, h, q, k):
        return torch.where(k > q, float("nan"), torch.sqrt(s.abs() + 0.1) / (k <= q))

    q, k, v = inputs()
    compared(ReferenceCase(q, k, v, mod, causal, torch.full((1, 1, 3, 4), PARTIAL)))


def test_a_nan_row_spoils_only_the_keys_that_are_live_in_it():
    case = case_of("nan_one_pair", True)
    out = case.forward()
    assert out.out[:, :, 1].isnan().all() and out.lse[:, :, 1].isnan().all()
    rest = [r for r in range(37) if r != 1]
    assert out.out[:, :, rest].isfinite().all()
    grads = case.backward(out, torch.ones_like(out.out))
    # Row 1 of a causal mask sees keys 0 and 1; the NaN itself passes no gradient to its score.
    assert grads.dk[:, :, 1].isnan().all() and grads.dk[:, :, 2:].isfinite().all()
    assert grads.dv[:, :, :2].isnan().all() and grads.dv[:, :, 2:].isfinite().all()


def test_a_plus_infinite_score_gives_a_nan_row():
    q, k, v = inputs()
    mod = lambda s, b, h, q, k: torch.where((q == 3) & (k == 2), float("inf"), s)  # noqa: E731
    out = ReferenceCase(q, k, v, mod).forward()
    assert out.out[:, :, 3].isnan().all() and out.lse[:, :, 3].isnan().all()
    assert (out.max_scores[:, :, 3] == math.inf).all()
    assert out.out[:, :, :3].isfinite().all() and out.out[:, :, 4:].isfinite().all()


@pytest.mark.parametrize("name", ["ignores_score", "constant_score", "rounded"])
def test_missing_derivatives_are_exact_zeros(name):
    _, grads = compared(case_of(name, True))
    assert not grads.dq.any() and not grads.dk.any() and grads.dv.any()


def test_gradients_of_tables_repeat_bit_for_bit():
    w = torch.randn(16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    q, k, v = (t.float() for t in inputs(rows=200, columns=300))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runs = []
        for _ in range(3):
            case = ReferenceCase(q, k, v, lambda s, b, h, q, k: s + w[(q * 3 + k) % 2 + h])
            out = case.forward()
            grads = case.backward(out, torch.ones_like(out.out))
            runs.append([grads.dq, grads.dk, grads.dv, grads.captured[0]])
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_colliding_additions_keep_float32_accuracy():
    w = torch.zeros(2, requires_grad=True)
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 600, 8, generator=g) for _ in range(3))
    case = ReferenceCase(q, k, v, lambda s, b, h, q, k: s + w[(q + k) % 2])
    out = case.forward()
    dout = torch.randn(out.out.shape, generator=g)
    got = case.backward(out, dout).captured[0]
    w64 = torch.zeros(2, dtype=F64, requires_grad=True)
    forward = dense_attention(
        q.double(), k.double(), v.double(), lambda s, b, h, q, k: s + w64[(q + k) % 2]
    )
    (expected,) = torch.autograd.grad(forward.out, w64, dout.double())
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def test_index_offsets_are_added_to_what_mods_see():
    q, k, v = inputs()
    kinds = torch.full((1, 1, 3, 4), PARTIAL)
    mask = lambda b, h, q, k: q >= k  # noqa: E731
    shifted = ReferenceCase(q, k, v, lambda s, b, h, q, k: s + 0.1 * q + b * h * k, mask, kinds)
    object.__setattr__(shifted.call, "index_offsets", (1, 2, 30, 10))
    out = shifted.forward()
    mod = lambda s, b, h, q, k: s + 0.1 * (q + 30) + (b + 1) * (h + 2) * (k + 10)  # noqa: E731
    direct = ReferenceCase(q, k, v, mod, lambda b, h, q, k: q + 20 >= k, kinds).forward()
    torch.testing.assert_close(out.out, direct.out)
    torch.testing.assert_close(out.lse, direct.lse)


def test_a_live_read_outside_raises_and_names_the_pair():
    q, k, v = inputs()
    w = torch.zeros(20, dtype=F64)
    mod = lambda s, b, h, q, k: s + w[k]  # noqa: E731
    with pytest.raises(ModIndexError, match=r"score_mod reads captured tensor 0, shape \[20\]"):
        ReferenceCase(q, k, v, mod).forward()
    with pytest.raises(IndexError, match="b=0, h=0, q_idx=0, kv_idx=20"):
        ReferenceCase(q, k, v, mod).forward()
    seen = lambda b, h, q, k: w[k] == 0  # noqa: E731
    with pytest.raises(ModIndexError, match="mask_mod reads captured tensor 0"):
        ReferenceCase(q, k, v, None, seen, torch.full((1, 1, 3, 4), PARTIAL)).forward()


def test_dead_reads_outside_do_not_raise(chunked):
    q, k, v = inputs()
    w = torch.randn(20, dtype=F64, requires_grad=True)
    empty = torch.zeros(0, dtype=F64)
    mod = lambda s, b, h, q, k: s + w[k] + empty[torch.where(k < 20, 0, q)]  # noqa: E731
    mask = lambda b, h, q, k: (k < 20) & (w[k] < 99) & (k > 99)  # noqa: E731
    case = ReferenceCase(q, k, v, mod, mask, torch.full((1, 1, 3, 4), PARTIAL))
    assert not case.forward().out.any()
    mod = lambda s, b, h, q, k: s + w[k]  # noqa: E731
    mask = lambda b, h, q, k: (k < 20) & (w.detach()[k] < 99)  # noqa: E731
    case = ReferenceCase(q, k, v, mod, mask, torch.full((1, 1, 3, 4), PARTIAL))
    out = case.forward()
    grads = case.backward(out, torch.ones_like(out.out))
    assert out.out.isfinite().all() and grads.captured[0].isfinite().all()
    kinds = torch.tensor([FULL, 0, 0, 0]).expand(1, 1, 3, 4)
    ReferenceCase(q, k, v, mod, None, kinds).forward()


@pytest.mark.parametrize(
    "name", ["alibi_learned", "softcap", "bias_twice", "scalar_learned", "identity"]
)
@pytest.mark.parametrize("masked", [False, True])
def test_untraceable_mods_run_through_vmap_with_gradients(name, masked):
    compared(case_of(name, masked, vmap=True))


def test_an_unknown_pure_operation_runs_through_vmap():
    t = torch.tensor([0.3, 0.4, 0.5, 0.6], dtype=F64, requires_grad=True)
    q, k, v = inputs()
    mod = lambda s, b, h, q, k: s + torch.lgamma(t[h] + (q - k).abs())  # noqa: E731
    kinds = causal_kinds(37, 53, (16, 16))
    compared(ReferenceCase(q, k, v, mod, causal, kinds, vmap=True))


def test_an_untraceable_mask_applies_to_partial_blocks_only(chunked):
    q, k, v = inputs()
    kinds = random_kinds(2, 4, 37, 53, (16, 16))
    mask = lambda b, h, q, k: torch.gcd(q + b, k + h) < 3  # noqa: E731
    case = ReferenceCase(q, k, v, None, None, kinds)
    object.__setattr__(case.call, "mask_function", mask)
    case.mask_mod = mask
    compared(case)


@pytest.mark.parametrize("name", ["alibi_learned", "nan_one_pair", "dead_rows_by_score"])
def test_devices_that_must_not_look_at_values_get_the_same_results(name, monkeypatch):
    # Everything counts as non-finite there; here the CPU takes that path.
    monkeypatch.setattr(nonfinite_products, "has_nonfinite", lambda values: True)
    monkeypatch.setattr(backward, "has_nonfinite", lambda values: True)
    compared(case_of(name, True))


def test_a_read_outside_in_a_mod_run_through_vmap_raises():
    q, k, v = inputs()
    w = torch.zeros(20, dtype=F64)
    with pytest.raises(ModIndexError, match="runs through vmap reads outside"):
        ReferenceCase(q, k, v, lambda s, b, h, q, k: s + w[k], vmap=True).forward()


def test_memory_is_bounded_by_the_chunk_not_by_the_lengths(monkeypatch):
    monkeypatch.setattr(chunks, "ELEMENTS", 1 << 16)
    q, k, v = (torch.randn(1, 1, 2048, 8) for _ in range(3))
    case = ReferenceCase(q, k, v, lambda s, b, h, q, k: s + 0.001 * (q - k))
    with torch.profiler.profile(profile_memory=True) as profile:
        out = case.forward()
        case.backward(out, torch.ones_like(out.out))
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    # The scores of the whole call are 16 MiB, of a chunk 256 KiB.
    assert peak < 16 * 4 * chunks.ELEMENTS
