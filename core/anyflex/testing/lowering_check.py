"""Check of a backend's table of operations against torch, without any kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from anyflex.plugin import DTYPES, OPERATIONS, Node, evaluate, operand_classes, type_class
from anyflex.testing.session import ConformanceFailure

__all__ = ["check_lowering", "defined_results"]

_FLOATS = (
    0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -1.5, 2.5, -2.5, 3.0, -7.25, 0.3, -0.04, 1e-4, 20.25,
    -30.5, 88.0, 1000.0, math.inf, -math.inf, math.nan,
)  # fmt: skip
_INTEGERS = (0, 1, -1, 2, -2, 3, -3, 5, 7, 8, -9, 31, 32, -32, 63, 64, -65, 100, 127, -128)
_CONSTANTS = {
    "bool": (True, False),
    "int": (0, 1, -1, 127, 300, 1 << 31, 1 << 40, -(1 << 63)),
    "float": (0.0, -0.0, 0.1, 1e5, -1e39, 1e300, 1.2345678901234567, math.inf, math.nan),
}
_STEPS = 8
"""Steps of its type by which a float may be off: functions of two right libraries differ."""

Evaluate = Callable[..., Sequence[Tensor]]


def check_lowering(
    evaluate: Evaluate,
    *,
    operations: Collection[str] = tuple(OPERATIONS),
    dtypes: Collection[torch.dtype] = tuple(DTYPES.values()),
) -> None:
    """Compare every operation of every type, at edge values, with what torch computes.

    Takes seconds where the conformance kit takes minutes, and names the operation.

    Args:
        evaluate: runs the target's code; called as `anyflex.plugin.evaluate` is, with the nodes,
            the positions of the wanted ones, and by name ``inputs`` (``kv_idx``, int64 [n]),
            ``captured``, ``ints`` and ``floats``. Returns tensors that broadcast to [n].
        operations: those that the backend declares.
        dtypes: of operands and results.

    Raises:
        ConformanceFailure: lists an example for each operation and type that is wrong.
    """
    names = [name for name, dtype in DTYPES.items() if dtype in dtypes]
    wrong = [
        f"{what}: {problem}"
        for operation in operations
        for what, nodes, captured, defined in _cases(operation, names)
        if (problem := _problem(evaluate, nodes, captured, defined))
    ]
    if wrong:
        raise ConformanceFailure("\n".join([f"{len(wrong)} are wrong:", *wrong]))


_Case = tuple[str, list[Node], list[Tensor], Tensor | None]
"""A case: what it tries, its nodes, of which the last is wanted, the captured tensors, and where
the result is defined; None for everywhere."""


def _cases(operation: str, names: Sequence[str]) -> Iterator[_Case]:
    """Operands are loads at kv_idx, so that no type is converted on the way."""
    index = [Node("input", torch.int64, (), "kv_idx")]
    if operation == "load":
        table = torch.arange(7, dtype=torch.float32)
        places = torch.tensor([*range(-10, 10), 2**40, -(2**40)])
        nodes = [*index, Node("load", torch.int64, (0,), 1), Node("load", table.dtype, (1,), 0)]
        yield "load", nodes, [table, places], None
        return
    for name in names:
        dtype = DTYPES[name]
        if operation == "const":
            for number in _CONSTANTS[type_class(dtype)]:
                if type_class(dtype) != "int" or _fits(number, dtype):
                    yield f"const {number} {name}", [Node("const", dtype, (), number)], [], None
        elif operation == "cast":
            for other in names:
                values, defined = _castable(_values(dtype), DTYPES[other])
                nodes = [*index, Node("load", dtype, (0,), 0), Node("cast", DTYPES[other], (1,))]
                yield f"cast {name} to {other}", nodes, [values], defined
        elif type_class(dtype) in operand_classes(operation) and OPERATIONS[operation]:
            yield _applied(operation, name)


def _fits(number: float, dtype: torch.dtype) -> bool:
    limits = torch.iinfo(dtype)
    return limits.min <= number <= limits.max


def _values(dtype: torch.dtype) -> Tensor:
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        return torch.tensor(_FLOATS, dtype=torch.float64).to(dtype)
    limits = torch.iinfo(dtype)
    kept = [value for value in _INTEGERS if _fits(value, dtype)]
    return torch.tensor([*kept, limits.min, limits.max, limits.max - 1], dtype=dtype)


def _castable(values: Tensor, target: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A number that doesn't fit an integer type becomes any number."""
    if not values.is_floating_point() or target.is_floating_point or target is torch.bool:
        return values, None
    limits = torch.iinfo(target)
    wide = values.double().trunc()
    return values, (wide >= limits.min) & (wide < limits.max) & values.isfinite()


