"""Launches of calls: argument classes, options and layouts; numbers at unusual scales."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from soak import SOAK
from torch import Tensor

import anyflex
from anyflex.plugin import Spec, isolated, parse_graph, register
from anyflex.testing import posing

pytest.importorskip("triton", reason="there is no Triton to interpret with")

from anyflex_triton.arguments import descriptor_of, heads_described, layout_of
from anyflex_triton.backend import TritonBackend
from anyflex_triton.configs import Config, KernelName, Target, Traits, config_for
from anyflex_triton.kernel_signatures import KernelInputs, Programs, heads_at_a_time
from anyflex_triton.mods import write_source
from anyflex_triton.program import Program

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with isolated(), posing("cuda"):
        register("cuda.mine", TritonBackend)
        yield


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Program, Mapping[str, object]]]:
    """Record programs in the order of their launches, which compute nothing."""
    seen: list[tuple[Program, Mapping[str, object]]] = []

    def note(
        program: Program, grid: int, device: torch.device, values: Mapping[str, object]
    ) -> None:
        assert grid > 0
        seen.append((program, values))

    monkeypatch.setattr(Program, "launch", note)
    return seen


def attention(query: Tensor, key: Tensor, value: Tensor, **more: object) -> Tensor:
    out = anyflex.flex_attention(query, key, value, backend="cuda.mine", **more)  # type: ignore[arg-type]
    assert isinstance(out, Tensor)
    return out


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_lengths_and_batches_share_their_programs(
    launched: list[tuple[Program, Mapping[str, object]]],
) -> None:
    for batch in (1, 2, 5):
        for length in (65, 128, 1000, 4096):
            attention(*[torch.zeros(batch, 1, length, 16)] * 3)
        for keys in (1, 15, 16, 17, 1000):
            attention(torch.zeros(batch, 1, 1, 16), *[torch.zeros(batch, 1, keys, 16)] * 2)
    programs = {program for program, _ in launched}
    assert sorted(program.function.__name__ for program in programs) == [
        "combine_kernel",
        "decode_kernel",
        "forward_kernel",
        "forward_kernel",
    ]
    # The second one knows that its tiles end where the lengths do.
    assert sorted(program.constants.get("EVEN", False) for program in programs) == [
        False, False, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "kv_batch", "kv_heads", "group", "queries", "keys"),
    [(4, 4, 8, 1, 8, 8), (4, 4, 8, 2, 16, 8), (4, 1, 2, 1, 8, 2), (1, 1, 3, 1, 3, 3)],
)
@pytest.mark.parametrize("masked", [False, True])
def test_few_heads_run_at_a_time(
    launched: list[tuple[Program, Mapping[str, object]]],
    batch: int,
    kv_batch: int,
    kv_heads: int,
    group: int,
    queries: int,
    keys: int,
    masked: bool,
) -> None:
    q = torch.zeros(batch, kv_heads * group, 256, 16, requires_grad=True)
    k, v = torch.zeros(2, kv_batch, kv_heads, 256, 16, requires_grad=True)
    mask = None
    if masked:
        mask = anyflex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256)
    out = attention(q, k, v, block_mask=mask, enable_gqa=True)
    torch.autograd.grad(out, (q, k, v), out.detach())
    # The first kernel counts query heads, because its tiles are of queries.
    wanted = {"forward_kernel": queries, "key_kernel": keys, "query_kernel": queries}
    assert {
        program.function.__name__: values["head_group"]
        for program, values in launched
        if "head_group" in values
    } == wanted


def test_as_many_heads_run_at_a_time_as_the_second_cache_holds() -> None:
    found = [heads_at_a_time(size << 20) for size in (0, 1, 2, 3, 8, 16, 17)]
    assert found == [8, 8, 8, 5, 2, 1, 1]
    assert heads_at_a_time(1 << 20, None) == 16


def documents_oracle(query: Tensor, key: Tensor, value: Tensor, ids: Tensor) -> Tensor:
    rows, keys = query.shape[2], key.shape[2]
    live = ids[:rows, None] == ids[None, :keys]
    scores = query.double() @ key.double().mT * query.shape[3] ** -0.5
    weights = scores.masked_fill(~live, -torch.inf).softmax(-1).nan_to_num(0.0)
    return weights @ value.double()


@pytest.mark.parametrize(
    ("dims", "scattered"),
    [((160, 192), True), *([((192, 128), False), ((72, 136), False)] if SOAK else [])],
)
def test_head_dims_of_129_to_192_come_in_parts(dims: tuple[int, int], scattered: bool) -> None:
    """Rows of another document have values that must not be seen, in the last part of columns."""
    head_dim, value_dim = dims
    ids = (torch.arange(100) >= 70).to(torch.int32)
    shapes = [(1, 2, 100, head_dim)] * 2 + [(1, 2, 100, value_dim)]
    tensors = [
        torch.stack([given, given], 4)[..., 0] if scattered else given
        for given in (randn(*shape).half() for shape in shapes)
    ]
    query, key, value = tensors
    value[0, 0, 80, value_dim - 1] = torch.inf
    key[0, 1, 90, head_dim - 1] = torch.nan
    query, key, value = (tensor.requires_grad_() for tensor in tensors)
    mask = anyflex.create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 100, 100)
    out = attention(query, key, value, block_mask=mask)
    dout = randn(1, 2, 100, value_dim).half()
    found = (out, *torch.autograd.grad(out, (query, key, value), dout))
    rows = ids == 0
    first = [tensor.detach()[:, :, rows].double().requires_grad_() for tensor in tensors]
    expected = documents_oracle(*first, ids[rows])
    wanted = (expected, *torch.autograd.grad(expected, first, dout[:, :, rows].double()))
    for result, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(result[:, :, rows].double(), right, atol=4e-3, rtol=2e-3)
    assert not out[:, :, ~rows].isfinite().all()


@pytest.mark.parametrize(
    ("dims", "packed", "dense_dout"),
    [((64, 64), True, False), ((16, 192), False, True), ((24, 32), False, False)],
)
def test_heads_beside_each_other_are_read_by_descriptors(
    dims: tuple[int, int], packed: bool, dense_dout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows past a batch entry's end belong to the next entry, columns past a head's to the next
    head: non-finite values there reach nobody else."""
    seen: dict[str, tuple[object, object]] = {}
    launched = Program.launch

    def noted(program: Program, *arguments: Any) -> Any:
        constants = program.constants
        if "BESIDE" in constants:
            seen[program.function.__name__] = constants["DESCRIBED"], constants["BESIDE"]
        return launched(program, *arguments)

    monkeypatch.setattr(Program, "launch", noted)
    (head_dim, value_dim), length = dims, 72
    shapes = [(2, length, 4, head_dim), (2, length, 2, head_dim), (2, length, 2, value_dim)]
    drawn = [randn(*shape) for shape in shapes]
    if packed:
        rows = torch.cat([tensor.flatten(2) for tensor in drawn], 2)
        parts = rows.split([tensor[0, 0].numel() for tensor in drawn], 2)
        drawn = [part.unflatten(2, (-1, head_dim)) for part in parts]
    drawn[1][1, 0, 1, 3] = torch.nan
    drawn[2][1, 2, 1, 0] = torch.inf
    query, key, value = (tensor.transpose(1, 2).detach() for tensor in drawn)
    if dims == (16, 192):
        # One tensor's heads lie beside each other, the other's one after the other.
        key = key.contiguous()
    query, key, value = (tensor.requires_grad_() for tensor in (query, key, value))
    out = attention(query, key, value, enable_gqa=True)
    dout = randn(2, length, 4, value_dim).transpose(1, 2)
    dout = dout.contiguous() if dense_dout else dout
    found = (out, *torch.autograd.grad(out, (query, key, value), dout))
    exact = [tensor.detach().double() for tensor in (query, key, value)]
    exact = [tensor[:1].requires_grad_() for tensor in exact]
    doubled = [tensor.repeat_interleave(2, 1) for tensor in exact[1:]]
    weights = (exact[0] @ doubled[0].mT * head_dim**-0.5).softmax(-1)
    expected = weights @ doubled[1]
    wanted = (expected, *torch.autograd.grad(expected, exact, dout[:1].double()))
    for result, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(result[:1].double(), right, atol=2e-5, rtol=1e-5)
    # In the other batch entry, the heads that read the first KV head stay finite.
    assert out[1, :2].isfinite().all() and not out[1, 2:].isfinite().any(dim=(-2, -1)).all()
    keys = {64: (True, True), 192: (False, True)}
    expected_seen = {
        "forward_kernel": ("host", keys[value_dim]), "query_kernel": ("host", keys[value_dim]),
        "key_kernel": ("host", (True, not dense_dout)),
    } if head_dim != 24 else dict.fromkeys(seen, (None, (False, False)))  # fmt: skip
    assert seen == expected_seen and len(seen) == 3


