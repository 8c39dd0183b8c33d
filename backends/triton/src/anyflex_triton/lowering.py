"""Lowering table: a mod graph's operations as lines of Triton, and the facts that its rules use.

A value is held in its node's type, with two exceptions: float16 and bfloat16 are float32 that is
rounded after each operation, and an int64 that provably fits is int32 (`_ranges`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from anyflex.plugin import IntegerRange, Lowering, Node, Spec, integer_ranges, simplify

__all__ = [
    "ARGUMENTS",
    "EARLY",
    "LANGUAGE",
    "TRITON",
    "DirectRead",
    "ModProgram",
    "cap_factors",
    "dependences",
    "direct_reads",
    "moved_pointer",
]

LONGEST = {32: 1 << 27, 64: (1 << 31) - (1 << 10)}
"""Bound of a call's lengths by ``Spec.index_width``; mods see up to 2^10 more, of padding."""

MOST_HEADS = 1 << 20
"""Bound of a call's batch and heads."""

LANGUAGE = "tl"
"""Name of the language's module in the generated text, as in ``tl.where``."""

ARGUMENTS = ("b", "h", "q_idx", "kv_idx")
"""Arguments of a mod beside a score."""

_TYPES = {
    torch.bool: "int1",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float32",
    torch.bfloat16: "float32",
    torch.float32: "float32",
    torch.float64: "float64",
}
"""Language type that holds a value of each dtype."""

_ROUNDINGS = {torch.float16: "ops.float16", torch.bfloat16: "ops.bfloat16"}
_EXACT = frozenset("neg abs minimum maximum where sign floor ceil round trunc detach".split())
"""Operations whose results have the operands' type without rounding."""

_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


# Ranges: which int64 values fit int32


def _ranges(nodes: Sequence[Node], spec: Spec) -> dict[Node, IntegerRange]:
    """Return the known ranges of integers and bools."""
    longest = LONGEST[spec.index_width] + (1 << 10)
    indices, heads = IntegerRange(0, longest - 1), IntegerRange(0, MOST_HEADS - 1)
    inputs = {"b": heads, "h": heads, "q_idx": indices, "kv_idx": indices}
    if spec.q_layout == "packed":
        # The user's numbers on a device, which nobody has looked at.
        inputs["b"] = IntegerRange(-MOST_HEADS, MOST_HEADS - 1)
        inputs["q_idx"] = IntegerRange(-longest, longest - 1)
    found = zip(nodes, integer_ranges(nodes, inputs), strict=True)
    return {node: range_ for node, range_ in found if range_ is not None}


def dependences(nodes: Sequence[Node]) -> dict[Node, frozenset[str]]:
    """Return for each node which inputs that differ within a tile it needs."""
    found: dict[Node, frozenset[str]] = {}
    for node in nodes:
        own = {str(node.attribute)} if node.operation == "input" else set()
        needed = own.union(*(found[nodes[argument]] for argument in node.arguments))
        found[node] = frozenset(needed & {"score", "grad", "q_idx", "kv_idx"})
    return found


# The program of one function


class DirectRead(NamedTuple):
    """Dimension of a captured tensor that b, h, q_idx or kv_idx (0 to 3) indexes unchanged."""

    captured: int
    axis: int
    argument: int


