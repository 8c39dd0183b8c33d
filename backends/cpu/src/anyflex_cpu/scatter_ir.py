"""Scatters: adding live pairs' gradients to the captured tensors' double accumulators.

A read that is the same for a whole row is summed over the lanes first. Where neighbouring columns
read neighbouring elements, 16 sums are one vector addition. Otherwise the lanes are added one
by one, in order, because two of them may share an element.
"""

from __future__ import annotations

from collections.abc import Iterable

from anyflex.plugin import Scatter
from anyflex_cpu.captured_ir import Table, element_offset, field
from anyflex_cpu.graph_stages import ROW, TILE
from anyflex_cpu.llvm_text import LANES, Value
from anyflex_cpu.tile_program import COLUMNS, TileLoops

__all__ = ["Scatters"]

# Functions of the native library.
_ADD_LANES = "af_add_lanes"
_ADD_STRIP = "af_add_strip"


class Scatters:
    """The scatters of a derivative, in the innermost block of its loops.

    Args:
        live: which lanes count.
    """

    def __init__(self, loops: TileLoops, live: Value) -> None:
        self.loops = loops
        self.lowering = loops.lowering
        self.live = live
        self._targets: dict[int, Table] = {}

    def add(self, scatter: Scatter) -> None:
        """Append one scatter."""
        pair = self.loops.pair
        self.lowering.emitter = pair
        value = self.lowering.operand(scatter.value)
        if value.type == "float":
            value = pair.convert("fpext", value, "double")
        value = pair.select(self.live, value, pair.constant("double", 0.0))
        stages = self.loops.stages
        moving = stages.moving_index(scatter.indices)
        if all(stages.of[index] in (TILE, ROW) for index in scatter.indices):
            self._add_row(scatter, value)
        elif moving is not None:
            self._add_stream(scatter, value, *moving)
        else:
            self._add_lanes(scatter, value)

    def _target(self, position: int) -> Table:
        """An accumulator, as its captured tensor's table with its own address and strides. One
        that isn't wanted, or has no elements, is replaced by one number on the stack, with strides
        0."""
        if position not in self._targets:
            e = self.loops.tile
            sums = self.loops.field("captured_grad", "ptr").text
            given = field(e, sums, 8 * position, "ptr")
            nowhere = e.function.fresh()
            e.line(f"{nowhere} = alloca double, align 8")
            e.line(f"store double 0.0, ptr {nowhere}, align 8")
            missing = e.put(f"icmp eq {given}, null", "i1")
            table = self.lowering.table(position)
            zero = e.constant("i64", 0)
            for size in table.sizes:
                missing = e.op("or", missing, e.compare("eq", size, zero))
            address = e.put(f"select {missing}, ptr {nowhere}, {given}", "ptr").text
            strides: list[Value] = []
            stride = e.constant("i64", 1)
            for size in reversed(table.sizes):
                strides.insert(0, e.select(missing, zero, stride))
                stride = e.mul(stride, size)
            self._targets[position] = table._replace(data=address, strides=tuple(strides))
        return self._targets[position]

    def _add_row(self, scatter: Scatter, value: Value) -> None:
        """Add to one element for all columns: sums of the lanes, added up at the row's end."""
        loops = self.loops
        target = self._fixed_address(scatter, range(len(scatter.indices)))
        sums = loops.carried(value.full_type, "zeroinitializer")
        loops.pair.line(f"{sums.text}.next = fadd {value.full_type} {sums.text}, {value.text}")
        end = loops.row_end
        reduce = f"llvm.vector.reduce.fadd.v{LANES}f64"
        end.module.declare(reduce, "double", ["double", value.full_type])
        total = end.put(
            f"call reassoc double @{reduce}(double -0.0, {value.full_type} {sums.text}.next)",
            "double",
        )
        end.store(end.add(end.load(target, "double", 8), total), target, 8)

    def _fixed_address(self, scatter: Scatter, dims: Iterable[int]) -> str:
        """The accumulator's address with the indices of `dims`, fixed in a row, applied."""
        row = self.loops.row
        target = self._target(scatter.captured)
        offset = row.constant("i64", 0)
        for dim in dims:
            argument = scatter.indices[dim]
            index = self.lowering.index(argument, self.lowering.scalars[argument])
            share, _ = element_offset(row, target, dim, index)
            offset = row.add(offset, share)
        return row.address(target.data, "double", offset)

    def _add_stream(self, scatter: Scatter, value: Value, which: int, step: int) -> None:
        """Add neighbours to neighbours: into the accumulator itself, or, where the row's indices
        leave it, into a strip of zeros that is scattered and cleared at the row's end."""
        loops, row = self.loops, self.loops.row
        target = self._target(scatter.captured)
        fixed = self._fixed_address(
            scatter, [dim for dim in range(len(scatter.indices)) if dim != which]
        )
        size = target.sizes[which]
        first, start, inside = loops.moving(scatter.indices[which], size, step)
        one = row.constant("i64", 1)
        inside = row.op("and", inside, row.compare("eq", target.strides[which], one))
        strip = loops.strip("double")
        tile = loops.tile
        tile.module.declare("llvm.memset.p0.i64", "void", ["ptr", "i8", "i64", "i1"])
        length = 8 * COLUMNS
        tile.line(
            f"call void @llvm.memset.p0.i64(ptr {strip.address}, i8 0, i64 {length}, i1 false)"
        )
        # With a step of -1, column 0 is at the strip's end. Vectors begin at their lowest
        # element.
        origin = tile.constant("i64", 0 if step > 0 else COLUMNS - 1)
        of_column_0 = tile.address(strip.address, "double", origin)
        lowest = row.constant("i64", 0 if step > 0 else 1 - LANES)
        direct = row.address(fixed, "double", row.add(start, lowest))
        kept = row.address(of_column_0, "double", lowest)
        base = row.put(f"select {inside}, ptr {direct}, ptr {kept}", "ptr").text
        lane, pair = loops.lane, loops.pair
        moved = loops.column if step > 0 else lane.negate(loops.column)
        place = lane.address(base, "double", moved)
        added = value if step > 0 else pair.reversed(value)
        pair.store(pair.add(pair.load(place, "double", 8), added), place, 8)
        tile.module.declare(_ADD_STRIP, "void", ["ptr", "ptr", *["i64"] * 6])
        count = row.select(inside, row.constant("i64", 0), loops.vectors)
        step_value = row.constant("i64", step)
        numbers = (first, step_value, size, target.lasts[which], target.strides[which])
        loops.row_end.line(
            f"call void @{_ADD_STRIP}(ptr {fixed}, ptr {of_column_0}, "
            f"{', '.join(map(str, (*numbers, count)))})"
        )

    def _add_lanes(self, scatter: Scatter, value: Value) -> None:
        """Store offsets and values in memory, and add them in a loop over the live lanes."""
        loops, pair, lane = self.loops, self.loops.pair, self.loops.lane
        target = self._target(scatter.captured)
        indices = [self.lowering.index(a, self.lowering.operand(a)) for a in scatter.indices]
        offset, _ = self.lowering.offsets(target, indices)
        offset = pair.resize(offset, "i64")
        places, values = loops.strip("i64", LANES), loops.strip("double", LANES)
        pair.store(offset, places.address, 64)
        pair.store(value, values.address, 64)
        lane.module.declare(_ADD_LANES, "void", ["ptr", "ptr", "ptr", "i32"])
        live = lane.convert("zext", pair.word(self.live), "i32")
        lane.line(
            f"call void @{_ADD_LANES}(ptr {target.data}, ptr {places.address}, "
            f"ptr {values.address}, {live})"
        )
