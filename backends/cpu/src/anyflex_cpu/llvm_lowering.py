"""Table from operations to LLVM IR.

Values are of these types: bool i1; integers their own width, int64 also i32 where it is proven to
fit; float16 and bfloat16 float, rounded after each operation, as torch does; the others their own.
Nothing is contracted or reassociated: results differ from torch's by elementary functions alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from anyflex.plugin import IntegerRange, Lowering, Node
from anyflex_cpu import elementary_ir as elementary
from anyflex_cpu.captured_ir import MEMORY_TYPES
from anyflex_cpu.integer_ir import INTEGERS, whole_power
from anyflex_cpu.libm_ir import angle_function, float_remainder, library_function
from anyflex_cpu.llvm_text import FLOATS, Emitter, Value

__all__ = ["CARRIERS", "LLVM", "Scope"]

CARRIERS = MEMORY_TYPES | {torch.bool: "i1", torch.float16: "float", torch.bfloat16: "float"}
"""Type of a value in registers."""


class Scope(Protocol):
    """Context that rules read beside their operands: where a node is being lowered."""

    emitter: Emitter
    nodes: Sequence[Node]
    result_type: str

    def range(self, position: int) -> IntegerRange | None:
        """Known range of an integer node."""

    def leaf(self, node: Node) -> Value:
        """The value of an input, number or constant."""

    def read(self, node: Node, indices: Sequence[Value]) -> Value:
        """An element of a captured tensor."""


_Rule = Callable[[Scope, Node, Sequence[Value]], Value]


def _constant(scope: Scope, position: int) -> int | float | None:
    node = scope.nodes[position]
    return node.value if node.operation == "const" else None


def _emitted(method: str, *names: str) -> _Rule:
    """Make a rule of a method of `Emitter` that takes these names, then the operands."""

    def rule(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
        value: Value = getattr(scope.emitter, method)(*names, *operands)
        return value

    return rule


def _divide(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
    e = scope.emitter
    x, y = operands
    divisor = _constant(scope, node.arguments[1])
    if not (e.vector and e.fused and x.type == "float" and divisor is not None):
        return e.div(x, y)
    if not 2.0**-60 < abs(divisor) < 2.0**60:
        return e.div(x, y)
    # Multiplying by the reciprocal in two pieces rounds as a division does, except for quotients
    # within 2^-48 of the middle of two floats (Brisebarre and Muller, Correctly rounded
    # multiplication by arbitrary precision constants, 2008). It takes a tenth of the time. Both
    # pieces have one sign, or an infinity would become NaN.
    high, low = _pieces(1 / divisor)
    if low == 0.0:
        return e.mul(x, e.constant("float", high))
    return e.fma(x, e.constant("float", high), e.mul(x, e.constant("float", low)))


def _pieces(value: float) -> tuple[float, float]:
    """(the float next to `value` towards 0, the residual)."""
    bits = struct.unpack("<q", struct.pack("<d", value))[0]
    high = float(struct.unpack("<d", struct.pack("<q", bits & ~0x1FFFFFFF))[0])
    return high, value - high


def _extremum(wins: str) -> _Rule:
    def rule(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
        e = scope.emitter
        x, y = operands
        number = _constant(scope, node.arguments[1])
        if number is not None and number == number:
            # One instruction; the result is x wherever x is NaN.
            return e.select(e.compare(wins, y, x), y, x)
        best = e.select(e.compare(wins, x, y), x, y)
        return e.select(e.compare("uno", x, x), x, best)

    return rule


def _sign(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
    e = scope.emitter
    (x,) = operands
    zero, one = e.constant(x.type, 0.0), e.constant(x.type, 1.0)
    below = e.select(e.compare("olt", x, zero), e.negate(one), zero)
    return e.select(e.compare("ogt", x, zero), one, below)


def _comparison(name: str) -> _Rule:
    def rule(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
        dtype = scope.nodes[node.arguments[0]].dtype
        if dtype.is_floating_point:
            order = "u" if name == "ne" else "o"
        elif name in ("eq", "ne"):
            order = ""
        else:
            order = "u" if dtype in (torch.bool, torch.uint8) else "s"
        return scope.emitter.compare(order + name, *operands)

    return rule


def _remainder(e: Emitter, x: Value, y: Value) -> Value:
    if e.vector and x.type == "float":
        return float_remainder(e, x, y)
    return library_function(e, "fmod", x, y)


def _fmod(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
    return _remainder(scope.emitter, *operands)


def _unlike(e: Emitter, remainder: Value, y: Value) -> Value:
    """Whether the remainder isn't 0 and has another sign than the divisor."""
    zero = e.constant(y.type, 0.0)
    below = e.compare("olt", remainder, zero)
    differ = e.op("xor", below, e.compare("olt", y, zero))
    return e.op("and", differ, e.compare("une", remainder, zero))


