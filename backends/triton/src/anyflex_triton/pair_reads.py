"""Reads of captured tensors by query and key that needn't be made pair by pair.

A value that a score mod reads by query and key may depend on the pair in one of four ways that a
kernel with steps of keys can use:

* ``distances``, on ``kv_idx - q_idx`` alone, as T5's table does: a step reads each distance once;
* ``chunks``, on the row and ``kv_idx // n``, as the height of SAM's decomposed positions: a step
  reads an element or a few per row;
* ``periods``, on the row and ``kv_idx % n``, as their width: a tile of rows reads them once, for
  all of its steps;
* ``dense``, on the row and ``kv_idx``, which is the last index of the read: a step reads its part
  of each row in words of 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from anyflex.plugin import ModGraph, Node, Spec, differentiate, simplify
from anyflex_triton.lowering import (
    LANGUAGE,
    TRITON,
    ModProgram,
    cap_factors,
    dependences,
    moved_pointer,
)
from anyflex_triton.mods import (
    CALL,
    INDICES,
    OF_GRADIENTS,
    EarlyReads,
    add_scatters,
    early_reads,
    function_lines,
    is_dense,
    learned_tensors,
    mod_lines,
    offset_of,
    program_of_read,
)

__all__ = ["dense_tables", "pair_kinds", "pair_reads_source"]

_MOST = 2
"""Maximum number of values of each kind: a period's keeps 16 or 32 registers of a thread."""
_MOST_DENSE = 4
"""Maximum number of bytes of a pair's dense values, which a thread keeps for 64 pairs."""
_WIDEST = 128
"""Maximum number of keys of a step."""
_SHORTEST_CHUNK = 32
_LONGEST_PERIOD = 64
"""Every step's keys are whole periods."""

_KEPT = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


class _Pairs(NamedTuple):
    """How a value depends on pairs.

    Args:
        drift: by how much the value grows where q_idx and kv_idx both grow by 1; None: unknown.
        grain: number of keys, from a multiple of it on, for which the value is the same.
        period: number of keys after which the value repeats; infinite where it needn't.
    """

    drift: int | None
    grain: float
    period: float


def _power_of_2(node: Node) -> int | None:
    """Return an integer constant that is a positive power of 2, else None."""
    if node.operation != "const" or node.dtype.is_floating_point:
        return None
    value = int(node.value)
    return value if value > 0 and value & (value - 1) == 0 else None


def _pairs(nodes: Sequence[Node]) -> list[_Pairs]:
    found: list[_Pairs] = []
    for node in nodes:
        of = [found[argument] for argument in node.arguments]
        drift = _drift(nodes, node, of)
        if node.operation == "input":
            of_key = node.attribute == "kv_idx"
            found.append(_Pairs(drift, 1 if of_key else math.inf, math.inf if of_key else 1))
            continue
        grain = min((each.grain for each in of), default=math.inf)
        period = max((each.period for each in of), default=1)
        operands = [nodes[argument] for argument in node.arguments]
        if len(operands) == 2 and operands[0].attribute == "kv_idx":
            # Only kv_idx itself is taken apart.
            number = _power_of_2(operands[1])
            if node.operation == "floordiv" and number:
                grain = number
            elif node.operation == "mod" and number:
                period = number
        found.append(_Pairs(drift, grain, period))
    return found


def _drift(nodes: Sequence[Node], node: Node, of: Sequence[_Pairs]) -> int | None:
    drifts = [each.drift for each in of]
    if node.operation == "input":
        return int(node.attribute in ("q_idx", "kv_idx"))
    if not any(each != 0 for each in drifts):
        return 0
    if node.dtype.is_floating_point or None in drifts:
        return None
    known = [each for each in drifts if each is not None]
    if node.operation == "add":
        return known[0] + known[1]
    if node.operation == "sub":
        return known[0] - known[1]
    if node.operation == "neg":
        return -known[0]
    return None


def _kind(node: Node, needs: frozenset[str], pairs: _Pairs) -> str:
    if needs != {"q_idx", "kv_idx"} or not node.dtype.is_floating_point or node.dtype.itemsize > 4:
        return ""
    if pairs.drift == 0:
        return "distances"
    if pairs.grain >= _SHORTEST_CHUNK:
        return "chunks"
    return "periods" if pairs.period <= _LONGEST_PERIOD else ""


