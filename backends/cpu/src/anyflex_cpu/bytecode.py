"""Mod graphs as bytecode for the native library's interpreter.

Narrow ints are computed in int32 and wrapped, half and bf16 in float and rounded, after each
operation; int64 in int32 where it is proven to fit (`anyflex_cpu.index_ranges`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from anyflex.plugin import Derivative, Lowering, ModGraph, Node
from anyflex_cpu import bytecode_steps as steps
from anyflex_cpu.bytecode_steps import Index, Steps, Value
from anyflex_cpu.graph_stages import COLUMN, PAIR, ROW, TILE, Stages
from anyflex_cpu.index_ranges import LIMITS, Limits, fits_int32, ranges

__all__ = ["BYTECODE", "mask_program", "score_backward_program", "score_program"]

_KINDS = {
    torch.bool: "p",
    torch.uint8: "i",
    torch.int8: "i",
    torch.int16: "i",
    torch.int32: "i",
    torch.int64: "l",
    torch.float16: "f",
    torch.bfloat16: "f",
    torch.float32: "f",
    torch.float64: "d",
}
_AFTER = {
    torch.uint8: "wrap_u8",
    torch.int8: "wrap_i8",
    torch.int16: "wrap_i16",
    torch.float16: "round_f16",
    torch.bfloat16: "round_bf16",
}
_EXACT = frozenset("minimum maximum fmod sign floor ceil round trunc and or xor shr".split())
"""Operations whose result is of their operands' type without wrapping or rounding."""

_EXCHANGED = {
    **dict.fromkeys(("add", "mul", "minimum", "maximum", "and", "or", "xor", "eq", "ne"), ""),
    "sub": "rsub",
    "truediv": "rtruediv",
    "lt": "gt",
    "le": "ge",
    "gt": "lt",
    "ge": "le",
}
"""Operation -> the equivalent operation with exchanged operands, "" for itself."""


def mask_program(graph: ModGraph, operations: dict[str, int], limits: Limits = LIMITS) -> bytes:
    """Return the program that writes the live bits of a tile.

    Args:
        graph: of a mask mod.
        operations: the library's numbers, from `anyflex_cpu.bytecode_steps.numbers`.
        limits: what calls keep to.
    """
    return _program(graph, steps.MASK, operations, limits)


def score_program(graph: ModGraph, operations: dict[str, int], limits: Limits = LIMITS) -> bytes:
    """Return the program that replaces the scores of a tile; see `mask_program`."""
    return _program(graph, steps.SCORE, operations, limits)


def _program(graph: ModGraph, kind: int, operations: dict[str, int], limits: Limits) -> bytes:
    context = _Context(graph.nodes, (graph.output,), limits)
    value = BYTECODE.lower(graph.nodes, context, (graph.output,))[graph.output]
    if kind == steps.MASK:
        context.steps.write(context.as_bool(value), steps.LIVE_ROW)
    else:
        context.steps.write(context.as_float(value), steps.SCORE_ROW)
    return context.steps.encoded(kind, operations)


def score_backward_program(
    derivative: Derivative, operations: dict[str, int], limits: Limits = LIMITS
) -> bytes:
    """Return the program that replaces gradients of modified scores by those of scores, and adds
    to the gradients of captured tensors; see `mask_program`."""
    context = _Context(derivative.nodes, derivative.roots, limits)
    values = BYTECODE.lower(derivative.nodes, context, derivative.roots)
    for scatter in derivative.scatters:
        indices = context.indices(scatter.indices, [values[i] for i in scatter.indices])
        context.steps.scatter(values[scatter.value], scatter.captured, indices)
    if derivative.score is None:
        value = context.steps.constant("f", 0.0)
    else:
        value = context.as_float(values[derivative.score])
    context.steps.write(value, steps.GRAD_ROW)
    return context.steps.encoded(steps.SCORE_BACKWARD, operations)


