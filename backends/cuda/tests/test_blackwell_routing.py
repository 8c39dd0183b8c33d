"""Routing of Blackwell's forward: which calls it takes, that users must opt in, and what explain
says of other calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="there is no Triton to launch with")

from recording import CORES, OnBlackwell, drawn, launches_on, recording, takes_fast_tanh

import anyflex
from anyflex.plugin import isolated, register
from anyflex_cuda.backend import VARIABLE

OURS = "anyflex_cuda.blackwell_forward"
PORTABLE = "anyflex_triton.forward"
SHAPE = (1, 2, 512, 64)


launches = partial(launches_on, OnBlackwell)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def of(launched: list[Any]) -> list[str]:
    return [str(launch[0].function.fn.__module__) for launch in launched]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")


@pytest.mark.parametrize("value", [None, "", "0", "yes"])
def test_unasked_blackwells_calls_are_portable_and_explain_says_how_to_ask(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    launched, said = launches(*drawn(*[SHAPE] * 3))
    assert of(launched) == [PORTABLE]
    assert (
        "not Blackwell's kernel: compiled, and never run by the project; "
        "ANYFLEX_CUDA_BLACKWELL=1 takes it"
    ) in said


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(("cap", "taken"), [(30.0, True), (300.0, False)])
def test_fast_tanh_is_said_where_it_is_taken(cap: float, taken: bool) -> None:
    ((program, _, _),), said = launches(
        *drawn(*[SHAPE] * 3),
        lambda s, b, h, q, k: cap * torch.tanh(s / cap),
        kernel_options={"cuda": {"fast_tanh": True}},
    )
    assert ("blackwell 256x128 fast tanh, never run" in said) is taken
    assert takes_fast_tanh(program) is taken


@pytest.mark.usefixtures("asked")
def test_asked_for_a_long_call_is_blackwells() -> None:
    launched, said = launches(*drawn(*[(2, 4, 1000, 128)] * 3))
    ((program, grid, values),) = launched
    assert of(launched) == [OURS] and "blackwell 256x128, never run by the project" in said
    assert grid == 2 * 4 * 4 and (values["tiles"], values["batch_heads"]) == (4, 8)
    assert program.constants["EVEN"] is False and program.constants["HAS_MASK"] is False
    assert values["o_desc"].block_shape == [1, 1, 128, 64]


@pytest.mark.usefixtures("asked")
def test_programs_are_no_more_than_multiprocessors() -> None:
    ((_, grid, values),), _ = launches(*drawn(*[(2, 64, 1024, 64)] * 3))
    assert grid == CORES and values["counter"].tolist() == [0]


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("block", [128, 256])
def test_a_mask_and_a_score_mod_come_along(block: int) -> None:
    mask = anyflex.create_block_mask(causal, None, None, 1024, 1024, BLOCK_SIZE=block)
    ((program, _, values),), said = launches(
        *drawn(*[(1, 2, 1024, 96)] * 3), lambda s, b, h, q, k: s * 2.0, mask
    )
    constants = program.constants
    assert "blackwell" in said and constants["HAS_MASK"] and constants["EVEN"]
    assert constants["Q_BLOCK"] == constants["KV_BLOCK"] == block
    assert (constants["DIM"], constants["D"]) == (96, 128)
    assert constants["SCORE_MOD"] is not None and constants["MASK_MOD"] is not None
    assert values["runs"].shape[1] == 3


ELSEWHERE: dict[str, tuple[Callable[[], list[Tensor]], str]] = {
    "float32": (lambda: drawn(*[SHAPE] * 3, dtype=torch.float32), "it takes bfloat16"),
    "wide heads": (lambda: drawn(*[(1, 2, 512, 192)] * 3), "head dims above 128"),
    "values of 20 columns": (lambda: drawn(SHAPE, SHAPE, (1, 2, 512, 20)), "rows of out"),
    "a scattered query": (
        lambda: [torch.zeros(1, 2, 64, 512, dtype=torch.bfloat16).mT, *drawn(SHAPE, SHAPE)],
        "TMA loads no boxes of query",
    ),
}


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_blackwells_does_not_take_is_portable_and_explain_says_why(name: str) -> None:
    tensors, reason = ELSEWHERE[name]
    launched, said = launches(*tensors())
    assert of(launched) == [PORTABLE]
    assert "not Blackwell's kernel" in said and reason in said


@pytest.mark.usefixtures("asked")
def test_blocks_that_are_not_whole_tiles_are_portable() -> None:
    mask = anyflex.create_block_mask(causal, None, None, 512, 512, BLOCK_SIZE=64)
    launched, said = launches(*drawn(*[SHAPE] * 3), None, mask)
    assert of(launched) == [PORTABLE]
    assert "blocks of 64 rows aren't multiples of 128" in said


@pytest.mark.usefixtures("asked")
def test_an_option_of_the_portable_kernels_is_not_ignored() -> None:
    launched, said = launches(*drawn(*[SHAPE] * 3), kernel_options={"cuda": {"block_m": 64}})
    assert of(launched) == [PORTABLE] and "the portable kernels have block_m" in said
    launched, said = launches(*drawn(*[SHAPE] * 3), kernel_options={"cuda": {"hopper": False}})
    assert of(launched) == [PORTABLE]
    assert "(not Blackwell's kernel: its option hopper is False)" in said


@pytest.mark.usefixtures("asked")
def test_decoding_stays_portable() -> None:
    launched, said = launches(*drawn((1, 2, 1, 64), SHAPE, SHAPE))
    assert set(of(launched)) == {"anyflex_triton.decode"} and "decode" in said


@pytest.mark.usefixtures("asked")
def test_backward_is_portable() -> None:
    q, k, v = (x.requires_grad_() for x in drawn(*[SHAPE] * 3))
    with isolated():
        register("cuda", OnBlackwell)
        with recording() as launched:
            out = anyflex.flex_attention(q, k, v, backend="cuda")
            said = str(anyflex.explain(q, k, v, backend="cuda"))
            assert isinstance(out, Tensor)
            torch.autograd.grad(out.sum(), (q, k, v))
    assert of(launched)[0] == OURS and launched[0][0].constants["WANT_REST"]
    assert all(name.startswith("anyflex_triton.") for name in of(launched)[1:])
    assert len(launched) > 1 and "backward portable" in said


@pytest.mark.usefixtures("asked")
def test_a_triton_that_was_not_tried_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.__version__", "3.10.0")
    launched, said = launches(*drawn(*[SHAPE] * 3))
    assert of(launched) == [PORTABLE] and "not Blackwell's kernel: Triton 3.10.0" in said


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "Blackwell's forward isn't taken: compiled, and never run by the project"),
        ("1", "Blackwell's forward is taken, and was never run by the project"),
        ("yes", "ANYFLEX_CUDA_BLACKWELL='yes' is not 0 or 1, and counts as unset"),
    ],
)
def test_doctor_says_whether_it_is_taken(
    value: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    notes = OnBlackwell("cuda", "cuda").notes()
    assert any(note.startswith(told) for note in notes), notes
