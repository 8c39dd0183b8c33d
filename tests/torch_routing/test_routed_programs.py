"""Programs in the manner of torch's suite, through torch's functions re-routed to anyflex."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, flex_attention

import anyflex
from anyflex.torch_routing import originals
from tests.soak import SOAK
from tests.torch_routing.attention import (
    ALL_AUX,
    Inputs,
    agree,
    attend,
    expected,
    gradients,
    inputs,
    poisoned,
    rerouted,
    weighted,
)
from tests.torch_routing.programs import PROGRAMS, SIZES, Sizes

__all__: list[str] = []

pytestmark = pytest.mark.filterwarnings("error::anyflex.PerformanceWarning")
NAMES = list(PROGRAMS)
EAGER_SIZES = list(SIZES) if SOAK else ["square", "ragged"]
COMPILED = [("aot_eager", "ragged")]


def ways(values: list[Any]) -> list[tuple[Any, str]]:
    """Each value eagerly, and compiled: the first alone in `make test`."""
    return [(value, "eager") for value in values] + [
        (value, "aot_eager") for value in values[: None if SOAK else 1]
    ]


COMPILED_NAMES = NAMES[:: 1 if SOAK else 4]
if SOAK:
    COMPILED += [
        ("aot_eager", "decode"), ("inductor", "ragged"), ("inductor", "square"),
        ("eager", "square"),
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def routed() -> Iterator[None]:
    with rerouted(), poisoned():
        yield


@pytest.mark.parametrize("size", EAGER_SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_an_eager_call_trains(name: str, size: str) -> None:
    program, sizes = PROGRAMS[name], SIZES[size]
    given = inputs(program, sizes)
    out = attend(program, sizes, given)
    wanted, grads = expected(program, sizes, given)
    agree([out, *gradients([out], given)], [*wanted, *grads])


@functools.cache
def compiled_results(backend: str, size: str) -> dict[str, tuple[Inputs, Tensor, list[Tensor]]]:
    """The programs in one compiled graph: a graph each would take minutes. The masks are torch's
    own."""
    sizes = SIZES[size]
    given = {
        name: inputs(PROGRAMS[name], sizes, make_mask=originals.create_block_mask)
        for name in COMPILED_NAMES
    }

    def attend_all(given: dict[str, Inputs]) -> dict[str, Tensor]:
        return {name: attend(PROGRAMS[name], sizes, each) for name, each in given.items()}

    torch._dynamo.reset()
    outputs = torch.compile(attend_all, backend=backend, fullgraph=True)(given)
    # Backward is one graph as well: gradients of all programs at once.
    leaves = [leaf for each in given.values() for leaf in each.leaves()]
    loss = sum(weighted(out) for out in outputs.values())
    found = iter(torch.autograd.grad(loss, leaves, allow_unused=True))
    results = {}
    for name, each in given.items():
        grads = [next(found) for _ in each.leaves()]
        filled = [
            torch.zeros_like(leaf) if grad is None else grad
            for grad, leaf in zip(grads, each.leaves(), strict=True)
        ]
        results[name] = each, outputs[name], filled
    return results


@pytest.mark.parametrize(("backend", "size"), COMPILED)
@pytest.mark.parametrize("name", COMPILED_NAMES)
def test_a_compiled_call_trains(name: str, backend: str, size: str) -> None:
    given, out, grads = compiled_results(backend, size)[name]
    wanted, wanted_grads = expected(PROGRAMS[name], SIZES[size], given)
    agree([out, *grads], [*wanted, *wanted_grads])


@pytest.mark.parametrize(
    ("name", "way"), ways(["alibi_causal", "plain", "lengths", "causal_score"])
)
def test_lse_and_max_scores_are_given_and_lse_has_a_gradient(name: str, way: str) -> None:
    program, sizes = PROGRAMS[name], SIZES["ragged"]
    given = inputs(program, sizes)

    def call(given: Inputs) -> Any:
        return attend(program, sizes, given, return_aux=ALL_AUX)

    if way != "eager":
        call = torch.compile(call, backend=way, fullgraph=True)
    out, aux = call(given)
    assert type(aux) is AuxOutput
    assert not aux.max_scores.requires_grad
    wanted, grads = expected(program, sizes, given, aux=True)
    found = [out, aux.lse, aux.max_scores]
    agree([*found, *gradients([out, aux.lse], given)], [*wanted, *grads])


def test_one_auxiliary_output_leaves_the_other_none() -> None:
    program, sizes = PROGRAMS["plain"], SIZES["square"]
    given = inputs(program, sizes)
    _, aux = attend(program, sizes, given, return_aux=AuxRequest(max_scores=True))
    assert aux.lse is None
    out, lse = attend(program, sizes, given, return_lse=True)
    wanted, _ = expected(program, sizes, given, aux=True)
    agree([out, lse, aux.max_scores], wanted)


@pytest.mark.parametrize(("scale", "way"), ways([0.3, 0.0, -1.25]))
def test_the_scale_is_used(scale: float, way: str) -> None:
    program, sizes = PROGRAMS["alibi_causal"], SIZES["square"]
    given = inputs(program, sizes)

    def call(given: Inputs) -> Tensor:
        return attend(program, sizes, given, scale=scale)

    out = (call if way == "eager" else torch.compile(call, backend=way, fullgraph=True))(given)
    wanted, grads = expected(program, sizes, given, scale=scale)
    agree([out, *gradients([out], given)], [*wanted, *grads])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "alibi_causal", "soft_cap_window", "documents"])
def test_other_dtypes_train(name: str, dtype: torch.dtype) -> None:
    program, sizes = PROGRAMS[name], SIZES["ragged"]
    given = inputs(program, sizes, dtype)
    # The registry would warn: none of the CPU's backends takes float64.
    forced = ("reference",) if dtype is torch.float64 else ()
    with anyflex.use_backend(*forced):
        out = attend(program, sizes, given)
        grads = gradients([out], given)
    assert out.dtype is dtype
    wanted, wanted_grads = expected(program, sizes, given)
    agree([out, *grads], [*wanted, *wanted_grads], dtype)


def test_autocast_casts_as_torch_does() -> None:
    program, sizes = PROGRAMS["causal"], SIZES["square"]
    given = inputs(program, sizes)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(program, sizes, given)
    assert out.dtype is torch.bfloat16
    wanted, grads = expected(program, sizes, given)
    agree([out, *gradients([out], given)], [*wanted, *grads], torch.bfloat16)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _by_columns(tensor: Tensor) -> Tensor:
    return tensor.transpose(2, 3).contiguous().transpose(2, 3)


def _with_gaps(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, torch.full_like(tensor, torch.nan)], -1)[..., 0]


@pytest.mark.parametrize(("layout", "way"), ways([_with_gaps, _transposed, _by_columns]))
def test_any_strides_train(layout: Any, way: str) -> None:
    program, sizes = PROGRAMS["alibi_causal"], SIZES["ragged"]
    given = inputs(program, sizes)

    def call(given: Inputs) -> Tensor:
        laid = [layout(tensor) for tensor in (given.query, given.key, given.value)]
        return attend(program, sizes, Inputs(*laid, given.captured, given.mask))

    out = (call if way == "eager" else torch.compile(call, backend=way, fullgraph=True))(given)
    wanted, grads = expected(program, sizes, given)
    agree([out, *gradients([out], given)], [*wanted, *grads])


@pytest.mark.parametrize("block_size", [8, 128, (16, 32), (1, 16), 100], ids=str)
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_any_block_size_trains(name: str, block_size: Any) -> None:
    program, sizes = PROGRAMS[name], SIZES["ragged"]
    given = inputs(program, sizes, block_size=block_size)
    assert (
        block_size if isinstance(block_size, tuple) else (block_size, block_size)
    ) == given.mask.BLOCK_SIZE
    out = attend(program, sizes, given)
    wanted, grads = expected(program, sizes, given)
    agree([out, *gradients([out], given)], [*wanted, *grads])


@pytest.mark.parametrize("name", ["documents", "several_or_masks"])
def test_keys_of_batch_one_serve_all_batches(name: str) -> None:
    program, sizes = PROGRAMS[name], SIZES["ragged"]
    given = inputs(program, sizes, key_batch=1)
    out = attend(program, sizes, given)
    wanted, grads = expected(program, sizes, given)
    agree([out, *gradients([out], given)], [*wanted, *grads])


def test_lengths_become_dynamic() -> None:
    frames = []

    def counting(graph: torch.fx.GraphModule, examples: Any) -> Any:
        frames.append(graph)
        return graph

    program = PROGRAMS["relative"]
    compiled = torch.compile(flex_attention, backend=counting, fullgraph=True)
    for length in (40, 64, 96, 120):
        sizes = Sizes(1, 2, 2, length, length, 16, 16)
        given = inputs(program, sizes)
        out = compiled(
            given.query, given.key, given.value, lambda s, b, h, q, k: s + 0.1 * (q - k)
        )
        wanted, grads = expected(program, sizes, given)
        agree([out, *gradients([out], given)], [*wanted, *grads])
    assert len(frames) == 2


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_other_operations_are_compiled_around_the_call(backend: str) -> None:
    program, sizes = PROGRAMS["alibi_causal"], SIZES["square"]
    given = inputs(program, sizes)

    def step(given: Inputs) -> Tensor:
        return attend(program, sizes, given) * 2.0

    out = torch.compile(step, backend=backend, fullgraph=True)(given)
    (wanted,), grads = expected(program, sizes, given)
    agree([out, *gradients([out], given)], [2.0 * wanted, *(2.0 * grad for grad in grads)])


def test_torch_s_tuning_keys_are_taken_and_unknown_ones_refused() -> None:
    program, sizes = PROGRAMS["causal"], SIZES["square"]
    given = inputs(program, sizes)
    with pytest.warns(anyflex.PerformanceWarning, match="BLOCK_M.* has no meaning"):
        out = attend(program, sizes, given, kernel_options={"BLOCK_M": 32})
    agree([out], expected(program, sizes, given)[0])
    with pytest.raises(anyflex.ArgumentError, match="BLOCK_MM"):
        attend(program, sizes, given, kernel_options={"BLOCK_MM": 32})


def test_an_untraceable_score_mod_runs_with_a_warning() -> None:
    sizes = SIZES["square"]
    given = inputs(PROGRAMS["plain"], sizes)
    with pytest.warns(anyflex.PerformanceWarning, match="runs on the reference"):
        flex_attention(
            given.query, given.key, given.value, lambda s, b, h, q, k: torch.special.i0(s)
        )
