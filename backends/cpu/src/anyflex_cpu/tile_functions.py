"""The three kinds of program: a mask's live bits, a score mod in place, a score mod's gradient.

Each is added to a module under a name, and returns the bytes of scratch memory that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anyflex.plugin import Derivative, ModGraph
from anyflex_cpu.index_ranges import Limits
from anyflex_cpu.llvm_text import FLOATS, Module, Value
from anyflex_cpu.node_ir import Fact
from anyflex_cpu.scatter_ir import Scatters
from anyflex_cpu.tile_program import TileLoops

__all__ = ["add_mask", "add_score", "add_score_backward"]


def _result(loops: TileLoops, position: int, dtype: torch.dtype) -> Value:
    """A node's value for the lanes of `pair`, as float."""
    e = loops.pair
    loops.lowering.emitter = e
    value = loops.lowering.operand(position)
    if value.type == "double":
        return e.convert("fptrunc", value, "float")
    if value.type == "i1":
        return e.convert("uitofp", value, "float")
    if value.type not in FLOATS:
        return e.convert("uitofp" if dtype is torch.uint8 else "sitofp", value, "float")
    return value


def _float_row(loops: TileLoops, member: str) -> str:
    """Address of 16 floats of the row of a tile's matrix, in the innermost block."""
    stride = loops.field("ld", "i64")
    row = loops.row_address(loops.field(member, "ptr").text, stride, "float")
    return loops.lane.address(row, "float", loops.column)


def _word_place(loops: TileLoops, row: str) -> str:
    lane = loops.lane
    return lane.address(row, "i16", lane.op("lshr", loops.column, lane.constant("i64", 4)))


def add_mask(
    module: Module, name: str, graph: ModGraph, facts: Sequence[Fact], limits: Limits
) -> int:
    """Add a mask program: it writes all words of a row."""
    loops = TileLoops(module, name, graph.nodes, [graph.output], facts, limits, checks=True)
    row = loops.row_address(loops.field("live", "ptr").text, loops.field("live_ld", "i64"), "i16")
    loops.lower_pairs()
    loops.lowering.emitter = loops.pair
    live = loops.lowering.operand(graph.output)
    if live.type != "i1":
        live = loops.pair.compare("ne", live, loops.pair.constant(live.type, 0))
    word = loops.pair.word(loops.pair.op("and", live, loops.valid))
    loops.lane.store(word, _word_place(loops, row), 2)
    _close(loops, graph)
    return loops.scratch_bytes


def add_score(
    module: Module, name: str, graph: ModGraph, facts: Sequence[Fact], limits: Limits
) -> int:
    """Add a score program: it replaces the scores."""
    loops = TileLoops(module, name, graph.nodes, [graph.output], facts, limits, checks=True)
    place = _float_row(loops, "score")
    if "score" in graph.inputs():
        loops.lowering.score = loops.pair.load(place, "float", 64)
    loops.lower_pairs()
    loops.pair.store(_result(loops, graph.output, graph.dtype), place, 64)
    _close(loops, graph)
    return loops.scratch_bytes


def _close(loops: TileLoops, graph: ModGraph) -> None:
    """Finish a program whose reads outside the library finds, in the program's bytecode."""
    indices = {
        argument for node in graph.nodes if node.operation == "load" for argument in node.arguments
    }
    # Scores that indices depend on are overwritten later.
    early = bool(indices & loops.stages.reads_score)
    if early:
        loops.entry.lines.append(loops.search)
    loops.close(search=not early)


def add_score_backward(
    module: Module, name: str, derivative: Derivative, facts: Sequence[Fact], limits: Limits
) -> int:
    """Add the program of a score mod's derivative: it replaces the gradient, and adds to the
    captured tensors' gradients. It notes no read outside, because forward has."""
    nodes = derivative.nodes
    loops = TileLoops(module, name, nodes, derivative.roots, facts, limits, checks=False)
    lane, pair = loops.lane, loops.pair
    word = lane.load(_word_place(loops, loops.live_row()), "i16", 2)
    live = pair.op("and", pair.from_word(word), loops.valid)
    place = _float_row(loops, "grad")
    zero = pair.constant("float", 0.0)
    # A dead pair's gradient is 0 whatever its memory holds.
    loops.lowering.grad = pair.select(live, pair.load(place, "float", 64), zero)
    if not loops.stages.reads_score.isdisjoint(loops.stages.needed):
        loops.lowering.score = pair.load(_float_row(loops, "score"), "float", 64)
    loops.lower_pairs()
    result = zero
    if derivative.score is not None:
        passed = _result(loops, derivative.score, nodes[derivative.score].dtype)
        result = pair.select(live, passed, zero)
    pair.store(result, place, 64)
    scatters = Scatters(loops, live)
    for scatter in derivative.scatters:
        scatters.add(scatter)
    loops.close()
    return loops.scratch_bytes
