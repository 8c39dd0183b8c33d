"""Packed sequences and pages in Triton's interpreter, against the dense formula in float64."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from soak import SOAK
from torch import Tensor

import anyflex
from anyflex.plugin import Accepted, Call, Outputs, Spec, isolated, register
from anyflex.testing import posing

pytest.importorskip("triton", reason="there is no Triton to interpret with")

from anyflex_triton.backend import TritonBackend
from anyflex_triton.kernel import TritonKernel
from anyflex_triton.kernel_signatures import Programs
from anyflex_triton.launch import FixedLaunch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BOTH = anyflex.AuxRequest(lse=True, max_scores=True)
Q_LENGTHS, KV_LENGTHS = [5, 0, 1, 130, 17, 3], [5, 7, 70, 200, 0, 1]
SLOTS = [2, 6, 0, 5, 1, 3]
FEW = [5, 0, 1, 9, 3, 2]
"""Query rows of sequences that are decoded."""
SPARE = 4
"""Number of padding rows."""
SLOPES = torch.randn(7, 4, generator=torch.Generator().manual_seed(9))
LIMITS = torch.tensor([3, 0, 9, 1, 30, 200, 7])
BY_KEY = torch.randn(300, generator=torch.Generator().manual_seed(8))
BY_QUERY = torch.randn(300, generator=torch.Generator().manual_seed(7))


def slope(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    # A sequence of more rows than keys has negative q_idx, which count from the table's end.
    return score - SLOPES[b, h] * (q_idx - kv_idx) * 0.01 + BY_KEY[kv_idx] * BY_QUERY[q_idx]


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ((q_idx >= kv_idx) & (q_idx - kv_idx < 40 + 3 * b)) | (kv_idx < LIMITS[b])


def of_heads(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 20 + 100 * h)


MODS: dict[str, tuple[Any, Any]] = {
    "plain": (None, None),
    "causal": (None, lambda b, h, q_idx, kv_idx: q_idx >= kv_idx),
    "of heads": (None, of_heads),
    "of slots": (slope, window),
}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kernels of packed calls that ran; outputs are NaN before."""
    calls: list[str] = []
    forward = TritonKernel.forward

    def poisoned(kernel: TritonKernel, call: Call, out: Outputs) -> None:
        assert call.packed is not None
        calls.append(kernel.describe(call).split()[0])
        for tensor in (out.out, out.lse, out.max_scores):
            if tensor is not None:
                tensor.fill_(torch.nan)
        forward(kernel, call, out)

    monkeypatch.setattr(TritonKernel, "forward", poisoned)
    with isolated(), posing("cuda"):
        register("cuda.mine", TritonBackend)
        yield calls


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Core makes structures as on a device, where bounds alone are known."""
    # No public name leads there: users can't ask for it on a CPU.
    made = importlib.import_module("anyflex.packed.row_blocks")
    monkeypatch.setattr("anyflex.packed.own_layout.row_blocks", made.static_row_blocks)
    monkeypatch.setattr("anyflex.packed.own_layout.offsets_within", made.static_offsets)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def int32(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wanted(
    q: Tensor, k: Tensor, v: Tensor, mods: tuple[Any, Any], q_lengths: list[int] = Q_LENGTHS
) -> tuple[Tensor, ...]:
    """Return out, lse and max_scores of the constants' sequences."""
    score_mod, mask_mod = mods
    q, k, v = q.double(), k.double(), v.double()
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    lse, highest = (q.new_full(q.shape[:2], -torch.inf) for _ in range(2))
    parts = zip(
        offsets(q_lengths).tolist(), q_lengths, offsets(KV_LENGTHS).tolist(), KV_LENGTHS, SLOTS,
        strict=False,
    )  # fmt: skip
    for begin, rows, first, keys, slot in parts:
        if rows == 0 or keys == 0:
            continue
        mine = q[begin : begin + rows].transpose(0, 1)
        k_mine, v_mine = (
            t[first : first + keys].repeat_interleave(group, 1).transpose(0, 1) for t in (k, v)
        )
        at = (
            torch.tensor(slot),
            torch.arange(heads)[:, None, None],
            torch.arange(rows)[:, None] + keys - rows,
            torch.arange(keys),
        )
        scores = mine @ k_mine.transpose(1, 2) * q.shape[2] ** -0.5
        if score_mod is not None:
            scores = score_mod(scores, *at)
        if mask_mod is not None:
            scores = torch.where(mask_mod(*at), scores, -torch.inf)
        sums = scores.logsumexp(-1, keepdim=True)
        weights = (scores - sums.nan_to_num(neginf=0.0)).exp()
        out[begin : begin + rows] = (weights @ v_mine).transpose(0, 1)
        lse[begin : begin + rows] = sums[..., 0].T
        highest[begin : begin + rows] = scores.amax(-1).T
    return out, lse, highest