@pytest.mark.parametrize("heads_last", [False, True])
def test_forward_foresees_backward_of_a_gradient_laid_out_as_its_query(
    heads_last: bool,
    launched: list[tuple[Program, Mapping[str, object]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    foreseen: list[Program] = []

    def foresee(_spec: Any, _program: Any, call: Any, out: Any, needed_next: Any) -> None:
        foreseen.extend(needed_next(call, out))

    def drawn() -> Tensor:
        tensor = randn(2, 140, 4, 16).transpose(1, 2)
        return tensor if heads_last else tensor.contiguous()

    monkeypatch.setattr("anyflex_triton.forward_call.compile_with_next", foresee)
    query, key, value = (drawn().requires_grad_() for _ in range(3))
    out = attention(query, key, value)
    launched.clear()
    torch.autograd.grad(out, (query, key, value), drawn())
    assert foreseen and [program for program, _ in launched] == foreseen


def test_grouped_heads_of_float32_in_parts() -> None:
    """Four query heads read a KV head that all batch entries share."""
    query, key, value = randn(2, 4, 40, 160), randn(1, 1, 70, 160), randn(1, 1, 70, 176)
    query, key, value = (tensor.requires_grad_() for tensor in (query, key, value))
    out = attention(query, key, value, enable_gqa=True, scale=1.0)
    dout = randn(2, 4, 40, 176)
    found = (out, *torch.autograd.grad(out, (query, key, value), dout))
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    weights = (exact[0] @ exact[1].mT).softmax(-1)
    expected = weights @ exact[2]
    wanted = (expected, *torch.autograd.grad(expected, exact, dout.double()))
    for result, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(result.double(), right, atol=2e-4, rtol=1e-5)


def test_parts_leave_nothing_to_pad(
    launched: list[tuple[Program, Mapping[str, object]]],
) -> None:
    query, key = (torch.zeros(1, 1, 256, 192, requires_grad=True) for _ in range(2))
    value = torch.zeros(1, 1, 256, 200, requires_grad=True)
    out = attention(query, key, value)
    torch.autograd.grad(out, (query, key, value), out.detach())
    columns = {
        program.function.__name__: (program.constants["D"], program.constants["DV"])
        for program, _ in launched
        if "D" in program.constants
    }
    assert columns == dict.fromkeys(("forward_kernel", "key_kernel", "query_kernel"), (64, 256))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [3, 200])
def test_values_that_are_not_finite_reach_the_rows_that_see_them(
    rows: int, dtype: torch.dtype
) -> None:
    """Non-finite values stand alone, fill a tile with their kind, or have another kind tiles
    away."""
    keys = 200
    query, key, value = (randn(1, 1, length, 16).to(dtype) for length in (rows, keys, keys))
    value[0, 0, 3, 0] = torch.inf
    value[0, 0, 150, 0] = -torch.inf
    value[0, 0, 64:192, 1] = torch.inf
    value[0, 0, 64:192, 2] = -torch.inf
    value[0, 0, 70, 3] = torch.nan
    value[0, 0, 5, 4], value[0, 0, 6, 4] = -torch.inf, torch.inf
    live = torch.arange(keys) <= torch.arange(rows)[:, None] * (keys // rows)

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q * (keys // rows)

    mask = anyflex.create_block_mask(seen, None, None, rows, keys)
    found = attention(query, key, value, block_mask=mask)[0, 0].double()
    scores = query[0, 0].double() @ key[0, 0].double().T / 4
    weights = scores.masked_fill(~live, -torch.inf).softmax(-1)
    wanted = (weights[..., None] * value[0, 0].double().where(live[..., None], 0.0)).sum(1)
    assert not wanted[:, :5].isfinite().all() and wanted[:, 5:].isfinite().all()
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=1e-3, equal_nan=True)


@pytest.mark.parametrize("length", [128, 192, 200] if SOAK else [128, 200])
@pytest.mark.parametrize("table", ["exact", "longer", "every second", "last dimension of two"])
def test_a_table_is_read_where_it_lies(length: int, table: str) -> None:
    """Lengths end where tiles do or elsewhere; indices stay inside or don't."""
    ids = (torch.arange(length) * 7 // 90).to(torch.int32)
    held = {
        "exact": ids,
        "longer": torch.cat([ids, ids.new_full((9,), 99)]),
        "every second": torch.stack([ids, ids.new_full((length,), -1)], 1).flatten()[::2],
        "last dimension of two": torch.stack([ids, ids]),
    }[table]

    def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if table == "last dimension of two":
            return held[0, q] == held[h, k]
        return held[q] == held[k]

    query, key, value = (randn(1, 2, length, 16).requires_grad_() for _ in range(3))
    mask = anyflex.create_block_mask(same, None, 2, length, length)
    out = attention(query, key, value, block_mask=mask)
    expected = documents_oracle(query, key, value, ids)
    assert torch.allclose(out.double(), expected, atol=1e-5)
    dout = randn(1, 2, length, 16)
    found = torch.autograd.grad(out, (query, key, value), dout)
    wanted = torch.autograd.grad(expected, (query, key, value), dout.double())
    for gradient, right in zip(found, wanted, strict=True):
        assert torch.allclose(gradient.double(), right.double(), atol=1e-5)


def test_a_table_shorter_than_the_lengths_is_clamped() -> None:
    bias = randn(70)
    query, key, value = (randn(1, 1, 128, 16) for _ in range(3))

    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + bias[torch.clamp(k, max=69)]

    def bare(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + bias[k]

    wanted = attention(query, key, value, score_mod=mod)
    assert torch.equal(attention(query, key, value, score_mod=bare), wanted)


@pytest.mark.parametrize("length", [1, 100])
def test_a_large_cap_after_small_ones_is_not_coarse(length: int) -> None:
    query, key, value = randn(1, 1, length, 32).half(), *(randn(1, 1, 128, 32).half(),) * 2
    for cap in (30.0, 40.0, 50.0, 1e6):

        def mod(
            score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, cap: float = cap
        ) -> Tensor:
            return cap * torch.tanh(score / cap)

        _, lse = anyflex.flex_attention(
            query, key, value, mod, return_lse=True, backend="cuda.mine", scale=1.0
        )
        scores = cap * torch.tanh(query.double() @ key.double().mT / cap)
        assert (lse.double() - scores.logsumexp(-1)).abs().max() < 2e-4


def test_a_masks_tanh_keeps_its_digits_beside_a_soft_cap() -> None:
    signs = randn(128) * 1e-7

    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return 30 * torch.tanh(score / 30)

    def up(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (torch.tanh(signs[k]) > 0) & (q >= 0)

    query, key, value = (randn(1, 1, 128, 32).half() for _ in range(3))
    mask = anyflex.create_block_mask(up, None, None, 128, 128)
    out = attention(query, key, value, score_mod=mod, block_mask=mask)
    scores = 30 * torch.tanh(query.double() @ key.double().mT * 32**-0.5 / 30)
    weights = scores.masked_fill(~(signs > 0), -torch.inf).softmax(-1)
    assert torch.allclose(out.double(), weights @ value.double(), atol=4e-3)


def test_an_index_that_becomes_direct_late_is_clamped() -> None:
    held = torch.full((200,), 100.0)
    held[:70] = randn(70)
    bias = held[:70]
    query, key, value = (randn(1, 1, 128, 16) for _ in range(3))

    def twice(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + bias[(k ^ -1) ^ -1]

    def clamped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + bias[torch.clamp(k, max=69)]

    wanted = attention(query, key, value, score_mod=clamped)
    assert torch.allclose(attention(query, key, value, score_mod=twice), wanted, atol=1e-6)


@pytest.mark.parametrize("cap", [1.0, 30.0, 250.0, 1000.0])
def test_a_soft_cap_in_float16_is_within_a_weights_rounding(cap: float) -> None:
    query, key, value = (randn(1, 2, 128, 32).half() * 3 for _ in range(3))

    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    out, lse = anyflex.flex_attention(
        query, key, value, mod, return_lse=True, backend="cuda.mine", scale=0.3
    )
    scores = cap * torch.tanh(query.double() @ key.double().mT * 0.3 / cap)
    assert (lse.double() - scores.logsumexp(-1)).abs().max() < 2e-4
    expected = scores.softmax(-1) @ value.double()
    assert torch.allclose(out.double(), expected, atol=4e-3, rtol=2e-3)


def test_an_option_reaches_the_kernel(
    launched: list[tuple[Program, Mapping[str, object]]],
) -> None:
    tensors = [torch.zeros(1, 1, 200, 16)] * 3
    attention(*tensors, kernel_options={"cuda.mine": {"block_m": 32, "num_warps": 8}})
    attention(*tensors, kernel_options={"BLOCK_N": 16})
    (first, _), (second, _) = launched
    assert (first.constants["BLOCK_M"], first.options.num_warps) == (32, 8)
    assert second.constants["BLOCK_N"] == 16


def test_options_of_backward_reach_their_kernels() -> None:
    wanted = {"dkv_block_m": 16, "dkv_block_n": 32, "dq_block_m": 32, "dq_block_n": 16}
    seen: dict[str, Program] = {}
    original = Program.launch

    def note(program: Program, *more: Any) -> None:
        seen[program.function.__name__] = program
        original(program, *more)

    tensors = [randn(1, 1, 70, 16).requires_grad_() for _ in range(3)]
    options = {"cuda.mine": {**wanted, "backward_num_warps": 2, "backward_num_stages": 1}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "launch", note)
        out = attention(*tensors, kernel_options=options)
        found = torch.autograd.grad(out, tensors, torch.ones_like(out))
    plain = attention(*tensors)
    for gradient, right in zip(
        found, torch.autograd.grad(plain, tensors, torch.ones_like(out)), strict=True
    ):
        assert torch.allclose(gradient, right, atol=1e-5)
    for kernel, prefix in (("key_kernel", "dkv"), ("query_kernel", "dq")):
        program = seen[kernel]
        assert program.constants["BLOCK_M"] == wanted[f"{prefix}_block_m"]
        assert program.constants["BLOCK_N"] == wanted[f"{prefix}_block_n"]
        assert (program.options.num_warps, program.options.num_stages) == (2, 1)
    assert seen["forward_kernel"].constants["BLOCK_M"] == 64


def test_a_limit_of_registers_goes_with_its_tile() -> None:
    def limit(dtype: torch.dtype, **overrides: int) -> object:
        spec = Spec("cuda", "sm_90", dtype, 64, 64, mask_kind="runs", mask_graph=parse_graph(
            "input i32 - q_idx;input i32 - kv_idx;ge bool 0,1 -;=2"
        ))  # fmt: skip
        config = Programs(KernelInputs(spec, write_source(spec), "hopper", overrides)).config(
            "forward"
        )
        return dict(config.options.more).get("maxnreg")

    # The limit is all registers that a thread can have; with 16 warps that is more than a
    # multiprocessor has.
    assert limit(torch.float32) == limit(torch.float32, block_n=32) == 255
    assert limit(torch.float32, num_warps=16) is None
    same = {"block_m": 64, "block_n": 64, "num_warps": 4}
    assert limit(torch.bfloat16) == limit(torch.bfloat16, **same, num_stages=1) == 128
    for name, other in (("block_m", 128), ("block_n", 32), ("num_warps", 2), ("num_warps", 8)):
        assert limit(torch.bfloat16, **{name: other}) is None


def test_a_wrong_option_is_refused() -> None:
    with pytest.raises(anyflex.AnyflexError, match="block_m"):
        attention(*[torch.zeros(1, 1, 200, 16)] * 3, kernel_options={"cuda.mine": {"block_m": 7}})


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1e-30, 3.0])
@pytest.mark.parametrize("length", [3, 90])
def test_any_scale_is_right(scale: float, length: int) -> None:
    query, key, value = randn(1, 2, length, 16), randn(1, 2, 70, 16), randn(1, 2, 70, 16)
    out = attention(query, key, value, scale=scale)
    scores = query.double() @ key.double().mT * scale
    assert torch.allclose(out.double(), scores.softmax(-1) @ value.double(), atol=1e-5)


@pytest.mark.parametrize(
    ("scored", "overlap", "keys", "block_n"),
    list(itertools.product([False, True], [False, True], [512, 506], [16, 64]))[
        :: 1 if SOAK else 9
    ],
)
def test_largest_scores_and_sums_in_parts_are_right(
    monkeypatch: pytest.MonkeyPatch, scored: bool, overlap: bool, keys: int, block_n: int
) -> None:
    """Parts are Hopper's, whose table the interpreter doesn't use: long FULL runs, PARTIAL runs,
    rows without a live key, infinite values, scores that grow from step to step."""
    launch_real = Program.launch
    parts_of_launches: list[object] = []

    def note(program: Program, *more: Any) -> None:
        parts_of_launches.append(program.constants["PARTS"])
        launch_real(program, *more)

    monkeypatch.setattr(Program, "launch", note)

    def in_parts(target: Target, kernel: KernelName, traits: Traits) -> Config:
        found = config_for(target, kernel, traits)
        return replace(found, block_n=block_n, overlap=overlap, parts=True)

    monkeypatch.setattr("anyflex_triton.kernel_signatures.config_for", in_parts)
    query, key, value = (randn(1, 1, length, 16).half() for length in (200, keys, keys))
    key *= torch.linspace(0, 3, keys)[:, None]
    value[0, 0, 70, 3] = torch.inf

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q + 400 >= k) & (q < 190)

    def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + (k - q) * 0.01

    rows = torch.arange(200)[:, None]
    bias = (torch.arange(keys) - rows) * 0.01 if scored else 0.0
    live = (rows + 400 >= torch.arange(keys)) & (rows < 190)
    mask = anyflex.create_block_mask(seen, None, None, 200, keys)
    for block_mask, kept in ((None, live.new_ones(())), (mask, live)):
        out, aux = anyflex.flex_attention(
            query, key, value, biased if scored else None, block_mask, backend="cuda.mine",
            return_aux=anyflex.AuxRequest(lse=True, max_scores=True),
        )  # fmt: skip
        scores = (query.double() @ key.double().mT / 4 + bias).masked_fill(~kept, -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        # Weights of 0 stay 0 even where a row's unseen value is infinite.
        parts = weights[..., None] * value.double()[:, :, None]
        wanted = parts.where(weights[..., None] > 0, 0.0).sum(-2)
        torch.testing.assert_close(out.double(), wanted, atol=2e-3, rtol=1e-3)
        torch.testing.assert_close(aux.lse.double(), scores.logsumexp(-1), atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(aux.max_scores.double(), scores.amax(-1), atol=1e-4, rtol=1e-5)
    assert parts_of_launches == [True, True]


def test_parts_are_for_kernels_that_they_make_no_slower() -> None:
    narrow, scored, float32, wide = (
        Traits(64, 2), Traits(128, 2, is_scored=True), Traits(128, 4), Traits(256, 2)
    )  # fmt: skip
    taken = [config_for("hopper", "forward", traits).parts for traits in (narrow, Traits(128, 2))]
    assert taken == [True, True]
    for traits in (scored, float32, wide):
        assert not config_for("hopper", "forward", traits).parts
    assert not config_for("blackwell", "forward", narrow).parts
    assert not config_for("hopper", "keys", narrow).parts
    plain = config_for("hopper", "forward", Traits(64, 2, is_plain=True))
    assert str(plain) == "64x128, 4 warps, 2 stages, parts"


def test_four_programs_of_head_dim_64_fit_a_core_of_hoppers() -> None:
    def taken(*traits: int, **more: bool) -> Config:
        return config_for("hopper", "forward", Traits(*traits, **more))

    # Four programs share a multiprocessor's registers.
    four = taken(64, 2)
    assert 4 * dict(four.options.more)["maxnreg"] * four.options.num_warps * 32 == 65536
    # With a third stage a program takes 57 KiB of shared memory, and a multiprocessor holds three.
    assert str(four) == "64x64, 4 warps, 2 stages, maxnreg 128, parts"
    for more in ({"is_scored": True}, {"mask_reads": True, "reads_keys": True}):
        assert taken(48, 2, **more) == four
    # With these traits registers would spill, or there is room without a limit.
    for more in (
        {"is_scored": True, "reads_keys": True}, {"is_scored": True, "mask_reads": True},
        {"is_scored": True, "score_reads_pairs": True},
        {"is_scored": True, "score_is_light": False},
        {"mask_reads": True, "mask_reads_pairs": True}, {"row_bytes": 2}, {"is_plain": True},
    ):  # fmt: skip
        assert not taken(64, 2, **more).options.more
    for traits in ((32, 2), (65, 2), (64, 4)):
        assert dict(taken(*traits).options.more).get("maxnreg") != 128


def test_what_decides_whether_128_registers_are_enough() -> None:
    def limit(dims: tuple[int, int], score: str = "", mask: str = "") -> object:
        spec = Spec(
            "cuda", "sm_90", torch.bfloat16, *dims,
            mask_kind="runs" if mask else "none",
            score_graph=parse_graph(score) if score else None,
            mask_graph=parse_graph(mask) if mask else None,
        )  # fmt: skip
        config = Programs(KernelInputs(spec, write_source(spec), "hopper", {})).config("forward")
        return dict(config.options.more).get("maxnreg")

    causal = "input i32 - q_idx;input i32 - kv_idx;ge bool 0,1 -;=2"
    cap, sine = (f"input f32 - score;{name} f32 0 -;=1" for name in ("tanh", "sin"))
    assert limit((64, 64), mask=causal) == limit((40, 48), mask=causal) == 128
    assert limit((64, 64), cap) == limit((64, 64), cap, causal) == 128
    assert limit((64, 64), sine) is None
    # Rows that aren't multiples of 16 bytes are loaded in another way.
    assert limit((36, 36), mask=causal) is limit((64, 36), mask=causal) is None


def test_documents_of_head_dim_128_have_smaller_steps_without_a_score_mod() -> None:
    documents = Traits(128, 2, mask_reads=True, reads_keys=True)
    found = [config_for("hopper", "forward", documents._replace(is_scored=s)) for s in (0, 1)]
    assert list(map(str, found)) == ["64x32, 4 warps, 3 stages, parts", "64x64, 4 warps, 2 stages"]


def config_of(
    kernel: KernelName, dim: int, dtype: torch.dtype, block: tuple[int, int], **options: int
) -> str:
    """Return Hopper's config, or the user's, within a mask's blocks."""
    spec = Spec("cuda", "sm_90", dtype, dim, dim, mask_kind="runs", block_size=block)
    config = Programs(KernelInputs(spec, write_source(spec), "hopper", options)).config(kernel)
    return f"{config.block_m}x{config.block_n} {config.options.num_warps}"


def test_tiles_that_a_masks_blocks_make_smaller_have_fewer_warps() -> None:
    half, single = torch.bfloat16, torch.float32
    assert config_of("queries", 128, half, (128, 128)) == "128x64 8"
    assert config_of("queries", 128, half, (64, 16)) == "64x64 4"
    assert config_of("queries", 128, half, (32, 128)) == "32x64 4"
    assert config_of("queries", 128, half, (192, 128)) == "128x64 8"
    assert config_of("keys", 256, half, (16, 64)) == "64x64 8"
    assert config_of("keys", 256, half, (128, 32)) == "64x32 4"
    assert config_of("forward", 128, single, (16, 128)) == "16x16 4"
    # The user's options stay, including the warps of larger tiles.
    assert config_of("queries", 128, half, (64, 64), backward_num_warps=8) == "64x64 8"
    assert config_of("forward", 128, single, (16, 128), num_warps=8) == "16x16 8"
    assert config_of("queries", 128, half, (64, 64), dq_block_m=128) == "64x64 4"


def test_tiles_in_parts_have_configurations_of_their_own() -> None:
    narrow = Traits(192, 2, has_narrow_values=True)
    wanted: dict[tuple[KernelName, Traits], str] = {
        ("keys", Traits(192, 2)): "64x128, 8 warps, 2 stages",
        ("keys", narrow): "32x64, 4 warps, 3 stages",
        ("keys", narrow._replace(shares_keys=True)): "64x64, 8 warps, 3 stages",
        ("queries", Traits(160, 2)): "128x64, 8 warps, 2 stages",
        ("queries", narrow): "128x64, 8 warps, 3 stages",
        ("queries", narrow._replace(mask_reads_pairs=True)): "128x64, 8 warps, 2 stages",
        ("forward", Traits(192, 2, is_scored=True)): "128x64, 8 warps, 3 stages",
        ("forward", narrow._replace(mask_reads=True)): "64x64, 4 warps, 2 stages",
        ("forward", Traits(192, 2, score_reads_pairs=True)): "64x32, 4 warps, 2 stages",
        ("forward", Traits(192, 4)): "16x64, 4 warps, 2 stages",
        ("queries", Traits(192, 4)): "32x32, 4 warps, 2 stages",
        # Four parts would be no better than one tile.
        ("queries", Traits(200, 2)): "64x64, 4 warps, 2 stages",
    }
    for (kernel, traits), config in wanted.items():
        assert str(config_for("hopper", kernel, traits)) == config
    assert config_of("keys", 192, torch.bfloat16, (128, 64)) == "64x64 8"


def test_a_score_mod_of_head_dim_128_takes_no_parts() -> None:
    tanh = parse_graph("input f32 - score;tanh f32 0 -;=1")
    for graph, parts in ((None, True), (tanh, False)):
        spec = Spec("cuda", "sm_90", torch.bfloat16, 128, 128, score_graph=graph)
        assert (
            Programs(KernelInputs(spec, write_source(spec), "hopper", {})).config("forward").parts
            == parts
        )


def test_no_keys_give_zeros_and_no_rows_nothing() -> None:
    out = attention(randn(1, 2, 70, 16), torch.empty(1, 2, 0, 16), torch.empty(1, 2, 0, 16))
    assert torch.equal(out, torch.zeros(1, 2, 70, 16))
    assert attention(torch.empty(1, 2, 0, 16), *[randn(1, 2, 5, 16)] * 2).shape == (1, 2, 0, 16)


def test_layouts_keep_what_is_known_of_alignment() -> None:
    dense = torch.zeros(2, 3, 5, 16)
    assert layout_of(dense) == layout_of(dense.clone())
    assert (layout_of(dense).unit, layout_of(dense).strides) == (4, (60, 20, 4, 1))
    assert layout_of(dense[..., 1:]).unit == 1
    for dtype, columns, unit, alignment in (
        (torch.bfloat16, 100, 4, 8), (torch.bfloat16, 50, 2, 4), (torch.bfloat16, 99, 1, 2),
        (torch.float32, 50, 2, 8), (torch.float32, 99, 1, 4), (torch.float64, 99, 1, 8),
    ):  # fmt: skip
        rows = torch.zeros(2, 3, 5, columns, dtype=dtype)
        layout = layout_of(rows)
        assert (layout.unit, layout.alignment) == (unit, alignment), (dtype, columns)
        assert layout.strides[2] * unit == columns
        # This address is less aligned than rows are.
        elements = torch.zeros(rows.numel() + 1, dtype=dtype)[1:]
        assert layout_of(elements.view(rows.shape)).alignment == rows.element_size()
    assert layout_of(dense.mT).scattered
    # The stride of one row may be anything.
    assert layout_of(dense.as_strided((2, 3, 1, 16), (240, 80, 7, 1))).strides == (60, 20, 0, 1)


def test_a_descriptor_takes_heads_one_after_the_other_or_beside_each_other() -> None:
    dense = torch.zeros(2, 3, 8, 16)
    assert heads_described(dense) == "stacked"
    assert heads_described(dense[1:]) == "stacked"
    assert heads_described(dense[:, :, 1:]) is None
    assert heads_described(dense[..., 1:]) is None
    assert heads_described(torch.zeros(1, 1, 4, 3)) is None
    assert heads_described(torch.zeros(1, 1, 0, 16)) is None
    # Models project heads like this, also with query, key and value in one row.
    beside = dense.transpose(1, 2)
    key = torch.zeros(2, 5, 3 * 4 * 16).view(2, 5, 3, 4, 16)[:, :, 1].transpose(1, 2)
    assert heads_described(beside) == heads_described(key) == "beside"
    assert heads_described(key[:1]) == heads_described(key[:1, :1].expand(1, 4, 5, 16)) == "beside"
    # This tensor has more columns than a descriptor can.
    wide = torch.empty_strided((1, 2, 3, 16), (0, 1 << 31, 1 << 32, 1), device="meta")
    assert heads_described(wide) is None
    # These heads don't begin at multiples of 16 bytes.
    assert heads_described(torch.zeros(2, 5, 4, 17)[..., :16].transpose(1, 2)) is None
    # Rows of the next batch entry don't follow.
    assert heads_described(key[:, :, :4]) is None
    for tensor, shape, step in (
        (dense, [48, 16], 16),
        (beside, [6, 128], 128),
        (key, [10, 64], 192),
    ):
        made = descriptor_of(tensor, 32, 16)
        assert (made.shape, made.strides, made.block_shape) == (shape, [step, 1], [32, 16])


def test_products_are_rounded_where_torch_allows_it() -> None:
    wanted: dict[tuple[KernelName, Traits], str] = {
        ("forward", Traits(64, 4, in_tf32=True)): "128x64, 8 warps, 3 stages",
        ("forward", Traits(96, 4, in_tf32=True, mask_reads=True)): "128x32, 8 warps, 3 stages",
        ("forward", Traits(192, 4, in_tf32=True)): "128x64, 8 warps, 1 stages",
        ("queries", Traits(192, 4, in_tf32=True)): "64x32, 4 warps, 2 stages",
        ("keys", Traits(64, 4, in_tf32=True, shares_keys=True)): "32x128, 8 warps, 1 stages",
        ("decode", Traits(64, 4, in_tf32=True)): "16x32, 4 warps, 2 stages",
    }
    for (kernel, traits), config in wanted.items():
        assert str(config_for("hopper", kernel, traits)) == config
    for precision, target, products in (
        ("highest", "hopper", "ieee"),
        ("high", "hopper", "tf32"),
        ("medium", "ampere", "tf32"),
        ("high", "xpu", "tf32"),
        # AMD's rounding is off, as in torch's own kernels: not all of its GPUs have such products.
        ("high", "amd", "ieee"),
    ):
        spec = Spec("cuda", "sm_90", torch.float32, 64, 64, fp32_precision=precision)
        made = Programs(KernelInputs(spec, write_source(spec), target, {}))
        assert made.constants["PRECISION"] == products


def test_the_variant_tells_of_rounded_products() -> None:
    query = randn(1, 2, 70, 16)
    explained = {}
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        try:
            explained[precision] = anyflex.explain(query, query, query).variant
        finally:
            torch.set_float32_matmul_precision("highest")
    assert explained == {"highest": "prefill 64x64", "high": "prefill 64x64 tf32"}
