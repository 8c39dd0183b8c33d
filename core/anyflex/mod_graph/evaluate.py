"""Evaluation of a mod graph on torch tensors: the table for torch, and its evaluator."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anyflex.mod_graph.graph import wrapped
from anyflex.mod_graph.lowering import Lowering, Rule
from anyflex.mod_graph.mkl_warmup import make_first_calls
from anyflex.mod_graph.node import Node, reached
from anyflex.mod_graph.operations import RECORDS

__all__ = ["TORCH", "Evaluator", "bounded_index", "evaluate"]


Read = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""Reads a captured tensor at one index a dimension."""


@dataclass(slots=True)
class _Context:
    """Values that the rules read beside their operands."""

    nodes: Sequence[Node]
    inputs: Mapping[str, Tensor]
    captured: Sequence[Tensor]
    ints: Sequence[int]
    floats: Sequence[float]
    device: torch.device
    out_of_range: list[tuple[int, Tensor]] | None
    read: Read | None = None

    def number(self, node: Node) -> int | float | None:
        """Return the Python value of a const or number node, None for any other."""
        if node.operation == "const":
            assert isinstance(node.attribute, (bool, int, float))
            return node.attribute
        if node.operation == "number":
            slot = str(node.attribute)
            return self.ints[int(slot[1:])] if slot[0] == "i" else self.floats[int(slot[1:])]
        return None


_Rule = Callable[[_Context, Node, Sequence[Tensor]], Tensor]


def _input(context: _Context, node: Node, operands: Sequence[Tensor]) -> Tensor:
    # `to` returns the same tensor where the type fits: a score in fp32, indices in int64.
    return context.inputs[str(node.attribute)].to(node.dtype)


def _held(value: int | float, dtype: torch.dtype) -> int | float:
    """Return a number as a type represents it."""
    if dtype.is_floating_point:
        return math.copysign(math.inf, value) if abs(value) > torch.finfo(dtype).max else value
    if dtype is torch.bool:
        return value
    return wrapped(int(value), dtype)


def _number(context: _Context, node: Node, operands: Sequence[Tensor]) -> Tensor:
    value = context.number(node)
    assert value is not None
    value = _held(value, node.dtype)
    # full, not tensor: it fills on the device and copies nothing from the host.
    return torch.full((), value, dtype=node.dtype, device=context.device)


def _division(context: _Context, node: Node, operands: Sequence[Tensor]) -> Tensor:
    """A quotient or remainder. An integer divided by 0 gives an arbitrary value and no
    exception."""
    dividend, divisor = operands
    number = context.number(context.nodes[node.arguments[1]])
    nonzero = number is not None and _held(number, node.dtype)
    if not nonzero and not node.dtype.is_floating_point:
        divisor = torch.where(divisor == 0, 1, divisor)
    function = RECORDS[node.operation].value
    assert function is not None
    return function(dividend, divisor)


def _power(context: _Context, node: Node, operands: Sequence[Tensor]) -> Tensor:
    exponent = context.number(context.nodes[node.arguments[1]])
    if exponent is not None and (node.dtype.is_floating_point or exponent >= 0):
        # A Python exponent takes torch's exact paths: x ** 2 is x * x.
        return torch.pow(operands[0], exponent)
    return torch.pow(operands[0], operands[1])


def _cast(context: _Context, node: Node, operands: Sequence[Tensor]) -> Tensor:
    return operands[0].to(node.dtype)