@dataclass
class ModProgram:
    """Lines of one generated function, and the facts that its rules use.

    Args:
        nodes: the nodes to be lowered.
        ranges: result of `_ranges`.
        needs: result of `dependences`.
        first_size: where in ``ints`` each captured tensor's sizes begin; its strides follow.
        first_number: where in ``ints`` the closed-over numbers begin.
        capped: whether each tanh of a float32 is one of `cap_factors`.
        direct: result of `direct_reads`.
        types: name of a value -> the language's type that holds it.
        multiples: name of a float32 -> (name of another one, number) whose product it is; the
            number is the same for a whole tile.
        tanhs: name of a tanh of `cap_factors` -> (x, number) whose product is its argument.
        scaled: name of a float32 -> (names of others, constant) whose product it is: see
            `_cancels`.
    """

    nodes: Sequence[Node]
    ranges: Mapping[Node, IntegerRange]
    needs: Mapping[Node, frozenset[str]]
    first_size: tuple[int, ...]
    first_number: int
    capped: bool
    direct: frozenset[DirectRead]
    lines: list[str] = field(default_factory=list)
    types: dict[str, str] = field(default_factory=dict)
    multiples: dict[str, tuple[str, str]] = field(default_factory=dict)
    tanhs: dict[str, tuple[str, str]] = field(default_factory=dict)
    scaled: dict[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: Spec, nodes: Sequence[Node], capped: bool) -> ModProgram:
        first, places = 0, []
        for facts in spec.captured:
            places.append(first)
            first += 2 * facts.rank
        return cls(
            nodes, _ranges(nodes, spec), dependences(nodes), tuple(places), first, capped,
            direct_reads(spec),
        )  # fmt: skip

    def emit(self, text: str, type_: str) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        self.types[name] = type_
        return name

    def cast(self, value: str, type_: str) -> str:
        if self.types.get(value) == type_:
            return value
        return self.emit(f"{LANGUAGE}.cast({value}, {LANGUAGE}.{type_})", type_)

    def rounded(self, value: str, dtype: torch.dtype) -> str:
        rounding = _ROUNDINGS.get(dtype)
        return value if rounding is None else self.emit(f"{rounding}({value})", "float32")

    def type_of(self, node: Node) -> str:
        """Return the type that holds the node's value."""
        if node.dtype is torch.int64 and node in self.ranges:
            low, high = self.ranges[node]
            if low >= -(1 << 31) and high < 1 << 31:
                return "int32"
        return _TYPES[node.dtype]

    def is_up(self, node: Node) -> bool:
        """Whether the node's value is never negative."""
        return node in self.ranges and self.ranges[node].low >= 0

    def number(self, position: int) -> int | None:
        """Return the value of an integer constant, or None for another node."""
        node = self.nodes[position]
        whole = node.operation == "const" and not node.dtype.is_floating_point
        return int(node.value) if whole else None

    def full(self, value: str, type_: str) -> str:
        return self.emit(f"{LANGUAGE}.full((), {value}, {LANGUAGE}.{type_})", type_)

    def nonempty(self, captured: int, rank: int) -> str:
        """Emit whether a captured tensor has elements."""
        if rank == 0:
            return self.full("True", "int1")
        return self.emit(f"ops.truth({self._count(captured, rank)} != 0)", "int1")

    def narrow(self, captured: int, rank: int) -> str:
        """Emit whether int32 holds the offsets in a captured tensor's gradient."""
        return self.emit(f"ops.truth({self._count(captured, rank)} < {1 << 31})", "int1")

    def _count(self, captured: int, rank: int) -> str:
        """Return the text of the number of a captured tensor's elements."""
        sizes = [f"ints[{self.first_size[captured] + axis}]" for axis in range(rank)]
        return " * ".join(f"{LANGUAGE}.cast({size}, {LANGUAGE}.int64)" for size in sizes)

    def place(self, captured: int, axis: int, position: int, index: str) -> str:
        """Emit an index into a captured tensor's dimension, wrapped and clamped."""
        size = f"ints[{self.first_size[captured] + axis}]"
        if self.types[index] not in ("int32", "int64"):
            index = self.cast(index, "int32")
        if _read(captured, axis, self.nodes[position]) in self.direct:
            return self.emit(f"ops.place_direct({index}, {size}, WITHIN)", self.types[index])
        name = "place_up" if self.is_up(self.nodes[position]) else "place"
        return self.emit(f"ops.{name}({index}, {size})", self.types[index])


_Rule = Callable[[ModProgram, Node, Sequence[str]], str]


def _unified(program: ModProgram, node: Node, operands: Sequence[str]) -> tuple[list[str], str]:
    """Return the operands, cast to the type that the node is computed in, and that type."""
    held = program.type_of(node)
    sources = [program.nodes[argument].dtype for argument in node.arguments]
    wide = held == "int64" or any(program.types[operand] == "int64" for operand in operands)
    index_type = "int64" if wide else "int32"
    unified = [
        program.cast(operand, index_type) if dtype is torch.int64 else operand
        for operand, dtype in zip(operands, sources, strict=True)
    ]
    if held == "int32" and node.dtype is torch.int64:
        return unified, index_type
    return unified, held


