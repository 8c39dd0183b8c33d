"""Lowering table: a mod graph's operations as lines of Metal, and the facts that its rules use.

A value is held in its node's type, with two exceptions: float16 and bfloat16 are float that is
rounded after each operation, and an int64 that provably fits is int (`integer_ranges`). Metal has
no float64: the backend refuses graphs that have it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from anyflex.plugin import IntegerRange, Lowering, Node, Spec, integer_ranges

__all__ = [
    "ARGUMENTS",
    "HELD",
    "LONGEST",
    "METAL",
    "MODS_AT",
    "MOST_HEADS",
    "ModProgram",
    "dependences",
]

LONGEST = (1 << 27) - (1 << 10)
"""Largest number of query rows, and of keys: 16 times a position fits int, and a launch of 32
threads a row fits the 32 bits of torch's grids."""

MOST_HEADS = 1 << 20
"""Largest batch, and number of query heads."""

MODS_AT = 64
"""Place in ``P`` of the first captured tensor's sizes: kernels' own entries come before."""

ARGUMENTS = {"b": "int", "h": "int", "q_idx": "int", "kv_idx": "int"}
"""Arguments of a mod beside a score, with their types."""

HELD = {
    torch.bool: "bool",
    torch.uint8: "uchar",
    torch.int8: "char",
    torch.int16: "short",
    torch.int32: "int",
    torch.int64: "long",
    torch.float16: "float",
    torch.bfloat16: "float",
    torch.float32: "float",
}
"""Metal type that holds a value of each dtype."""

_NARROW = frozenset({"uchar", "char", "short"})
"""Types that Metal computes as int."""

_ROUNDINGS = {torch.float16: "half", torch.bfloat16: "bfloat"}
_EXACT = frozenset("neg abs minimum maximum where sign floor ceil round trunc detach".split())
"""Operations whose results have the operands' type without rounding."""


# The program of one function


def dependences(nodes: Sequence[Node]) -> dict[Node, frozenset[str]]:
    """Return for each node which inputs that differ within a tile it needs."""
    found: dict[Node, frozenset[str]] = {}
    for node in nodes:
        own = {str(node.attribute)} if node.operation == "input" else set()
        needed = own.union(*(found[nodes[argument]] for argument in node.arguments))
        found[node] = frozenset(needed & {"score", "grad", "q_idx", "kv_idx"})
    return found


