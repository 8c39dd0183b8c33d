"""Generated text of a spec's mods: a module of functions in Triton, and their early reads.

The text becomes a file, because Triton reads its functions' source.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

from anyflex.plugin import (
    Derivative,
    ModGraph,
    Node,
    Scatter,
    Spec,
    differentiate,
    free_in_child,
    simplify,
)
from anyflex_triton.lowering import (
    ARGUMENTS,
    EARLY,
    LANGUAGE,
    TRITON,
    ModProgram,
    cap_factors,
    dependences,
)
from anyflex_triton.mask_conditions import Bound, Operand, conditions_of

__all__ = [
    "IMPORTED_OPERATIONS",
    "Addition",
    "Sums",
    "captured_additions",
    "is_light",
    "load_module",
    "mask_scores_source",
    "reads_pairs",
    "source_for",
    "write_source",
]

_LOCK = threading.Lock()
free_in_child(sys.modules[__name__], "_LOCK")
_loaded: dict[str, ModuleType] = {}
_FOLDER: list[tempfile.TemporaryDirectory[str]] = []

Sums = Literal["floats", "bounds", "integers"]
"""Numbers that captured tensors' gradients add up: see `backward_call.total_launches`."""

IMPORTED_OPERATIONS = "from anyflex_triton import operations as ops\n"
"""Line of the generated text that imports the functions it calls."""
_HEADER = f"""\
from __future__ import annotations

import triton
import triton.language as {LANGUAGE}

{IMPORTED_OPERATIONS}
WITHIN = {LANGUAGE}.constexpr(False)
COARSE = {LANGUAGE}.constexpr(False)
SHORT = {LANGUAGE}.constexpr(False)
SUMS = {LANGUAGE}.constexpr('floats')
"""
_JIT = "triton.jit"


# The functions

INDICES = ", ".join(ARGUMENTS)
CALL = "tables, ints, floats"
OF_GRADIENTS = f"grad, score, live, {INDICES}, {CALL}"


def function_lines(name: str, arguments: str, lines: Sequence[str], last: str) -> list[str]:
    body = [f"    {line}" for line in (*lines, last)]
    return ["", "", f"@{_JIT}", f"def {name}({arguments}):", *body]


# Early reads

_MOST_EARLY = 4
"""Maximum number of early values, of rows and of columns each: every one keeps a register or two
per row of a tile."""


def _early(nodes: Sequence[Node], output: int) -> dict[str, tuple[int, ...]]:
    """Return the positions of values that depend on a read and on a row alone, ``rows``, which
    need neither kv_idx nor score, or on a column alone, ``columns``, which need kv_idx alone. They
    are maximal: the output, and those that a node of neither kind needs. A row's value that only a
    column's needs isn't read early, like ``perm[h]`` in ``table[perm[h], kv_idx]``."""
    needs = dependences(nodes)
    kinds: list[str] = []
    for node in nodes:
        reads = node.operation == "load" or any(kinds[a] for a in node.arguments)
        of_row, of_column = needs[node] <= {"q_idx"}, needs[node] == {"kv_idx"}
        kinds.append("rows" if reads and of_row else "columns" if reads and of_column else "")
    wanted = {output} | {
        argument
        for position, node in enumerate(nodes)
        if not kinds[position]
        for argument in node.arguments
    }
    return {
        kind: tuple(p for p in sorted(wanted) if kinds[p] == kind)[:_MOST_EARLY]
        for kind in ("rows", "columns")
    }


def reads_pairs(graph: ModGraph) -> bool:
    """Whether a read depends on both row and column, so that it can't be made early."""
    nodes = simplify(graph).nodes
    needs = dependences(nodes)
    return any(node.operation == "load" and len(needs[node]) > 1 for node in nodes)


_FEW_INSTRUCTIONS = frozenset({
    "input", "number", "const", "cast", "detach", "load", "add", "sub", "mul", "truediv", "neg",
    "abs", "minimum", "maximum", "and", "or", "xor", "not", "shl", "shr", "eq", "ne", "lt", "le",
    "gt", "ge", "where",
})  # fmt: skip


def is_light(graph: ModGraph) -> bool:
    """Whether no operation takes many instructions and registers, except for a soft cap's tanh."""
    others = [n.operation for n in simplify(graph).nodes if n.operation not in _FEW_INSTRUCTIONS]
    return others in ([], ["tanh"])