def _mod(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
    e = scope.emitter
    x, y = operands
    remainder = _remainder(e, x, y)
    return e.select(_unlike(e, remainder, y), e.add(remainder, y), remainder)


def _floordiv(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
    e = scope.emitter
    x, y = operands
    zero, one = e.constant(x.type, 0.0), e.constant(x.type, 1.0)
    remainder = _remainder(e, x, y)
    q = e.div(e.sub(x, remainder), y)
    q = e.select(_unlike(e, remainder, y), e.sub(q, one), q)
    floor = e.intrinsic("floor", q)
    near = e.compare("ogt", e.sub(q, floor), e.constant(x.type, 0.5))
    floor = e.select(near, e.add(floor, one), floor)
    plain = e.div(x, y)
    signed_zero = elementary.copy_sign(e, zero, plain)
    result = e.select(e.compare("oeq", q, zero), signed_zero, floor)
    return e.select(e.compare("oeq", y, zero), plain, result)


def _power(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
    e = scope.emitter
    x, y = operands
    exponent = _constant(scope, node.arguments[1])
    if exponent is None:
        power = library_function(e, "pow", x, y)
        if scope.nodes[node.arguments[1]].operation == "number":
            # A Python exponent takes torch's exact paths.
            root = e.intrinsic("sqrt", x)
            half, one = e.constant(y.type, 0.5), e.constant(y.type, 1.0)
            power = e.select(e.compare("oeq", y, half), root, power)
            inverse = e.compare("oeq", y, e.negate(half))
            return e.select(inverse, e.div(one, root), power)
        return power
    one = e.constant(x.type, 1.0)
    if exponent == 0.5:
        return e.intrinsic("sqrt", x)
    if exponent == -0.5:
        return e.div(one, e.intrinsic("sqrt", x))
    if exponent == int(exponent) if abs(exponent) <= 4 else False:
        power = whole_power(e, x, abs(int(exponent)))
        return e.div(one, power) if exponent < 0 else power
    return library_function(e, "pow", x, y)


def _function(name: str) -> _Rule:
    inlined = _INLINED.get(name)

    def rule(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
        e = scope.emitter
        if inlined is not None and e.vector and operands[0].type == "float":
            return inlined(e, *operands)
        return library_function(e, name, *operands)

    return rule


_INLINED: dict[str, Callable[..., Value]] = {
    "exp": elementary.exponential,
    "exp2": elementary.exponential_base_2,
    "expm1": elementary.exponential_less_1,
    "log": lambda e, x: elementary.logarithm(e, x, "log"),
    "log2": lambda e, x: elementary.logarithm(e, x, "log2"),
    "log10": lambda e, x: elementary.logarithm(e, x, "log10"),
    "log1p": elementary.logarithm_of_1_plus,
    "sin": lambda e, x: angle_function(e, "sin", x),
    "cos": lambda e, x: angle_function(e, "cos", x),
    "tanh": elementary.hyperbolic_tangent,
    "erf": elementary.error_function,
}


def _rsqrt(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
    e = scope.emitter
    (x,) = operands
    return e.div(e.constant(x.type, 1.0), e.intrinsic("sqrt", x))


def _sigmoid(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
    e = scope.emitter
    (x,) = operands
    if e.vector and x.type == "float":
        return elementary.sigmoid(e, x)
    one = e.constant(x.type, 1.0)
    return e.div(one, e.add(one, library_function(e, "exp", e.negate(x))))


def _cast_from_bool(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
    e = scope.emitter
    (x,) = operands
    target = scope.result_type
    if target == "i1":
        return x
    return e.convert("uitofp" if target in FLOATS else "zext", x, target)


def _cast_from_int(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
    e = scope.emitter
    (x,) = operands
    target = scope.result_type
    signed = scope.nodes[node.arguments[0]].dtype is not torch.uint8
    if target == "i1":
        return e.compare("ne", x, e.constant(x.type, 0))
    if target in FLOATS:
        return e.convert("sitofp" if signed else "uitofp", x, target)
    return e.resize(x, target, signed=signed)


def _cast_from_float(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
    e = scope.emitter
    (x,) = operands
    target = CARRIERS[node.dtype]
    if target == "i1":
        return e.compare("une", x, e.constant(x.type, 0.0))
    if target in FLOATS:
        if x.type == target:
            return x
        return e.convert("fpext" if target == "double" else "fptrunc", x, target)
    if node.dtype in (torch.int64, torch.uint8):
        return e.resize(e.to_integer(x, "i64"), target)
    return e.resize(e.to_integer(x, "i32"), target)


LLVM: Lowering[Scope, Value] = Lowering(
    "LLVM",
    {
        **INTEGERS,
        **dict.fromkeys(
            ("input", "number", "const"), lambda scope, node, operands: scope.leaf(node)
        ),
        "load": lambda scope, node, operands: scope.read(node, operands),
        "add": _emitted("add"),
        "sub": _emitted("sub"),
        "mul": _emitted("mul"),
        "truediv": _divide,
        "floordiv:float": _floordiv,
        "mod:float": _mod,
        "fmod:float": _fmod,
        "pow:float": _power,
        "minimum:float": _extremum("olt"),
        "maximum:float": _extremum("ogt"),
        "neg": _emitted("negate"),
        "abs:float": _emitted("intrinsic", "fabs"),
        "sign:float": _sign,
        **{name: _emitted("op", name) for name in ("and", "or", "xor")},
        "not": _emitted("invert"),
        **{name: _comparison(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
        "round": _emitted("intrinsic", "rint"),
        **{name: _emitted("intrinsic", name) for name in ("floor", "ceil", "trunc", "sqrt")},
        **{
            name: _function(name)
            for name in (
                "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan atan2 sinh cosh "
                "tanh asinh acosh atanh erf erfc"
            ).split()
        },
        "rsqrt": _rsqrt,
        "sigmoid": _sigmoid,
        "where": _emitted("select"),
        "detach": lambda scope, node, operands: operands[0],
        "cast:bool": _cast_from_bool,
        "cast:int": _cast_from_int,
        "cast:float": _cast_from_float,
    },
)
"""Every operation on every type."""
