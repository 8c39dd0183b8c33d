"""Mask mods of slices: the same function at other indices.

A slice counts its batch entries, heads and rows from 0, and the mask mod must see their numbers
in the whole mask. So an index is replaced: ``q_idx`` by ``q_idx + n``, where n is a number slot of
the graph (slices that differ in n alone share one graph, hence one kernel), or by ``table[q_idx]``
where the chosen positions aren't a range.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anyflex.mod_graph.graph import ModGraph, parse_graph
from anyflex.mod_graph.graph_builder import GraphBuilder
from anyflex.mod_graph.node import Node
from anyflex.tensors.torch_versions import dynamo_constant
from anyflex.tracing.mod_types import MaskMod
from anyflex.tracing.trace import TracedMod

__all__ = [
    "ShiftedMaskMod",
    "Shifts",
    "indices_read",
    "shifted_mod",
    "shifted_opaque",
    "with_number",
]

Shifts = Mapping[str, "int | Tensor"]
"""Input name (b, h, q_idx, kv_idx) -> number added to it, or int64 vector that it indexes."""

_INPUTS = ("b", "h", "q_idx", "kv_idx")
_LARGEST = 2**63 - 1


def indices_read(traced: TracedMod | None, opaque: MaskMod | None) -> frozenset[str]:
    """Return the names of the indices that a mask mod may read."""
    if traced is not None:
        return _inputs(traced.text)
    return frozenset(_INPUTS if opaque is not None else ())


@functools.lru_cache(maxsize=1024)
def _inputs(text: str) -> frozenset[str]:
    return parse_graph(text).inputs()


def shifted_mod(traced: TracedMod, shifts: Shifts) -> TracedMod:
    """Return the mod that sees its indices shifted; `traced` itself if it reads none of them.

    An index that the mod only reads as ``index + number`` already, as that of a slice's slice,
    gets no second number: the first is changed.
    """
    text, captured = traced.text, list(traced.captured)
    ints, names = list(traced.ints), list(traced.names)
    for name, shift in shifts.items():
        if isinstance(shift, Tensor):
            longer = _with_table(text, name, len(captured))
            if longer != text:
                text = longer
                captured.append(shift)
                names.append("")
            continue
        slot = _own_number(text, name)
        if slot is not None and abs(ints[slot] + shift) <= _LARGEST:
            ints[slot] += shift
            continue
        longer = _with_number(text, name, len(ints))
        if longer != text:
            text = longer
            ints.append(shift)
    return TracedMod(text, captured, ints, traced.floats, names, traced.depends_on_facts)


@dynamo_constant
def with_number(text: str, name: str, slots: int) -> tuple[str, int | None]:
    """Return the graph that reads an index plus a number, and the number's int slot: the next
    one, `slots`, or one that the graph has for this already. None if it doesn't read the index."""
    slot = _own_number(text, name)
    if slot is not None:
        return text, slot
    longer = _with_number(text, name, slots)
    return longer, None if longer == text else slots


@functools.lru_cache(maxsize=1024)
def _own_number(text: str, name: str) -> int | None:
    """Return the int slot of a number that `name` is added to wherever it is read, and that is
    read nowhere else."""
    nodes = parse_graph(text).nodes
    readers: dict[int, list[Node]] = {}
    for node in nodes:
        for argument in node.arguments:
            readers.setdefault(argument, []).append(node)
    for position, node in enumerate(nodes):
        if (node.operation, node.attribute) != ("input", name):
            continue
        adds = readers.get(position, [])
        if len(adds) != 1 or adds[0].operation != "add":
            return None
        (number,) = set(adds[0].arguments) - {position}
        slot = str(nodes[number].attribute)
        alone = len(readers[number]) == 1 and nodes[number].operation == "number"
        return int(slot[1:]) if alone and slot[0] == "i" else None
    return None


@functools.lru_cache(maxsize=1024)
def _with_number(text: str, name: str, slot: int) -> str:
    def added(graph: GraphBuilder, index: int) -> int:
        number = graph.add("number", torch.int64, (), f"i{slot}")
        return graph.add("add", torch.int64, (index, number))

    return _replaced(text, name, added)


@functools.lru_cache(maxsize=1024)
def _with_table(text: str, name: str, position: int) -> str:
    return _replaced(
        text, name, lambda graph, index: graph.add("load", torch.int64, (index,), position)
    )


def _replaced(text: str, name: str, replacement: Callable[[GraphBuilder, int], int]) -> str:
    """Return the graph with another value for an input; the same text if it isn't read."""
    old = parse_graph(text)
    if name not in old.inputs():
        return text
    graph = GraphBuilder()
    moved: list[int] = []
    for node in old.nodes:
        arguments = tuple(moved[argument] for argument in node.arguments)
        position = graph.add(node.operation, node.dtype, arguments, node.attribute)
        if node.operation == "input" and node.attribute == name:
            position = replacement(graph, position)
        moved.append(position)
    return ModGraph(tuple(graph.nodes), moved[old.output]).text


@dataclass(frozen=True)
class ShiftedMaskMod:
    """`shifted_mod` for a mask mod that can't be traced: a function around it.

    Args:
        function: the mask mod of the whole mask.
        shifts: pairs of an index's name and a number, or a table as a tuple.
        tables: the tables again, as tensors: a tensor made of a tuple is a copy to the device at
            each call, which no graph capture takes.
    """

    function: MaskMod
    shifts: tuple[tuple[str, int | tuple[int, ...]], ...]
    tables: Mapping[str, Tensor] = field(compare=False, repr=False)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        indices = dict(zip(_INPUTS, (b, h, q_idx, kv_idx), strict=True))
        for name, shift in self.shifts:
            index = indices[name]
            if isinstance(shift, tuple):
                indices[name] = self.tables[name].to(index.device)[index]
            else:
                indices[name] = index + shift
        return self.function(*indices.values())


def shifted_opaque(function: MaskMod, shifts: Shifts) -> ShiftedMaskMod:
    """Return a function that calls `function` with shifted indices."""
    tables = {name: shift for name, shift in shifts.items() if isinstance(shift, Tensor)}
    new: dict[str, Any] = {
        name: tuple(shift.tolist()) if isinstance(shift, Tensor) else shift
        for name, shift in shifts.items()
    }
    if isinstance(function, ShiftedMaskMod):
        # Numbers add up, so that a slice of a slice equals the slice of the whole.
        old: dict[str, Any] = dict(function.shifts)
        if not any(isinstance(shift, tuple) for shift in (*old.values(), *new.values())):
            new = {name: old.get(name, 0) + new.get(name, 0) for name in (old | new)}
            function = function.function
    return ShiftedMaskMod(function, tuple(new.items()), tables)
