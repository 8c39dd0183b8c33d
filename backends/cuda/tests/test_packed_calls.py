"""Routes of packed calls to Hopper's kernels, without a GPU."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import torch
from recording import OnHopper, drawn, recording

import anyflex
from anyflex.plugin import Call, Outputs, isolated, register
from anyflex_cuda import forward_call, packed_decode_call, packed_forward_call
from anyflex_cuda.decode_steps import EACH, NONE
from anyflex_cuda.packed_decode_call import PackedDecode
from anyflex_cuda.packed_forward_call import PackedForward
from anyflex_triton.building import FixedLaunch, TritonKernel

LENGTHS = (100, 0, 17, 900)


def launched(*given: Any, **named: Any) -> list[Any]:
    """Return what `launched_here` returns on a Hopper."""
    with isolated():
        register("cuda", OnHopper)
        return launched_here(*given, **named)


def launched_here(
    rows: int = 1,
    heads: tuple[int, int] = (32, 8),
    page: int = 64,
    dim: int = 128,
    mask: Any = None,
    dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
    stored: torch.dtype | None = None,
) -> list[Any]:
    """Return the launches of a call whose sequences have `rows` query rows each, and whose keys
    may be stored in 8 bits."""
    count = len(LENGTHS)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    offsets = torch.arange(count + 1, dtype=torch.int32) * rows
    (query,) = drawn((count * rows, heads[0], dim), dtype=dtype)
    if page:
        table = torch.zeros(count, -(-max(LENGTHS) // page), dtype=torch.int32)
        batch = anyflex.Packed(offsets, lengths, page_table=table)
        shape = (70, heads[1], page, dim)
    else:
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
        batch = anyflex.Packed(offsets, lengths, kv_offsets=ends)
        shape = (sum(LENGTHS), heads[1], dim)
    key, value = drawn(shape, shape, dtype=stored or dtype)
    scale = None if stored is None else torch.ones(heads[1])
    with recording() as launches:
        anyflex.flex_attention_packed(
            query, key, value, batch.begin(), mask_mod=mask, enable_gqa=True, backend="cuda",
            k_scale=scale, v_scale=scale, batch_invariant=batch_invariant,
        )  # fmt: skip
    return launches


def names_of(launches: list[Any]) -> list[str]:
    return [
        f"{program.function.__module__.split('.')[-1]}.{program.function.__name__}"
        for program, _, _ in launches
    ]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k + h


DECODED = "hopper_decode.decode_kernel"
ADDED = "decode_sums.combine_kernel"
SHARED = ["packed_steps.share_kernel", DECODED]
LISTED = ["packed_steps.list_kernel", *SHARED]
FORWARD = ["packed_tile_list.tile_kernel", "hopper_forward.forward_kernel"]
PORTABLE = ["decode.decode_kernel", "decode.combine_kernel"]


@pytest.mark.parametrize("page", [0, 16, 48, 64, 256])
def test_no_length_decides_the_grids_of_decoding(page: int) -> None:
    launches = launched(page=page)
    assert names_of(launches) == SHARED and launches[0][1] == 1
    program, grid, values = launches[1]
    assert grid == 2 * 132 and program.constants["PLAN"] == NONE.value
    assert program.constants["ALONE"] and program.constants["ADDS"]
    # Boxes of whole steps where a page has them, else as wide as the swizzle.
    box = {16: [1, 1, 16, 64], 48: [1, 1, 16, 64]}.get(page, [1, 1, 64, 128])
    assert values["k_desc"].block_shape == values["v_desc"].block_shape == box
    assert (values["batch"], values["most"], values["most_rows"]) == (4, 15, 1)


def test_the_layers_of_a_step_share_its_shares() -> None:
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    batch = anyflex.Packed(
        torch.arange(5, dtype=torch.int32),
        lengths,
        page_table=torch.zeros(4, 15, dtype=torch.int32),
    )
    (query,) = drawn((4, 32, 128), dtype=torch.bfloat16)
    pools = drawn((70, 8, 64, 128), (70, 8, 64, 128), dtype=torch.bfloat16)
    with isolated():
        register("cuda", OnHopper)
        with recording() as launches:
            step = batch.begin()
            for mask in (None, causal, None, causal):
                anyflex.flex_attention_packed(
                    query, *pools, step, mask_mod=mask, enable_gqa=True, backend="cuda"
                )
    assert names_of(launches) == [*SHARED, *LISTED, DECODED, DECODED]


def test_head_dims_with_other_tiles_have_lists_of_their_own() -> None:
    batch = anyflex.Packed(
        torch.arange(3, dtype=torch.int32) * 100,
        torch.full((2,), 200, dtype=torch.int32),
        page_table=torch.zeros(2, 4, dtype=torch.int32),
    )
    with isolated():
        register("cuda", OnHopper)
        with recording() as launches:
            step = batch.begin()
            for dim in (128, 256, 128):
                shapes = (200, 4, dim), (9, 4, 64, dim), (9, 4, 64, dim)
                query, *pools = drawn(*shapes, dtype=torch.bfloat16)
                anyflex.flex_attention_packed(query, *pools, step, backend="cuda")
    lists = [program for program, *_ in launches if program.function.__name__ == "tile_kernel"]
    assert [program.constants["BLOCK_N"] for program in lists] == [128, 64]


def test_a_mask_s_steps_are_listed_before_and_many_parts_added_up_after() -> None:
    launches = launched(mask=causal)
    assert names_of(launches) == LISTED
    assert [grid for _, grid, _ in launches] == [4, 1, 264]
    assert launches[2][0].constants["PLAN"] == EACH.value
    launches = launched(mask=causal, heads=(16, 1))
    assert names_of(launches) == [*LISTED, ADDED]
    assert launches[3][1] == 4 * 16


@pytest.mark.parametrize(
    ("heads", "rows", "names"),
    [
        ((32, 8), 4, SHARED),
        ((32, 8), 16, [*SHARED, ADDED]),
        # Shorter sequences may be beside these.
        ((32, 8), 17, [*FORWARD, *SHARED, ADDED]),
        ((64, 1), 1, [*SHARED, ADDED]),
        ((128, 1), 1, ["forward.forward_kernel"]),
        ((128, 1), 2, FORWARD),
    ],
)
def test_a_tile_holds_the_rows_of_all_heads_of_a_key_head(
    heads: tuple[int, int], rows: int, names: list[str]
) -> None:
    launches = launched(rows, heads)
    assert names_of(launches) == names
    for program, _, values in launches:
        if program.function.__name__ == "decode_kernel":
            # The other kernel writes padding rows.
            assert program.constants["ALONE"] == (FORWARD[0] not in names)
            assert values["most_rows"] == min(rows, 64 * heads[1] // heads[0])
        elif program.function.__name__ == "tile_kernel":
            assert values["short_rows"] == (64 * heads[1] // heads[0] if DECODED in names else 0)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("rows", "heads", "tile_rows"), [(1, (32, 8), 16), (5, (32, 8), 32), (1, (32, 1), 32)]
)
@pytest.mark.parametrize("page", [0, 16, 64])
def test_keys_in_8_bits_are_decoded_in_tiles_of_few_rows(
    stored: torch.dtype, rows: int, heads: tuple[int, int], tile_rows: int, page: int
) -> None:
    program, _, values = launched(rows, heads, page, dim=80, stored=stored)[1]
    assert names_of([(program, 0, values)]) == [DECODED]
    assert program.constants["ROWS"] == tile_rows
    # Whatever the head dim, a row of a box is as wide as the swizzle.
    assert values["k_desc"].block_shape == [1, 1, page or 64, 128]
    assert values["k_scale"][2:] == values["v_scale"][2:] == (1, 0)


def test_the_tiles_of_one_spec_s_calls_follow_their_rows() -> None:
    with isolated():
        register("cuda", OnHopper)
        for rows, tile_rows in ((8, 32), (2, 16), (8, 32)):
            program, _, _ = launched_here(rows, stored=torch.int8)[-1]
            assert program.constants["ROWS"] == tile_rows


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"rows": 9}, PORTABLE),
        ({"heads": (33, 1)}, PORTABLE),
        ({"dim": 72}, PORTABLE),
        ({"dim": 144}, PORTABLE),
        ({"page": 8}, PORTABLE),
        ({"mask": by_head}, PORTABLE),
        ({"dtype": torch.float32}, PORTABLE),
    ],
    ids=str,
)
def test_other_calls_with_keys_in_8_bits_take_the_portable_kernels(
    given: dict[str, Any], names: list[str]
) -> None:
    assert names_of(launched(stored=torch.int8, **given)) == names


@pytest.mark.parametrize(
    "given",
    [{"page": 8}, {"dim": 160}, {"dim": 129}, {"mask": by_head}, {"dtype": torch.float32}],
    ids=str,
)
def test_other_decoding_takes_the_portable_kernels(given: dict[str, Any]) -> None:
    assert names_of(launched(**given)) == PORTABLE


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, [*FORWARD, *SHARED, ADDED]),
        ({"page": 0}, [*FORWARD, *SHARED, ADDED]),
        ({"page": 48}, [*FORWARD, *SHARED, ADDED]),
        ({"mask": by_head}, FORWARD),
        ({"dim": 192}, FORWARD),
        ({"page": 8}, ["forward.forward_kernel"]),
        ({"page": 24}, ["forward.forward_kernel"]),
        ({"dtype": torch.float32}, ["forward.forward_kernel"]),
        ({"dim": 68}, ["forward.forward_kernel"]),
    ],
    ids=str,
)
def test_long_sequences_take_forward_where_it_takes_their_layout(
    given: dict[str, Any], names: list[str]
) -> None:
    assert names_of(launched(rows=20, **given)) == names


def test_batch_invariant_calls_take_the_portable_kernels_and_say_why() -> None:
    """Hopper's share out the keys of all sequences."""
    described: list[str] = []
    forward = TritonKernel.forward

    def noted(kernel: TritonKernel, call: Call, out: Outputs) -> None:
        described.append(kernel.describe(call))
        forward(kernel, call, out)

    with mock.patch.object(TritonKernel, "forward", noted):
        assert names_of(launched(batch_invariant=True)) == PORTABLE
        both = ["forward.forward_kernel", *PORTABLE]
        # Shorter sequences may be beside these.
        assert names_of(launched(rows=5, batch_invariant=True)) == both
        assert names_of(launched(heads=(128, 1), batch_invariant=True)) == both[:1]
    reason = "batch-invariant (not Hopper's kernel: its sums depend on the other sequences"
    assert all(reason in each for each in described) and len(described) == 3
    assert described[0].startswith("decode splits=2,")
    assert "and decode splits=2," in described[1] and "decode" not in described[2]