class Addition(NamedTuple):
    """Dependences of the summand that a mod's backward adds to a captured tensor's gradient.

    Args:
        at: those of ``q_idx``, ``kv_idx`` and ``score`` that decide its place.
        of: those of the same and ``grad`` that decide its value.
        is_dense: each pair has a place of its own in a row: see `is_dense`.
    """

    at: frozenset[str]
    of: frozenset[str]
    is_dense: bool

    @property
    def is_by_pair(self) -> bool:
        """Whether query and key together decide the place, or the score does."""
        return "score" in self.at or {"q_idx", "kv_idx"} <= self.at


def captured_additions(spec: Spec) -> tuple[Addition, ...]:
    """Return the summands of ``captured_gradients``; empty where no captured tensor needs a
    gradient."""
    learned = frozenset(i for i, facts in enumerate(spec.captured) if facts.needs_grad)
    if spec.score_graph is None or not learned:
        return ()
    slope = differentiate(simplify(spec.score_graph), wanted_captured=learned)
    needs = dependences(slope.nodes)

    def needed(*positions: int) -> frozenset[str]:
        return frozenset().union(*(needs[slope.nodes[position]] for position in positions))

    return tuple(
        Addition(
            needed(*each.indices), needed(each.value), is_dense(slope.nodes, needs, each.indices)
        )
        for each in slope.scatters
    )


def is_dense(
    nodes: Sequence[Node], needs: Mapping[Node, frozenset[str]], indices: Sequence[int]
) -> bool:
    """Return whether the last of a captured tensor's indices is kv_idx, and the query row decides
    the others."""
    if not indices:
        return False
    *rows, last = (nodes[index] for index in indices)
    of_rows = frozenset[str]().union(*(needs[row] for row in rows))
    return last.operation == "input" and last.attribute == "kv_idx" and of_rows == {"q_idx"}


class EarlyReads(NamedTuple):
    """Early reads of a spec's mods.

    Args:
        functions: the text of ``read_rows`` and ``read_columns``, each where it reads something.
        graphs: name of a mod -> its graph, simplified.
        places: name of a mod -> position of a node -> text of its early value.
    """

    functions: list[str]
    graphs: dict[str, ModGraph]
    places: dict[str, dict[int, str]]


def early_reads(spec: Spec) -> EarlyReads:
    of_spec = {"score_mod": spec.score_graph, "mask_mod": spec.mask_graph}
    graphs = {name: simplify(graph) for name, graph in of_spec.items() if graph is not None}
    found = [_early(graph.nodes, graph.output) for graph in graphs.values()]
    first = count = len(spec.captured)
    lines: list[str] = []
    stand_ins: list[dict[int, str]] = [{} for _ in graphs]
    for kind, index in (("rows", "q_idx"), ("columns", "kv_idx")):
        body: list[str] = []
        given: list[str] = []
        for graph, early, places in zip(graphs.values(), found, stand_ins, strict=True):
            positions = early[kind]
            program = replace(ModProgram.of(spec, graph.nodes, False), lines=body)
            lowered = TRITON.lower(graph.nodes, program, positions)
            for position in positions:
                node = graph.nodes[position]
                places[position] = f"ops.along(tables[{count}], {index})"
                count += 1
                given.append(program.cast(lowered[position], program.type_of(node)))
        if not given:
            continue
        arguments = f"b, h, {index}, {CALL}"
        if kind == "rows":
            # Values of columns may be there already.
            last = f"return tables[:{first}] + ({', '.join(given)},) + tables[{first}:]"
        else:
            last = f"return tables + ({', '.join(given)},)"
        lines += function_lines(f"read_{kind}", arguments, body, last)
    return EarlyReads(lines, graphs, dict(zip(graphs, stand_ins, strict=True)))


def _early_functions(spec: Spec) -> list[str]:
    """Return ``read_rows`` and ``read_columns`` where they read something, and the mods that take
    their values."""
    reads = early_reads(spec)
    lines = reads.functions
    for name, graph in reads.graphs.items() if lines else ():
        given = "score, " if name == "score_mod" else ""
        program = program_of_read(spec, graph, reads.places[name], bool(given))
        lines += mod_function(f"{name}_of_read", program, graph.output, given)
    return lines


