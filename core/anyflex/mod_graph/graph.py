"""The mod graph: a score or mask function as a typed SSA graph of scalar operations."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from anyflex.mod_graph.dtypes import DTYPES
from anyflex.mod_graph.node import Attribute, Node, reached
from anyflex.mod_graph.operations import OPERATIONS
from anyflex.mod_graph.printing import printed

__all__ = ["ModGraph", "parse_graph", "wrapped"]


@dataclass(frozen=True, slots=True, eq=False)
class ModGraph:
    """A traced mod: nodes in evaluation order and the position of the result.

    Two graphs are equal when their texts are. Printed, a graph is what
    `anyflex.mod_graph.printing` makes of it.
    """

    nodes: tuple[Node, ...]
    output: int
    _text: str | None = field(init=False, repr=False, default=None)

    @property
    def text(self) -> str:
        """The graph on one line; `parse_graph` reads it back."""
        # Made at most once, and on demand: many graphs are steps on the way to another one. Not
        # compared by nodes, because 0.0 equals -0.0.
        found = self._text
        if found is None:
            found = ";".join([*map(str, self.nodes), f"={self.output}"])
            object.__setattr__(self, "_text", found)
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModGraph) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __str__(self) -> str:
        return printed(self.nodes, self.output)

    @property
    def dtype(self) -> torch.dtype:
        """The result's type."""
        return self.nodes[self.output].dtype

    def inputs(self) -> frozenset[str]:
        """Names of the inputs that the result depends on."""
        needed = [self.nodes[position] for position in self.reached((self.output,))]
        return frozenset(str(node.attribute) for node in needed if node.operation == "input")

    def loads(self) -> dict[int, tuple[torch.dtype, int]]:
        """dtype and rank of each captured tensor that is read, by its position."""
        found = {}
        for node in self.nodes:
            if node.operation == "load":
                assert isinstance(node.attribute, int)
                found[node.attribute] = node.dtype, len(node.arguments)
        return found

    def number_slots(self) -> tuple[int, int]:
        """How many of a call's ints and floats there are up to the last one that is read."""
        ends = {"i": 0, "f": 0}
        for node in self.nodes:
            if node.operation == "number":
                slot = str(node.attribute)
                ends[slot[0]] = max(ends[slot[0]], int(slot[1:]) + 1)
        return ends["i"], ends["f"]

    def reached(self, roots: Iterable[int]) -> set[int]:
        """Positions of the nodes that `roots` need, the roots included."""
        return set(reached(self.nodes, roots))

    def bind(
        self,
        *,
        constants: dict[str, int | float] | None = None,
        shift_captured: int = 0,
        shift_ints: int = 0,
        shift_floats: int = 0,
    ) -> ModGraph:
        """Return the graph with numbers made constants, and slots moved.

        Args:
            constants: slot -> value, by the slot's old name. Numbers that are absent stay numbers.
            shift_captured, shift_ints, shift_floats: added to the positions of captured tensors
                and number slots: a mask graph's follow the score graph's in one call.
        """
        constants = constants or {}
        nodes = []
        for node in self.nodes:
            if node.operation == "load":
                assert isinstance(node.attribute, int)
                node = Node("load", node.dtype, node.arguments, node.attribute + shift_captured)
            elif node.operation == "number":
                slot = str(node.attribute)
                if slot in constants:
                    node = Node("const", node.dtype, (), _converted(constants[slot], node.dtype))
                else:
                    shift = shift_ints if slot[0] == "i" else shift_floats
                    node = Node("number", node.dtype, (), f"{slot[0]}{int(slot[1:]) + shift}")
            nodes.append(node)
        return ModGraph(tuple(nodes), self.output)


def wrapped(value: int, dtype: torch.dtype) -> int:
    """Return an integer as an integer type represents it; values beyond the range wrap, as in
    torch."""
    limits = torch.iinfo(dtype)
    return (value - limits.min) % (1 << limits.bits) + limits.min


def _converted(value: int | float, dtype: torch.dtype) -> int | float | bool:
    if dtype is torch.bool:
        return bool(value)
    return float(value) if dtype.is_floating_point else wrapped(int(value), dtype)


@functools.lru_cache(maxsize=1024)
def parse_graph(text: str) -> ModGraph:
    """Read a graph's text. Raises ValueError if it isn't one: a request may come from a file."""
    *lines, last = text.split(";")
    nodes: list[Node] = []
    for line in lines:
        operation, dtype_name, arguments, attribute = line.split(" ")
        if operation not in OPERATIONS or dtype_name not in DTYPES:
            raise ValueError(f"unknown operation or type in a mod graph: {line!r}")
        dtype = DTYPES[dtype_name]
        positions = () if arguments == "-" else tuple(map(int, arguments.split(",")))
        if any(not 0 <= p < len(nodes) for p in positions):
            raise ValueError(f"an argument that is not before its node: {line!r}")
        nodes.append(Node(operation, dtype, positions, _attribute(operation, dtype, attribute)))
    if last[:1] != "=" or not 0 <= int(last[1:]) < len(nodes):
        raise ValueError(f"a mod graph without a result: {text!r}")
    return ModGraph(tuple(nodes), int(last[1:]))


def _attribute(operation: str, dtype: torch.dtype, text: str) -> Attribute:
    if operation in ("input", "number"):
        # Backends write these names into the source that they generate.
        if not (text.isascii() and text.isidentifier()):
            raise ValueError(f"a name that is none in a mod graph: {text!r}")
        return text
    if operation == "load":
        return int(text)
    if operation == "const":
        if dtype is torch.bool:
            return text == "True"
        return float(text) if dtype.is_floating_point else wrapped(int(text), dtype)
    return None
