"""Routing of backward: which calls take Hopper's kernels, what explain says of the others, and
what is launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from compiling_backward import causal, recorded
from scripts_beside import SOAK

import anyflex
from anyflex_triton import forward_call as portable_call
from anyflex_triton.building import Boxes, Program, layout_of

Mod = Callable[..., Any]
OURS = ["prepare_kernel", "backward_kernel", "convert_kernel", "repair_kernel"]
WITHOUT_DQ = ["prepare_kernel", "backward_kernel", "repair_kernel"]
WIDE = ["prepare_kernel", "wide_kernel", "wide_kernel", "repair_kernel"]
WIDE_WITHOUT_DQ = ["prepare_kernel", "wide_kernel", "repair_kernel"]


def by_head(table: Any, s: Any, h: Any, i: Any, j: Any) -> Any:
    return s + table[h, 0]


def by_key(table: Any, s: Any, h: Any, i: Any, j: Any) -> Any:
    return s + table[h, j] * 2.0


def by_row(table: Any, s: Any, h: Any, i: Any, j: Any) -> Any:
    return s + table[h, i]


def by_distance(table: Any, s: Any, h: Any, i: Any, j: Any) -> Any:
    return s + table[h, i - j + 300]


def by_factor(table: Any, s: Any, h: Any, i: Any, j: Any) -> Any:
    return s * table[h, 0]


def by_score(table: Any, s: Any, h: Any, i: Any, j: Any) -> Any:
    return s + table[h, s.to(torch.int32).clamp(0, 9)]


def by_pair(table: Any, s: Any, h: Any, i: Any, j: Any) -> Any:
    return s + table[i % 4, j]


def by_factor_of_pair(table: Any, s: Any, h: Any, i: Any, j: Any) -> Any:
    return s * table[i % 4, j]


def by_key_and_row(table: Any, s: Any, h: Any, i: Any, j: Any) -> Any:
    return s + table[h, j] + table[h, i]


def heads_last(like: torch.Tensor) -> torch.Tensor:
    """Return zeros in memory order [B, L, H, E]."""
    return torch.zeros_like(like.transpose(1, 2).contiguous()).transpose(1, 2)


def reading(table: torch.Tensor, adds: Mod) -> Mod:
    """Return a score mod that reads a table."""

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return adds(table, s, h, i, j)

    return score


def called(
    *,
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.bfloat16,
    block: int | tuple[int, int] | None = None,
    wanted: str = "qkv",
    learns: bool | Mod = False,
    expanded: bool = False,
    query: torch.Tensor | None = None,
    scored: Mod | None = None,
) -> tuple[list[str], str]:
    """Return (names of the kernels that backward launches, explain's description)."""
    q, k, v = (torch.zeros(2, 2, 300, d).to(dtype) for d in (dims[0], *dims))
    q = q if query is None else query
    leaves = {"q": q, "k": k, "v": v}
    chosen = [leaves[name].requires_grad_() for name in wanted]
    score = scored
    if learns:
        table = torch.zeros(2, 600).requires_grad_()
        chosen.append(table)
        score = reading(table, by_head if learns is True else learns)
    mask = None
    if block is not None:
        mask = anyflex.create_block_mask(causal, None, None, 300, 300, BLOCK_SIZE=block)
    with recorded() as launched:
        given: dict[str, Any] = {
            "score_mod": score, "block_mask": mask, "backend": "cuda.recorded",
        }  # fmt: skip
        said = anyflex.explain(q, k, v, **given).variant
        out = anyflex.flex_attention(q, k, v, **given)
        assert isinstance(out, torch.Tensor)
        launched.clear()
        dout = torch.zeros(1, dtype=dtype).expand_as(out) if expanded else torch.zeros_like(out)
        torch.autograd.grad(out, chosen, dout)
    assert said is not None
    return [program.function.__name__ for program, _ in launched], said


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"dims": (128, 128)},
        {"dims": (40, 96)},
        {"dtype": torch.float16},
        {"block": 128},
        {"block": (64, 256)},
        {"expanded": True},
        {"query": torch.zeros(2, 300, 2, 64, dtype=torch.bfloat16).transpose(1, 2)},
    ],
)
def test_a_call_that_fits_takes_hoppers_backward(call: dict[str, Any]) -> None:
    names, said = called(**call)
    assert names == OURS
    assert said.endswith(", backward hopper")


