"""Numbers of sizes and of `.item()` where no Dynamo traces: torch.export as it is, and make_fx."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

import anyflex
from anyflex.errors import AnyflexError, ArgumentError, ModTraceError
from anyflex.tracing.trace_cache import traced
from tests.soak import SOAK

__all__: list[str] = []

TRACED, LATER = 40, (9, 41, 77)
Mod = Callable[..., Any]
Attend = Callable[[Tensor], Tensor]


def query(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn((1, 2, length, 8), generator=generator)


def dense(tensor: Tensor, mod: Mod | None = None, scale: float = 8**-0.5) -> Tensor:
    """Attention of a tensor with itself, in float64; `mod` is called on whole matrices."""
    rows = tensor.double()
    scores = rows @ rows.mT * scale
    if mod is not None:
        place = torch.arange(tensor.shape[2])
        head = torch.arange(tensor.shape[1])[:, None, None]
        scores = torch.as_tensor(mod(scores, 0, head, place[:, None], place[None, :]))
        scores = scores.double().expand(1, 2, len(place), len(place))
    return scores.softmax(-1) @ rows


class Module(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, query: Tensor) -> Any:
        return self.function(query)


def exported(attend: Attend) -> Any:
    length = torch.export.Dim("length", min=8, max=400)
    program = torch.export.export(
        Module(attend), (query(TRACED),), dynamic_shapes={"query": {2: length}}
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


def by_make_fx(attend: Attend) -> Any:
    return make_fx(attend, tracing_mode="symbolic")(query(TRACED))


WAYS = pytest.mark.parametrize("program_of", [exported, by_make_fx])

OF_A_LENGTH: dict[str, Callable[[Any], Any]] = {
    "n": lambda n: n,
    "-n": lambda n: -n,
    "n - 5": lambda n: n - 5,
    "n // 4": lambda n: n // 4,
    "n % 3": lambda n: n % 3,
    "n / 4": lambda n: n / 4,
    "1 / n": lambda n: 1 / n,
    "n ** 0.5": lambda n: n**0.5,
    "sym_min(n, 20)": lambda n: torch.sym_min(n, 20),
    "n > 30": lambda n: n > 30,
}


@WAYS
@pytest.mark.parametrize("expression", list(OF_A_LENGTH)[:: 1 if SOAK else 5])
def test_a_number_of_a_size_follows_the_size(
    expression: str, program_of: Callable[[Attend], Any]
) -> None:
    number = OF_A_LENGTH[expression]

    def mod(n: Any) -> Mod:
        return lambda s, b, h, q, k: s + torch.where(q <= k + n, 0.0, k * 0.1) + k * 0.01 * n

    def attend(query: Tensor) -> Any:
        n = number(query.shape[2])
        return anyflex.flex_attention(query, query, query, mod(n))

    program = program_of(attend)
    for length in LATER:
        given = query(length)
        wanted = dense(given, mod(number(length)))
        torch.testing.assert_close(program(given).double(), wanted, rtol=1e-5, atol=1e-5)


table = torch.linspace(-1, 1, 512)

IN_MODS: dict[str, Callable[[Any], Mod]] = {
    "a read at it": lambda n: lambda s, b, h, q, k: s + table[k + 0 * n] * table[k * 0 + n],
    "an index by itself": lambda n: lambda s, b, h, q, k: s + table[k] * matrix[n, k],
    "a tensor of it": lambda n: lambda s, b, h, q, k: s + torch.tensor(n) * 0.01 * k,
    "filled with a float as int": lambda n: (
        lambda s, b, h, q, k: s + torch.full_like(k, n / 3) * k * 0.01
    ),
    "filled as bool": lambda n: (
        lambda s, b, h, q, k: torch.where(
            torch.full_like(k, n % 2, dtype=torch.bool), s, s + k * 0.1
        )
    ),
    "new_full": lambda n: lambda s, b, h, q, k: s + k.new_full((), n) * 0.01 * q * k,
    "clamp": lambda n: lambda s, b, h, q, k: s + k.clamp(max=n // 2) * 0.1,
    "masked_fill": lambda n: lambda s, b, h, q, k: s.masked_fill(q > k, -n),
    "where of two": lambda n: lambda s, b, h, q, k: torch.where(q > k, n // 8, n // 7),
    "divisor": lambda n: lambda s, b, h, q, k: s + k % (n // 4),
    "alpha": lambda n: lambda s, b, h, q, k: torch.add(s, k, alpha=n / 400),
    "elu's alpha": lambda n: lambda s, b, h, q, k: nn.functional.elu(s, alpha=n / 4),
    "the mod's whole result": lambda n: lambda s, b, h, q, k: n,
}
matrix = torch.linspace(-3, 3, 512 * 100).reshape(512, 100)


@pytest.mark.parametrize("name", list(IN_MODS)[:: 1 if SOAK else 3])
def test_a_number_of_a_size_wherever_a_mod_takes_numbers(name: str) -> None:
    mod = IN_MODS[name]
    program = exported(
        lambda query: anyflex.flex_attention(query, query, query, mod(query.shape[2]))
    )
    for length in LATER:
        given = query(length)
        wanted = dense(given, mod(length))
        torch.testing.assert_close(program(given).double(), wanted, rtol=1e-5, atol=1e-5)


@WAYS
def test_ready_made_mods_take_a_symbolic_offset(program_of: Callable[[Attend], Any]) -> None:
    slopes = [0.25, 0.5]

    def attend(query: Tensor) -> Any:
        mod = anyflex.mods.alibi(torch.tensor(slopes), symmetric=True, offset=query.shape[2] // 2)
        return anyflex.flex_attention(query, query, query, mod)

    def formula(n: int) -> Mod:
        steep = torch.tensor(slopes)[:, None, None]
        return lambda s, b, h, q, k: s - steep * (k - q - n).abs()

    if program_of is by_make_fx:  # a tensor that is made inside is recorded
        program = program_of(attend)
    else:
        program = exported(attend)
    for length in LATER:
        wanted = dense(query(length), formula(length // 2))
        torch.testing.assert_close(program(query(length)).double(), wanted, rtol=1e-5, atol=1e-5)


@WAYS
@pytest.mark.parametrize("of", ["1 / n", "n ** 0.5", "n"])
def test_scale_may_be_a_number_of_a_size(of: str, program_of: Callable[[Attend], Any]) -> None:
    scale = OF_A_LENGTH.get(of, lambda n: n)
    program = program_of(
        lambda query: anyflex.flex_attention(query, query, query, scale=scale(query.shape[2]))
    )
    for length in LATER:
        wanted = dense(query(length), scale=scale(length))
        torch.testing.assert_close(program(query(length)).double(), wanted, rtol=1e-4, atol=1e-4)


def test_strict_export_sets_no_bounds_for_a_scale_of_a_size() -> None:
    length = torch.export.Dim("length", min=2, max=400)
    program = torch.export.export(
        Module(
            lambda query: anyflex.flex_attention(query, query, query, scale=query.shape[2] ** -0.5)
        ),
        (query(TRACED),),
        dynamic_shapes={"query": {2: length}},
        strict=True,
    ).module()
    wanted = dense(query(77), scale=77**-0.5)
    torch.testing.assert_close(program(query(77)).double(), wanted, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_program_that_make_fx_recorded() -> None:
    def mod(n: int) -> Mod:
        return lambda s, b, h, q, k: s * (n / 40) + (k - q + n // 3) * 0.01 * s

    def gradient(query: Tensor) -> Tensor:
        query = query.detach().requires_grad_()
        out = anyflex.flex_attention(query, query, query, mod(query.shape[2]))
        return torch.autograd.grad(out.square().sum(), query)[0]

    program = make_fx(gradient, tracing_mode="symbolic")(query(TRACED))
    given = query(77).requires_grad_()
    wanted = torch.autograd.grad(dense(given, mod(77)).square().sum(), given)[0]
    torch.testing.assert_close(program(query(77)), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("values", [(3, 5, -7), (3.5, 0.25, -1.0)])
def test_export_keeps_the_item_of_a_tensor_a_number(values: tuple[float, ...]) -> None:
    class Attention(nn.Module):
        def forward(self, query: Tensor, number: Tensor) -> Any:
            return anyflex.flex_attention(query, query, query, mod(number.item()))

    def mod(n: Any) -> Mod:
        return lambda s, b, h, q, k: torch.where(q < k + n, s, k * 0.1) + torch.where(q < k, n, k)

    program = torch.export.export(Attention(), (query(12), torch.tensor(values[0]))).module()
    for value in values:
        found = program(query(12), torch.tensor(value))
        wanted = dense(query(12), mod(value))
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


class Scaled(nn.Module):
    def forward(self, query: Tensor, scale: Tensor) -> Any:
        return anyflex.flex_attention(query, query, query, scale=scale.item())


@pytest.mark.parametrize("strict", [False, True])
def test_a_scale_without_a_value_is_checked_when_it_has_one(strict: bool) -> None:
    program = torch.export.export(Scaled(), (query(12), torch.tensor(0.5)), strict=strict)
    found = program.module()(query(12), torch.tensor(2.0))
    wanted = dense(query(12), scale=2.0)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ArgumentError, match="scale must be finite, got inf"):
        program.module()(query(12), torch.tensor(torch.inf))


def test_what_a_mod_needs_as_a_constant_is_refused_instead_of_frozen() -> None:
    def attend(query: Tensor) -> Any:
        places = query.shape[2] // 20
        return anyflex.flex_attention(
            query, query, query, lambda s, b, h, q, k: torch.round(s, decimals=places)
        )

    with pytest.raises(ModTraceError, match="symbolic number .* where a mod needs a constant"):
        by_make_fx(attend)


def test_torchs_word_on_a_number_without_a_value_is_left_as_it_is() -> None:
    class Attention(nn.Module):
        def forward(self, query: Tensor, number: Tensor) -> Any:
            n = number.item()
            return anyflex.flex_attention(
                query,
                query,
                query,
                lambda s, b, h, q, k: s + torch.where(q < k, n, k.to(torch.int8)),
            )

    with pytest.raises(GuardOnDataDependentSymNode, match="data-dependent expression") as caught:
        torch.export.export(Attention(), (query(12), torch.tensor(3)))
    assert not isinstance(caught.value, AnyflexError)


def test_a_symbolic_number_that_meets_a_call_on_values_is_its_value() -> None:
    numbers = []
    make_fx(lambda tensor: numbers.append(tensor.shape[2]) or tensor, tracing_mode="symbolic")(
        query(TRACED)
    )
    number = numbers[0]
    assert isinstance(number, torch.SymInt)
    mod = traced(lambda s, b, h, q, k: s + number * k, "score", torch.float32, torch.device("cpu"))
    assert [type(value) for value in mod.ints] == [int]
    found = anyflex.flex_attention(
        query(12), query(12), query(12), lambda s, b, h, q, k: s + 0.01 * number * k
    )
    wanted = dense(query(12), lambda s, b, h, q, k: s + 0.01 * TRACED * k)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
