"""Misuses in a compiled mod are refused too, by the symbol or in Dynamo's own words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import TorchDynamoException
from torch.overrides import TorchFunctionMode

import anyflex
from anyflex.errors import AnyflexError, ModTraceError
from anyflex.tracing.trace import trace_mod
from tests.soak import SOAK

__all__: list[str] = []

QUERY = torch.linspace(-1.0, 1.0, 128).view(1, 1, 16, 8)
NUMBER = torch.tensor(0.05)
OTHER = torch.tensor(-0.02)
TABLE = torch.linspace(0.1, 0.9, 16)
ARRAY = numpy.linspace(0.1, 0.9, 16)
SQUARE = torch.linspace(-1.0, 1.0, 256).view(16, 16)
MEAN = torch.ones(16)

Mod = Callable[..., Any]


@torch.library.custom_op("anyflex_tests::write", mutates_args=("written",))
def write(written: torch.Tensor) -> None:
    """Change a tensor, which only the operation's schema shows."""
    written.zero_()


REFUSED: dict[str, Mod] = {
    "range of two": lambda s, b, h, q, k: s + len(range(2, q)),
    "repeat": lambda s, b, h, q, k: s + len(list(itertools.repeat(1, q))),
    "bin": lambda s, b, h, q, k: s + len(bin(q)),
    "min": lambda s, b, h, q, k: min(1.0, s),
    "min of a list": lambda s, b, h, q, k: min([s, 1.0]),
    "max with a read": lambda s, b, h, q, k: max(s, TABLE[k]),
    "sqrt": lambda s, b, h, q, k: math.sqrt(s),
    "floor": lambda s, b, h, q, k: math.floor(s),
    "randn_like": lambda s, b, h, q, k: s + torch.randn_like(s),
    "normal": lambda s, b, h, q, k: s + torch.normal(s, 1.0),
    "sorted": lambda s, b, h, q, k: sorted([s, 1.0])[0],
    "numpy function": lambda s, b, h, q, k: numpy.tanh(s),
    "numpy table": lambda s, b, h, q, k: s + ARRAY[k],
    "complex": lambda s, b, h, q, k: complex(s),
    "reversed": lambda s, b, h, q, k: next(reversed(s)),
    "letter": lambda s, b, h, q, k: s if "ab"[q] == "a" else -s,
    "padding": lambda s, b, h, q, k: s + F.pad(TABLE, (q, 0))[0],
    "tensor": lambda s, b, h, q, k: torch.tensor(s),
    "zeros": lambda s, b, h, q, k: s + torch.zeros(q)[0],
    "arange": lambda s, b, h, q, k: s + torch.arange(0, q)[0],
    "empty_like": lambda s, b, h, q, k: s + torch.empty_like(s),
    "imag": lambda s, b, h, q, k: s.imag,
    "batch norm": lambda s, b, h, q, k: s * F.batch_norm(SQUARE, MEAN, MEAN, training=True)[q, k],
    "raw batch norm": lambda s, b, h, q, k: (
        s * torch.ops.aten.native_batch_norm(SQUARE, None, None, MEAN, MEAN, True, 0.1, 1e-5)[0][0]
    ),
    "raw sum": lambda s, b, h, q, k: s * torch.ops.aten.sum(TABLE),
    "raw change": lambda s, b, h, q, k: s * torch.ops.aten.add_(TABLE, 0)[k],
    "operator with out": lambda s, b, h, q, k: s * torch.ops.aten.add.out(MEAN, MEAN, out=MEAN)[k],
    "custom operator": lambda s, b, h, q, k: (write(MEAN), s)[1],
}


def attend(mod: Mod) -> torch.Tensor:
    out = anyflex.flex_attention(QUERY, QUERY, QUERY, mod)
    assert isinstance(out, torch.Tensor)
    return out


@pytest.mark.parametrize("name", list(REFUSED)[:: 1 if SOAK else 3])
def test_a_compiled_mod_that_an_eager_call_refuses_gives_no_numbers(name: str) -> None:
    with pytest.raises(ModTraceError):
        attend(REFUSED[name])
    with pytest.raises((AnyflexError, TorchDynamoException)):
        torch.compile(attend, backend="eager", fullgraph=True)(REFUSED[name])
    assert (MEAN == 1).all()


@pytest.mark.parametrize(
    "name", ["min of a list", "sqrt", "randn_like", "imag", "custom operator"][:: 1 if SOAK else 4]
)
def test_a_broken_graph_refuses_as_an_eager_call_does(name: str) -> None:
    with pytest.raises(ModTraceError):
        torch.compile(attend, backend="eager")(REFUSED[name])
    assert (MEAN == 1).all()


# Dynamo compiles what an eager call refuses: each beside the mod that it means.
COMPILED_ALONE: dict[str, tuple[Mod, Mod]] = {
    "min": (
        lambda s, b, h, q, k: min(s, NUMBER),
        lambda s, b, h, q, k: torch.minimum(s, NUMBER),
    ),
    "max of captured numbers": (
        lambda s, b, h, q, k: s * max(NUMBER, OTHER),
        lambda s, b, h, q, k: s * torch.maximum(NUMBER, OTHER),
    ),
    "in a list": (
        lambda s, b, h, q, k: torch.where(q in [1, 2], s, 0.0),
        lambda s, b, h, q, k: torch.where((q == 1) | (q == 2), s, 0.0),
    ),
    "radians": (
        lambda s, b, h, q, k: math.radians(s),
        lambda s, b, h, q, k: s * (math.pi / 180),
    ),
}