@dataclass
class ModProgram:
    """Lines of one generated function, and the facts that its rules use.

    Args:
        nodes: the nodes to be lowered.
        ranges: known ranges of integers and bools.
        needs: `dependences` of the nodes.
        first_size: where in ``P`` each captured tensor's sizes begin; its strides follow.
        first_number: where in ``P`` the closed-over integers begin.
        types: name of a value -> the type that holds it.
    """

    nodes: Sequence[Node]
    ranges: Mapping[Node, IntegerRange]
    needs: Mapping[Node, frozenset[str]]
    first_size: tuple[int, ...]
    first_number: int
    lines: list[str] = field(default_factory=list)
    types: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: Spec, nodes: Sequence[Node]) -> ModProgram:
        first, places = MODS_AT, []
        for facts in spec.captured:
            places.append(first)
            first += 2 * facts.rank
        indices = IntegerRange(0, LONGEST - 1)
        heads = IntegerRange(0, MOST_HEADS - 1)
        inputs = {"b": heads, "h": heads, "q_idx": indices, "kv_idx": indices}
        if spec.q_layout == "packed":
            # Slots and first positions are on the device: no host has checked them.
            inputs["b"] = inputs["q_idx"] = IntegerRange(-(1 << 31), (1 << 31) - 1)
        found = zip(nodes, integer_ranges(nodes, inputs), strict=True)
        ranges = {node: range_ for node, range_ in found if range_ is not None}
        types = {"score": "float", "grad": "float", **ARGUMENTS}
        return cls(nodes, ranges, dependences(nodes), tuple(places), first, types=types)

    def emit(self, text: str, type_: str) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"const {type_} {name} = {text};")
        self.types[name] = type_
        return name

    def cast(self, value: str, type_: str) -> str:
        source = self.types[value]
        if source == type_:
            return value
        if type_ == "bool":
            return self.emit(f"{value} != {'0.0f' if source == 'float' else '0'}", type_)
        if source == "float" and type_ in ("int", "long"):
            return self.emit(f"op_to_{type_}({value})", type_)
        return self.emit(f"({type_}){value}", type_)

    def rounded(self, value: str, dtype: torch.dtype) -> str:
        narrow = _ROUNDINGS.get(dtype)
        return value if narrow is None else self.emit(f"(float)({narrow}){value}", "float")

    def proves(self, node: Node) -> bool:
        """Whether an int64 node's value is known not to have wrapped."""
        return node.dtype is torch.int64 and node in self.ranges

    def type_of(self, node: Node) -> str:
        """Return the type that holds the node's value."""
        if self.proves(node):
            low, high = self.ranges[node]
            if low >= -(1 << 31) and high < 1 << 31:
                return "int"
        return HELD[node.dtype]

    def is_up(self, node: Node) -> bool:
        """Whether the node's value is never negative."""
        return node in self.ranges and self.ranges[node].low >= 0

    def number(self, position: int) -> int | None:
        """Return the value of an integer constant, or None for another node."""
        node = self.nodes[position]
        whole = node.operation == "const" and not node.dtype.is_floating_point
        return int(node.value) if whole else None

    def nonempty(self, captured: int, rank: int) -> list[str]:
        """Return the conditions on which a captured tensor has elements."""
        first = self.first_size[captured]
        return [f"P[{first + axis}] != 0" for axis in range(rank)]

    def place(self, captured: int, axis: int, position: int, index: str) -> str:
        """Emit an index into a captured tensor's dimension, wrapped and clamped."""
        if self.types[index] not in ("int", "long"):
            index = self.cast(index, "int")
        type_ = self.types[index]
        function = "op_place_up" if self.is_up(self.nodes[position]) else "op_place"
        return self.emit(
            f"{function}_{type_}({index}, P[{self.first_size[captured] + axis}])", type_
        )


_Rule = Callable[[ModProgram, Node, Sequence[str]], str]


def _unified(program: ModProgram, node: Node, operands: Sequence[str]) -> tuple[list[str], str]:
    """Return the operands, cast to the type that the node is computed in, and that type."""
    held = program.type_of(node)
    sources = [program.nodes[argument].dtype for argument in node.arguments]
    wide = held == "long" or any(program.types[operand] == "long" for operand in operands)
    index_type = "long" if wide else "int"
    unified = [
        program.cast(operand, index_type) if dtype is torch.int64 else operand
        for operand, dtype in zip(operands, sources, strict=True)
    ]
    return unified, index_type if node.dtype is torch.int64 else held


