"""Mods as source text, which CuTe's compiler traces: the table, and the functions around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from anyflex.plugin import (
    DTYPES,
    FULL,
    PARTIAL,
    Call,
    Lowering,
    Node,
    Spec,
    differentiate,
    simplify,
)
from anyflex_flash4.block_lists import fits_tiles

__all__ = [
    "FLASH4",
    "call_numbers",
    "load_source",
    "reads_call",
    "table_count",
    "write_source",
]


@dataclass
class _Program:
    """The lines of one function, and the positions of sizes and closed-over numbers in
    ``ints``."""

    first_size: tuple[int, ...]
    first_number: int
    lines: list[str] = field(default_factory=list)


def _emit(program: _Program, node: Node, text: str) -> str:
    name = f"v{len(program.lines)}"
    program.lines.append(f"{name} = {text}")
    return name


_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def _converter(dtype: torch.dtype) -> str:
    return f"ops.{_NAMES[dtype]}"


def _const(program: _Program, node: Node, operands: Sequence[str]) -> str:
    return _emit(program, node, f"{_converter(node.dtype)}({node.value!r})")


def _number(program: _Program, node: Node, operands: Sequence[str]) -> str:
    slot = str(node.attribute)
    position = int(slot[1:])
    if slot[0] == "i":
        low = program.first_number + 2 * position
        text = f"ops.wide(ints[{low}], ints[{low + 1}])"
    else:
        text = f"floats[{position}]"
    return _emit(program, node, f"{_converter(node.dtype)}({text})")


def _load(program: _Program, node: Node, operands: Sequence[str]) -> str:
    """-N..-1 counts from the end; then the index is clamped: nothing outside is read."""
    position = node.attribute
    assert isinstance(position, int)
    place = "ops.i64(0)"
    for axis, operand in enumerate(operands):
        size = f"ints[{program.first_size[position] + axis}]"
        inner = _emit(program, node, f"ops.place({operand}, {size})")
        if axis == 0:
            place = inner
        else:
            place = _emit(program, node, f"{place} * ops.i64({size}) + {inner}")
    return _emit(program, node, f"{_converter(node.dtype)}(tables[{position}][{place}])")


def _typed(call: str) -> Callable[[_Program, Node, Sequence[str]], str]:
    """A rule whose function is told the type, and the number of bits if it wants it."""

    def rule(program: _Program, node: Node, operands: Sequence[str]) -> str:
        bits = 0 if node.dtype.is_floating_point else torch.iinfo(node.dtype).bits
        text = call.format(*operands, type=_converter(node.dtype), bits=bits)
        return _emit(program, node, f"{_converter(node.dtype)}({text})")

    return rule


_ORDER = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}


_FUNCTIONS = (
    "floor ceil round trunc exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos "
    "atan sinh cosh tanh asinh acosh atanh erf erfc"
).split()

FLASH4: Lowering[_Program, str] = Lowering(
    "FlashAttention-4",
    {
        **{name: f"{{type}}(ops.call({name!r}, {{0}}))" for name in _FUNCTIONS},
        "input": "{type}({attribute})",
        "number": _number,
        "const": _const,
        "load": _load,
        "add": "{type}({0} + {1})",
        "sub": "{type}({0} - {1})",
        "mul": "{type}({0} * {1})",
        "truediv": "{type}({0} / {1})",
        "floordiv:int": _typed("ops.floordiv({type}, {0}, {1})"),
        "floordiv:float": _typed("ops.floor_divide({type}, {0}, {1})"),
        "mod:int": _typed("ops.mod({type}, {0}, {1})"),
        "mod:float": _typed("ops.remainder({type}, {0}, {1})"),
        "fmod:int": _typed("ops.fmod({type}, {0}, {1})"),
        "fmod:float": "{type}(ops.call('fmod', {0}, {1}))",
        "pow:int": _typed("ops.integer_power({type}, {bits}, {0}, {1})"),
        "pow:float": "{type}(ops.call('pow', {0}, {1}))",
        "atan2": "{type}(ops.call('atan2', {0}, {1}))",
        "minimum": "{type}(ops.minimum({0}, {1}))",
        "maximum": "{type}(ops.maximum({0}, {1}))",
        "neg": "{type}(-{0})",
        "abs": _typed("ops.magnitude({type}, {0})"),
        "sign": _typed("ops.sign({type}, {0})"),
        "sigmoid": _typed("ops.sigmoid({type}, {0})"),
        "and": "{type}({0} & {1})",
        "or": "{type}({0} | {1})",
        "xor": "{type}({0} ^ {1})",
        "not:bool": "ops.inverted({0})",
        "not:int": "{type}({0} ^ {type}(-1))",
        "shl": _typed("ops.shifted_left({type}, {bits}, {0}, {1})"),
        "shr": _typed("ops.shifted_right({type}, {bits}, {0}, {1})"),
        "eq": "{0} == {1}",
        "ne": "{0} != {1}",
        # To a signed type of one bit True is -1.
        **{
            f"{name}:bool": f"ops.i32({{0}}) {sign} ops.i32({{1}})"
            for name, sign in _ORDER.items()
        },
        **{name: f"{{0}} {sign} {{1}}" for name, sign in _ORDER.items()},
        "where": "ops.select({0}, {1}, {2})",
        "cast": "{type}({0})",
        "detach": "{type}({0})",
    },
    emit=_emit,
    types={dtype: f"ops.{name}" for name, dtype in DTYPES.items()},
)

_INDICES = "b, h, q_idx, kv_idx"


def _asks_structure(spec: Spec) -> bool:
    """Whether the mask function has to read the mask's own blocks, because kernels walk over other
    ones."""
    return spec.mask_kind == "runs" and not fits_tiles(spec.block_size)


def _layout(spec: Spec) -> tuple[tuple[int, ...], int]:
    """Positions in ``ints`` where each captured tensor's sizes begin, and where the numbers do."""
    first, places = 4 if _asks_structure(spec) else 0, []
    for facts in spec.captured:
        places.append(first)
        first += facts.rank
    return tuple(places), first