def _is_dense_read(
    nodes: Sequence[Node], node: Node, needs: Mapping[Node, frozenset[str]]
) -> bool:  # fmt: skip
    if node.operation != "load" or not node.dtype.is_floating_point:
        return False
    return node.dtype.itemsize in (2, 4) and is_dense(nodes, needs, node.arguments)


class _Value(NamedTuple):
    """A value that is read so.

    Args:
        kind: of the module's docstring.
        position: of its node.
        keys: of a chunk or period; 0 for the other kinds.
    """

    kind: str
    position: int
    keys: int

    @property
    def name(self) -> str:
        """Name of the function that reads it."""
        return f"read_{self.kind}_{self.position}"

    @property
    def flag(self) -> str:
        """Constant of the module without which the value is left to pairs, or ""."""
        return {"distances": "", "dense": "DENSE"}.get(self.kind, "STEADY")


def _values(nodes: Sequence[Node], output: int | None) -> list[_Value]:
    """Return the largest values that depend on a read by query and key, and on pairs in one of the
    ways."""
    needs, pairs = dependences(nodes), _pairs(nodes)
    kinds: list[str] = []
    reads: list[bool] = []
    for node, each in zip(nodes, pairs, strict=True):
        by_pair = node.operation == "load" and needs[node] >= {"q_idx", "kv_idx"}
        reads.append(by_pair or any(reads[a] for a in node.arguments))
        kind = _kind(node, needs[node], each) if reads[-1] else ""
        if not kind and _is_dense_read(nodes, node, needs):
            kind = "dense"
        kinds.append(kind)
    wanted = {output} | {
        argument
        for position, node in enumerate(nodes)
        for argument in node.arguments
        if kinds[argument] != kinds[position]
    }
    found: list[_Value] = []
    held = 0
    for position, kind in enumerate(kinds):
        same = sum(value.kind == kind for value in found)
        if not kind or position not in wanted or same == _MOST:
            continue
        if kind == "dense":
            held += nodes[position].dtype.itemsize
            if held > _MOST_DENSE:
                continue
        node, of = nodes[position], pairs[position]
        keys = {"chunks": of.grain, "periods": max(of.period, 8)}.get(kind, 0)
        if node.operation == "cast" and nodes[node.arguments[0]].dtype in _KEPT:
            # A value of 16 bits takes less room.
            position = node.arguments[0]
        value = _Value(kind, position, int(min(keys, _WIDEST)))
        if value not in found:
            found.append(value)
    return found


def pair_kinds(spec: Spec) -> list[str]:
    """Return the kinds of the values that `pair_reads_source` reads."""
    if spec.score_graph is None:
        return []
    graph = simplify(spec.score_graph)
    return [value.kind for value in _values(graph.nodes, graph.output)]


def dense_tables(spec: Spec) -> list[int]:
    """Return the captured tensors of the ``dense`` values that `pair_reads_source` reads."""
    if spec.score_graph is None:
        return []
    graph = simplify(spec.score_graph)
    return [
        int(str(graph.nodes[value.position].attribute))
        for value in _values(graph.nodes, graph.output)
        if value.kind == "dense"
    ]


