"""Lowering a graph's nodes into a function over a tile: each node in the block of its stage, with
operands of earlier stages spread over the lanes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from anyflex.plugin import IntegerRange, Node
from anyflex_cpu import structs
from anyflex_cpu.captured_ir import (
    Index,
    Table,
    bounded,
    decode,
    field,
    gather,
    open_table,
    read,
)
from anyflex_cpu.graph_stages import ROW, TILE, Stages
from anyflex_cpu.index_ranges import Limits, fits_int32, ranges
from anyflex_cpu.llvm_lowering import CARRIERS, LLVM
from anyflex_cpu.llvm_text import FLOATS, Emitter, Value
from anyflex_cpu.narrow_floats_ir import round_to

__all__ = ["Fact", "NodeLowering"]

# Operations whose low result bits depend on the low bits of the operands alone.
_LOW_BITS = frozenset("add sub mul neg and or xor not where".split())
_COMPARISONS = frozenset("eq ne lt le gt ge".split())
# Operations whose results are among their operands, or whole numbers: no rounding is needed.
_EXACT = frozenset("input number const load where neg abs minimum maximum detach sign".split())
_INPUTS = {"b": 0, "h": 1, "q_idx": 2, "kv_idx": 3}


class Fact(NamedTuple):
    """Fixed properties of a captured tensor."""

    dtype: torch.dtype
    rank: int


class NodeLowering:
    """The values of a graph's nodes in one function; the context of the table's rules.

    Scalars of stages TILE and ROW are lowered into the blocks of `tile` and `row`, the others by
    `lower` into that of `emitter`.

    Args:
        nodes, stages: the graph.
        facts: of all captured tensors.
        limits: what calls keep to.
        tile: emitter of the function's first block; `inputs` is the address of the af_mod_inputs.
        row: emitter of the block in which a row begins.
        first: of the tile's indices b, h, q_idx, kv_idx, offsets added, i64.

    Attributes:
        emitter: where nodes are being lowered.
        values: of stages COLUMN and PAIR at `emitter`.
        columns: kv_idx of the lanes at `emitter`.
        row_index: q_idx of the row, i64.
        score, grad: the lanes' inputs at `emitter`, float.
        outside: for each index of a read, the lanes, as i1, where it was outside.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        stages: Stages,
        facts: Sequence[Fact],
        limits: Limits,
        tile: Emitter,
        row: Emitter,
        inputs: str,
        first: Sequence[Value],
    ) -> None:
        self.nodes = nodes
        self.stages = stages
        self.facts = facts
        self.wide = limits.captured > 1 << 31
        self.ranges = ranges(nodes, limits)
        self.tile, self.row = tile, row
        self.emitter = tile
        self.inputs = inputs
        self.first = first
        self.values: dict[int, Value] = {}
        self.scalars: dict[int, Value] = {}
        self.columns: Value | None = None
        self.row_index: Value | None = None
        self.score: Value | None = None
        self.grad: Value | None = None
        self.outside: list[Value] = []
        self.result_type = ""
        self._spread: dict[tuple[str, int], Value] = {}
        self._tables: dict[int, Table] = {}
        self._captured = ""

    @property
    def index_type(self) -> str:
        """Type of columns and of offsets into captured tensors."""
        return "i64" if self.wide else "i32"

    def range(self, position: int) -> IntegerRange | None:
        return self.ranges[position]

    def carrier(self, position: int) -> str:
        """Type of the node's value."""
        node = self.nodes[position]
        if node.dtype is torch.int64 and fits_int32(self.ranges[position]):
            return "i32"
        return CARRIERS[node.dtype]

    def lower(self, position: int) -> Value:
        """Append a node to the emitter's block and keep its value."""
        node = self.nodes[position]
        operands = self._operands(position, node)
        self.result_type = self.carrier(position)
        rule = LLVM.rule(self.nodes, node)
        value = LLVM.apply(rule, self, node, operands)
        if node.dtype in (torch.float16, torch.bfloat16) and node.operation not in _EXACT:
            value = round_to(self.emitter, value, node.dtype)
        wanted = self.carrier(position)
        if value.type != wanted:
            value = self.emitter.resize(value, wanted)
        home = self.scalars if self.stages.of[position] in (TILE, ROW) else self.values
        home[position] = value
        return value

    def lower_scalars(self, stage: int) -> None:
        """Lower all nodes of stage TILE or ROW."""
        self.emitter = self.tile if stage == TILE else self.row
        for position in self.stages.needed:
            if self.stages.of[position] == stage:
                self.lower(position)

    def operand(self, position: int) -> Value:
        """A node's value, broadcast as the emitter needs it."""
        scalar = self.scalars.get(position)
        if scalar is None:
            return self.values[position]
        if not self.emitter.vector:
            return scalar
        node = self.nodes[position]
        if node.operation == "const":
            return self._constant(node, scalar.type)
        return self.spread(scalar, self.stages.of[position])

    def spread(self, scalar: Value, stage: int) -> Value:
        """A scalar of stage TILE or ROW over the lanes."""
        key = (scalar.text, stage)
        if key not in self._spread:
            self._spread[key] = (self.tile if stage == TILE else self.row).spread(scalar)
        return self._spread[key]

    def _operands(self, position: int, node: Node) -> list[Value]:
        arguments = node.arguments
        if node.operation == "load" or not arguments:
            return [self.operand(a) for a in arguments]
        narrowed = self._narrowed(node)
        if narrowed is not None:
            return narrowed
        operands = [self.operand(a) for a in arguments]
        if node.operation in ("cast", "detach"):
            return operands
        if self.nodes[arguments[-1]].dtype is not torch.int64:
            return operands
        kinds = {x.type for x in operands if x.type != "i1"}
        if node.operation in _LOW_BITS:
            kinds = {self.carrier(position)}
        elif node.operation not in _COMPARISONS:
            kinds.add(self.carrier(position))
        kind = "i64" if "i64" in kinds else "i32"
        return [x if x.type == "i1" else self.emitter.resize(x, kind) for x in operands]

    def _narrowed(self, node: Node) -> list[Value] | None:
        """Lower a comparison of an index with a number that may be any int64: the number is
        clamped once, and the lanes are compared as int32."""
        if node.operation not in _COMPARISONS or not self.emitter.vector:
            return None
        kinds = [self.carrier(a) for a in node.arguments]
        if sorted(kinds) != ["i32", "i64"]:
            return None
        narrow, wide = (node.arguments[kinds.index(kind)] for kind in ("i32", "i64"))
        known = self.ranges[narrow]
        scalar = self.scalars.get(wide)
        if scalar is None or known is None:
            return None
        if known.low <= -(1 << 31) or known.high >= (1 << 31) - 1:
            return None
        stage = self.stages.of[wide]
        e = self.tile if stage == TILE else self.row
        low, high = e.constant("i64", -(1 << 31)), e.constant("i64", (1 << 31) - 1)
        clamped = e.intrinsic("smin", e.intrinsic("smax", scalar, low), high)
        spread = e.spread(e.resize(clamped, "i32"))
        other = self.operand(narrow)
        return [other if kind == "i32" else spread for kind in kinds]

    # Methods that the table's rules call.

    def leaf(self, node: Node) -> Value:
        if node.operation == "const":
            return self._constant(node, self.result_type)
        if node.operation == "number":
            return self._number(node)
        name = str(node.attribute)
        if name in ("score", "grad"):
            value = self.score if name == "score" else self.grad
            assert value is not None
            return self._from_float(value, node.dtype)
        if name == "kv_idx":
            assert self.columns is not None
            value = self.columns
        elif name == "q_idx":
            assert self.row_index is not None
            value = self.row_index
        else:
            value = self.first[_INPUTS[name]]
        if self.result_type in FLOATS:
            value = self.emitter.convert("sitofp", value, self.result_type)
            narrow = node.dtype in (torch.float16, torch.bfloat16)
            return round_to(self.emitter, value, node.dtype) if narrow else value
        return self.emitter.resize(value, self.result_type)

    def _from_float(self, value: Value, dtype: torch.dtype) -> Value:
        if dtype is torch.float64:
            return self.emitter.convert("fpext", value, "double")
        if dtype in (torch.float16, torch.bfloat16):
            return round_to(self.emitter, value, dtype)
        return value

    def _constant(self, node: Node, type_: str) -> Value:
        return self.emitter.constant(type_, node.value)

    def _number(self, node: Node) -> Value:
        e = self.emitter
        slot = str(node.attribute)
        is_int = slot[0] == "i"
        offset = structs.ModInputs.ints.offset if is_int else structs.ModInputs.floats.offset
        values = field(e, self.inputs, offset, "ptr").text
        value = field(e, values, 8 * int(slot[1:]), "i64" if is_int else "double")
        type_ = CARRIERS[node.dtype]
        if type_ == "i1":
            if is_int:
                return e.compare("ne", value, e.constant("i64", 0))
            return e.compare("une", value, e.constant("double", 0.0))
        if type_ not in FLOATS:
            return e.resize(value if is_int else e.to_integer(value, "i64"), type_)
        if is_int:
            value = e.convert("sitofp", value, type_)
        else:
            size = e.intrinsic("fabs", value)
            infinity = e.intrinsic("copysign", e.constant("double", math.inf), value)
            largest = e.constant("double", torch.finfo(node.dtype).max)
            value = e.select(e.compare("ogt", size, largest), infinity, value)
            if type_ == "float":
                value = e.convert("fptrunc", value, "float")
        if node.dtype in (torch.float16, torch.bfloat16):
            return round_to(e, value, node.dtype)
        return value

    def table(self, position: int) -> Table:
        """A captured tensor's table in the function."""
        if position not in self._tables:
            if not self._captured:
                offset = structs.ModInputs.captured.offset
                self._captured = field(self.tile, self.inputs, offset, "ptr").text
            fact = self.facts[position]
            self._tables[position] = open_table(
                self.tile, self._captured, position, fact.dtype, fact.rank
            )
        return self._tables[position]

    def index(self, position: int, value: Value) -> Index:
        """A node's value as an index."""
        known = self.ranges[position]
        signed = self.nodes[position].dtype is not torch.uint8
        return Index(value, signed, known is None or known.low < 0)

    def read(self, node: Node, indices: Sequence[Value]) -> Value:
        assert isinstance(node.attribute, int)
        table = self.table(node.attribute)
        found = [self.index(a, v) for a, v in zip(node.arguments, indices, strict=True)]
        if not self.emitter.vector:
            value, beyond = read(self.emitter, table, found)
            self.outside += beyond
            return value
        offset, beyond = self.offsets(table, found)
        self.outside += beyond
        return decode(self.emitter, gather(self.emitter, table, offset), table.dtype)

    def offsets(self, table: Table, indices: Sequence[Index]) -> tuple[Value, list[Value]]:
        """(offset of each lane's element, for each dimension the lanes that were outside)."""
        e = self.emitter
        total: Value | None = None
        beyond = []
        for dim, index in enumerate(indices):
            kind = "i64" if self.wide or index.value.type == "i64" else "i32"
            index = index._replace(value=e.resize(index.value, kind, signed=index.signed))
            size, last = (self._sized(x[dim], kind) for x in (table.sizes, table.lasts))
            place, outside = bounded(e, index, size, last)
            beyond.append(outside)
            place = e.resize(place, self.index_type)
            stride = self._sized(table.strides[dim], self.index_type)
            product = e.mul(place, stride)
            total = product if total is None else e.add(total, product)
        assert total is not None
        return total, beyond

    def _sized(self, scalar: Value, type_: str) -> Value:
        """A tile's number, i64, in all lanes of a vector of another width."""
        key = (f"{scalar.text}:{type_}", TILE)
        if key not in self._spread:
            narrow = self.tile.resize(scalar, type_)
            self._spread[key] = self.tile.spread(narrow)
        return self._spread[key]

    def at_column(self, position: int, column: Value) -> Value:
        """An index that moves by whole steps (`Stages.step`) at one column, as i64, in the row's
        block.

        Args:
            column: kv_idx, i64, of one lane.
        """
        e = self.row
        node = self.nodes[position]
        scalar = self.scalars.get(position)
        signed = node.dtype is not torch.uint8
        if scalar is not None:
            return e.resize(scalar, "i64", signed=signed)
        if node.operation == "input":
            return column
        operands = [self.at_column(a, column) for a in node.arguments]
        if node.operation == "neg":
            value = e.negate(operands[0])
        elif node.operation == "cast":
            value = operands[0]
        else:
            value = e.op(node.operation, *operands)
        if node.dtype is torch.int64:
            return value
        return e.resize(e.resize(value, CARRIERS[node.dtype]), "i64")