def _function_lines(
    spec: Spec, name: str, arguments: str, nodes: Sequence[Node], result: int | None
) -> list[str]:
    program = _Program(*_layout(spec))
    # None: a score mod that ignores the score.
    value = "ops.f32(0.0)"
    if result is not None:
        value = FLASH4.lower(nodes, program, [result])[result]
    body = [f"    {line}" for line in (*program.lines, f"return {value}")]
    return ["", "", f"def {name}(ops, tables, ints, floats, {arguments}):", *body]


def _structure_lines(spec: Spec) -> list[str]:
    """A mask function that reads the mask's own blocks first: structure wins."""
    places = []
    for axis, (index, size) in enumerate(zip(("q_idx", "kv_idx"), spec.block_size, strict=True)):
        # Indices aren't negative, so neither the shift nor the division rounds in another way.
        power = size.bit_length() - 1
        by = f">> ops.i32({power})" if size == 1 << power else f"// ops.i32({size})"
        places.append(f"ops.place(ops.i32({index}) {by}, ints[{2 + axis}])")
    lines = [
        f"row = {places[0]}",
        f"column = {places[1]}",
        "place = ops.i64(b) * ops.i64(ints[0]) + ops.i64(h) * ops.i64(ints[1])",
        f"kind = ops.i32(tables[{len(spec.captured)}][place + row * ops.i64(ints[3]) + column])",
    ]
    if spec.mask_graph is None:
        lines.append("return kind != ops.i32(0)")
    else:
        lines += [
            f"kept = within_mask(ops, tables, ints, floats, {_INDICES})",
            f"return (kind == ops.i32({FULL})) | ((kind == ops.i32({PARTIAL})) & kept)",
        ]
    body = [f"    {line}" for line in lines]
    return ["", "", f"def mask_mod(ops, tables, ints, floats, {_INDICES}):", *body]


def write_source(spec: Spec) -> str:
    """Return the text of a module with the functions that `spec` needs, of ``score_mod``,
    ``score_mod_bwd`` and ``mask_mod``.

    Each takes ``ops``, an `anyflex_flash4.operations.Operations`, ``tables``, ``ints`` and
    ``floats`` (see `call_numbers`), and the scalars that its name says.
    """
    lines = ["from math import inf, nan"]
    if spec.score_graph is not None:
        graph = simplify(spec.score_graph)
        arguments = f"score, {_INDICES}"
        lines += _function_lines(spec, "score_mod", arguments, graph.nodes, graph.output)
        if spec.needs_backward:
            slope = differentiate(graph, wanted_captured=frozenset())
            arguments = f"grad, {arguments}"
            lines += _function_lines(spec, "score_mod_bwd", arguments, slope.nodes, slope.score)
    if spec.mask_graph is not None:
        graph = simplify(spec.mask_graph)
        name = "within_mask" if _asks_structure(spec) else "mask_mod"
        lines += _function_lines(spec, name, _INDICES, graph.nodes, graph.output)
    if _asks_structure(spec):
        lines += _structure_lines(spec)
    return "\n".join([*lines, ""])


def load_source(text: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of `write_source` by name."""
    functions: dict[str, Any] = {}
    exec(compile(text, "<mods>", "exec"), functions)
    names = ("score_mod", "score_mod_bwd", "mask_mod")
    return {name: functions[name] for name in names if name in functions}


def reads_call(spec: Spec) -> tuple[bool, bool]:
    """Whether the mods read anything of a call's ints, sizes included, and of its floats."""
    slots = {
        str(node.attribute)[0]
        for graph in (spec.score_graph, spec.mask_graph)
        for node in (graph.nodes if graph is not None else ())
        if node.operation == "number"
    }
    return bool(_layout(spec)[1]) or "i" in slots, "f" in slots


def table_count(spec: Spec) -> int:
    """How many ``tables`` the functions read: captured tensors, and the mask's own blocks."""
    return len(spec.captured) + _asks_structure(spec)


def call_numbers(
    call: Call, structure: Sequence[int] = ()
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return ``ints``, the sizes of captured tensors and the low and high halves of the call's
    ints, and ``floats``. All fit 32 bits.

    Args:
        structure: of `anyflex_flash4.block_lists.kinds_of`, where the mask function asks it.
    """
    ints = [*structure, *(size for table in call.captured for size in table.shape)]
    for number in call.ints:
        low = number & 0xFFFFFFFF
        ints += [low - (1 << 32) if low >> 31 else low, number >> 32]
    return tuple(ints), call.floats
