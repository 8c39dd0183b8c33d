"""The loops of a mod on tiles, as an LLVM function: rows, and columns.

Values that depend on columns alone are computed once a tile into strips in the tile's scratch
memory; those that depend on rows alone once a row, as scalars; the rest on vectors of 16 pairs. A
read whose index moves by one a column is one contiguous load: where the row's indices leave the
tensor, or its elements aren't neighbours, they are first gathered into a strip.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from anyflex.plugin import Node
from anyflex_cpu.captured_ir import (
    MEMORY_TYPES,
    Index,
    Table,
    decode,
    element_offset,
    first_indices,
    gather,
    tile_field,
)
from anyflex_cpu.graph_stages import ROW, TILE, Stages
from anyflex_cpu.index_ranges import Limits
from anyflex_cpu.llvm_text import LANES, WIDTHS, Block, Emitter, Function, Module, Value
from anyflex_cpu.node_ir import Fact, NodeLowering

__all__ = ["COLUMNS", "Strip", "TileLoops"]

COLUMNS = 512
"""Maximum number of columns of a tile, the header's AF_TILE_COLUMNS. A strip of floats takes
2 KiB, so that some of them stay in L1."""

_ONES = "@af.ones"
_SEARCH = "af_find_read_outside"


class Strip(NamedTuple):
    """A row of scratch memory, one element per column: its address, and the element's type."""

    address: str
    type: str