@pytest.mark.parametrize(
    "call",
    [
        {"dims": (256, 256)},
        {"dims": (192, 128), "dtype": torch.float16},
        {"dims": (136, 16), "block": (128, 64)},
        {"dims": (64, 256), "expanded": True},
    ],
)
def test_above_head_dim_128_dk_with_dv_and_dq_have_kernels_of_their_own(
    call: dict[str, Any],
) -> None:
    names, said = called(**call)
    assert names == WIDE
    assert said.endswith(", backward hopper wide")


def test_above_head_dim_128_sums_repeat_anyway() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        names, said = called(dims=(256, 256))
    finally:
        torch.use_deterministic_algorithms(False)
    assert names == WIDE
    assert said.endswith(", backward hopper wide")


def test_above_head_dim_128_what_learns_is_portable() -> None:
    names, said = called(dims=(192, 192), learns=True)
    assert names == [*WIDE_WITHOUT_DQ, "query_kernel"]
    assert said.endswith(", backward hopper wide, dq and captured portable")


def test_above_head_dim_128_dq_that_nobody_wants_is_not_made() -> None:
    assert called(dims=(192, 192), wanted="kv")[0] == WIDE_WITHOUT_DQ


def test_tables_that_shared_memory_has_no_room_for_take_the_portable_backward() -> None:
    tables = [torch.zeros(2, 2, 2, 2) for _ in range(38)]

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        for table in tables:
            s = s + table[0, 0, 0, h]
        return s

    names, said = called(dims=(256, 256), scored=score)
    assert names[0] == "row_kernel"
    assert "38 captured tensors, for which shared memory has no room" in said


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"dtype": torch.float32}, "float32"),
        ({"dims": (32, 64)}, "head dims 32 and 64, for it takes 33 to 128, or one of"),
        ({"dims": (64, 36)}, "head dims 64 and 36, for TMA takes multiples of 8"),
        ({"wanted": "qv"}, "gradients of key and value aren't both wanted"),
        ({"block": 64}, "mask blocks of 64 x 64, for it takes multiples of 64 x 128"),
        (
            {"dims": (192, 192), "block": 64},
            "mask blocks of 64 x 64, for it takes multiples of 128 x 64",
        ),
        (
            {"query": torch.zeros(2, 2, 300, 65, dtype=torch.bfloat16)[..., :64]},
            "TMA loads no boxes of query",
        ),
    ],
)
def test_explain_says_why_a_call_takes_the_portable_backward(
    call: dict[str, Any], reason: str
) -> None:
    names, said = called(**call)
    assert names[0] == "row_kernel"
    assert "backward_kernel" not in names
    assert f", backward portable (not Hopper's kernel: {reason}" in said


def seen(value: Any, places: dict[int, int]) -> Any:
    """Return a comparable form of an argument: tensors are equal if they have the same layout and
    the same place in a call."""
    if isinstance(value, torch.Tensor):
        place = places.setdefault(value.data_ptr(), len(places))
        return place, value.dtype, value.shape, value.stride()
    if isinstance(value, Boxes):
        return seen(value.base, places), value.shape, value.strides, value.block_shape
    return tuple(seen(part, places) for part in value) if isinstance(value, tuple) else value


BOOLS = (True, False)
KINDS_OF_CALLS = list(
    product([(64, 128), (136, 160)], ["qkv", "kv", "q", "v"], BOOLS, BOOLS, BOOLS, BOOLS)
)