class _Context:
    """State that the rules share: the steps so far, and the graph's types."""

    def __init__(self, nodes: Sequence[Node], roots: Sequence[int], limits: Limits) -> None:
        self.nodes = nodes
        self.steps = Steps()
        self.stages = Stages(nodes, roots)
        self.kinds = _kinds(nodes, limits)
        # Nodes are compared by identity: equal ones are merged before, or cost little.
        self._positions = {id(node): position for position, node in enumerate(nodes)}

    def kind(self, node: Node) -> str:
        return self.kinds[self._positions[id(node)]]

    def emit(
        self, name: str, kind: str, reads: tuple[Value, ...], indices: tuple[Index, ...] = (),
        immediate: int = 0,
    ) -> Value:  # fmt: skip
        """Append a step at the first stage where its operands are known."""
        stage = TILE
        for value in (*reads, *(index.value for index in indices)):
            stage |= value.stage
        return self.steps.add(name, kind, stage, reads, immediate, indices)

    def lanes(self, value: Value, stage: int) -> Value:
        """Give one value to all lanes, where a step of this stage has no form for one value."""
        if stage == PAIR and value.is_one:
            return self.steps.add(f"spread_{value.kind}", value.kind, PAIR, (value,))
        return value

    def unary(self, name: str, kind: str, x: Value) -> Value:
        """Append a step on one operand; `name` is the step's whole name."""
        return self.emit(name, kind, (x,))

    def binary(self, name: str, kind: str, x: Value, y: Value) -> Value:
        """Append a step on two operands of one kind; `name` is the operation's."""
        stage = x.stage | y.stage
        ending = f"_{x.kind}"
        if x.kind == "p":
            x, y = self.lanes(x, stage), self.lanes(y, stage)
        if stage == PAIR and x.is_one:
            if name in _EXCHANGED:
                exchanged = _EXCHANGED[name]
                if exchanged.startswith("r"):
                    return self.emit(exchanged + ending + "S", kind, (y, x))
                name, x, y = exchanged or name, y, x
            else:
                x = self.lanes(x, stage)
        if stage == PAIR and y.is_one:
            ending += "S"
        return self.emit(name + ending, kind, (x, y))

    def select(self, condition: Value, x: Value, y: Value) -> Value:
        kind = x.kind
        stage = condition.stage | x.stage | y.stage
        condition = self.lanes(condition, stage)
        one_x, one_y = (stage == PAIR and value.is_one for value in (x, y))
        name = f"where_{'S' if one_x else ''}{kind}{'S' if one_y else ''}"
        return self.emit(name, kind, (condition, x, y))

    def to_kind(self, value: Value, kind: str) -> Value:
        """Convert lanes; ints wrap."""
        if value.kind == kind:
            return value
        if value.kind == "p" and kind in "ld":
            value = self.unary("p_to_i", "i", value)
        if kind == "p":
            return self.binary("ne", "p", value, self.steps.constant(value.kind, 0))
        return self.unary(f"{value.kind}_to_{kind}", kind, value)

    def as_bool(self, value: Value) -> Value:
        return self.to_kind(value, "p")

    def as_float(self, value: Value) -> Value:
        return self.to_kind(value, "f")

    def after(self, dtype: torch.dtype, value: Value) -> Value:
        """Wrap or round what an operation of a narrow type gave."""
        name = _AFTER.get(dtype)
        return value if name is None else self.unary(name, value.kind, value)

    def indices(self, positions: Sequence[int], values: Sequence[Value]) -> tuple[Index, ...]:
        return tuple(
            Index(value, self.stages.step(position))
            for position, value in zip(positions, values, strict=True)
        )


def _kinds(nodes: Sequence[Node], limits: Limits) -> list[str]:
    """The kind of each node: int64 becomes int32 where it fits, and so do its int operands."""
    kinds: list[str] = []
    for node, found in zip(nodes, ranges(nodes, limits), strict=True):
        kind = _KINDS[node.dtype]
        if kind == "l" and node.operation != "load" and fits_int32(found):
            operands = (kinds[a] for a in node.arguments)
            kind = "l" if any(operand in "lfd" for operand in operands) else "i"
        kinds.append(kind)
    return kinds


_Rule = Callable[[_Context, Node, Sequence[Value]], Value]


def _input(context: _Context, node: Node, operands: Sequence[Value]) -> Value:
    name = str(node.attribute)
    if name in ("score", "grad"):
        value = Value("f", PAIR, steps.SCORE_ROW if name == "score" else steps.GRAD_ROW)
        return context.after(node.dtype, context.to_kind(value, context.kind(node)))
    kind = context.kind(node)
    whole = kind if kind in "il" else "l"
    stage = {"b": TILE, "h": TILE, "q_idx": ROW, "kv_idx": COLUMN}[name]
    value = context.steps.add(f"{name.removesuffix('_idx')}_{whole}", whole, stage)
    return context.after(node.dtype, context.to_kind(value, kind))


def _number(context: _Context, node: Node, operands: Sequence[Value]) -> Value:
    slot = str(node.attribute)
    name, kind = ("int_l", "l") if slot[0] == "i" else ("float_d", "d")
    value = context.steps.add(name, kind, TILE, (), int(slot[1:]))
    return context.after(node.dtype, context.to_kind(value, context.kind(node)))


def _const(context: _Context, node: Node, operands: Sequence[Value]) -> Value:
    return context.steps.constant(context.kind(node), node.value)


def _load(context: _Context, node: Node, operands: Sequence[Value]) -> Value:
    assert isinstance(node.attribute, int)
    kind = _KINDS[node.dtype]
    indices = context.indices(node.arguments, operands)
    return context.emit(f"load_{kind}", kind, (), indices, node.attribute)