def program_of_read(
    spec: Spec, graph: ModGraph, places: Mapping[int, str], scored: bool
) -> ModProgram:
    """Return the program of a mod that takes early values, of `EarlyReads.places`."""
    program = ModProgram.of(spec, graph.nodes, scored and bool(cap_factors(spec)))
    nodes, ranges, needs = list(graph.nodes), dict(program.ranges), dict(program.needs)
    for position, text in places.items():
        node = nodes[position]
        early = nodes[position] = Node(EARLY, node.dtype, (), text)
        needs[early] = needs[node]
        if node in ranges:
            ranges[early] = ranges[node]
    return replace(program, nodes=nodes, ranges=ranges, needs=needs)


def mod_function(name: str, program: ModProgram, output: int | None, given: str = "") -> list[str]:
    """Return the text of a mod.

    Args:
        output: position of its result; None is 0.
        given: arguments before the indices: a score, which has the result's shape, is the last;
            a mask mod has none.
    """
    *lines, last = mod_lines(program, output, bool(given))
    return function_lines(name, f"{given}{INDICES}, {CALL}", lines, last)


def mod_lines(program: ModProgram, output: int | None, scored: bool) -> list[str]:
    """Return the body of a mod's function, of a score mod where `scored`."""
    if output is None:
        value = program.full("0.0", "float32")
    else:
        value = TRITON.lower(program.nodes, program, [output])[output]
    result = f"ops.spread({value}, score)" if scored else program.cast(value, "int1")
    return [*program.lines, f"return {result}"]


def mask_scores_source(spec: Spec) -> str:
    """Return the text of additional functions for a module of `write_source`, for kernels whose
    language selects by several conditions at once; it is empty where there is no mask mod.

    ``mask_scores(scores, full, first, columns, b, h, q_idx, kv_idx, tables, ints, floats)``
        Returns the scores, -inf at dead pairs. ``full``: whether all pairs are live; None where
        that is unknown. ``columns``: 0, 1, ... as [1, N]; ``kv_idx`` is ``columns + first`` for
        pairs that count. The other arguments are those of ``mask_mod``.
    ``mask_scores_of_read``
        The same with the arguments of ``mask_mod_of_read``, where that function exists.
    """
    if spec.mask_graph is None:
        return ""
    reads = early_reads(spec)
    graph, places = reads.graphs["mask_mod"], reads.places["mask_mod"]
    program = ModProgram.of(spec, graph.nodes, False)
    lines = _mask_scores("mask_scores", program, graph.output)
    if reads.functions:
        program = program_of_read(spec, graph, places, False)
        lines += _mask_scores("mask_scores_of_read", program, graph.output)
    return "\n".join([*lines, ""])


def _mask_scores(name: str, program: ModProgram, output: int) -> list[str]:
    # Where a mask reads nothing, `anyflex_cuda` runs steps with dead pairs in a loop of their own,
    # and two selects per score are faster: with one, windows of head dim 64 took 1.09 of the time
    # on an H200, the causal mask 1.10, with head dim 128 0.99 and 1.01.
    found = None
    if any(node.operation == EARLY for node in program.nodes):
        found = conditions_of(program.nodes, output, program.needs, program.ranges)
    if found is None:
        value = TRITON.lower(program.nodes, program, [output])[output]
        last = f"return ops.choose(scores, full, {program.cast(value, 'int1')})"
    else:
        wanted = [p for operand in found.operands for p in operand.positions()]
        values = TRITON.lower(program.nodes, program, wanted)
        operands = ", ".join(_operand(program, values, operand) for operand in found.operands)
        tokens = "; ".join(found.tokens)
        last = f"return ops.choose_by({tokens!r}, scores, full, first, columns, ({operands},))"
    arguments = f"scores, full, first, columns, {INDICES}, {CALL}"
    return function_lines(name, arguments, program.lines, last)


def _operand(program: ModProgram, values: Mapping[int, str], operand: Operand | Bound) -> str:
    if isinstance(operand, Operand):
        return program.cast(values[operand.position], operand.type)
    signed = [(program.cast(values[position], "int32"), f) for position, f in operand.terms]
    if operand.clamped is not None:
        position, factor = operand.clamped
        signed.append((program.emit(f"ops.index_bound({values[position]})", "int32"), factor))
    total = ""
    for value, factor in signed:
        text = f"{total} {'-' if factor < 0 else '+'} {value}"
        total = program.emit(text, "int32") if total or factor < 0 else value
    return total