class TileLoops:
    """The loops of one function, without what happens to a pair's result.

    Args:
        module: what the function is added to.
        name: the function's.
        nodes, roots: the graph and the results' positions.
        facts: of all captured tensors.
        limits: what calls keep to.
        checks: whether to note that an index was outside.

    Attributes:
        pair: emitter of the innermost block, `LANES` pairs of a row.
        lowering: its `values` hold, after `lower_pairs`, what `pair` needs.
        column: column of the tile that lane 0 of `pair` is, i64.
        valid: which lanes of `pair` are columns of the tile.
        scratch_bytes: sum over the strips that were asked for.
    """

    def __init__(
        self,
        module: Module,
        name: str,
        nodes: Sequence[Node],
        roots: Sequence[int],
        facts: Sequence[Fact],
        limits: Limits,
        *,
        checks: bool,
    ) -> None:
        self.function = Function(module, name, f"define void @{name}(ptr %program, ptr %tile)")
        self.checks = checks
        self._may_be_outside = False
        self.scratch_bytes = 0
        block = self.function.block
        self.entry, self._strips_head, self._row_head = (
            block("entry"),
            block("strips"),
            block("row"),
        )
        self.tile = Emitter(self.function, self.entry, vector=False)
        self._before_rows = Emitter(self.function, self._strips_head, vector=False)
        self.row = Emitter(self.function, self._row_head, vector=False)
        self._open_tile()
        self.stages = Stages(nodes, roots)
        self.lowering = NodeLowering(
            nodes, self.stages, facts, limits, self.tile, self.row, self.inputs, self.first
        )
        self.lowering.lower_scalars(TILE)
        self._note_scalars(self.tile)
        self._open_columns()
        self.strips: dict[int, Strip] = {}
        if self.stages.strips:
            self._fill_strips()
        self._open_row()
        self.lowering.lower_scalars(ROW)
        self._note_scalars(self.row)
        self._streams: dict[int, tuple[Table, str, int]] = {}
        for position, (which, step) in self.stages.streams.items():
            self._open_stream(position, which, step)
        self._open_pairs()

    # Values of the tile.

    def field(self, member: str, type_: str) -> Value:
        """A field of the tile, loaded in the first block."""
        return tile_field(self.tile, member, type_)

    def _open_tile(self) -> None:
        e = self.tile
        self.rows = e.resize(self.field("rows", "i32"), "i64")
        self.columns = e.resize(self.field("cols", "i32"), "i64")
        self.inputs = self.field("inputs", "ptr").text
        self.first = first_indices(e, self.inputs)
        self.scratch = self.field("scratch", "ptr").text
        self.flag = e.function.fresh()
        if self.checks:
            e.line(f"{self.flag} = alloca i32, align 4")
            e.line(f"store i32 0, ptr {self.flag}, align 4")

    def strip(self, type_: str, elements: int = COLUMNS) -> Strip:
        """Allocate a strip in scratch memory for the columns."""
        e = self.tile
        address = e.address(self.scratch, "i8", e.constant("i64", self.scratch_bytes))
        size = elements * max(1, WIDTHS[type_] // 8)
        self.scratch_bytes += -(-size // 64) * 64
        return Strip(address, type_)

    # Columns, and their strips.

    def _open_columns(self) -> None:
        e = self.tile
        rounded = e.add(self.columns, e.constant("i64", LANES - 1))
        self.vectors = e.op("and", rounded, e.constant("i64", -LANES))
        kind = self.lowering.index_type
        lanes = ", ".join(f"{kind} {lane}" for lane in range(LANES))
        wide = Emitter(self.function, e.block, vector=True)
        iota = Value(f"<{lanes}>", kind, True)
        self._kv = wide.add(e.spread(e.resize(self.first[3], kind)), iota)
        self._kv_end = e.spread(e.resize(e.add(self.first[3], self.columns), kind))

    def _columns_loop(self, name: str, before: Emitter) -> tuple[Block, Value, Value]:
        """(block, column of lane 0, kv_idx of the lanes): a loop over vectors whose
        end `_close_columns` writes."""
        block = self.function.block(name)
        kind = self.lowering.index_type
        column = Value(self.function.fresh(), "i64", False)
        kv = Value(self.function.fresh(), kind, True)
        before.block.end = f"br label %{block.label}"
        start = before.block.label
        block.phis.append(f"{column.text} = phi i64 [0, %{start}], [{column.text}.next, %LATCH]")
        block.phis.append(
            f"{kv.text} = phi {kv.full_type} [{self._kv.text}, %{start}], [{kv.text}.next, %LATCH]"
        )
        return block, column, kv

    def _close_columns(
        self, head: Block, last: Emitter, column: Value, kv: Value, done: Block
    ) -> None:
        step = last.constant(kv.type, LANES)
        last.line(f"{kv.text}.next = add {kv}, {step.text}")
        last.line(f"{column.text}.next = add i64 {column.text}, {LANES}")
        more = self.function.fresh()
        last.line(f"{more} = icmp ult i64 {column.text}.next, {self.vectors.text}")
        last.block.end = f"br i1 {more}, label %{head.label}, label %{done.label}"
        head.phis = [phi.replace("%LATCH", f"%{last.block.label}") for phi in head.phis]

    def _fill_strips(self) -> None:
        head, column, kv = self._columns_loop("strip", self._before_rows)
        e = Emitter(self.function, head, vector=True)
        self._at(e, kv)
        kept = self.stages.strips
        for position in self.stages.columns_for(kept):
            self.lowering.lower(position)
        for position in kept:
            value = self.lowering.values[position]
            if value.type == "i1":
                strip = self.strip("i16", COLUMNS // LANES)
                word = e.word(value)
                one = Emitter(self.function, head, vector=False)
                one.store(word, self._word_address(one, strip.address, column), 2)
            else:
                strip = self.strip(value.type)
                e.store(value, e.address(strip.address, strip.type, column), 64)
            self.strips[position] = strip
        self._note_lanes(e, kv)
        done = self.function.block("rows")
        self._close_columns(head, e, column, kv, done)
        self._before_rows.block = done

    def _word_address(self, e: Emitter, base: str, column: Value) -> str:
        word = e.op("lshr", column, e.constant("i64", 4))
        return e.address(base, "i16", word)

    # Rows.

    def _open_row(self) -> None:
        self.row_number = Value(self.function.fresh(), "i64", False)
        self.lowering.row_index = self.row.add(self.first[2], self.row_number)

    def row_address(self, base: str, stride: Value, type_: str) -> str:
        """Address of the row's first element."""
        return self.row.address(base, type_, self.row.mul(self.row_number, stride))

    def live_row(self) -> str:
        """Address of the row's live bits; all ones if the tile has none."""
        e = self.tile
        e.module.globals[_ONES] = (
            f"{_ONES} = internal constant [{COLUMNS // LANES} x i16] "
            f"[{', '.join(['i16 -1'] * (COLUMNS // LANES))}], align 64"
        )
        given = self.field("live", "ptr")
        none = e.put(f"icmp eq {given}, null", "i1")
        base = e.put(f"select {none}, ptr {_ONES}, {given}", "ptr")
        stride = e.select(none, e.constant("i64", 0), self.field("live_ld", "i64"))
        return self.row_address(base.text, stride, "i16")

    def _open_stream(self, position: int, which: int, step: int) -> None:
        """Find where a row's elements are neighbours, or copy them to a strip."""
        node = self.stages.nodes[position]
        assert isinstance(node.attribute, int)
        table = self.lowering.table(node.attribute)
        type_ = MEMORY_TYPES[table.dtype]
        e = self.row
        first, start, inside = self.moving(node.arguments[which], table.sizes[which], step)
        one = e.constant("i64", 1)
        inside = e.op("and", inside, e.compare("eq", table.strides[which], one))
        # Bounds the other indices, and finds whether they are outside.
        offset = start
        for dim, argument in enumerate(node.arguments):
            if dim != which:
                index = self.lowering.index(argument, self.lowering.scalars[argument])
                share, outside = element_offset(e, table, dim, index)
                self.lowering.outside.append(outside)
                offset = e.add(offset, share)
        self._note_scalars(e)
        lowest = offset if step > 0 else e.sub(offset, e.constant("i64", LANES - 1))
        direct = e.address(table.data, type_, lowest)
        strip = self.strip(type_)
        # With a step of -1, the strip is filled from its end.
        begin = 0 if step > 0 else COLUMNS - LANES
        copied = self.tile.address(strip.address, type_, self.tile.constant("i64", begin))
        slow, done = self.function.block("copy"), self.function.block("row")
        before = e.block
        before.end = f"br {inside}, label %{done.label}, label %{slow.label}"
        source = self._copy_stream(slow, done, node, table, which, step, first, copied).label
        base = self.function.fresh()
        done.phis.append(f"{base} = phi ptr [{direct}, %{before.label}], [{copied}, %{source}]")
        e.block = done
        self._streams[position] = (table, base, step)

    def moving(self, index: int, size: Value, step: int) -> tuple[Value, Value, Value]:
        """An index that moves by `step` a column: (its value at the first column, that value
        wrapped if all are negative, whether all the row's lanes stay inside)."""
        e = self.row
        zero, one = e.constant("i64", 0), e.constant("i64", 1)
        first = self.lowering.at_column(index, self.first[3])
        reach = e.sub(self.vectors, one)
        last = e.add(first, reach) if step > 0 else e.sub(first, reach)
        negative = e.op("and", e.compare("slt", first, zero), e.compare("slt", last, zero))
        start = e.select(negative, e.add(first, size), first)
        end = e.select(negative, e.add(last, size), last)
        inside = e.op("and", e.compare("ult", start, size), e.compare("ult", end, size))
        return first, start, inside

    def _copy_stream(
        self,
        slow: Block,
        done: Block,
        node: Node,
        table: Table,
        which: int,
        step: int,
        first: Value,
        copied: str,
    ) -> Block:
        """Fill the strip at `copied`; return the loop's last block."""
        before = Emitter(self.function, slow, vector=False)
        lanes = ", ".join(f"i64 {step * lane}" for lane in range(LANES))
        wide = Emitter(self.function, slow, vector=True)
        begin = wide.add(before.spread(first), Value(f"<{lanes}>", "i64", True))
        # The tensor's numbers are broadcast in the first block, and offsets in `slow`.
        head, column, kv = self._columns_loop("copied", before)
        e = Emitter(self.function, head, vector=True)
        one = Emitter(self.function, head, vector=False)
        self.lowering.emitter = e
        moved = e.op("add" if step > 0 else "sub", begin, one.spread(column))
        indices = [
            Index(moved, True, True)
            if dim == which
            else self.lowering.index(a, before.spread(self.lowering.scalars[a]))
            for dim, a in enumerate(node.arguments)
        ]
        offset, beyond = self.lowering.offsets(table, indices)
        raw = gather(e, table, offset)
        if step < 0:
            raw = e.reversed(raw)
            target = one.address(copied, raw.type, one.negate(column))
        else:
            target = one.address(copied, raw.type, column)
        e.store(raw, target, WIDTHS[raw.type] // 8)
        self.lowering.outside.append(beyond[which])
        self._note_lanes(e, kv)
        self._close_columns(head, e, column, kv, done)
        return e.block

    # Pairs.

    def _open_pairs(self) -> None:
        # Loops may only append values that they don't change to the row's last block.
        head, column, kv = self._columns_loop("pairs", self.row)
        self.column, self._pair_kv, self._pair_head = column, kv, head
        self.pair = Emitter(self.function, head, vector=True)
        self.lane = Emitter(self.function, head, vector=False)
        self.row_end = Emitter(self.function, self.function.block("row_end"), vector=False)

    @property
    def valid(self) -> Value:
        return self.pair.compare("slt", self._pair_kv, self._kv_end)

    def carried(self, value: str, start: str) -> Value:
        """A value that a pair's block passes on to the next: `value` names it there; the last
        one's name ends in ``.next`` and may be read in `row_end`. `value` is its full type."""
        name = self.function.fresh()
        before = self.row.block.label
        self._pair_head.phis.append(
            f"{name} = phi {value} [{start}, %{before}], [{name}.next, %LATCH]"
        )
        return Value(name, value, False)

    def lower_pairs(self) -> None:
        """Lower everything that the innermost block computes; read streams and strips."""
        self._at(self.pair, self._pair_kv)
        wanted = self.stages.pairs()
        strips = self.stages.column_roots() & set(self.strips)
        for position in sorted({*wanted, *strips}):
            if position in self.strips:
                self.lowering.values[position] = self._read_strip(position)
            elif position in self._streams:
                self.lowering.values[position] = self._read_stream(position)
            else:
                self.lowering.lower(position)
        self._note_pairs()

    def _read_strip(self, position: int) -> Value:
        strip = self.strips[position]
        if self.lowering.carrier(position) == "i1":
            word = self.lane.load(
                self._word_address(self.lane, strip.address, self.column), "i16", 2
            )
            return self.pair.from_word(word)
        place = self.lane.address(strip.address, strip.type, self.column)
        return self.pair.load(place, strip.type, 64)

    def _read_stream(self, position: int) -> Value:
        table, base, step = self._streams[position]
        type_ = MEMORY_TYPES[table.dtype]
        column = self.column if step > 0 else self.lane.negate(self.column)
        raw = self.pair.load(self.lane.address(base, type_, column), type_, WIDTHS[type_] // 8)
        return decode(self.pair, raw if step > 0 else self.pair.reversed(raw), table.dtype)

    def _at(self, e: Emitter, kv: Value) -> None:
        self.lowering.emitter = e
        self.lowering.columns = kv
        self.lowering.values = {}

    # Indices outside.

    def _any_outside(self, e: Emitter) -> Value | None:
        """Whether an index is outside that was lowered since the last call; by lanes, if `e` has
        several. None: none can be, or nobody asks."""
        found, self.lowering.outside = self.lowering.outside, []
        if not self.checks or not found:
            return None
        self._may_be_outside = True
        return functools.reduce(functools.partial(e.op, "or"), found)

    def _raise_flag(self, e: Emitter, bits: Value) -> None:
        flag = e.load(self.flag, "i32", 4)
        e.store(e.op("or", flag, e.convert("zext", bits, "i32")), self.flag, 4)

    def _note_scalars(self, e: Emitter) -> None:
        outside = self._any_outside(e)
        if outside is not None:
            self._raise_flag(e, outside)

    def _bits_outside(self, e: Emitter, kv: Value) -> Value | None:
        """The bits of the lanes with an index outside."""
        outside = self._any_outside(e)
        if outside is None:
            return None
        return e.word(e.op("and", outside, e.compare("slt", kv, self._kv_end)))

    def _note_lanes(self, e: Emitter, kv: Value) -> None:
        bits = self._bits_outside(e, kv)
        if bits is not None:
            self._raise_flag(Emitter(self.function, e.block, vector=False), bits)

    def _note_pairs(self) -> None:
        bits = self._bits_outside(self.pair, self._pair_kv)
        if bits is not None:
            carried = self.carried("i16", "0")
            self.lane.line(f"{carried.text}.next = or i16 {carried.text}, {bits.text}")
            self._raise_flag(self.row_end, Value(f"{carried.text}.next", "i16", False))

    @property
    def search(self) -> str:
        """A call of the library's function that notes the first read outside at a live pair."""
        self.function.module.declare(_SEARCH, "void", ["ptr", "ptr"])
        return f"call void @{_SEARCH}(ptr %program, ptr %tile)"

    def close(self, *, search: bool = False) -> None:
        """Write the ends of all loops, and finish the function.

        Args:
            search: call `search` where an index was outside, at a live pair or not.
        """
        end = self.row_end
        self._close_columns(self._pair_head, self.pair, self.column, self._pair_kv, end.block)
        leave = self.function.block("leave")
        row, more = self.row_number.text, self.function.fresh()
        end.line(f"{row}.next = add i64 {row}, 1")
        end.line(f"{more} = icmp slt i64 {row}.next, {self.rows.text}")
        end.block.end = f"br i1 {more}, label %{self._row_head.label}, label %{leave.label}"
        before = self._before_rows.block
        self._row_head.phis.append(
            f"{row} = phi i64 [0, %{before.label}], [{row}.next, %{end.block.label}]"
        )
        before.end = f"br label %{self._row_head.label}"
        self.entry.end = f"br label %{self._strips_head.label}"
        leave.end = "ret void"
        if search and self._may_be_outside:
            self._search_where_flagged(leave)
        self.function.finish()

    def _search_where_flagged(self, leave: Block) -> None:
        e = Emitter(self.function, leave, vector=False)
        flag = e.load(self.flag, "i32", 4)
        found = e.compare("ne", flag, e.constant("i32", 0))
        look, nothing = self.function.block("look"), self.function.block("nothing")
        look.lines.append(self.search)
        look.end = nothing.end = "ret void"
        leave.end = f"br {found}, label %{look.label}, label %{nothing.label}"