def _arithmetic(context: _Context, node: Node, operands: Sequence[Value]) -> Value:
    kind = context.kind(node)
    x, y = (context.to_kind(operand, kind) for operand in operands)
    value = context.binary(node.operation, kind, x, y)
    return value if node.operation in _EXACT else context.after(node.dtype, value)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _by_power_of_two(context: _Context, node: Node, operands: Sequence[Value]) -> Value:
    """floordiv and mod of ints: a shift and a mask where the divisor is a constant power of 2."""
    divisor = context.nodes[node.arguments[1]]
    number = divisor.attribute
    if divisor.operation == "const" and isinstance(number, int) and _is_power_of_two(number):
        kind = context.kind(node)
        x = context.to_kind(operands[0], kind)
        if node.operation == "mod":
            return context.binary("and", kind, x, context.steps.constant(kind, number - 1))
        amount = context.steps.constant(kind, number.bit_length() - 1)
        return context.binary("shr", kind, x, amount)
    return _arithmetic(context, node, operands)


def _float_power(context: _Context, node: Node, operands: Sequence[Value]) -> Value:
    """Power of floats. A Python exponent takes torch's exact paths: x ** 2 is x * x."""
    x, y = operands
    exponent = context.nodes[node.arguments[1]].operation
    name = "pow_number" if exponent in ("const", "number") else "pow"
    return context.after(node.dtype, context.binary(name, x.kind, x, y))


def _comparison(context: _Context, node: Node, operands: Sequence[Value]) -> Value:
    x, y = operands
    kind = "l" if "l" in (x.kind, y.kind) else x.kind
    x, y = context.to_kind(x, kind), context.to_kind(y, kind)
    return context.binary(node.operation, "p", x, y)


def _bool_comparison(context: _Context, node: Node, operands: Sequence[Value]) -> Value:
    x, y = operands
    name = node.operation
    if name in ("eq", "ne"):
        value = context.binary("xor", "p", x, y)
    elif name in ("gt", "le"):
        value = context.binary("and_not", "p", x, y)
    else:
        value = context.binary("and_not", "p", y, x)
    return context.unary("not_p", "p", value) if name in ("eq", "le", "ge") else value


def _unary(context: _Context, node: Node, operands: Sequence[Value]) -> Value:
    kind = context.kind(node)
    value = context.unary(f"{node.operation}_{kind}", kind, context.to_kind(operands[0], kind))
    exact = node.operation in _EXACT
    if node.dtype.is_floating_point and node.operation in ("neg", "abs"):
        exact = True
    return value if exact else context.after(node.dtype, value)


def _where(context: _Context, node: Node, operands: Sequence[Value]) -> Value:
    condition, x, y = operands
    kind = context.kind(node)
    return context.select(condition, context.to_kind(x, kind), context.to_kind(y, kind))


def _bool_where(context: _Context, node: Node, operands: Sequence[Value]) -> Value:
    condition, x, y = operands
    kept = context.binary("and", "p", condition, x)
    return context.binary("or", "p", kept, context.binary("and_not", "p", y, condition))


def _cast(context: _Context, node: Node, operands: Sequence[Value]) -> Value:
    source = context.nodes[node.arguments[0]].dtype
    kind = context.kind(node)
    value = operands[0]
    if kind == "p":
        return context.as_bool(value)
    if kind == "i" and value.kind == "d" and node.dtype is not torch.int32:
        # Converts as torch does, through the widest integer, so that values beyond the range wrap.
        value = context.to_kind(value, "l")
    value = context.to_kind(value, kind)
    return value if source is torch.bool else context.after(node.dtype, value)


def _detach(context: _Context, node: Node, operands: Sequence[Value]) -> Value:
    return operands[0]


_FUNCTIONS = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh "
    "asinh acosh atanh sigmoid erf erfc floor ceil round trunc sign neg abs not"
).split()

_TABLE: dict[str, _Rule] = {
    "input": _input,
    "number": _number,
    "const": _const,
    "load": _load,
    **dict.fromkeys(
        "add sub mul truediv minimum maximum fmod atan2 and or xor".split(), _arithmetic
    ),
    **dict.fromkeys(("shl", "shr", "pow:int", "floordiv:float", "mod:float"), _arithmetic),
    **dict.fromkeys(("floordiv:int", "mod:int"), _by_power_of_two),
    "pow:float": _float_power,
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _comparison),
    **{f"{name}:bool": _bool_comparison for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **dict.fromkeys(_FUNCTIONS, _unary),
    "where": _where,
    "where:bool": _bool_where,
    "cast": _cast,
    "detach": _detach,
}

BYTECODE: Lowering[_Context, Value] = Lowering("bytecode", _TABLE)
"""Operations as steps of bytecode."""