def _applied(operation: str, name: str) -> _Case:
    """An operation on all pairs of values, or of three operands on them and a bool."""
    dtype, count = DTYPES[name], OPERATIONS[operation]
    values = _values(dtype)
    first, second = (side.flatten() for side in torch.meshgrid(values, values, indexing="ij"))
    captured = [first, second][:count]
    kinds = [dtype, dtype][:count]
    if count == 3:
        captured = [torch.arange(len(first)) % 3 > 0, first, second]
        kinds = [torch.bool, dtype, dtype]
    nodes = [Node("input", torch.int64, (), "kv_idx")]
    nodes += [Node("load", kind, (0,), place) for place, kind in enumerate(kinds)]
    compares = operation in ("eq", "ne", "lt", "le", "gt", "ge")
    arguments = tuple(range(1, len(nodes)))
    nodes.append(Node(operation, torch.bool if compares else dtype, arguments))
    return f"{operation} {name}", nodes, captured, defined_results(operation, first, second)


def defined_results(operation: str, first: Tensor, second: Tensor) -> Tensor | None:
    """Where integers have a result: elsewhere a target may give any, and must not trap."""
    if first.is_floating_point() or first.dtype is torch.bool:
        return None
    if operation == "pow":
        return (first != 0) | (second >= 0)
    if operation in ("floordiv", "mod", "fmod"):
        overflows = (first == torch.iinfo(first.dtype).min) & (second == -1)
        return (second != 0) & ~overflows
    return None


def _problem(
    run: Evaluate, nodes: list[Node], captured: list[Tensor], defined: Tensor | None
) -> str:
    """Return an example of a wrong value, or ""."""
    # A load's index is the last captured tensor where there are several of unlike lengths.
    size = len(captured[-1]) if captured else 1
    inputs = {"kv_idx": torch.arange(size)}
    last = len(nodes) - 1

    def result(evaluator: Evaluate) -> Tensor:
        (value,) = evaluator(nodes, [last], inputs=inputs, captured=captured, ints=(), floats=())
        return value

    wanted = result(evaluate)
    try:
        found = result(run)
    except Exception as error:  # noqa: BLE001  whatever a target raises is its outcome
        return f"raised {type(error).__name__}: {error}"
    if found.dtype is not wanted.dtype:
        return f"has type {found.dtype}, wanted {wanted.dtype}"
    wanted, found = (value.cpu().broadcast_to(size) for value in (wanted, found))
    bad = ~_equal(found, wanted) if defined is None else defined & ~_equal(found, wanted)
    if not bad.any():
        return ""
    at = int(bad.nonzero()[0])
    operands = [table[at].item() for table in captured if len(table) == size]
    return f"of {operands} is {found[at].item()}, wanted {wanted[at].item()}"


def _equal(found: Tensor, wanted: Tensor) -> Tensor:
    if not wanted.is_floating_point():
        return found == wanted
    limits = torch.finfo(wanted.dtype)
    near = (found.double() - wanted.double()).abs() <= (
        _STEPS * limits.eps * wanted.double().abs() + limits.tiny
    )
    zero = (wanted != 0) | (found.signbit() == wanted.signbit())
    near &= wanted.isfinite() & (wanted != 0)
    return ((found == wanted) & zero) | near | (found.isnan() & wanted.isnan())
