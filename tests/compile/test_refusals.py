"""What a mod may not do is refused compiled as in an eager call, also where Dynamo comes first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import anyflex
from anyflex.errors import ModTraceError
from anyflex.mod_graph.dynamo_refusals import wrap

__all__: list[str] = []

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="Dynamo before 2.13 refuses some of these in its own words",
)
QUERY = torch.linspace(-1.0, 1.0, 128).view(1, 1, 16, 8)
NUMBER = torch.tensor(2.0)
TABLE = torch.linspace(0.1, 0.9, 16)

Mod = Callable[..., Any]

REFUSED: dict[str, Mod] = {
    "range of two": lambda s, b, h, q, k: s + len(range(2, q)),
    "range with a step": lambda s, b, h, q, k: s + len(range(0, 9, q)),
    "range of a read": lambda s, b, h, q, k: s + len(range(TABLE[k])),
    "range of a row": lambda s, b, h, q, k: s + len(range(TABLE.view(4, 4)[k])),
    "repeat": lambda s, b, h, q, k: s + len(list(itertools.repeat(1, q))),
    "bin": lambda s, b, h, q, k: s + len(bin(q)),
    "hex": lambda s, b, h, q, k: s + len(hex(q)),
    "chr": lambda s, b, h, q, k: s + ord(chr(q)),
    "min from the right": lambda s, b, h, q, k: min(1.0, s),
    "min of three": lambda s, b, h, q, k: min(s, 1.0, 2.0),
    "min of a list": lambda s, b, h, q, k: min([s, 1.0]),
    "min of two symbols": lambda s, b, h, q, k: s + min(q, k),
    "min with a captured number": lambda s, b, h, q, k: min(s, NUMBER),
    "max of a captured number": lambda s, b, h, q, k: max(NUMBER, s),
    "max with a read": lambda s, b, h, q, k: max(s, TABLE[k]),
    "in a list": lambda s, b, h, q, k: torch.where(q in [1, 2], s, 0.0),
    "in a list of symbols": lambda s, b, h, q, k: s + float(1 in [q, k]),
    "not in a tuple": lambda s, b, h, q, k: s + float(1 not in (q, k)),
    "sqrt": lambda s, b, h, q, k: math.sqrt(s),
    "exp of an index": lambda s, b, h, q, k: s + math.exp(-k),
    "pow": lambda s, b, h, q, k: math.pow(2.0, s),
    "radians": lambda s, b, h, q, k: math.radians(s),
    "floor": lambda s, b, h, q, k: math.floor(s),
    "ceil": lambda s, b, h, q, k: math.ceil(s),
    "trunc": lambda s, b, h, q, k: math.trunc(s),
    "randn_like": lambda s, b, h, q, k: s + torch.randn_like(s),
    "randint_like": lambda s, b, h, q, k: s + torch.randint_like(s, 4),
    "random table": lambda s, b, h, q, k: s + torch.rand_like(TABLE)[k],
    "normal table": lambda s, b, h, q, k: s + torch.normal(TABLE, 1.0)[k],
    "normal": lambda s, b, h, q, k: s + torch.normal(s, 1.0),
}


def attend(mod: Mod) -> torch.Tensor:
    return anyflex.flex_attention(QUERY, QUERY, QUERY, mod)


def problem(error: BaseException) -> str:
    """The message without what follows from where it was raised."""
    return str(error).split("\n")[0].split(" (")[0].split(", on captured")[0]


@pytest.mark.parametrize("name", REFUSED)
def test_a_compiled_mod_is_refused_as_an_eager_one(name: str) -> None:
    mod = REFUSED[name]
    with pytest.raises(ModTraceError) as eager:
        attend(mod)
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    with pytest.raises(ModTraceError) as caught:
        compiled(mod)
    assert type(caught.value).__name__ == type(eager.value).__name__
    assert caught.value.operation == eager.value.operation
    assert problem(caught.value).startswith(problem(eager.value))


@pytest.mark.parametrize("name", ["min of a list", "in a list of symbols", "sqrt", "random table"])
def test_a_broken_graph_refuses_too(name: str) -> None:
    with pytest.raises(ModTraceError):
        torch.compile(attend, backend="eager")(REFUSED[name])


def test_python_numbers_in_a_compiled_mod_stay_python_numbers() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for i in range(min(2, 3)):
            s = s * math.cos(math.radians(max([i, 30]))) + math.floor(1.5)
        return s * len(bin(2)) if 1 in [1, 2] else -s

    found = torch.compile(attend, backend="eager", fullgraph=True)(mod)
    torch.testing.assert_close(found, attend(mod))


class Doubling(TorchFunctionMode):
    """Answers two random functions, if it is asked."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.rand_like, torch.fill_):
            return args[0] * 2
        return func(*args, **(kwargs or {}))


class Ordered:
    """An object with its own order, which Dynamo inlines."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ordered) and self.value == other.value

    def __hash__(self) -> int:
        return self.value


def others(x: torch.Tensor, n: int) -> tuple[Any, ...]:
    """Each thing that a mod may not do, by a program without mods."""
    y = torch.zeros(3)
    y.data = x
    y.grad = x + 1
    torch.relu_(x)
    return (
        sum(i for i in range(n)),
        min(x.sum(), y.sum()),
        max(x.sum(), 2.0),
        max(n, 2),
        min([3, n]),
        math.sqrt(n) + math.floor(2.5) + math.radians(30.0),
        2 in [n, 2],
        Ordered(2) in [Ordered(1), Ordered(2)],
        len(bin(3)),
        ord(chr(70)),
        y.grad,
        x,
    )


def test_a_torch_without_such_methods_is_left_alone() -> None:
    def never(otherwise: Any) -> Any:
        raise AssertionError

    wrap("no_such_module", "BaseListVariable", "sq_contains", never)
    wrap("lists", "NoSuchVariable", "sq_contains", never)
    wrap("lists", "BaseListVariable", "no_such_method", never)


def test_other_programs_are_compiled_as_before() -> None:
    with pytest.raises(ModTraceError):  # the entries are there now
        torch.compile(attend, backend="eager", fullgraph=True)(REFUSED["sqrt"])
    torch._dynamo.reset()
    x = torch.tensor([-1.0, 2.0, 3.0])
    for n in (2, 5, 7):
        compiled = torch.compile(others, backend="eager")
        torch.testing.assert_close(compiled(x.clone(), n), others(x.clone(), n))

    def random() -> torch.Tensor:
        with Doubling():
            return torch.rand_like(torch.full((3,), 7.0))

    # A mode of somebody else's is not asked more than before, right as that would be.
    found = torch.compile(random, backend="eager", fullgraph=True)()
    assert (found < 1).all()
