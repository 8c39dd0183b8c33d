"""Rules for integers that aren't one instruction: division that rounds down and never traps,
shifts by any amount."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from anyflex.plugin import Node
from anyflex_cpu.libm_ir import library_function
from anyflex_cpu.llvm_text import FLOATS, WIDTHS, Emitter, Value

if TYPE_CHECKING:
    from anyflex_cpu.llvm_lowering import Scope

__all__ = ["INTEGERS", "whole_power"]

_Rule = Callable[["Scope", Node, Sequence[Value]], Value]


def _is_signed(scope: Scope, node: Node) -> bool:
    return scope.nodes[node.arguments[0]].dtype is not torch.uint8


def _extremum(name: str) -> _Rule:
    def rule(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
        kind = "s" if _is_signed(scope, node) else "u"
        return scope.emitter.intrinsic(kind + name, *operands)

    return rule


def _abs(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
    if not _is_signed(scope, node):
        return operands[0]
    return scope.emitter.intrinsic("abs", operands[0], extra="i1 false")


def _sign(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
    e = scope.emitter
    (x,) = operands
    zero = e.constant(x.type, 0)
    signed = _is_signed(scope, node)
    above = e.convert("zext", e.compare("sgt" if signed else "ne", x, zero), x.type)
    if not signed:
        return above
    return e.op("or", above, e.op("ashr", x, e.constant(x.type, WIDTHS[x.type] - 1)))


def _shl(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
    e = scope.emitter
    x, amount = operands
    inside = e.compare("ult", amount, e.constant(x.type, WIDTHS[x.type]))
    return e.select(inside, e.op("shl", x, amount), e.constant(x.type, 0))


def _shr(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
    e = scope.emitter
    x, amount = operands
    last = e.constant(x.type, WIDTHS[x.type] - 1)
    if _is_signed(scope, node):
        return e.op("ashr", x, e.intrinsic("umin", amount, last))
    inside = e.compare("ule", amount, last)
    return e.select(inside, e.op("lshr", x, amount), e.constant(x.type, 0))


def _number(scope: Scope, node: Node) -> int | None:
    divisor = scope.nodes[node.arguments[1]]
    if divisor.operation != "const":
        return None
    assert isinstance(divisor.attribute, int)
    return divisor.attribute


def _quotient(scope: Scope, node: Node, x: Value, y: Value) -> tuple[Value, Value]:
    """(x / y towards 0, the divisor without zeros)."""
    e = scope.emitter
    signed = _is_signed(scope, node)
    number = _number(scope, node)
    one = e.constant(x.type, 1)
    name = "sdiv" if signed else "udiv"
    if number is not None and number not in (0, -1):
        return e.op(name, x, y), y
    y = e.select(e.compare("eq", y, e.constant(x.type, 0)), one, y)
    if e.vector and x.type != "i64":
        # Processors have no vector division of integers, but double quotients of these are exact.
        wide = "double" if x.type == "i32" else "float"
        to = "sitofp" if signed else "uitofp"
        ratio = e.div(e.convert(to, x, wide), e.convert(to, y, wide))
        return e.resize(e.to_integer(ratio, "i32"), x.type), y
    if not signed:
        return e.op("udiv", x, y), y
    # The least integer over -1 traps.
    negative = e.compare("eq", y, e.constant(x.type, -1))
    q = e.op("sdiv", x, e.select(negative, one, y))
    return e.select(negative, e.negate(x), q), y


def _rounds_alike(scope: Scope, node: Node) -> bool:
    """Rounding down and towards 0 are the same: neither operand is negative."""
    if not _is_signed(scope, node):
        return True
    found = [scope.range(argument) for argument in node.arguments]
    return all(r is not None and r.low >= 0 for r in found)


def _division(which: str) -> _Rule:
    def rule(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
        e = scope.emitter
        x, y = operands
        number = _number(scope, node)
        if number is not None and number > 0 and number & (number - 1) == 0 and which != "fmod":
            if which == "mod":
                return e.op("and", x, e.constant(x.type, number - 1))
            shift = "ashr" if _is_signed(scope, node) else "lshr"
            return e.op(shift, x, e.constant(x.type, number.bit_length() - 1))
        q, y = _quotient(scope, node, x, y)
        if which == "floordiv" and _rounds_alike(scope, node):
            return q
        rest = e.sub(x, e.mul(q, y))
        if which == "fmod" or _rounds_alike(scope, node):
            return rest
        zero = e.constant(x.type, 0)
        differ = e.compare("slt", e.op("xor", rest, y), zero)
        wrong = e.op("and", differ, e.compare("ne", rest, zero))
        if which == "mod":
            return e.select(wrong, e.add(rest, y), rest)
        return e.add(q, e.convert("sext", wrong, x.type))

    return rule


def whole_power(e: Emitter, x: Value, exponent: int) -> Value:
    """x to a power that is known, not negative, by squaring."""
    result: Value | None = None
    square = x
    while exponent:
        if exponent & 1:
            result = square if result is None else e.mul(result, square)
        exponent >>= 1
        if exponent:
            square = e.mul(square, square)
    return result or e.constant(x.type, 1.0 if x.type in FLOATS else 1)


def _power(scope: Scope, node: Node, operands: Sequence[Value]) -> Value:
    e = scope.emitter
    x, y = operands
    number = _number(scope, node)
    if number is not None and number >= 0:
        return whole_power(e, x, number)
    power = _called_power(e, x, y)
    if not _is_signed(scope, node):
        return power
    # Negative exponents: powers of 1 and -1 are whole, all others round to 0.
    zero, one = e.constant(x.type, 0), e.constant(x.type, 1)
    odd = e.compare("ne", e.op("and", y, one), zero)
    of_minus_1 = e.select(odd, e.constant(x.type, -1), one)
    minus_1 = e.compare("eq", x, e.constant(x.type, -1))
    below = e.select(e.compare("eq", x, one), one, e.select(minus_1, of_minus_1, zero))
    return e.select(e.compare("slt", y, zero), below, power)


def _called_power(e: Emitter, x: Value, y: Value) -> Value:
    """x to a power by the native library's function, which takes the exponent without sign."""
    x64, y64 = (e.resize(value, "i64", signed=False) for value in (x, y))
    return e.resize(library_function(e, "af_power", x64, y64), x.type)


INTEGERS: dict[str, _Rule] = {
    "floordiv:int": _division("floordiv"),
    "mod:int": _division("mod"),
    "fmod:int": _division("fmod"),
    "pow:int": _power,
    "minimum:int": _extremum("min"),
    "maximum:int": _extremum("max"),
    "abs:int": _abs,
    "sign:int": _sign,
    "shl:int": _shl,
    "shr:int": _shr,
}
"""``"operation:int"`` -> rule, of operations that have other rules for floats. Operands and result
have one type."""