# Every fifth has each two values of two parameters together.
@pytest.mark.parametrize(
    ("dims", "wanted", "masked", "learns", "with_lse", "hopper"),
    KINDS_OF_CALLS[:: 1 if SOAK else 5],
)
def test_a_call_whose_layout_was_there_launches_what_the_first_one_did(
    dims: tuple[int, int], wanted: str, masked: bool, learns: bool, with_lse: bool, hopper: bool
) -> None:
    options = {"cuda.recorded": {"hopper": hopper}}
    mask = anyflex.create_block_mask(causal, None, None, 300, 300) if masked else None
    shapes = {
        "q": (2, 4, 300, dims[0]), "k": (2, 2, 300, dims[0]), "v": (2, 2, 300, dims[1]),
    }  # fmt: skip
    found = []
    with recorded() as launched:
        for scale, make in (
            (0.5, torch.zeros_like), (0.5, torch.zeros_like), (0.25, torch.zeros_like),
            (0.5, heads_last), (0.5, heads_last),
        ):  # fmt: skip
            leaves = {name: torch.zeros(shape).bfloat16() for name, shape in shapes.items()}
            chosen = [leaves[name].requires_grad_() for name in wanted]
            table = torch.zeros(4, 600).requires_grad_(learns)
            outs = anyflex.flex_attention(
                *leaves.values(), reading(table, by_head), mask, scale, enable_gqa=True,
                return_lse=True, kernel_options=options, backend="cuda.recorded",
            )  # fmt: skip
            outs = outs if with_lse else outs[:1]
            launched.clear()
            torch.autograd.grad(outs, [*chosen, *[table][:learns]], [make(out) for out in outs])
            leaves["table"] = table
            places = {leaf.data_ptr(): i for i, leaf in enumerate(leaves.values())}
            found.append(
                [
                    (program, {name: seen(value, places) for name, value in values.items()})
                    for program, values in launched
                ]
            )
    first, again, scaled, other, other_again = found
    assert again == first != scaled
    assert first != other == other_again
    ours = hopper and wanted not in ("q", "v")
    assert first[0][0].function.__name__ == ("prepare_kernel" if ours else "row_kernel")
    if mask is not None:
        # Transposing synchronizes on a GPU.
        assert ("transposed" in mask.views()._derived) == (wanted != "q")
    for (program, values), (other, others) in zip(first, scaled, strict=True):
        assert program is other
        assert {**values, "scale": 0.25} == {**others, "scale": 0.25}


@contextmanager
def foreseen(*, beside: bool = True) -> Iterator[list[Program]]:
    """Yield the programs that forward begins to compile for backward, on a CPU that can compile
    concurrently (`beside`)."""
    known: list[Program] = []

    def compiled(
        program: Program, device: int | None, after_front_end: Callable[[], None]
    ) -> None:
        after_front_end()

    with (
        mock.patch.object(Program, "is_compiled", lambda program, device: False),
        mock.patch.object(Program, "compile", compiled),
        mock.patch.object(portable_call, "_compiles_beside", lambda call: beside),
        mock.patch.object(portable_call, "current_target"),
        mock.patch.object(
            portable_call, "begin_compiling", lambda programs, target: known.extend(programs)
        ),
    ):
        yield known