def _plain(text: str) -> _Rule:
    """Return a rule for text with ``{0}`` and ``{1}`` for the operands, ``{wide}`` for the type
    that integers are computed in, int or long, ``{unsigned}`` for the type in which these wrap,
    and ``{bits}`` for the result's width."""

    def rule(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
        unified, type_ = _unified(program, node, operands)
        wide = "long" if type_ == "long" else "int"
        filled = text.format(
            *unified, wide=wide, unsigned=f"u{wide}", bits=8 * node.dtype.itemsize
        )
        if type_ in _NARROW:
            filled = f"({type_})({filled})"
        value = program.emit(filled, type_)
        if node.operation not in _EXACT:
            value = program.rounded(value, node.dtype)
        return program.cast(value, program.type_of(node))

    return rule


# Leaves, conversions, reads


def _input(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    return program.rounded(program.cast(str(node.attribute), program.type_of(node)), node.dtype)


def _const(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    value, type_ = node.value, program.type_of(node)
    if type_ == "float":
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        return program.emit(f"as_type<float>({bits:#010x}u)", type_)
    if type_ == "bool":
        return program.emit("true" if value else "false", type_)
    suffix = "L" if type_ == "long" else ""
    lowest = value == {"int": -(1 << 31), "long": -(1 << 63)}.get(type_)
    # A literal has no sign: the least number's size is no literal of its type.
    text = f"{int(value) + 1}{suffix} - 1{suffix}" if lowest else f"{int(value)}{suffix}"
    return program.emit(f"({type_}){text}" if type_ in _NARROW else text, type_)


def _number(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    slot = str(node.attribute)
    position = int(slot[1:])
    if slot[0] == "i":
        value = program.emit(f"P[{program.first_number + position}]", "long")
    else:
        value = program.emit(f"F[{position + 1}]", "float")
    return program.rounded(program.cast(value, program.type_of(node)), node.dtype)


def _load(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    """Emit a load at a wrapped and clamped index, so that nothing outside is read; an empty tensor
    gives 0."""
    captured, rank = node.attribute, len(operands)
    assert isinstance(captured, int)
    stored = "float" if node.dtype.is_floating_point else HELD[node.dtype]
    if not rank:
        return program.cast(
            program.emit(f"({stored})t{captured}[0]", stored), program.type_of(node)
        )
    terms = []
    for axis, (position, index) in enumerate(zip(node.arguments, operands, strict=True)):
        place = program.place(captured, axis, position, index)
        terms.append(f"(long){place} * P[{program.first_size[captured] + rank + axis}]")
    offset = program.emit(" + ".join(terms), "long")
    inside = " && ".join(program.nonempty(captured, rank))
    text = f"{inside} ? ({stored})t{captured}[{offset}] : ({stored})0"
    return program.cast(program.emit(text, stored), program.type_of(node))


def _cast(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    (value,) = operands
    source = program.nodes[node.arguments[0]].dtype
    if source.is_floating_point and node.dtype in (torch.uint8, torch.int8, torch.int16):
        # The cast goes through int, as in torch: larger values wrap, and -1.0 becomes byte 255.
        value = program.cast(value, "int")
    value = program.cast(value, program.type_of(node))
    return value if source is node.dtype else program.rounded(value, node.dtype)


def _detach(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    return operands[0]


# Integers


def _wrapping(sign: str) -> _Rule:
    """Return the rule of an operation that wraps: the overflow of signed numbers is undefined."""
    wraps = _plain(f"({{wide}})(({{unsigned}}){{0}} {sign} ({{unsigned}}){{1}})")
    proven = _plain(f"{{0}} {sign} {{1}}")
    return lambda program, node, operands: (proven if program.proves(node) else wraps)(
        program, node, operands
    )


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
    if number is None or not 1 <= number <= 4:
        return _plain("op_power_{wide}({0}, {1})")(program, node, operands)
    product = " * ".join(["({unsigned}){0}"] * number)
    return _plain(f"({{wide}})({product})")(program, node, operands)


# Floats

_POWERS = {
    0.5: "precise::sqrt({0})",
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
    -0.5: "precise::rsqrt({0})",
    -1.0: "1.0f / {0}",
    -2.0: "1.0f / ({0} * {0})",
}
"""Operations that torch computes for these exponents."""


def _power(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    exponent = program.nodes[node.arguments[1]]
    text = "op_power({0}, {1})"
    # torch takes no square roots for float16: they differ for -0.0 and -infinity.
    if exponent.operation == "const" and node.dtype is not torch.float16:
        text = _POWERS.get(exponent.value, text)
    return _plain(text)(program, node, operands)


_STEPS = {
    "floor", "ceil", "round", "trunc", "floordiv", "mod", "fmod", "sign",
    "eq", "ne", "lt", "le", "gt", "ge",
}  # fmt: skip


def _of_scores(program: ModProgram, node: Node) -> bool:
    return bool(program.needs[node] & {"score", "grad"})


def _steps(program: ModProgram, node: Node) -> bool:
    """Whether a small change of a score may change the node's result by a whole step."""
    is_step = node.operation in _STEPS or (
        node.operation == "cast" and not node.dtype.is_floating_point
    )
    operands = (program.nodes[place] for place in node.arguments)
    return is_step and any(_of_scores(program, operand) for operand in operands)


def _true_division(program: ModProgram, node: Node, operands: Sequence[str]) -> str:
    """Emit a product where the divisor is the same for the whole tile, as in a soft cap: its
    reciprocal leaves the loops, and a division takes some ten instructions.

    A step function's operand must be exact where torch is, like q_idx / 3 at 6, or score / 41 at
    82: indices may be one's, and scores are where the mod has one.
    """
    divisor = program.nodes[node.arguments[1]]
    exact = not _of_scores(program, node) or any(_steps(program, each) for each in program.nodes)
    if program.needs[divisor] or exact:
        return _plain("{0} / {1}")(program, node, operands)
    inverse = program.emit(f"1.0f / {operands[1]}", "float")
    return _plain("{0} * {1}")(program, node, (operands[0], inverse))


METAL: Lowering[ModProgram, str] = Lowering(
    "Metal",
    {
        "input": _input,
        "number": _number,
        "const": _const,
        "load": _load,
        "cast": _cast,
        "detach": _detach,
        "where": _plain("{0} ? {1} : {2}"),
        "add:int": _wrapping("+"),
        "sub:int": _wrapping("-"),
        "mul:int": _wrapping("*"),
        "add:float": _plain("{0} + {1}"),
        "sub:float": _plain("{0} - {1}"),
        "mul:float": _plain("{0} * {1}"),
        "truediv": _true_division,
        "floordiv:int": _division(
            "{0} >> {shift}",
            "{0} / {1}",
            "op_floor_divide_by_{wide}({0}, {1})",
            "op_floor_divide_{wide}({0}, {1})",
        ),
        "floordiv:float": _plain("op_floor_divide({0}, {1})"),
        "mod:int": _division(
            "{0} & {rest}", "{0} % {1}", "op_mod_by_{wide}({0}, {1})", "op_mod_{wide}({0}, {1})"
        ),
        "mod:float": _plain("op_remainder({0}, {1})"),
        "fmod:int": _division("", "{0} % {1}", "{0} % {1}", "op_fmod_{wide}({0}, {1})"),
        "fmod:float": _plain("op_fmod({0}, {1})"),
        "pow:int": _integer_power,
        "pow:float": _power,
        "atan2": _plain("op_atan2({0}, {1})"),
        "minimum:int": _plain("{0} < {1} ? {0} : {1}"),
        "maximum:int": _plain("{0} > {1} ? {0} : {1}"),
        "minimum:float": _plain("op_minimum({0}, {1})"),
        "maximum:float": _plain("op_maximum({0}, {1})"),
        "neg:int": _plain("({wide})(({unsigned})0 - ({unsigned}){0})"),
        "neg:float": _plain("-{0}"),
        "abs:int": _plain("{0} < 0 ? ({wide})(({unsigned})0 - ({unsigned}){0}) : {0}"),
        "abs:float": _plain("fabs({0})"),
        "sign:int": _plain("({wide})({0} > 0) - ({wide})({0} < 0)"),
        "sign:float": _plain("(float)({0} > 0.0f) - (float)({0} < 0.0f)"),
        "and": _plain("{0} & {1}"),
        "or": _plain("{0} | {1}"),
        "xor": _plain("{0} ^ {1}"),
        "not:bool": _plain("!{0}"),
        "not:int": _plain("~{0}"),
        "shl": _shift(
            "({wide})(({unsigned}){0} << {1})", "op_shifted_left_{wide}({0}, {1}, {bits})"
        ),
        "shr": _shift("{0} >> {1}", "op_shifted_right_{wide}({0}, {1}, {bits})"),
        "eq": _plain("{0} == {1}"),
        "ne": _plain("{0} != {1}"),
        "lt": _plain("{0} < {1}"),
        "le": _plain("{0} <= {1}"),
        "gt": _plain("{0} > {1}"),
        "ge": _plain("{0} >= {1}"),
        "round": _plain("rint({0})"),
        **{name: _plain(f"{name}({{0}})") for name in "floor ceil trunc".split()},
        **{name: _plain(f"precise::{name}({{0}})") for name in "exp2 sqrt rsqrt sin cos".split()},
        **{
            name: _plain(f"op_{name}({{0}})")
            for name in (
                "exp expm1 log log2 log10 log1p tan asin acos atan sinh cosh tanh asinh acosh "
                "atanh sigmoid erf erfc"
            ).split()
        },
    },
)
