"""Search for the first live pair that reads outside of a captured tensor: a plain loop over a
tile's pairs that the fast loops call once they have met such an index, on a live pair or not."""

from __future__ import annotations

from collections.abc import Sequence

from anyflex.plugin import Node
from anyflex_cpu.captured_ir import first_indices, tile_field
from anyflex_cpu.graph_stages import PAIR, Stages
from anyflex_cpu.index_ranges import Limits
from anyflex_cpu.llvm_text import Block, Emitter, Function, Module, Value
from anyflex_cpu.node_ir import Fact, NodeLowering

__all__ = ["add_search"]

_NOTE = "af_note_read_outside"
"""Name of the native library's function that keeps the first read outside."""


def add_search(
    module: Module,
    name: str,
    nodes: Sequence[Node],
    loads: Sequence[int],
    facts: Sequence[Fact],
    limits: Limits,
    mod: int,
) -> None:
    """Add a function of a program and a tile that reports the first live pair at which one of the
    `loads` has an index outside.

    Args:
        mod: 0 for a score mod, 1 for a mask. If an index of a score mod depends on scores, the
            tile must still hold the unmodified ones.
    """
    module.declare(_NOTE, "void", ["ptr", "i32", "i32", "i32", "i64"])
    header = f"define internal void @{name}(ptr %program, ptr %tile)"
    # Not optimised: it hardly ever runs, and every first call would wait for the passes.
    function = Function(module, name, f"{header} noinline optnone cold")
    entry, row, pair, leave = (function.block(x) for x in ("entry", "row", "pair", "leave"))
    tile = Emitter(function, entry, vector=False)
    rows, columns = (
        tile.resize(tile_field(tile, name, "i32"), "i64") for name in ("rows", "cols")
    )
    inputs = tile_field(tile, "inputs", "ptr").text
    first = first_indices(tile, inputs)
    r, c = Value("%r", "i64", False), Value("%c", "i64", False)
    row_e, e = Emitter(function, row, vector=False), Emitter(function, pair, vector=False)
    next_pair, next_row = function.block("next_pair"), function.block("next_row")
    entry.end = f"br label %{row.label}"
    row.phis.append(f"%r = phi i64 [0, %{entry.label}], [%r.next, %{next_row.label}]")
    row.end = f"br label %{pair.label}"
    pair.phis.append(f"%c = phi i64 [0, %{row.label}], [%c.next, %{next_pair.label}]")
    next_pair.lines.append("%c.next = add i64 %c, 1")
    next_pair.lines.append(f"%c.more = icmp slt i64 %c.next, {columns.text}")
    next_pair.end = f"br i1 %c.more, label %{pair.label}, label %{next_row.label}"
    next_row.lines.append("%r.next = add i64 %r, 1")
    next_row.lines.append(f"%r.more = icmp slt i64 %r.next, {rows.text}")
    next_row.end = f"br i1 %r.more, label %{row.label}, label %{leave.label}"
    leave.end = "ret void"

    e.block = _if_live(e, tile, row_e, r, c, next_pair)
    stages = Stages(nodes, loads)
    # The whole innermost block, one pair at a time.
    stages.of = [PAIR] * len(nodes)
    stages.streams = {}
    lowering = NodeLowering(nodes, stages, facts, limits, tile, row_e, inputs, first)
    lowering.emitter = e
    lowering.columns = e.add(first[3], c)
    lowering.row_index = e.add(first[2], r)
    if stages.reads_score & set(stages.needed):
        score = tile_field(tile, "score", "ptr").text
        stride = tile_field(tile, "ld", "i64")
        place = e.address(score, "float", e.add(e.mul(r, stride), c))
        lowering.score = e.load(place, "float", 4)
    wanted = set(loads)
    for position in stages.needed:
        lowering.lower(position)
        found, lowering.outside = lowering.outside, []
        if position not in wanted:
            continue
        for captured, dim, outside in found:
            argument = nodes[position].arguments[dim]
            index = lowering.index(argument, lowering.values[argument])
            _report(e, leave, outside, (mod, captured, dim), index.value, index.signed)
    e.block.end = f"br label %{next_pair.label}"
    function.finish()


def _if_live(e: Emitter, tile: Emitter, row: Emitter, r: Value, c: Value, dead: Block) -> Block:
    """Append the test of a pair's bit; return the block where it is set."""
    function = e.function
    bits = tile_field(tile, "live", "ptr")
    stride = tile_field(tile, "live_ld", "i64")
    none = tile.put(f"icmp eq {bits}, null", "i1")
    look, live = function.block("look"), function.block("live")
    e.block.end = f"br {none}, label %{live.label}, label %{look.label}"
    at = Emitter(function, look, vector=False)
    word = at.add(at.mul(r, stride), at.op("lshr", c, at.constant("i64", 4)))
    found = at.load(at.address(bits.text, "i16", word), "i16", 2)
    bit = at.resize(at.op("and", c, at.constant("i64", 15)), "i16")
    one = at.op("and", at.op("lshr", found, bit), at.constant("i16", 1))
    is_live = at.compare("ne", one, at.constant("i16", 0))
    look.end = f"br {is_live}, label %{live.label}, label %{dead.label}"
    return live


def _report(
    e: Emitter,
    leave: Block,
    outside: Value,
    where: tuple[int, int, int],
    index: Value,
    signed: bool,
) -> None:
    report, following = e.function.block("report"), e.function.block("inside")
    wide = e.resize(index, "i64", signed=signed)
    e.block.end = f"br {outside}, label %{report.label}, label %{following.label}"
    numbers = ", ".join(f"i32 {number}" for number in where)
    report.lines.append(f"call void @{_NOTE}(ptr %tile, {numbers}, {wide})")
    report.end = f"br label %{leave.label}"
    e.block = following