def pair_reads_source(spec: Spec) -> str:
    """Return the text of additional functions for a module of `write_source`, for kernels whose
    language has layouts; it is empty where the score mod has no such values.

    ``read_tile(b, h, q_idx, tables, ints, floats)``
        Returns a tuple, the values of ``periods``.
    ``read_step(b, h, q_idx, first_q, first_kv, read, tables, ints, floats, BLOCK_N)``
        Returns ``tables``, from `read_rows` and `read_columns`, with the values of a step of
        BLOCK_N keys appended. ``first_q``, ``first_kv``: the tile's first row and the step's first
        key, as mods see them. ``read``: the result of ``read_tile``.
    ``score_mod_of_pairs``
        ``score_mod`` with such tables.
    ``read_dense(b, h, q_idx, first_kv, tables, ints, floats, BLOCK_N)``
        Returns ``tables`` with the ``dense`` values of BLOCK_N keys appended that have 16 bits,
        for scores of the shape [BLOCK_N, M] where q_idx is [1, M]. Absent where there are no
        dense values, or no gradients.
    ``score_mod_of_dense``
        ``score_mod`` with the tables of ``read_dense``.
    ``captured_gradients_of_dense(..., totals, first_kv, BLOCK_N)``
        ``captured_gradients`` for such scores, which adds dense values' gradients by words. Absent
        where no captured tensor needs a gradient.

    STEADY (`source_for`): each step begins at a multiple of BLOCK_N, for mods too, and has BLOCK_N
    keys. Else ``chunks`` and ``periods`` aren't read so. DENSE: words of 16 bytes can be read from
    the `dense_tables`. Else ``dense`` values aren't read so.
    """
    if spec.score_graph is None:
        return ""
    reads = early_reads(spec)
    graph = reads.graphs["score_mod"]
    values = _values(graph.nodes, graph.output)
    if not values:
        return ""
    lines = ["", "", *(f"{flag} = {LANGUAGE}.constexpr(False)" for flag in ("STEADY", "DENSE"))]
    for value in values:
        program = ModProgram.of(spec, graph.nodes, False)
        if value.kind == "dense":
            lines += _read_dense(value, program)
            continue
        found = TRITON.lower(graph.nodes, program, [value.position])[value.position]
        kept = _KEPT.get(graph.nodes[value.position].dtype, "float32")
        last = f"return {program.cast(found, kept)}"
        lines += function_lines(value.name, f"{INDICES}, {CALL}", program.lines, last)
    first = len(spec.captured) + sum(map(len, reads.places.values()))
    of_step = f"b, h, q_idx, first_q, first_kv, read, {CALL}, BLOCK_N: {LANGUAGE}.constexpr"
    of_pairs = partial(_score_mod, spec, reads, first)
    for name, arguments, body in (
        ("read_tile", f"b, h, q_idx, {CALL}", _read_tile),
        ("read_step", of_step, _read_step),
        ("score_mod_of_pairs", f"score, {INDICES}, {CALL}", of_pairs),
    ):
        *before, last = _by_flags(body, values, ("STEADY", "DENSE"))
        lines += function_lines(name, arguments, before, last)
    dense = [value for value in values if value.kind == "dense"]
    if dense and spec.needs_backward:
        # Pair by pair, values of 32 bits fill the sectors that are loaded for transposed scores.
        # With words backward took 1.03 of the time on an H200, and 1.19 with head dim 128.
        some = [v for v in dense if graph.nodes[v.position].dtype.itemsize == 2]
        of_dense = partial(
            _score_mod, spec, EarlyReads([], reads.graphs, {"score_mod": {}}), len(spec.captured)
        )
        for name, arguments, body in (
            (
                "read_dense",
                f"b, h, q_idx, first_kv, {CALL}, BLOCK_N: {LANGUAGE}.constexpr",
                _read_dense_step,
            ),
            ("score_mod_of_dense", f"score, {INDICES}, {CALL}", of_dense),
        ):
            *before, last = _by_flags(body, some, ("DENSE",))
            lines += function_lines(name, arguments, before, last)
        if learned_tensors(spec):
            lines += _dense_gradients(spec, graph)
    return "\n".join([*lines, ""])


def _by_flags(
    body: Callable[[Sequence[_Value]], list[str]], values: Sequence[_Value], flags: Sequence[str]
) -> list[str]:
    """Return the lines of a body, which has other values where flags aren't set."""
    if not flags:
        return body(values)
    flag, *others = flags
    given = _by_flags(body, values, others)
    missing = _by_flags(body, [value for value in values if value.flag != flag], others)
    if given == missing:
        return given
    given, missing = ([f"    {line}" for line in lines] for lines in (given, missing))
    return [f"if {flag}:", *given, "else:", *missing]


def _read_dense(value: _Value, program: ModProgram) -> list[str]:
    """Return the function that reads a step's part of each row."""
    node = program.nodes[value.position]
    *rows, _ = node.arguments
    assert isinstance(node.attribute, int)
    found = TRITON.lower(program.nodes, program, rows)
    pointers = moved_pointer(program, node, [found[row] for row in rows])
    length = f"ints[{program.first_size[node.attribute] + len(rows)}]"
    size = node.dtype.itemsize
    return function_lines(
        value.name,
        f"b, h, q_idx, first_kv, {CALL}, BLOCK_N: {LANGUAGE}.constexpr",
        [f"q_idx = ops.dense_rows(q_idx, {size}, BLOCK_N)", *program.lines],
        f"return ops.load_dense({pointers}, first_kv, {length}, {size}, BLOCK_N, STEADY)",
    )


