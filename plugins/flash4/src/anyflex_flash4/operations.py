"""Functions that the text of a mod calls: arithmetic with torch's meaning, over any scalars with
operators.

The same rules serve the scalars of CuTe (`anyflex_flash4.cute_mods`) and, in tests, tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Operations"]


class Operations:
    """Operations with torch's meaning, built from a target's own.

    A scalar's operators are those of its type: ``//`` rounds either way, division by 0 must not
    be asked of it, and amounts of shifts lie within the type.

    Args:
        types: name of a type -> what converts to it: ``"f32"``.
        select: (bool, a, b) -> a where true, else b; a and b have one type.
        function: name of an elementary function -> the target's function.
    """

    def __init__(
        self,
        types: Mapping[str, Callable[[Any], Any]],
        select: Callable[[Any, Any, Any], Any],
        function: Callable[[str], Callable[..., Any]],
    ) -> None:
        self.select = select
        self.function = function
        for name, convert in types.items():
            setattr(self, name, convert)
        self.i64 = types["i64"]
        self.f32 = types["f32"]

    def wide(self, low: Any, high: Any) -> Any:
        """An int64 of its two halves, int32."""
        return (self.i64(high) << self.i64(32)) | (self.i64(low) & self.i64(0xFFFFFFFF))

    def place(self, index: Any, size: Any) -> Any:
        """An index into a dimension, as int64: it wraps once, then is clamped."""
        index, size, zero = self.i64(index), self.i64(size), self.i64(0)
        index = self.select(index < zero, index + size, index)
        index = self.select(index >= size, size - self.i64(1), index)
        return self.select(index < zero, zero, index)

    def call(self, name: str, *operands: Any) -> Any:
        """One of the target's functions. Half-precision types are computed as float32."""
        return self.function(name)(*operands)

    def floordiv(self, convert: Callable[[Any], Any], a: Any, b: Any) -> Any:
        """Divide integers, rounding down. Division by 0 gives an arbitrary value."""
        quotient, _ = self._divided(convert, a, b)
        return quotient

    def mod(self, convert: Callable[[Any], Any], a: Any, b: Any) -> Any:
        """Remainder of integers, with the divisor's sign. Division by 0 gives an arbitrary
        value."""
        _, remainder = self._divided(convert, a, b)
        return remainder

    def fmod(self, convert: Callable[[Any], Any], a: Any, b: Any) -> Any:
        """Remainder of integers, with the dividend's sign. Division by 0 gives an arbitrary
        value."""
        b, zero = self._divisor(convert, b), convert(0)
        remainder = self.mod(convert, a, b)
        unlike = (remainder != zero) & ((a < zero) != (b < zero))
        return self.select(unlike, convert(remainder - b), remainder)

    def _divisor(self, convert: Callable[[Any], Any], b: Any) -> Any:
        return self.select(b == convert(0), convert(1), b)

    def _divided(self, convert: Callable[[Any], Any], a: Any, b: Any) -> tuple[Any, Any]:
        b, zero = self._divisor(convert, b), convert(0)
        quotient = convert(a // b)
        remainder = convert(a - convert(quotient * b))
        # Where the target's division rounds to zero.
        unlike = (remainder != zero) & ((remainder < zero) != (b < zero))
        return (
            self.select(unlike, convert(quotient - convert(1)), quotient),
            self.select(unlike, convert(remainder + b), remainder),
        )

    def floor_divide(self, convert: Callable[[Any], Any], a: Any, b: Any) -> Any:
        """Floating numbers: the integer nearest to (a - remainder) / b, which division alone
        misses where it rounds up."""
        zero, one = convert(0.0), convert(1.0)
        remainder = convert(self.call("fmod", a, b))
        quotient = convert(convert(a - remainder) / b)
        unlike = (remainder != zero) & ((b < zero) != (remainder < zero))
        quotient = self.select(unlike, convert(quotient - one), quotient)
        floor = convert(self.call("floor", quotient))
        gap = convert(quotient - floor)
        floor = self.select(gap > convert(0.5), convert(floor + one), floor)
        ratio = convert(a / b)
        # A zero has the ratio's sign.
        signed_zero = convert(ratio * zero)
        floor = self.select(quotient == zero, signed_zero, floor)
        return self.select(b == zero, ratio, floor)

    def remainder(self, convert: Callable[[Any], Any], a: Any, b: Any) -> Any:
        """Floating numbers, with the divisor's sign."""
        zero = convert(0.0)
        remainder = convert(self.call("fmod", a, b))
        unlike = (remainder != zero) & ((b < zero) != (remainder < zero))
        return self.select(unlike, convert(remainder + b), remainder)

    def minimum(self, a: Any, b: Any) -> Any:
        """NaN wins."""
        return self.select(a != a, a, self.select(b != b, b, self.select(a < b, a, b)))

    def maximum(self, a: Any, b: Any) -> Any:
        """NaN wins."""
        return self.select(a != a, a, self.select(b != b, b, self.select(a > b, a, b)))

    def magnitude(self, convert: Callable[[Any], Any], a: Any) -> Any:
        """Absolute value; -0.0 gives 0.0."""
        zero = convert(0)
        return self.select(a <= zero, convert(zero - a), a)

    def sign(self, convert: Callable[[Any], Any], a: Any) -> Any:
        """-1, 0 or 1; NaN gives 0, as torch has it."""
        zero, one = convert(0), convert(1)
        return self.select(a > zero, one, self.select(a < zero, convert(zero - one), zero))

    def sigmoid(self, convert: Callable[[Any], Any], a: Any) -> Any:
        """1 / (1 + exp(-a))."""
        one = convert(1.0)
        return convert(one / convert(one + convert(self.call("exp", convert(-a)))))

    def integer_power(self, convert: Callable[[Any], Any], bits: int, a: Any, b: Any) -> Any:
        """a ** b of integers, wrapping. A negative b gives 0, except for 1 and -1."""
        zero, one = convert(0), convert(1)
        result, square = one, a
        for bit in range(bits - 1):
            odd = (convert(b >> convert(bit)) & one) != zero
            result = self.select(odd, convert(result * square), result)
            square = convert(square * square)
        unit = (a == one) | (a == convert(-1))
        return self.select((b < zero) & self.inverted(unit), zero, result)

    def inverted(self, a: Any) -> Any:
        """not, of a bool."""
        return a != (a == a)

    def shifted_left(self, convert: Callable[[Any], Any], bits: int, a: Any, b: Any) -> Any:
        """An amount outside of the type's bits gives 0."""
        zero = convert(0)
        outside = (b < zero) | (b >= convert(bits))
        amount = self.select(outside, zero, b)
        return self.select(outside, zero, convert(a << amount))

    def shifted_right(self, convert: Callable[[Any], Any], bits: int, a: Any, b: Any) -> Any:
        """An amount outside of the type's bits gives 0, or -1 for negative numbers."""
        zero = convert(0)
        outside = (b < zero) | (b >= convert(bits))
        sign = self.select(a < zero, convert(zero - convert(1)), zero)
        amount = self.select(outside, zero, b)
        return self.select(outside, sign, convert(a >> amount))