def _finished(program: ModProgram, node: Node, value: str) -> str:
    if node.operation not in _EXACT:
        value = program.rounded(value, node.dtype)
    return program.cast(value, program.type_of(node))


def _plain(text: str) -> _Rule:
    """Return a rule for text with ``{0}`` and ``{1}`` for the operands, ``{bits}`` for the
    width."""

    def rule(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
        unified, type_ = _unified(program, node, operands)
        bits = "".join(filter(str.isdigit, type_))
        value = program.emit(text.format(*unified, bits=bits, tl=LANGUAGE), type_)
        return _finished(program, node, value)

    return rule


def _comparison(sign: str) -> _Rule:
    def rule(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
        text = f"{{0}} {sign} {{1}}"
        scalar = not program.needs[node]
        return _plain(f"ops.truth({text})" if scalar else text)(program, node, operands)

    return rule


# Leaves, conversions, reads


def _input(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    type_ = program.type_of(node)
    value = program.emit(f"{LANGUAGE}.cast({node.attribute}, {LANGUAGE}.{type_})", type_)
    return program.rounded(value, node.dtype)


def _const(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    value, type_ = node.value, program.type_of(node)
    if isinstance(value, float) and not math.isfinite(value):
        return program.full(f'float("{value}")', type_)
    if isinstance(value, float) and value == 0 and math.copysign(1, value) < 0:
        # `full` loses the sign of -0.0.
        return program.emit(f"{program.full('-1.0', type_)} * 0.0", type_)
    return program.full(repr(value), type_)


def _number(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    slot, type_ = str(node.attribute), program.type_of(node)
    position = int(slot[1:])
    source = (
        f"ints[{program.first_number + position}]" if slot[0] == "i" else f"floats[{position}]"
    )
    value = program.emit(f"{LANGUAGE}.cast({source}, {LANGUAGE}.{type_})", type_)
    return program.rounded(value, node.dtype)


def moved_pointer(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    """Emit a load's pointer, moved by the indices of its first dimensions, wrapped and clamped, so
    that nothing outside is read."""
    captured, rank = node.attribute, len(node.arguments)
    assert isinstance(captured, int)
    pointer, first = f"tables[{captured}]", program.first_size[captured]
    for axis, (position, index) in enumerate(zip(node.arguments, operands, strict=False)):
        place = program.place(captured, axis, position, index)
        stride = f"ints[{first + rank + axis}]"
        if axis == rank - 1:
            text = f"ops.moved_last({pointer}, {place}, {stride}, WITHIN)"
        else:
            text = f"ops.moved({pointer}, {place}, {stride})"
        pointer = program.emit(text, "pointer")
    return pointer


def _load(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    """Emit a load at a `moved_pointer`; an empty tensor gives 0."""
    captured, rank = node.attribute, len(operands)
    assert isinstance(captured, int)
    pointer = moved_pointer(program, node, operands)
    if rank:
        text = f"ops.load_once({pointer}, {program.nonempty(captured, rank)})"
    else:
        text = f"{LANGUAGE}.load({pointer})"
    value = program.cast(program.emit(text, ""), program.type_of(node))
    if node.dtype is torch.bool and not program.needs[node]:
        value = program.emit(f"ops.truth({value})", "int1")
    return value


EARLY = "early"
"""Operation of a node that stands for a value that was read early; its attribute is the place."""


def _early_value(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    return program.emit(str(node.attribute), program.type_of(node))


def _cast(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    (value,) = operands
    source = program.nodes[node.arguments[0]].dtype
    if source.is_floating_point and node.dtype in (torch.uint8, torch.int8, torch.int16):
        # The cast goes through int32, as in torch: larger values wrap, and -1.0 becomes byte 255.
        value = program.cast(value, "int32")
    apart = _index_difference(program, node)
    if apart is not None:
        value = program.emit(f"{apart} if SHORT else {value}", "")
    value = program.cast(value, program.type_of(node))
    if node.dtype is torch.bool and source is not torch.bool and not program.needs[node]:
        value = program.emit(f"ops.truth({value})", "int1")
    return value if source is node.dtype else program.rounded(value, node.dtype)


def _index_difference(program: ModProgram, node: Node) -> str | None:
    """Return text for the difference of q_idx and kv_idx that a cast to float32 takes, computed in
    float32: the indices are converted once per row and column, not once per pair."""
    difference = program.nodes[node.arguments[0]]
    if difference.operation != "sub" or program.type_of(node) != "float32":
        return None
    names = [str(program.nodes[a].attribute) for a in difference.arguments]
    if any(program.nodes[a].operation != "input" for a in difference.arguments):
        return None
    if set(names) != {"q_idx", "kv_idx"}:
        return None
    minuend, subtrahend = (f"{LANGUAGE}.cast({name}, {LANGUAGE}.float32)" for name in names)
    return f"{minuend} - {subtrahend}"


def _detach(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    return operands[0]


# Integers


def _division(power_of_2: str, up: str, by_number: str, by_any: str) -> _Rule:
    """Return the rule that chooses among four texts: for a constant power of 2 (``{shift}``,
    ``{rest}``), for operands that aren't negative with a positive constant, for a constant other
    than 0 and -1, and for all else."""

    def rule(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
        number = program.number(node.arguments[1])
        text = by_any
        if number is not None and number not in (0, -1):
            text = by_number
            if number > 0 and program.is_up(program.nodes[node.arguments[0]]):
                text = up
            if number > 0 and number & (number - 1) == 0 and power_of_2:
                shift, rest = str(number.bit_length() - 1), str(number - 1)
                text = power_of_2.replace("{shift}", shift).replace("{rest}", rest)
        return _plain(text)(program, node, operands)

    return rule


def _shift(direct: str, any_amount: str) -> _Rule:
    def rule(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
        number = program.number(node.arguments[1])
        # Amounts below 8 are valid for every type.
        inside = number is not None and 0 <= number < 8
        return _plain(direct if inside else any_amount)(program, node, operands)

    return rule


def _integer_power(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    number = program.number(node.arguments[1])
    if number is not None and 1 <= number <= 4:
        return _plain(" * ".join(["{0}"] * number))(program, node, operands)
    digits = "{bits}" if node.dtype is torch.uint8 else "{bits} - 1"
    return _plain(f"ops.integer_power({{0}}, {{1}}, {digits})")(program, node, operands)


def _not(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    # The interpreter has no ~ for bytes.
    text = "{0} ^ 255" if node.dtype is torch.uint8 else "~{0}"
    return _plain(text)(program, node, operands)


# Floats

_POWERS = {
    0.5: "{tl}.sqrt({0})",
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
    -0.5: "ops.rsqrt({0})",
    -1.0: "1.0 / {0}",
    -2.0: "1.0 / ({0} * {0})",
}
"""Operations that torch computes for these exponents."""


def _power(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    exponent = program.nodes[node.arguments[1]]
    text = "ops.power({0}, {1})"
    # torch takes no square roots for float16: they differ for -0.0 and -infinity.
    if exponent.operation == "const" and node.dtype is not torch.float16:
        text = _POWERS.get(exponent.value, text)
    return _plain(text)(program, node, operands)


def _of_indices(program: ModProgram, node: Node) -> bool:
    """Whether a float32 value may be a step function's, which must be exact where torch is, like
    q_idx / 3 at 6."""
    of_scores = program.needs[node] & {"score", "grad"}
    return not of_scores and _TYPES[node.dtype] == "float32"


def _true_division(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    if _of_indices(program, node):
        return _plain("{tl}.div_rn({0}, {1})")(program, node, operands)
    if program.needs[program.nodes[node.arguments[1]]] or node.dtype is torch.float64:
        return _plain("{0} / {1}")(program, node, operands)
    others, number = program.scaled.get(operands[0], ((), ""))
    if number == operands[1]:
        # This is the slope of a soft cap, whose cap is both a factor and a divisor.
        return _plain(" * ".join(others))(program, node, operands)
    # The divisor is the same for the whole tile, as in a soft cap. Division itself is 2 ulp off.
    inverse = program.emit(f"1.0 / {operands[1]}", "float32")
    value = _plain("{0} * {1}")(program, node, (operands[0], inverse))
    if node.dtype is torch.float32:
        program.multiples[value] = (operands[0], inverse)
    return value


def _sqrt(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    name = "sqrt_rn" if _of_indices(program, node) else "sqrt"
    return _plain(f"{{tl}}.{name}({{0}})")(program, node, operands)


def _tanh(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    if not program.capped or node.dtype is not torch.float32:
        return _plain("ops.tanh({0})")(program, node, operands)
    x, number = program.multiples.get(operands[0], (operands[0], "1.0"))
    value = program.emit(f"ops.tanh_capped({x}, {number}, 1.0, COARSE)", "float32")
    program.tanhs[value] = (x, number)
    return value


def _cancels(node: Node) -> bool:
    """Whether a factor can be dropped where it is divided by again: it must be a constant whose
    products hardly overflow, neither 0 nor infinite, for which torch gives NaN."""
    return node.operation == "const" and 2.0**-32 < abs(node.value) < 2.0**32


def _float_product(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    """Fold a factor that is the same for the whole tile into a tanh of `cap_factors`, as the
    divisor of a soft cap is folded; emit other products as they are."""
    if node.dtype is torch.float32:
        for slot, operand in enumerate(operands):
            other = node.arguments[1 - slot]
            if operand in program.tanhs and not program.needs[program.nodes[other]]:
                x, number = program.tanhs[operand]
                text = f"ops.tanh_capped({x}, {number}, {operands[1 - slot]}, COARSE)"
                return program.emit(text, "float32")
    value = _plain("{0} * {1}")(program, node, operands)
    if node.dtype is torch.float32:
        for slot, operand in enumerate(operands):
            beside = operands[1 - slot]
            if operand in program.scaled:
                others, scale = program.scaled[operand]
                program.scaled[value] = ((*others, beside), scale)
            elif _cancels(program.nodes[node.arguments[1 - slot]]):
                program.scaled[value] = ((operand,), beside)
    return value


_EVERY = "{tl}.PropagateNan.ALL"

TRITON: Lowering[ModProgram, str] = Lowering(
    "Triton",
    {
        "input": _input,
        "number": _number,
        "const": _const,
        "load": _load,
        "cast": _cast,
        "detach": _detach,
        EARLY: _early_value,
        "where": _plain("{tl}.where({0}, {1}, {2})"),
        "add": _plain("{0} + {1}"),
        "sub": _plain("{0} - {1}"),
        "mul:int": _plain("{0} * {1}"),
        "mul:float": _float_product,
        "truediv": _true_division,
        "sqrt": _sqrt,
        "floordiv:int": _division(
            "{0} >> {shift}",
            "{0} // {1}",
            "ops.floor_divide_by({0}, {1})",
            "ops.integer_floor_divide({0}, {1})",
        ),
        "floordiv:float": _plain("ops.floor_divide({0}, {1})"),
        "mod:int": _division(
            "{0} & {rest}", "{0} % {1}", "ops.mod_by({0}, {1})", "ops.integer_mod({0}, {1})"
        ),
        "mod:float": _plain("ops.remainder({0}, {1})"),
        "fmod:int": _division("", "{0} % {1}", "{0} % {1}", "ops.integer_fmod({0}, {1})"),
        "fmod:float": _plain("ops.fmod({0}, {1})"),
        "pow:int": _integer_power,
        "pow:float": _power,
        "atan2": _plain("ops.atan2({0}, {1})"),
        "minimum:int": _plain("{tl}.minimum({0}, {1})"),
        "maximum:int": _plain("{tl}.maximum({0}, {1})"),
        "minimum:float": _plain(f"{{tl}}.minimum({{0}}, {{1}}, propagate_nan={_EVERY})"),
        "maximum:float": _plain(f"{{tl}}.maximum({{0}}, {{1}}, propagate_nan={_EVERY})"),
        "neg:int": _plain("-{0}"),
        # Triton computes `-x` as 0 - x, which loses -0.0.
        "neg:float": _plain("{0} * -1.0"),
        "abs": _plain("{tl}.abs({0})"),
        "sign": _plain("ops.sign({0})"),
        "and": _plain("{0} & {1}"),
        "or": _plain("{0} | {1}"),
        "xor": _plain("{0} ^ {1}"),
        "not": _not,
        "shl": _shift("{0} << {1}", "ops.shifted_left({0}, {1}, {bits})"),
        "shr": _shift("{0} >> {1}", "ops.shifted_right({0}, {1}, {bits})"),
        **{name: _comparison(sign) for name, sign in _COMPARISONS.items()},
        # In a signed type of one bit True is -1.
        "lt:bool": _plain("~{0} & {1}"),
        "le:bool": _plain("~{0} | {1}"),
        "gt:bool": _plain("{0} & ~{1}"),
        "ge:bool": _plain("{0} | ~{1}"),
        "tanh": _tanh,
        "round": _plain("ops.round_to_even({0})"),
        **{
            name: _plain(f"{{tl}}.{name}({{0}})")
            for name in "floor ceil exp2 log log2 sin cos erf".split()
        },
        **{
            name: _plain(f"ops.{name}({{0}})")
            for name in (
                "trunc exp expm1 log10 log1p rsqrt tan asin acos atan sinh cosh asinh acosh "
                "atanh sigmoid erfc"
            ).split()
        },
    },
)


# Assumptions of a call's functions


def direct_reads(spec: Spec) -> frozenset[DirectRead]:
    """Return the reads that a call must check before it takes functions that are `within`
    (`source_for`). Their indices are never negative, as b and q_idx of packed sequences may be."""
    arguments = (1, 3) if spec.q_layout == "packed" else (0, 1, 2, 3)
    found = (
        _read(int(str(node.attribute)), axis, nodes[argument])
        for graph in (spec.score_graph, spec.mask_graph)
        if graph is not None
        for nodes in (simplify(graph).nodes,)
        for node in nodes
        if node.operation == "load"
        for axis, argument in enumerate(node.arguments)
    )
    return frozenset(read for read in found if read is not None and read.argument in arguments)


def _read(captured: int, axis: int, index: Node) -> DirectRead | None:
    """Return the direct read if the index is b, h, q_idx or kv_idx itself, else None."""
    if index.operation != "input" or index.attribute not in ARGUMENTS:
        return None
    return DirectRead(captured, axis, ARGUMENTS.index(str(index.attribute)))


def cap_factors(spec: Spec) -> tuple[float | str, ...]:
    """Return the factor of each tanh of a float32 in the score mod before it adds to the score: a
    number, the name of a number's slot, or 1 where there is none. It is empty if a tanh is used in
    any other way, or if the score is wanted with float32's accuracy."""
    if spec.score_graph is None or spec.dtype.itemsize != 2:
        return ()
    graph = simplify(spec.score_graph)
    nodes = graph.nodes
    readers: list[list[tuple[int, int]]] = [[] for _ in nodes]
    for reader, node in enumerate(nodes):
        for slot, argument in enumerate(node.arguments):
            readers[argument].append((reader, slot))

    def adds_up(position: int) -> bool:
        # A value may be read once only: a sum with itself would make its factor larger.
        return len(readers[position]) <= 1 and all(passes(*reader) for reader in readers[position])

    def passes(reader: int, slot: int) -> bool:
        operation = nodes[reader].operation
        return (
            nodes[reader].dtype is torch.float32
            and (operation in ("add", "sub") or (operation == "where" and slot > 0))
            and adds_up(reader)
        )

    factors: list[float | str] = []
    for position, node in enumerate(nodes):
        if node.operation != "tanh" or node.dtype is not torch.float32:
            continue
        if not readers[position]:  # it is the score: a soft cap of 1 loses its product
            factors.append(1.0)
        for reader, slot in readers[position]:
            if passes(reader, slot):
                factors.append(1.0)
                continue
            product = nodes[reader]
            other = nodes[product.arguments[1 - slot]] if product.operation == "mul" else node
            if other.operation not in ("const", "number") or not adds_up(reader):
                return ()
            known = other.operation == "const"
            factors.append(float(other.value) if known else str(other.attribute))
    return tuple(factors)