def bounded_index(index: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
    """Wrap an index once and clamp it into 0..size-1.

    Args:
        index: any integer type, any shape.
        size: of the dimension that it indexes, not 0.

    Returns:
        (int64 index, bool tensor of the elements outside of [-size, size)); on the CPU the second
        is None where there are none.
    """
    index = index.to(torch.int64)
    if index.device.type == "cpu" and index.numel() > 0:
        # One pass that usually saves four. On a device it would synchronise.
        low, high = (int(bound) for bound in torch.aminmax(index))
        if low >= 0 and high < size:
            return index, None
        outside = None if -size <= low and high < size else (index < -size) | (index >= size)
    else:
        outside = (index < -size) | (index >= size)
    wrapped = torch.where(index < 0, index + size, index)
    return wrapped.clamp_(0, size - 1), outside


def _load(context: _Context, node: Node, operands: Sequence[Tensor]) -> Tensor:
    position = node.attribute
    assert isinstance(position, int)
    table = context.captured[position]
    if not operands:
        return table
    if context.read is not None:
        return context.read(table, operands)
    if table.numel() == 0:
        shape = functools.reduce(torch.add, operands).shape
        if context.out_of_range is not None:
            everywhere = torch.ones(shape, dtype=torch.bool, device=context.device)
            context.out_of_range.append((position, everywhere))
        return torch.zeros(shape, dtype=node.dtype, device=context.device)
    indices: list[Tensor | None] = []
    outside: Tensor | None = None
    for index, size in zip(operands, table.shape, strict=True):
        bounded, beyond = bounded_index(index, size)
        indices.append(bounded)
        if beyond is not None:
            outside = beyond if outside is None else outside | beyond
    if context.out_of_range is not None and outside is not None:
        context.out_of_range.append((position, outside))
    # Not table[...]: that reads a 0-d index on the host.
    value: Tensor = torch.ops.aten.index.Tensor(table, indices)
    return value


def _plain(function: Callable[..., Tensor]) -> _Rule:
    return lambda context, node, operands: function(*operands)


_TABLE: dict[str, Rule[_Context, Tensor]] = {
    **{name: _plain(record.value) for name, record in RECORDS.items() if record.value is not None},
    "input": _input,
    "number": _number,
    "const": _number,
    "floordiv": _division,
    "mod": _division,
    "fmod": _division,
    "pow": _power,
    "cast": _cast,
    "load": _load,
}

TORCH: Lowering[_Context, Tensor] = Lowering("torch", _TABLE)
"""Operations on torch tensors."""


class Evaluator:
    """A graph prepared for many evaluations: only the nodes that `wanted` need, in order, with
    each intermediate dropped after its last use.

    Args:
        nodes: of a graph or a derivative.
        wanted: positions whose values are returned.
    """

    def __init__(self, nodes: Sequence[Node], wanted: Sequence[int]) -> None:
        make_first_calls()
        self.nodes = tuple(nodes)
        self.wanted = tuple(wanted)
        needed = reached(self.nodes, self.wanted)
        last_use = {a: position for position in needed for a in self.nodes[position].arguments}
        kept = set(self.wanted)
        self._steps: list[tuple[int, Node, _Rule, tuple[int, ...]]] = []
        for position in needed:
            node = self.nodes[position]
            rule = TORCH.rule(self.nodes, node)
            assert not isinstance(rule, str)
            dropped = {a for a in node.arguments if last_use[a] == position and a not in kept}
            self._steps.append((position, node, rule, tuple(dropped)))

    def __call__(
        self,
        inputs: Mapping[str, Tensor],
        captured: Sequence[Tensor],
        ints: Sequence[int],
        floats: Sequence[float],
        out_of_range: list[tuple[int, Tensor]] | None = None,
        read: Read | None = None,
    ) -> list[Tensor]:
        """Return the wanted values; see `evaluate`."""
        device = torch.device("cpu")
        for tensor in (*inputs.values(), *captured):
            device = tensor.device
            break
        context = _Context(self.nodes, inputs, captured, ints, floats, device, out_of_range, read)
        values: dict[int, Tensor] = {}
        for position, node, rule, dropped in self._steps:
            values[position] = rule(context, node, [values[a] for a in node.arguments])
            for argument in dropped:
                del values[argument]
        return [values[position] for position in self.wanted]


def evaluate(
    nodes: Sequence[Node],
    wanted: Sequence[int],
    *,
    inputs: Mapping[str, Tensor],
    captured: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    out_of_range: list[tuple[int, Tensor]] | None = None,
    read: Read | None = None,
) -> list[Tensor]:
    """Return the values of the nodes at `wanted`.

    Values have the broadcast shape of what they depend on, from 0-d for constants up, so indices
    given as b [B, 1, 1, 1], h [1, H, 1, 1], q_idx [1, 1, L, 1] and kv_idx [1, 1, 1, S] keep small
    what depends on few of them. A value may be an input or a captured tensor itself: don't write
    into it.

    Args:
        nodes: of a graph or a derivative.
        inputs: name -> tensor; converted to the node's type where it differs.
        captured: what loads count into. An index in -N..-1 wraps, then it is clamped.
        ints, floats: values of the number slots.
        out_of_range: if given, (captured position, bool tensor that is True where an index was
            outside of [-N, N)) is appended for each load of which that was so; on devices other
            than the CPU for every load, because looking would synchronise.
        read: how captured tensors are read, instead of that.
    """
    return Evaluator(nodes, wanted)(inputs, captured, ints, floats, out_of_range, read)
