"""Routing of forward: which calls Hopper's kernel takes, what explain says of the others, and the
launch's arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="there is no Triton to launch with")

from recording import CORES, OnHopper, drawn, launches_on, recording, takes_fast_tanh

import anyflex
from anyflex.plugin import isolated, register
from anyflex_cuda.backend import CudaBackend
from anyflex_cuda.gluon_kernels import BACKWARD_OPTIONS, FORWARD_OPTIONS, refused_options
from anyflex_cuda.gluon_launch import descriptor, descriptor_type, is_boxed
from anyflex_triton import TritonBackend, untried_triton, write_ready_kernels
from anyflex_triton.backend import TRIED

HOPPERS = "anyflex_cuda.hopper_forward"
PORTABLE = "anyflex_triton.forward"


launches = partial(launches_on, OnHopper)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def of(launch: Any) -> str:
    return str(launch[0].function.fn.__module__)


def test_a_long_call_is_hoppers() -> None:
    ((program, grid, values),), said = launches(*drawn(*[(2, 8, 1000, 128)] * 3))
    assert of((program,)) == HOPPERS and "hopper 128x128" in said
    assert grid == 2 * 8 * 8 and (values["tiles"], values["batch_heads"]) == (8, 16)
    assert program.constants["EVEN"] is False and program.constants["HAS_MASK"] is False


def test_programs_are_no_more_than_multiprocessors_and_then_count_from_zero() -> None:
    ((_, grid, values),), _ = launches(*drawn(*[(2, 16, 2048, 64)] * 3))
    assert grid == CORES and values["counter"].tolist() == [0]


def test_where_each_program_has_one_tile_nothing_is_set_to_zero_for_a_counter() -> None:
    ((_, grid, values),), _ = launches(*drawn(*[(1, CORES, 128, 64)] * 3))
    assert grid == CORES and values["counter"] is values["out"]
    ((_, grid, values),), _ = launches(*drawn(*[(1, CORES + 1, 128, 64)] * 3))
    assert grid == CORES and values["counter"].tolist() == [0]


@pytest.mark.parametrize(
    ("heads", "length", "without_mask", "under_one"),
    [(32, 512, 8, 32), (32, 2048, 8, 16), (4, 16384, 2, 2)],
)
def test_heads_that_run_at_a_time_share_the_second_cache(
    heads: int, length: int, without_mask: int, under_one: int
) -> None:
    q, k, v = drawn(*[(1, heads, length, 128)] * 3)
    ((_, _, values),), _ = launches(q, k, v)
    assert values["head_group"] == without_mask
    # The longest tiles come first, in groups of as many heads as the cache holds.
    mask = anyflex.create_block_mask(causal, None, None, length, length)
    ((_, _, values),), _ = launches(q, k, v, None, mask)
    assert values["head_group"] == under_one


def test_a_mask_and_a_score_mod_come_along() -> None:
    mask = anyflex.create_block_mask(causal, None, None, 1024, 1024)
    ((program, _, values),), _ = launches(
        *drawn(*[(1, 2, 1024, 128)] * 3), lambda s, b, h, q, k: s * 2.0, mask
    )
    constants = program.constants
    assert constants["HAS_MASK"] and constants["EVEN"]
    assert constants["Q_BLOCK"] == constants["KV_BLOCK"] == 128
    assert constants["SCORE_MOD"] is not None and constants["MASK_MOD"] is not None
    assert values["runs"].shape[1] == 3


def strided(shape: tuple[int, ...], stride: int) -> Tensor:
    """Return a tensor with rows `stride` elements apart."""
    return torch.zeros((*shape[:3], stride), dtype=torch.bfloat16)[..., : shape[3]]


SHAPE = (1, 2, 256, 64)
ELSEWHERE: dict[str, tuple[Callable[[], list[Tensor]], str]] = {
    "float32": (lambda: drawn(*[SHAPE] * 3, dtype=torch.float32), "wgmma takes"),
    "wide values": (lambda: drawn(SHAPE, SHAPE, (1, 2, 256, 192)), "values of more than 128"),
    "rows of 130 bytes": (
        lambda: [*drawn(SHAPE, SHAPE), strided(SHAPE, 65)],
        "TMA loads no boxes of value",
    ),
    "a scattered query": (
        lambda: [torch.zeros(1, 2, 64, 256, dtype=torch.bfloat16).mT, *drawn(SHAPE, SHAPE)],
        "TMA loads no boxes of query",
    ),
    "a broadcast key": (
        lambda: [drawn(SHAPE)[0], drawn((1, 1, 256, 64))[0].expand(SHAPE), drawn(SHAPE)[0]],
        "TMA loads no boxes of key",
    ),
    "values of 20 columns": (lambda: drawn(SHAPE, SHAPE, (1, 2, 256, 20)), "rows of out"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_hoppers_does_not_take_is_portable_and_explain_says_why(name: str) -> None:
    tensors, reason = ELSEWHERE[name]
    launched, said = launches(*tensors())
    assert [of(launch) for launch in launched] == [PORTABLE]
    assert "not Hopper's kernel" in said and reason in said


def test_blocks_that_are_not_whole_tiles_are_portable() -> None:
    mask = anyflex.create_block_mask(causal, None, None, 256, 256, BLOCK_SIZE=64)
    launched, said = launches(*drawn(*[SHAPE] * 3), None, mask)
    assert [of(launch) for launch in launched] == [PORTABLE]
    assert "blocks of 64 rows aren't made of whole tiles" in said


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0+git1234", "unknown"])
def test_a_triton_that_was_not_tried_is_not_trusted(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton.__version__", version)
    launched, said = launches(*drawn(*[SHAPE] * 3))
    assert [of(launch) for launch in launched] == [PORTABLE]
    assert f"Triton {version}, and they were tried with 3.6 to 3.9" in said


def test_tritons_that_were_tried() -> None:
    assert [untried_triton(v) for v in ("3.6.0", "3.7.1", "3.9.0+gitabc")] == [None] * 3
    for found in (CudaBackend("cuda", "cuda"), TritonBackend("cuda.triton", "cuda")):
        note = found.notes()[0]
        assert note == f"tried with Triton {TRIED}; here is triton {version_of('triton')}"
    # Versions that the checks compile with.
    root = Path(__file__).parents[3]
    pinned = re.findall(r"^triton==(\d+\.\d+)", (root / "constraints-dev.txt").read_text(), re.M)
    newest = re.findall(r"newest-triton/(\d+\.\d+)", (root / "Makefile").read_text())
    assert f"{pinned[0]} to {newest[0]}" == TRIED


def test_a_triton_without_a_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "importlib.metadata.version", lambda name: None if name == "triton" else version_of(name)
    )
    notes = CudaBackend("cuda", "cuda").notes()
    assert notes[0] == f"tried with Triton {TRIED}; here is triton of no version"
    assert notes[-1].startswith("Hopper's and Blackwell's kernels aren't taken: Triton of no ")


def test_doctor_tells_what_came_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyflex_cuda.backend.READY", tmp_path / "ready.zip")
    assert any("no kernels came compiled" in line for line in OnHopper("cuda", "cuda").notes())
    write_ready_kernels(tmp_path / "ready.zip", "other sources", {"kernel-a.zip": b"a"})
    (note,) = [line for line in OnHopper("cuda", "cuda").notes() if "came compiled" in line]
    assert note.startswith("the 1 kernels that came compiled are for other sources; here is ")


def heads_last(*shape: int) -> Tensor:
    """Return [B, H, L, E] with memory order [B, L, H, E]."""
    b, h, length, dim = shape
    return torch.zeros(b, length, h, dim, dtype=torch.bfloat16).transpose(1, 2)


def off_by_two_bytes(*shape: int) -> Tensor:
    size = torch.Size(shape).numel()
    return torch.zeros(size + 1, dtype=torch.bfloat16)[1:].view(shape)


def each_of(count: int, make: Callable[..., Tensor], *shape: int) -> list[Tensor]:
    return [make(*shape) for _ in range(count)]


# One kernel serves all these calls; a cached decision about one must not be applied to the next.
IN_TURN: dict[str, Callable[[], tuple[Any, ...]]] = {
    "contiguous": lambda: (*drawn(*[(1, 2, 256, 64)] * 3),),
    "heads last": lambda: (*each_of(3, heads_last, 1, 2, 256, 64),),
    "keys heads last": lambda: (*drawn((1, 2, 256, 64)), *each_of(2, heads_last, 1, 2, 256, 64)),
    "longer": lambda: (*drawn(*[(1, 2, 512, 64)] * 3),),
    "more keys": lambda: (*drawn((1, 2, 256, 64), *[(1, 2, 384, 64)] * 2),),
    "odd keys": lambda: (*drawn((1, 2, 256, 64), *[(1, 2, 300, 64)] * 2),),
    "more heads": lambda: (*drawn(*[(1, 4, 256, 64)] * 3),),
    "larger batch": lambda: (*drawn(*[(3, 2, 256, 64)] * 3),),
    "elsewhere in memory": lambda: (*each_of(3, off_by_two_bytes, 1, 2, 256, 64),),
    "half of each row": lambda: (*[strided((1, 2, 256, 64), 128) for _ in range(3)],),
    "a row": lambda: (*drawn((1, 2, 1, 64), *[(1, 2, 256, 64)] * 2),),
    "a row of heads last": lambda: (*each_of(3, heads_last, 1, 2, 1, 64),),
    "a row of more keys": lambda: (*drawn((1, 2, 1, 64), *[(1, 2, 4096, 64)] * 2),),
}


def facts(launch: Any) -> tuple[Any, ...]:
    """Return a launch without its tensors."""
    program, grid, values = launch
    plain = {
        name: (value.shape, value.strides, value.block_shape)
        if hasattr(value, "block_shape")
        else (value.shape, value.stride())
        if isinstance(value, Tensor)
        else value
        for name, value in values.items()
    }
    constants = {k: v for k, v in program.constants.items() if not callable(v)}
    return of((program,)), grid, plain, constants


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_calls_of_other_shapes_strides_and_masks_are_answered_for_themselves(
    masked: bool, hopper: bool
) -> None:
    options: Any = {"cuda": {"hopper": hopper}}

    def posed(name: str) -> tuple[Any, ...]:
        q, k, v = IN_TURN[name]()
        if not masked:
            return q, k, v
        return q, k, v, None, anyflex.create_block_mask(causal, None, None, q.shape[2], k.shape[2])

    alone = {
        name: [facts(launch) for launch in launches(*posed(name), kernel_options=options)[0]]
        for name in IN_TURN
    }
    with isolated():
        register("cuda", OnHopper)
        with recording() as launched:
            for name in [*IN_TURN, *reversed(IN_TURN)]:
                launched.clear()
                anyflex.flex_attention(*posed(name), backend="cuda", kernel_options=options)
                assert [facts(launch) for launch in launched] == alone[name], name
    assert alone["contiguous"][0][0] == (HOPPERS if hopper else PORTABLE)
    assert alone["elsewhere in memory"][0][0] == PORTABLE
    assert alone["heads last"] != alone["contiguous"]


def test_tensors_of_one_layout_are_not_each_others() -> None:
    with isolated():
        register("cuda", OnHopper)
        with recording() as launched:
            given = [drawn(*[SHAPE] * 3) for _ in range(2)]
            for tensors in given:
                anyflex.flex_attention(*tensors, backend="cuda")
    for (_, _, values), tensors in zip(launched, given, strict=True):
        for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
            assert values[name] is values[f"{name[0]}_desc"].base
            assert values[name] is tensor
        assert values["out"] is values["o_desc"].base
    assert launched[0][2]["out"] is not launched[1][2]["out"]


def test_calls_of_one_shape_take_the_program_of_their_own_mods() -> None:
    tensors = drawn(*[SHAPE] * 3)
    with isolated():
        register("cuda", OnHopper)
        with recording() as launched:
            for scale in (0.1, 2.0**-120, 0.2, -0.1):
                anyflex.flex_attention(*tensors, scale=scale, backend="cuda")
    scored = [program.constants["SCORE_MOD"] is not None for program, _, _ in launched]
    assert scored == [False, True, False, True]
    assert launched[0][0] is launched[2][0] and launched[1][0] is launched[3][0]
    assert [values["scale"] for _, _, values in launched] == [0.1, 2.0**-120, 0.2, -0.1]


def test_what_is_not_wanted_has_no_descriptor() -> None:
    ((program, _, values),), _ = launches(*drawn(*[SHAPE] * 3))
    assert program.constants["r_desc"] is None and "r_desc" not in values
    q, k, v = (tensor.requires_grad_() for tensor in drawn(*[SHAPE] * 3))
    ((program, _, values),), _ = launches(q, k, v)
    assert program.constants["WANT_REST"] and values["r_desc"].base is values["rest"]


def test_tiles_follow_head_dims_and_blocks_of_the_mask() -> None:
    launched, said = launches(*drawn(*[(1, 40, 256, 192)] * 3))
    assert [of(launch) for launch in launched] == [HOPPERS] and "hopper 128x64" in said
    _, said = launches(*drawn(*[(1, 40, 256, 128)] * 3))
    assert "hopper 128x128" in said
    _, said = launches(*drawn(*[(1, 40, 384, 64)] * 3))
    assert "hopper 192x128" in said
    for block, rows in ((384, 192), (128, 128)):
        mask = anyflex.create_block_mask(causal, 1, 1, 384, 384, BLOCK_SIZE=(block, 128))
        _, said = launches(*drawn(*[(1, 40, 384, 64)] * 3), block_mask=mask)
        assert f"hopper {rows}x128" in said


@pytest.mark.parametrize(
    ("kind", "masked", "rows"),
    [
        ("slopes", True, 192), ("distances", False, 192), ("distances", True, 128),
        ("two distances", False, 128), ("chunks", False, 128), ("periods", False, 128),
        ("dense", False, 128),
    ],
)  # fmt: skip
def test_values_by_pairs_have_registers(kind: str, masked: bool, rows: int) -> None:
    table, other = torch.zeros(40, 800), torch.zeros(40, 800)
    score = {
        "slopes": lambda s, b, h, q, k: s + table[h, 0] * (k - q),
        "distances": lambda s, b, h, q, k: s + table[h, k - q + 400],
        "two distances": lambda s, b, h, q, k: s * table[h, k - q + 400] + other[h, q - k + 400],
        "chunks": lambda s, b, h, q, k: s + table[q % 40, k // 64],
        "periods": lambda s, b, h, q, k: s + table[q % 40, k % 64],
        "dense": lambda s, b, h, q, k: s + table[q % 40, k],
    }[kind]
    mask = None
    if masked:
        mask = anyflex.create_block_mask(causal, 1, 1, 384, 384, BLOCK_SIZE=(384, 128))
    _, said = launches(*drawn(*[(1, 40, 384, 64)] * 3), score_mod=score, block_mask=mask)
    assert f"hopper {rows}x128" in said


@pytest.mark.parametrize(("dim", "keys"), [(64, 128), (128, 128), (256, 64)])
def test_a_tile_has_one_consumer_where_all_run_at_once(dim: int, keys: int) -> None:
    mask = anyflex.create_block_mask(causal, 1, 1, 256, 256)
    ((program, grid, values),), said = launches(
        *drawn(*[(1, CORES // 4, 256, dim)] * 3), block_mask=mask
    )
    assert f"hopper 64x{keys}" in said and program.constants["CONSUMERS"] == 1
    assert grid == values["tiles"] * values["batch_heads"] == CORES
    ((program, grid, _),), said = launches(
        *drawn(*[(1, CORES // 4 + 1, 256, dim)] * 3), block_mask=mask
    )
    assert f"hopper 128x{keys}" in said and program.constants["CONSUMERS"] == 2


@pytest.mark.parametrize(
    "options",
    [
        {"cuda": {"block_m": 64}}, {"BLOCK_N": 32}, {"cuda": {"num_warps": 8}},
        {"cuda": {"finer_mask": True}},
    ],
)  # fmt: skip
def test_an_option_of_the_portable_kernels_is_not_ignored(options: dict[str, Any]) -> None:
    launched, said = launches(*drawn(*[SHAPE] * 3), kernel_options=options)
    assert [of(launch) for launch in launched] == [PORTABLE]
    assert "not Hopper's kernel: the portable kernels have " in said
    _, said = launches(*drawn(*[SHAPE] * 3), kernel_options={"cuda": {"dq_block_m": 64}})
    assert "hopper 64x128" in said


def test_autotuning_is_the_portable_kernels() -> None:
    for names in (FORWARD_OPTIONS, BACKWARD_OPTIONS):
        assert refused_options({"autotune": True}, names)
        assert refused_options({"autotune": False, "finer_mask": False}, names) is None


def test_without_an_element_explain_says_so() -> None:
    _, said = launches(*drawn((1, 2, 256, 64), (1, 2, 0, 64), (1, 2, 0, 64)))
    assert "key is empty" in said


def test_the_option_takes_hoppers_kernels_away() -> None:
    launched, said = launches(*drawn(*[SHAPE] * 3), kernel_options={"cuda": {"hopper": False}})
    assert [of(launch) for launch in launched] == [PORTABLE]
    assert "(not Hopper's kernel: its option hopper is False)" in said


def test_dropout_is_the_portable_kernels() -> None:
    launched, said = launches(*drawn(*[SHAPE] * 3), dropout_p=0.1)
    assert [of(launch) for launch in launched] == [PORTABLE]
    assert "(not Hopper's kernel: it doesn't drop weights)" in said


def test_boxes_are_of_whole_tensors_whatever_the_order_of_dimensions() -> None:
    tensor = torch.zeros(2, 100, 4, 64, dtype=torch.float16).transpose(1, 2)
    assert is_boxed(tensor)
    made = descriptor(tensor, (1, 1, 64, 64))
    assert made.shape == [2, 4, 100, 64] and made.strides == [25600, 64, 256, 1]
    assert "fp16[1, 1, 64, 64]" in descriptor_type(torch.float16, (1, 1, 64, 64))


def test_a_dimension_of_one_element_may_have_any_stride() -> None:
    tensor = torch.zeros(4 * 128, dtype=torch.float16).as_strided((1, 1, 4, 128), (3, 5, 128, 1))
    assert is_boxed(tensor)
    strides = descriptor(tensor, (1, 1, 64, 128)).strides
    assert strides[2:] == [128, 1] and all(
        stride % 8 == 0 and stride > 0 for stride in strides[:3]
    )


def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 30.0 * torch.tanh(score / 30.0)


def small_blocks() -> anyflex.BlockMask:
    length = SHAPE[2]
    return anyflex.create_block_mask(causal, 1, 1, length, length, BLOCK_SIZE=(64, 128))


@pytest.mark.parametrize(
    "score_mod",
    [
        None,
        lambda s, b, h, q, k: 2 * s,
        lambda s, b, h, q, k: torch.tanh(s) * s,
        lambda s, b, h, q, k: 300.0 * torch.tanh(s / 300.0),
    ],
)
def test_fast_tanh_is_not_said_where_no_cap_takes_it(score_mod: Any) -> None:
    options = {"cuda": {"fast_tanh": True}}
    ((program, _, _),), said = launches(*drawn(*[SHAPE] * 3), score_mod, kernel_options=options)
    assert "hopper 64x128" in said and "fast tanh" not in said
    assert not takes_fast_tanh(program)


def test_fast_tanh_is_taken_and_said_where_all_of_a_call_is_hoppers() -> None:
    fast: dict[str, Any] = {"score_mod": softcap, "kernel_options": {"cuda": {"fast_tanh": True}}}
    launched, said = launches(*drawn(*[SHAPE] * 3), **fast)
    assert "hopper 64x128 fast tanh" in said
    assert takes_fast_tanh(launched[0][0])
    launched, said = launches(*drawn(*[SHAPE] * 3), score_mod=softcap)
    assert "fast tanh" not in said
    assert not takes_fast_tanh(launched[0][0])
    # In training a portable part would compute other weights.
    for more, taken in (({}, True), ({"block_mask": small_blocks()}, False)):
        leaves = [x.requires_grad_() for x in drawn(*[SHAPE] * 3)]
        _, said = launches(*leaves, **fast, **more)
        assert ("fast tanh" in said) == taken, said
    torch.use_deterministic_algorithms(True)
    try:
        _, said = launches(*[x.requires_grad_() for x in drawn(*[SHAPE] * 3)], **fast)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "dq portable" in said and "fast tanh" not in said
    # The portable pass makes a table's gradient where query doesn't want one.
    q, k, v = drawn(*[SHAPE] * 3)
    table = torch.zeros(SHAPE[1], requires_grad=True)
    fast["score_mod"] = lambda s, b, h, i, j: softcap(s + table[h], b, h, i, j)
    _, said = launches(q, k.requires_grad_(), v.requires_grad_(), **fast)
    assert "captured portable" in said and "fast tanh" not in said
