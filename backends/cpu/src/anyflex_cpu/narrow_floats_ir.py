"""float16 and bfloat16 in float registers: rounding to them, and reading them from memory.

A processor that converts neither gets arithmetic: LLVM would call functions that not every
process has.
"""

from __future__ import annotations

import math

import torch

from anyflex_cpu.llvm_text import Emitter, Value

__all__ = ["from_memory", "round_to"]


def _converts(e: Emitter) -> bool:
    """Whether the processor converts float16."""
    return bool({"f16c", "avx512fp16", "neon"} & e.module.features)


def round_to(e: Emitter, x: Value, dtype: torch.dtype) -> Value:
    """Round a float to a narrower type, to nearest, halves to even."""
    if dtype is torch.bfloat16:
        # Rounds by arithmetic: the processor's own conversion takes denormals for 0.
        return e.select(e.compare("uno", x, x), x, _without_low_bits(e, x, 16))
    if _converts(e):
        return e.convert("fpext", e.convert("fptrunc", x, "half"), "float")
    size = e.intrinsic("fabs", x)
    half = e.constant("float", 0.5)
    # Denormals are whole multiples of 2^-24: adding 0.5 rounds to such a multiple.
    small = e.sub(e.add(size, half), half)
    rounded = _without_low_bits(e, size, 13)
    over = e.compare("ogt", rounded, e.constant("float", 65504.0))
    rounded = e.select(over, e.constant("float", math.inf), rounded)
    rounded = e.select(e.compare("olt", size, e.constant("float", 2.0**-14)), small, rounded)
    rounded = e.intrinsic("copysign", rounded, x)
    return e.select(e.compare("uno", x, x), x, rounded)


def _without_low_bits(e: Emitter, x: Value, count: int) -> Value:
    """Clear the lowest `count` bits, rounding to even. Not for NaN."""
    bits = e.convert("bitcast", x, "i32")
    odd = e.op("and", e.op("lshr", bits, e.constant("i32", count)), e.constant("i32", 1))
    up = e.add(bits, e.add(odd, e.constant("i32", (1 << (count - 1)) - 1)))
    return e.convert("bitcast", e.op("and", up, e.constant("i32", -(1 << count))), "float")


def from_memory(e: Emitter, raw: Value, dtype: torch.dtype) -> Value:
    """Convert 16 bits to the float that they represent."""
    if dtype is torch.bfloat16:
        high = e.op("shl", e.convert("zext", raw, "i32"), e.constant("i32", 16))
        return e.convert("bitcast", high, "float")
    if _converts(e):
        return e.convert("fpext", e.convert("bitcast", raw, "half"), "float")
    bits = e.convert("zext", raw, "i32")
    size = e.op("shl", e.op("and", bits, e.constant("i32", 0x7FFF)), e.constant("i32", 13))
    # The exponent is 112 lower than float's.
    value = e.mul(e.convert("bitcast", size, "float"), e.constant("float", 2.0**112))
    top = e.op("or", size, e.constant("i32", 0x7F800000))
    endless = e.compare("uge", size, e.constant("i32", 0x7C00 << 13))
    value = e.select(endless, e.convert("bitcast", top, "float"), value)
    sign = e.op("shl", e.op("and", bits, e.constant("i32", 0x8000)), e.constant("i32", 16))
    return e.convert("bitcast", e.op("or", e.convert("bitcast", value, "i32"), sign), "float")