@pytest.mark.parametrize("taker", [PackedForward, PackedDecode])
def test_launches_are_of_one_device(taker: type[Any]) -> None:
    # A spec's kernel serves all devices of its architecture; a loaded function is of one.
    launch, calls = taker.launch, []

    def noted(*arguments: Any) -> None:
        calls.append(arguments)
        launch(*arguments)

    with mock.patch.object(taker, "launch", noted):
        launched(rows=17)
    ((self, *arguments),) = calls
    at = next(i for i, each in enumerate(arguments) if isinstance(each, Call))
    arguments[at] = copy.copy(arguments[at])
    arguments[at].query = arguments[at].query.to("meta")
    kept = self._laid if taker is PackedForward else self._kept
    before = len(kept)
    with (
        mock.patch.object(forward_call, "cores", lambda device: 132),
        mock.patch.object(FixedLaunch, "run"),
        mock.patch.object(packed_decode_call, "launch_all"),
    ):
        launch(self, *arguments)
    # The shares are the step's, which is of one device.
    assert len(kept) == before + 1


@pytest.mark.parametrize(
    ("shape", "taken"),
    [
        ((1, 1, 2**30 - 1, 64), True),
        ((1, 1, 2**30, 64), False),
        ((2**24, 8, 64, 64), False),
        ((2**21, 8, 64, 64), True),
        ((2**24 - 1, 1, 64, 64), True),
        ((2**24, 1, 64, 64), False),
    ],
)
def test_forward_takes_no_tensor_of_more_rows_than_descriptors_have(
    shape: tuple[int, ...], taken: bool
) -> None:
    found = packed_forward_call._refused_rows("key", torch.empty(shape, device="meta").half())
    assert found == (None if taken else "key of 2^30 rows")