def _is_grad(derivative: Derivative) -> bool:
    """Whether the derivative is the incoming gradient itself, as for everything that is added to a
    score."""
    if derivative.score is None:
        return False
    node = derivative.nodes[derivative.score]
    return node.operation == "input" and node.attribute == "grad"


def _captured_gradients(spec: Spec, derivative: Derivative) -> list[str]:
    program = ModProgram.of(spec, derivative.nodes, bool(cap_factors(spec)))
    add_scatters(spec, program, derivative.scatters)
    return function_lines("captured_gradients", f"{OF_GRADIENTS}, totals", program.lines, "return")


def add_scatters(spec: Spec, program: ModProgram, scatters: Sequence[Scatter]) -> None:
    """Emit additions to captured tensors' gradients by `operations.accumulate`."""
    learned = learned_tensors(spec)
    wanted = [node for s in scatters for node in (*s.indices, s.value)]
    values = TRITON.lower(program.nodes, program, wanted)
    for scatter in scatters:
        offset = offset_of(program, scatter.captured, scatter.indices, values)
        rank = len(scatter.indices)
        inside = program.nonempty(scatter.captured, rank)
        place = f"{offset or program.full('0', 'int64')}, {inside}"
        name = "accumulate"
        of_pairs = [
            position
            for position in scatter.indices
            if not program.needs[program.nodes[position]].isdisjoint(("q_idx", "kv_idx"))
        ]
        # Where rows or keys have elements of their own, a tile has too many.
        if len(of_pairs) == 1 and _is_bucket(program, of_pairs[0]):
            name, place = (
                "accumulate_buckets",
                f"{place}, {program.narrow(scatter.captured, rank)}",
            )
        program.lines.append(
            f"ops.{name}(totals, {learned.index(scatter.captured)}, {place}, "
            f"{values[scatter.value]}, live, SUMS)"
        )


def _is_bucket(program: ModProgram, position: int) -> bool:
    """Return whether an index by query and key may be the same for many pairs, because it is more
    than a sum of indices."""
    node = program.nodes[position]
    if not program.needs[node] >= {"q_idx", "kv_idx"}:
        return False
    if node.operation not in ("add", "sub", "neg", "cast"):
        return True
    return any(_is_bucket(program, argument) for argument in node.arguments)


def learned_tensors(spec: Spec) -> list[int]:
    """Return the captured tensors that need a gradient, in the order of ``totals``."""
    return [i for i, facts in enumerate(spec.captured) if facts.needs_grad]


def offset_of(
    program: ModProgram, captured: int, indices: Sequence[int], values: Mapping[int, str]
) -> str:
    """Emit the offset, in a contiguous tensor of the first dimensions, of indices of these; return
    "" where there are none.

    Args:
        indices: node positions. values: their values.
    """
    offset = ""
    for axis, position in enumerate(indices):
        size = f"ints[{program.first_size[captured] + axis}]"
        place = program.place(captured, axis, position, values[position])
        if axis == 0:
            offset = program.cast(place, "int64")
        else:
            offset = program.emit(f"ops.next_index({offset}, {size}, {place})", "int64")
    return offset


def source_for(
    source: str, *, within: bool, coarse: bool, short: bool = False, sums: Sums = "floats",
    steady: bool = False, dense: bool = False,
) -> str:  # fmt: skip
    """Return the variant of `write_source`'s text for some calls.

    Args:
        within: each of `direct_reads` stays inside its dimension, and every captured tensor's last
            stride is 1.
        coarse: the sum of `cap_factors` is small, so that tanh may have fewer digits.
        short: q_idx and kv_idx are at most 2^24, so that float32 holds them.
        sums: the numbers that ``captured_gradients`` adds to `totals` (`operations.accumulate`).
        steady, dense: of `pair_reads.pair_reads_source`.
    """
    for name, default, value in (
        ("WITHIN", False, within),
        ("COARSE", False, coarse),
        ("SHORT", False, short),
        ("SUMS", "floats", sums),
        ("STEADY", False, steady),
        ("DENSE", False, dense),
    ):
        line = f"\n{name} = {LANGUAGE}.constexpr("
        source = source.replace(f"{line}{default!r})\n", f"{line}{value!r})\n")
    return source