def poison(like: Tensor) -> Tensor:
    """Return NaN of a tensor's shape and type, or the lowest integer."""
    if not like.is_floating_point():
        return torch.full_like(like, torch.iinfo(like.dtype).min)
    return torch.full(like.shape, torch.nan).to(like.dtype)


def pooled(packed: Tensor, page: int, table: Tensor, pages: int) -> Tensor:
    """Return a pool whose other rows are poison."""
    pool = poison(packed[:1, :, None].expand(pages, -1, page, -1))
    for i, (begin, length) in enumerate(
        zip(offsets(KV_LENGTHS).tolist(), KV_LENGTHS, strict=False)
    ):
        for row in range(length):
            pool[table[SLOTS[i], row // page], :, row % page] = packed[begin + row]
    return pool


def given(
    dims: tuple[int, int], q_lengths: list[int] = Q_LENGTHS
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        drawn(sum(q_lengths) + SPARE, 2, dims[0], seed=1),
        drawn(sum(KV_LENGTHS), 1, dims[0], seed=2),
        drawn(sum(KV_LENGTHS), 1, dims[1], seed=3),
    )


def compare(found: Any, expected: tuple[Tensor, ...], tolerance: float) -> None:
    out, aux = found
    for mine, theirs in zip((out, aux.lse, aux.max_scores), expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=tolerance)


def attend(q: Tensor, k: Tensor, v: Tensor, step: Any, mods: tuple[Any, Any]) -> Any:
    return anyflex.flex_attention_packed(
        q, k, v, step, *mods, enable_gqa=True, return_aux=BOTH, backend="cuda.mine"
    )


def packed_keys(mods: tuple[Any, Any], q_lengths: list[int] = Q_LENGTHS) -> None:
    q, k, v = given((16, 32), q_lengths)
    # Rows past the last sequence's keys are padding.
    k, v = (torch.cat([t, torch.full_like(t[:3], torch.nan)]) for t in (k, v))
    batch = anyflex.Packed(offsets(q_lengths), kv_offsets=offsets(KV_LENGTHS), slots=int32(SLOTS))
    compare(attend(q, k, v, batch.begin(), mods), wanted(q, k, v, mods, q_lengths), 2e-5)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("name", ["plain", "of heads", *(["causal", "of slots"] * SOAK)])
def test_packed_keys(name: str, gpu: list[str]) -> None:
    packed_keys(MODS[name])
    assert gpu == ["prefill"]


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("name", ["of heads", "of slots", *(["plain", "causal"] * SOAK)])
def test_few_rows_are_decoded(name: str, gpu: list[str]) -> None:
    packed_keys(MODS[name], FEW)
    assert gpu == ["decode"]


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("most", [2, 150])
@pytest.mark.parametrize("name", ["plain", "causal"])
def test_a_batch_that_breaks_its_bounds_has_dead_rows(name: str, most: int) -> None:
    """No bits of earlier results are left in them: outputs are NaN before."""
    q, k, v = drawn(160, 2, 16, seed=1), drawn(9, 1, 16, seed=2), drawn(9, 1, 16, seed=3)
    sound = int32([0, most, most + 1])
    for broken in ([0, most + 1, most + 2], [0, 155, 20], [1, 2, 3]):
        batch = anyflex.Packed(sound.clone(), kv_offsets=int32([0, 4, 9]), max_q=most)
        step = batch.begin()
        batch.q_offsets.copy_(int32(broken))
        out, aux = attend(q, k, v, step, MODS[name])
        assert (out == 0).all() and (aux.lse == -torch.inf).all()
        assert (aux.max_scores == -torch.inf).all()


def test_packed_keys_whose_numbers_the_host_knows(gpu: list[str]) -> None:
    packed_keys(MODS["of slots"])
    assert gpu == ["prefill"]


@pytest.mark.usefixtures("on_device")
def test_positions_before_the_first_key_wrap_in_tables(gpu: list[str]) -> None:
    """Neither they nor slots lead outside of a table, whatever a device's numbers are."""
    table = drawn(3, 9, seed=6)

    def by_row(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[b, q_idx]

    q, k, v = drawn(4, 2, 16, seed=1), drawn(2, 1, 16, seed=2), drawn(2, 1, 16, seed=3)
    batch = anyflex.Packed(int32([0, 4]), kv_offsets=int32([0, 2]), slots=int32([1]))
    step = batch.begin()
    batch.slots.fill_(-2)
    _, aux = attend(q, k, v, step, (by_row, None))
    scores = torch.einsum("qhd,kd->qhk", q.double(), k[:, 0].double()) / 4
    lse = scores.logsumexp(-1) + table[-2, torch.tensor([-2, -1, 0, 1])][:, None]
    torch.testing.assert_close(aux.lse.double(), lse, rtol=0, atol=2e-5)
    assert gpu == ["decode"]


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(
    ("name", "page", "q_lengths"),
    [
        ("of slots", 1, Q_LENGTHS),
        ("plain", 16, Q_LENGTHS),
        ("of slots", 48, Q_LENGTHS),
        ("causal", 64, Q_LENGTHS),
        ("plain", 128, FEW),
    ]
    + [
        (name, page, lengths)
        for name in MODS
        for page in (1, 16, 48, 64, 128)
        for lengths in (FEW, Q_LENGTHS)
    ]
    * SOAK,
)
def test_pages(name: str, page: int, q_lengths: list[int], gpu: list[str]) -> None:
    dims = (16, 16) if page == 64 else (32, 16)
    q, k, v = given(dims, q_lengths)
    expected = wanted(q, k, v, MODS[name], q_lengths)
    width = -(-max(KV_LENGTHS) // page) + 1
    table = torch.randperm(7 * width, generator=torch.Generator().manual_seed(0))
    table = table.view(7, width).to(torch.int32)
    k, v = (pooled(t, page, table, 7 * width) for t in (k, v))
    for i, length in enumerate(KV_LENGTHS):
        # Entries past a length are never followed.
        table[SLOTS[i], -(-length // page) :] = 2**31 - 1 if i % 2 else -1
    if page == 16:
        # Rows before heads, as some caches have them.
        k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
    batch = anyflex.Packed(
        offsets(q_lengths), int32(KV_LENGTHS), page_table=table, slots=int32(SLOTS)
    )
    compare(attend(q, k, v, batch.begin(), MODS[name]), expected, 2e-5)
    assert gpu == ["decode" if q_lengths is FEW else "prefill"]


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(
    ("stored", "by", "page", "q_lengths"),
    [
        (torch.int8, "token", 16, FEW),
        (torch.int8, "head", 0, Q_LENGTHS),
        (torch.float8_e4m3fn, "token", 64, Q_LENGTHS),
        (torch.float8_e4m3fn, "tensor", 0, FEW),
    ]
    + [
        (stored, by, page, lengths)
        for stored in (torch.int8, torch.float8_e4m3fn)
        for by in ("tensor", "head", "token")
        for page in (0, 16, 48, 64)
        for lengths in (FEW, Q_LENGTHS)
    ]
    * SOAK,
)
def test_numbers_stored_in_8_bits(
    stored: torch.dtype, by: str, page: int, q_lengths: list[int], gpu: list[str]
) -> None:
    """Padding rows, and their scales, are NaN or the lowest number."""
    mods = MODS["of slots"]
    q, k, v = given((16, 32), q_lengths)
    scales = {
        "tensor": lambda rows: rows.new_tensor(0.03),
        "head": lambda rows: rows.new_tensor([0.02]),
        "token": lambda rows: rows.abs().amax(-1) / 127,
    }
    k_scale, v_scale = (scales[by](rows) for rows in (k, v))
    for_rows = [s.expand(k.shape[:-1])[..., None] for s in (k_scale, v_scale)]
    k, v = (
        (rows / s).clamp(-127, 127).to(stored) for rows, s in zip((k, v), for_rows, strict=True)
    )
    for_key, for_value = (s.double() for s in for_rows)
    expected = wanted(q, k.double() * for_key, v.double() * for_value, mods, q_lengths)
    if page:
        width = -(-max(KV_LENGTHS) // page)
        table = torch.randperm(7 * width, generator=torch.Generator().manual_seed(0))
        table = table.view(7, width).to(torch.int32)
        k, v = (pooled(t, page, table, 7 * width) for t in (k, v))
        if by == "token":
            k_scale, v_scale = (
                pooled(s[..., None], page, table, 7 * width)[..., 0] for s in (k_scale, v_scale)
            )
        batch = anyflex.Packed(
            offsets(q_lengths), int32(KV_LENGTHS), page_table=table, slots=int32(SLOTS)
        )
    else:
        k, v = (torch.cat([t, poison(t[:3])]) for t in (k, v))
        if by == "token":
            k_scale, v_scale = (torch.cat([s, poison(s[:3])]) for s in (k_scale, v_scale))
        batch = anyflex.Packed(
            offsets(q_lengths), kv_offsets=offsets(KV_LENGTHS), slots=int32(SLOTS)
        )
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float16, 4e-3)):
        found = anyflex.flex_attention_packed(
            q.to(dtype), k, v, batch.begin(), *mods, enable_gqa=True, return_aux=BOTH,
            backend="cuda.mine", k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        compare(found, expected, tolerance)
    assert gpu == ["decode" if q_lengths is FEW else "prefill"] * 2


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("q_lengths", [[1, 1], [1, 70]])
def test_a_scale_that_is_infinite_stays_its_sequence_s(q_lengths: list[int]) -> None:
    q, scale = drawn(sum(q_lengths), 2, 16, seed=1), torch.full((40, 2), 0.01)
    k, v = ((drawn(40, 2, 16, seed=seed) * 40).to(torch.int8) for seed in (2, 3))
    batch = anyflex.Packed(offsets(q_lengths), kv_offsets=offsets([17, 23]))

    def call(k_scale: Tensor, v_scale: Tensor) -> Tensor:
        found = anyflex.flex_attention_packed(
            q, k, v, batch.begin(), k_scale=k_scale, v_scale=v_scale, backend="cuda.mine"
        )
        assert isinstance(found, Tensor)
        return found

    infinite = scale.clone()
    infinite[3] = torch.inf
    plain = call(scale, scale)
    for found in (call(scale, infinite), call(infinite, scale)):
        assert not found[: q_lengths[0]].isfinite().any()
        assert torch.equal(found[q_lengths[0] :], plain[q_lengths[0] :])


def test_an_older_gpu_refuses_float8() -> None:
    backend = TritonBackend("cuda.triton", "cuda")
    common = {"q_layout": "packed", "kv_layout": "packed", "q_class": "one"}
    for arch, storage, taken in (
        ("sm_80", "int8", True), ("sm_86", "fp8_e4m3", False), ("sm_89", "fp8_e4m3", True),
        ("sm_100", "fp8_e4m3", True), ("gfx942", "fp8_e4m3", True),
    ):  # fmt: skip
        spec = Spec("cuda", arch, torch.bfloat16, 64, 64, kv_storage=storage, **common)
        decision = backend.supports(spec)
        assert isinstance(decision, Accepted) == taken
        assert taken or ("float8_e4m3fn" in decision.reason and "int8" in decision.reason)


LENGTHS = [1050, 0, 16, 1, 33]


def decoded(k: Tensor, v: Tensor, table: Tensor, first: int, count: int) -> Any:
    """Return out of one query row each of `count` sequences, of table row `first` and on."""
    batch = anyflex.Packed(
        torch.arange(count + 1, dtype=torch.int32),
        int32(LENGTHS[first : first + count]),
        page_table=table[first:],
        max_kv=1056,
    )
    query = drawn(5, 4, 16, seed=4).half()[first : first + count]
    return anyflex.flex_attention_packed(
        query, k, v, batch.begin(), enable_gqa=True, backend="cuda.mine"
    )


@pytest.mark.usefixtures("on_device")
def test_calls_of_one_shape_share_their_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    fixed_launch = Programs.fixed_launch

    def count(programs: Programs, function: Any, *rest: Any, **more: Any) -> FixedLaunch:
        made.append(function.__name__)
        return fixed_launch(programs, function, *rest, **more)

    monkeypatch.setattr(Programs, "fixed_launch", count)
    k, v = (drawn(330, 2, 16, 16, seed=seed).half() for seed in (5, 6))
    tables = [
        torch.randperm(330, generator=torch.Generator().manual_seed(seed)).view(5, 66).int()
        for seed in (1, 2)
    ]
    first = decoded(k, v, tables[0], 0, 5)
    assert sorted(made) == ["combine_kernel", "decode_kernel"]
    # Other pages and lengths have the shapes of the first call, fewer sequences have others.
    other = decoded(k, v, tables[1], 0, 5)
    assert len(made) == 2 and not torch.equal(first, other)
    assert torch.equal(decoded(k, v, tables[1], 1, 3), other[1:4])
    assert len(made) == 4
    assert torch.equal(decoded(k, v, tables[0], 0, 5), first)
    assert len(made) == 4


@pytest.mark.usefixtures("on_device")
def test_a_decoding_row_has_the_bits_that_it_has_alone(gpu: list[str]) -> None:
    k, v = (drawn(330, 2, 16, 16, seed=seed).half() for seed in (5, 6))
    table = torch.randperm(330, generator=torch.Generator().manual_seed(1)).view(5, 66).int()
    together = decoded(k, v, table, 0, 5)
    keys, values = (t[table.long()].transpose(2, 3).flatten(1, 2).double() for t in (k, v))
    query = drawn(5, 4, 16, seed=4).half().double().unflatten(1, (2, 2))
    for i, length in enumerate(LENGTHS):
        scores = torch.einsum("hgd,khd->hgk", query[i], keys[i, :length]) / 4
        expected = torch.einsum("hgk,khd->hgd", scores.softmax(-1), values[i, :length])
        torch.testing.assert_close(together[i].double(), expected.flatten(0, 1), rtol=0, atol=2e-3)
    for i in (0, 4):
        assert torch.equal(decoded(k, v, table, i, 1)[0], together[i])
    assert gpu == ["decode"] * 3


@pytest.mark.usefixtures("on_device")
def test_a_sequence_s_own_nan_stays_its_own_and_ids_are_clamped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a device nobody looks at ids.
    monkeypatch.setattr("anyflex.packed.own_layout.check_pages", lambda *_: None)
    lengths = [20, 18]
    k, v = (drawn(4, 2, 16, 16, seed=seed) for seed in (5, 6))
    table = torch.tensor([[2, 7], [1, -3]], dtype=torch.int32)
    inside = torch.tensor([[2, 3], [1, 0]], dtype=torch.int32)
    v[1, 0, 3, 5] = torch.nan
    v[0, 1, 0, 2] = torch.inf
    q = drawn(4, 4, 16, seed=4)
    mask = MODS["causal"][1]

    def call(pages: Tensor, backend: str) -> Any:
        batch = anyflex.Packed(int32([0, 3, 4]), int32(lengths), page_table=pages)
        return anyflex.flex_attention_packed(
            q, k, v, batch.begin(), None, mask, enable_gqa=True, backend=backend
        )

    found = call(table, "cuda.mine")
    expected = call(inside, "reference")
    assert found[:3].isfinite().all() and found[3].isnan().sum() == 2
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5, equal_nan=True)