def _dense_gradients(spec: Spec, graph: ModGraph) -> list[str]:
    """Return ``captured_gradients_of_dense``."""
    learned = learned_tensors(spec)
    slope = differentiate(graph, wanted_captured=frozenset(learned))
    program = ModProgram.of(spec, slope.nodes, bool(cap_factors(spec)))
    # Calls with other rows than whole words are told by these tensors.
    checked = dense_tables(spec)
    dense = [
        scatter
        for scatter in slope.scatters
        if scatter.captured in checked and is_dense(slope.nodes, program.needs, scatter.indices)
    ]
    values = TRITON.lower(slope.nodes, program, [scatter.value for scatter in dense])
    lines: list[str] = []
    for number, scatter in enumerate(dense):
        *rows, _ = scatter.indices
        of_rows = replace(program, lines=[], types={})
        found = TRITON.lower(slope.nodes, of_rows, rows)
        offset = offset_of(of_rows, scatter.captured, rows, found)
        length = f"ints[{program.first_size[scatter.captured] + len(rows)}]"
        lines += function_lines(
            f"rows_of_dense_{number}",
            f"b, h, q_idx, {CALL}, BLOCK_N: {LANGUAGE}.constexpr",
            ["q_idx = ops.dense_rows(q_idx, 4, BLOCK_N)", *of_rows.lines],
            f"return ops.next_index({offset}, {length}, 0)",
        )
        place = f"rows_of_dense_{number}(b, h, q_idx, {CALL}, BLOCK_N)"
        total = f"totals[{learned.index(scatter.captured)}]"
        added = f"{total} + {place}, first_kv, {length}, {values[scatter.value]}, live, BLOCK_N"
        program.lines.append(f"ops.add_dense({added})")
    add_scatters(spec, program, [scatter for scatter in slope.scatters if scatter not in dense])
    pairs = f"captured_gradients({OF_GRADIENTS}, totals)"
    body = ["if DENSE:", *(f"    {line}" for line in program.lines), "else:", f"    {pairs}"]
    arguments = f"{OF_GRADIENTS}, totals, first_kv, BLOCK_N: {LANGUAGE}.constexpr"
    return [*lines, *function_lines("captured_gradients_of_dense", arguments, body, "return")]


def _read_dense_step(values: Sequence[_Value]) -> list[str]:
    read = "".join(f"{v.name}(b, h, q_idx, first_kv, {CALL}, BLOCK_N), " for v in values)
    return [f"return tables + ({read})" if read else "return tables"]


def _read_tile(values: Sequence[_Value]) -> list[str]:
    read = ""
    for value in values:
        if value.kind == "periods":
            rows, keys = f"ops.rows_of(q_idx, {value.keys})", f"ops.keys_of({value.keys})"
            read += f"{value.name}(b, h, {rows}, {keys}, {CALL}), "
    return [f"return ({read})" if read else "return tables[:0]"]


def _read_step(values: Sequence[_Value]) -> list[str]:
    read = ""
    for value in values:
        if value.kind == "distances":
            keys = "ops.distant_keys(first_kv, BLOCK_N)"
            read += f"{value.name}(b, h, first_q, {keys}, {CALL}), "
        elif value.kind == "chunks":
            for begin in range(0, _WIDEST, value.keys):
                key = f"ops.key_beside(q_idx, first_kv + {begin})"
                read += f"{value.name}(b, h, q_idx, {key}, {CALL}), "
        elif value.kind == "dense":
            read += f"{value.name}(b, h, q_idx, first_kv, {CALL}, BLOCK_N), "
    return [f"return tables + ({read}) + read" if read else "return tables + read"]


def _score_mod(spec: Spec, reads: EarlyReads, first: int, values: Sequence[_Value]) -> list[str]:
    """Return the body of ``score_mod_of_pairs``; `first` is the number of other tables."""
    graph = reads.graphs["score_mod"]
    places = dict(reads.places["score_mod"])
    for value in values:
        if value.kind == "distances":
            places[value.position] = f"ops.along_distances(tables[{first}], score)"
            first += 1
        elif value.kind == "chunks":
            last = first + _WIDEST // value.keys
            read = ", ".join(f"tables[{i}]" for i in range(first, last))
            places[value.position] = f"ops.along_chunks(({read},), {value.keys}, score)"
            first = last
        elif value.kind == "dense":
            places[value.position] = f"ops.along_dense(tables[{first}], score)"
            first += 1
    for value in values:
        if value.kind == "periods":
            places[value.position] = f"ops.along_periods(tables[{first}], score)"
            first += 1
    program = program_of_read(spec, graph, places, bool(cap_factors(spec)))
    return mod_lines(program, graph.output, scored=True)