def write_source(spec: Spec) -> str:
    """Return the text of a module with those of the functions below that `spec` needs; all are
    ``triton.jit``. Shapes are those of a tile of scores: [M, N] or its transpose.

    ``score_mod(score, b, h, q_idx, kv_idx, tables, ints, floats)``
        Returns the new score, float32, of the score's shape.
    ``mask_mod(b, h, q_idx, kv_idx, tables, ints, floats)``
        Returns whether pairs are live, int1, of any shape that broadcasts.
    ``score_mod_backward(grad, score, b, h, q_idx, kv_idx, tables, ints, floats)``
        Returns the gradient of the incoming score, float32, of its shape. Absent where it equals
        ``grad``.
    ``captured_gradients(grad, score, live, b, h, q_idx, kv_idx, tables, ints, floats, totals)``
        Adds the gradients of live pairs to ``totals``, a contiguous accumulator for each captured
        tensor that needs a gradient, by atomic additions. ``live`` is int1 of the score's shape.
        `source_for` makes functions that add in other ways.

    ``read_rows(b, h, q_idx, tables, ints, floats)``, ``read_columns(b, h, kv_idx, ...)``
        Return ``tables`` with early values appended: those that a row or a column alone decides.
        Each takes the tables that the other returned, in either order; ``b`` and ``h`` are
        scalars. The side that a loop steps over is [N], so that each value is read once. A
        function without reads is absent. ``score_mod_of_read`` and ``mask_mod_of_read`` take these
        tables and make the other reads.

    ``b``, ``h``: scalars or tensors; ``q_idx``, ``kv_idx``: int32 tensors; all broadcast with the
    score. ``tables``: pointers to the captured tensors, bool as int8. ``ints``: sizes, then
    strides, of each captured tensor; then the call's ints. ``floats``: the call's floats.
    """
    lines = _HEADER.splitlines()
    if spec.score_graph is not None:
        graph = simplify(spec.score_graph)
        program = ModProgram.of(spec, graph.nodes, bool(cap_factors(spec)))
        lines += mod_function("score_mod", program, graph.output, "score, ")
        learned = frozenset(i for i, facts in enumerate(spec.captured) if facts.needs_grad)
        if spec.needs_backward:
            slope = differentiate(graph, wanted_captured=learned)
        if spec.needs_backward and not _is_grad(slope):
            program = ModProgram.of(spec, slope.nodes, bool(cap_factors(spec)))
            lines += mod_function("score_mod_backward", program, slope.score, "grad, score, ")
        if learned:
            lines += _captured_gradients(spec, slope)
    if spec.mask_graph is not None:
        graph = simplify(spec.mask_graph)
        program = ModProgram.of(spec, graph.nodes, False)
        lines += mod_function("mask_mod", program, graph.output)
    lines += _early_functions(spec)
    return "\n".join([*lines, ""])


def load_module(text: str) -> ModuleType:
    """Return the module whose source is `text`; equal texts give one object.

    Its file lies in a temporary folder of this process; the text itself is an artifact of the
    spec.
    """
    name = "anyflex_triton_mods_" + hashlib.sha256(text.encode()).hexdigest()[:24]
    with _LOCK:
        found = _loaded.get(name)
        if found is not None:
            return found
        path = _folder() / f"{name}.py"
        # Written to another name and renamed: a forked child shares the folder with its parent,
        # who may be reading.
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(text)
        beside.replace(path)
        loader = importlib.util.spec_from_file_location(name, path)
        assert loader is not None and loader.loader is not None
        module = importlib.util.module_from_spec(loader)
        # Triton looks a function's module up by name.
        sys.modules[name] = module
        try:
            loader.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        # Registered when it is complete; a child forked before makes it anew.
        _loaded[name] = module
        return module


def _folder() -> Path:
    # A forked child must not remove its parent's folder.
    if not _FOLDER or not os.path.isdir(_FOLDER[0].name):
        _FOLDER[:] = [tempfile.TemporaryDirectory(prefix="anyflex-triton-")]
    return Path(_FOLDER[0].name)
