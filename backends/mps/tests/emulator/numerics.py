"""Numeric variants: what an Apple GPU may compute otherwise than the emulator does by default."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LAYOUTS", "SCHEDULES", "Numerics"]

SCHEDULES = ("forward", "reverse", "random", "greedy", "greedy-reverse")
"""Orders in which simdgroups and lanes take turns; a greedy simdgroup goes on as far as it can."""
LAYOUTS = ("apple", "rows")
"""Layouts of 8x8 matrices over a simdgroup's lanes; "rows" is none of Apple's."""


@dataclass(frozen=True)
class Numerics:
    """A numeric variant. A kernel's error budget must hold in each.

    Attributes:
        flush_denormals: subnormal floats count as zero, as operands and results.
        contract: products and sums contract to fma, as if `#pragma METAL fp contract(off)` were
            ignored.
        fast_math: the compiler assumes that nothing is NaN or infinite, and reorders, as if
            `#pragma METAL fp math_mode(safe)` were ignored. For these two, kernels are compiled
            again; all else is chosen at run time.
        ulps: exp, exp2, log, log2, rsqrt, sin, cos and the like are off by 1 to this many units in
            the last place, at random. Exact powers of two, and results that are zero, subnormal or
            not finite, stay.
        reversed_sums: the eight products of a matrix product's element are summed backwards.
        layout: layout of 8x8 matrices, of LAYOUTS.
    """

    flush_denormals: bool = False
    contract: bool = False
    fast_math: bool = False
    ulps: int = 0
    reversed_sums: bool = False
    layout: str = "apple"

    @property
    def compiler_flags(self) -> tuple[str, ...]:
        """Flags of clang's for this variant."""
        contraction = f"-ffp-contract={'fast' if self.contract else 'off'}"
        return (contraction, "-ffast-math") if self.fast_math else (contraction,)