@pytest.mark.parametrize("wanted", ["qkv", "kv", "v"])
@pytest.mark.parametrize("lengths_differ", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forward_knows_what_backward_will_compile(
    wanted: str, lengths_differ: bool, dtype: torch.dtype
) -> None:
    """Check Hopper's kernels, and the portable ones, which float32 takes."""
    keys = 300 if lengths_differ else 256
    q, k, v = (torch.zeros(2, 2, n, 64, dtype=dtype) for n in (256, keys, keys))
    leaves = {"q": q, "k": k, "v": v}
    chosen = [leaves[name].requires_grad_() for name in wanted]
    mask = anyflex.create_block_mask(causal, None, None, 256, keys)
    with recorded() as launched, foreseen() as known:
        out = anyflex.flex_attention(q, k, v, None, mask, backend="cuda.recorded")
        assert isinstance(out, torch.Tensor) and known
        launched.clear()
        torch.autograd.grad(out, chosen, torch.zeros_like(out))
        assert [program for program, _ in launched] == known


def fused(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return query, key and value as parts of one projection."""
    return [part.transpose(1, 2) for part in torch.zeros(2, 201, 3, 8, 64, dtype=dtype).unbind(2)]


def expanded(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return keys and values that the batch shares, of two KV heads, which are split."""
    kv = torch.zeros(2, 1, 2, 202, 64, dtype=dtype).expand(-1, 2, -1, -1, -1)
    return [torch.zeros(2, 8, 202, 64, dtype=dtype), *kv]


@pytest.mark.parametrize("layout", [fused, expanded])
@pytest.mark.parametrize(
    ("dtype", "hopper"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)],
)
def test_gradients_are_written_by_their_own_strides_after_forward_has_foreseen_their_kernels(
    layout: Callable[[torch.dtype], list[torch.Tensor]], dtype: torch.dtype, hopper: bool
) -> None:
    leaves = [tensor.detach().requires_grad_() for tensor in layout(dtype)]
    with recorded() as launched, foreseen() as known:
        out = anyflex.flex_attention(
            *leaves, enable_gqa=True, backend="cuda.recorded",
            kernel_options={"cuda.recorded": {"hopper": hopper}},
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        launched.clear()
        gradients = torch.autograd.grad(out, leaves, torch.zeros_like(out))
        assert [program for program, _ in launched] == known
    places = {gradient.data_ptr(): gradient for gradient in gradients}
    written = set()
    for _, values in launched:
        for name in ("dq", "dk", "dv"):
            found = values.get(name)
            if isinstance(found, Boxes):
                assert found.strides == list(places[found.base.data_ptr()].stride())
            elif found is not None and f"{name}_strides" in values:
                gradient = places[found.data_ptr()]
                assert values[f"{name}_strides"] == layout_of(gradient).strides
            else:
                continue
            written.add(name)
    assert written == {"dq", "dk", "dv"}


def test_a_gradient_at_an_unaligned_address_is_copied() -> None:
    q = torch.zeros(2, 2, 204, 64, dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn(q.numel() + 4).bfloat16()[4:].view(q.shape)
    assert dout.is_contiguous() and dout.data_ptr() % 16
    with recorded() as launched:
        out = anyflex.flex_attention(q, q, q, backend="cuda.recorded")
        assert isinstance(out, torch.Tensor)
        launched.clear()
        torch.autograd.grad(out, q, dout)
    bases = [
        values["dout"].base for _, values in launched if isinstance(values.get("dout"), Boxes)
    ]
    assert bases
    for base in bases:
        assert base.data_ptr() % 16 == 0 and base.equal(dout)


def test_forward_knows_what_repeatable_sums_will_compile() -> None:
    q = torch.zeros(2, 2, 256, 64, requires_grad=True)
    table = torch.zeros(2, requires_grad=True)
    with (
        recorded() as launched,
        foreseen() as known,
        mock.patch("torch.are_deterministic_algorithms_enabled", lambda: True),
    ):
        out = anyflex.flex_attention(
            q, q, q, lambda s, b, h, i, j: s * table[h], backend="cuda.recorded"
        )
        assert isinstance(out, torch.Tensor)
        launched.clear()
        torch.autograd.grad(out, [q, table], torch.zeros_like(out))
        assert [program for program, _ in launched] == known
        assert len({program.function.__name__ for program in known}) > 3


def test_while_a_graph_is_captured_nothing_of_backward_is_begun() -> None:
    """Backward's programs depend on the transposed mask, which synchronizes."""
    q = torch.zeros(2, 2, 256, 64, requires_grad=True).bfloat16()
    mask = anyflex.create_block_mask(causal, None, None, 256, 256)
    with recorded() as launched, foreseen(beside=False) as known:
        anyflex.flex_attention(q, q, q, None, mask, backend="cuda.recorded")
    assert len(launched) == 1 and not known


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "group"),
    [(512, 16, 16, 8), (512, 4, 4, 4), (4096, 8, 8, 4), (32768, 2, 2, 1), (4096, 16, 8, 4)],
)
@pytest.mark.parametrize("masked", [False, True])
def test_heads_whose_sums_of_dq_the_second_cache_holds_run_at_a_time(
    length: int, heads: int, kv_heads: int, group: int, masked: bool
) -> None:
    q = torch.zeros(1, heads, length, 128, dtype=torch.bfloat16, requires_grad=True)
    k, v = torch.zeros(2, 1, kv_heads, 128, 128, dtype=torch.bfloat16, requires_grad=True)
    mask = anyflex.create_block_mask(causal, None, None, length, 128) if masked else None
    with recorded() as launched:
        out = anyflex.flex_attention(
            q, k, v, block_mask=mask, backend="cuda.recorded", enable_gqa=True
        )
        assert isinstance(out, torch.Tensor)
        launched.clear()
        torch.autograd.grad(out, (q, k, v), out.detach())
    (values,) = (values for program, values in launched if "head_group" in values)
    assert values["head_group"] == group


@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "width", "splits"),
    [
        (32, 1, 8192, 128, 16), (32, 2, 8192, 64, 8), (8, 1, 300, 64, 8), (24, 3, 2048, 128, 8),
        (8, 1, 1024, 256, 8), (32, 8, 4096, 128, None), (8, 8, 300, 64, None),
    ],
)  # fmt: skip
def test_query_heads_of_few_kv_heads_are_split_and_their_sums_added(
    heads: int, kv_heads: int, length: int, width: int, splits: int | None
) -> None:
    q = torch.zeros(1, heads, length, width, dtype=torch.bfloat16, requires_grad=True)
    k, v = torch.zeros(2, 1, kv_heads, length, width, dtype=torch.bfloat16, requires_grad=True)
    with recorded() as launched:
        out = anyflex.flex_attention(q, k, v, backend="cuda.recorded", enable_gqa=True)
        assert isinstance(out, torch.Tensor)
        launched.clear()
        torch.autograd.grad(out, (q, k, v), out.detach())
    names = [program.function.__name__ for program, _ in launched]
    of_dq = "wide_kernel" if width > 128 else "convert_kernel"
    assert set(names) >= {"prepare_kernel", of_dq, "repair_kernel"}
    values = {program.function.__name__: values for program, values in reversed(launched)}
    if splits is None:
        assert "sum_kernel" not in names
        return
    rows = 64 if width > 128 else 128
    sums = values["sum_kernel"]
    assert sums["head_splits"] == splits
    assert sums["padded_keys"] == -(-length // rows) * rows
    main = values["wide_kernel" if width > 128 else "backward_kernel"]
    assert main["units"] == kv_heads * splits
    assert main["split_heads"] * splits == heads // kv_heads
    assert main["key_sums"].data_ptr() == sums["key_sums"].data_ptr()


def test_without_gradient_of_query_no_sums_of_it_are_made() -> None:
    names, said = called(wanted="kv")
    assert names == WITHOUT_DQ
    assert said.endswith(", backward hopper")


def test_gradients_of_captured_tensors_are_made_beside_dq() -> None:
    names, said = called(learns=True)
    assert names == OURS
    assert said.endswith(", backward hopper")
    # Without gradients of query no kernel looks for far rows.
    names, said = called(learns=True, wanted="kv")
    assert names == [*WITHOUT_DQ, "query_kernel"]
    assert said.endswith(", backward hopper, captured portable")


@pytest.mark.parametrize(
    ("learns", "narrow", "wide"),
    [
        (by_head, True, True), (by_key, True, True), (by_row, False, False),
        (by_distance, False, False), (by_factor, True, False), (by_score, False, False),
        (by_key_and_row, False, False), (by_pair, True, False), (by_factor_of_pair, False, False),
    ],
)  # fmt: skip
def test_gradients_of_captured_tensors_are_the_portable_pass_s_where_that_is_faster(
    learns: Mod, narrow: bool, wide: bool
) -> None:
    for width, is_ours in ((64, narrow), (128, wide)):
        names, said = called(learns=learns, dims=(width, width))
        assert names == (OURS if is_ours else [*WITHOUT_DQ, "query_kernel"])
        assert said.endswith("backward hopper" if is_ours else ", dq and captured portable")


def test_where_sums_must_repeat_the_portable_pass_makes_dq_and_captured_gradients() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        names, said = called()
        assert names == [*WITHOUT_DQ, "query_kernel"]
        assert said.endswith(", backward hopper, dq portable")
        names, said = called(learns=True)
        assert names == [*WITHOUT_DQ, "query_kernel", "query_kernel", "total_kernel"]
        assert said.endswith(", backward hopper, dq and captured portable")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("rows", "described"), [(16, False), (32, True), (64, True)])
def test_portable_row_values_come_by_tma_where_each_stage_fills_128_bytes(
    rows: int, described: bool
) -> None:
    """Stages of 64 bytes would be adjacent, but TMA writes only to multiples of 128."""
    q, k, v = (torch.zeros(1, 2, 256, 128).bfloat16().requires_grad_() for _ in "qkv")
    options = {"cuda.recorded": {"dkv_block_m": rows, "backward_num_stages": 3}}
    with recorded() as launched:
        out = anyflex.flex_attention(q, k, v, backend="cuda.recorded", kernel_options=options)
        assert isinstance(out, torch.Tensor)
        launched.clear()
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    (keys,) = [one for one, _ in launched if one.function.__name__ == "key_kernel"]
    assert (keys.constants["BLOCK_M"], keys.options.num_stages) == (rows, 3)
    for name in ("row_values", "query"):
        assert str(keys.types[name]).startswith("tensordesc") == described
    assert (keys.constants["DESCRIBED"] == "host") == described