@pytest.mark.parametrize("name", COMPILED_ALONE)
def test_what_dynamo_compiles_all_the_same_is_what_python_means(name: str) -> None:
    mod, meant = COMPILED_ALONE[name]
    with pytest.raises(ModTraceError):
        attend(mod)
    try:
        found = torch.compile(attend, backend="eager", fullgraph=True)(mod)
    except TorchDynamoException:  # by another torch
        return
    torch.testing.assert_close(found, attend(meant))


def test_a_mod_that_prints_is_compiled_around(capsys: pytest.CaptureFixture[str]) -> None:
    found = torch.compile(attend, backend="eager")(lambda s, b, h, q, k: (print("score", s), s)[1])
    torch.testing.assert_close(found, attend(lambda s, b, h, q, k: s))
    assert "score <f32 symbol %4>" in capsys.readouterr().out


ANSWERED: dict[str, Mod] = {
    "facts": lambda s, b, h, q, k: s * (2 if s.device.type == "cpu" and s.ndim == 0 else 3),
    "raw": lambda s, b, h, q, k: torch.ops.aten.tanh(s) + torch.ops.aten.add.Tensor(s, TABLE[k]),
    "raw names": lambda s, b, h, q, k: torch.ops.aten.sub(s, TABLE[k], alpha=2),
}


@pytest.mark.parametrize("name", ANSWERED)
def test_what_a_symbol_answers_is_the_same_compiled(name: str) -> None:
    mod = ANSWERED[name]
    wanted = trace_mod(mod, "score")
    text, floats = torch.compile(
        lambda: (lambda traced: (traced.text, traced.floats))(trace_mod(mod, "score")),
        backend="eager",
        fullgraph=True,
    )()
    assert (text, floats) == (wanted.text, wanted.floats)


ATTRIBUTES: dict[str, tuple[Mod, Mod]] = {
    "transposed": (lambda s, b, h, q, k: s.mT + s.real, lambda s, b, h, q, k: s + s),
    "device": (lambda s, b, h, q, k: s if s.is_cpu else -s, lambda s, b, h, q, k: s),
    "leaf": (
        lambda s, b, h, q, k: s * 2 if s.grad_fn is None else -s,
        lambda s, b, h, q, k: s * 2,
    ),
}


@pytest.mark.filterwarnings("ignore::anyflex.PerformanceWarning")
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_of_a_tensor_is_answered_by_the_reference_and_refused_compiled(
    name: str,
) -> None:
    mod, meant = ATTRIBUTES[name]
    torch.testing.assert_close(attend(mod), attend(meant))
    with pytest.raises(ModTraceError, match=r"attribute under torch\.compile: Tensor\."):
        torch.compile(attend, backend="eager", fullgraph=True)(mod)


def test_python_numbers_in_a_compiled_mod_stay_python_numbers() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for i in range(min(2, 3)):
            s = s * math.cos(math.radians(max([i, 30]))) + math.floor(1.5)
        return s * len(str(2)) if 1 in [1, 2] else -s

    found = torch.compile(attend, backend="eager", fullgraph=True)(mod)
    torch.testing.assert_close(found, attend(mod))


class Doubling(TorchFunctionMode):
    """Answers a random function, if it is asked."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0] * 2 if func is torch.rand_like else func(*args, **(kwargs or {}))


class Ordered:
    """An object with its own order and inverse, which Dynamo inlines."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ordered) and self.value == other.value

    def __hash__(self) -> int:
        return self.value


class Squared(torch.autograd.Function):
    """x * x, with a derivative of its own that tells that it was used."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.saved_tensors[0] * 20


def others(x: torch.Tensor, n: int) -> tuple[Any, ...]:
    """Use what the entries are for, in a program without mods."""
    return (
        F.sigmoid(x) + F.tanh(x) + F.hardswish(x) + F.hardsigmoid(x),
        ~(x > n),
        ~n,
        n < 3,
        n >= 3,
        n == 2,
        Ordered(2) in [Ordered(1), Ordered(2)],
        isinstance(x, torch.Tensor) and not isinstance(n, torch.Tensor),
        isinstance(Ordered(1), (int, Ordered)),
        torch.is_tensor(x) and not torch.is_tensor(Ordered(1)),
        torch.autograd.grad(Squared.apply(x).sum(), x)[0],
    )


def test_other_programs_are_compiled_as_before() -> None:
    with pytest.raises((AnyflexError, TorchDynamoException)):  # the entries are there now
        torch.compile(attend, backend="eager", fullgraph=True)(REFUSED["sqrt"])
    torch._dynamo.reset()
    x = torch.tensor([-1.0, 2.0, 3.0]).requires_grad_()
    for n in (2, 5, 7):
        compiled = torch.compile(others, backend="eager")
        torch.testing.assert_close(compiled(x, n), others(x, n))

    def random() -> torch.Tensor:
        with Doubling():
            return torch.rand_like(torch.full((3,), 7.0))

    # A user's own mode isn't asked more than before, although that would be right.
    found = torch.compile(random, backend="eager", fullgraph=True)()
    assert (found < 1).all()
