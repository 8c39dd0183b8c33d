"""Record of an operation: all that anyflex knows of it beside the text of its targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor

from anyflex.mod_graph.operations.bounds import Bounds
from anyflex.mod_graph.operations.terms import Term

__all__ = ["Gradient", "Operation", "Reading", "Sample"]

Gradient: TypeAlias = "Callable[..., Term]"
"""Function of the gradient of the result, the result, and the operands, that returns the gradient
of one operand, as torch's autograd has it, kinks included."""

Sample: TypeAlias = "Callable[[Any, Any, Any], Any]"
"""Function of the score, q_idx and kv_idx, in torch's functions."""

Reading: TypeAlias = Literal["floats", "rounding", "comparison", "bits", "shift", "own"]
"""Operands that torch's function takes, and their common type:

``"floats"``: ints and bools become the default float; ``"rounding"``: an int is its own result;
``"comparison"``: any, the result is bool; ``"bits"``: no floats; ``"shift"``: ints; ``"own"``: a
function of `anyflex.tracing` reads them.
"""


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation of mod graphs.

    Args:
        name: in graphs and in the tables of targets.
        value: torch's function of the operands' values. None where
            `anyflex.mod_graph.evaluate` has an own rule.
        operands: their number; None for any.
        types: classes of types that operands can have: ``"bool"``, ``"int"``, ``"float"``.
        names: more names that torch has for that function, in torch, torch.special or
            torch.nn.functional, or as a method.
        reading: the operands that these functions take.
        sign: Python's operator, between two operands or before one.
        method: name of the operator's method without underscores, where it isn't `name`.
        gradients: one an operand, None for an operand that gets none. Empty where the derivative
            is 0.
        bounds: range of the result; None where it is unknown.
        integer_bounds: likewise, but for ints alone. A divisor is not 0.
        keeps_steps: for ints, the number of first operands that give equal or neighbouring results
            where they are neighbours. Where these take all values between their bounds, and the
            others one, so does the result.
        approximate: torch may compute the last bits of one value in another way than those of
            many.
        samples: score mods for the conformance kit, by name; they are differentiated.
        index_samples: functions of q_idx and kv_idx that are added to the score. Operations that
            jump have these: every backend has the same exact value of an index.
    """

    name: str
    value: Callable[..., Tensor] | None = None
    operands: int | None = 1
    types: tuple[str, ...] = ("bool", "int", "float")
    names: tuple[str, ...] = ()
    reading: Reading = "own"
    sign: str = ""
    method: str = ""
    gradients: tuple[Gradient | None, ...] = ()
    bounds: Bounds | None = None
    integer_bounds: Bounds | None = None
    keeps_steps: int = 0
    approximate: bool = False
    samples: Mapping[str, Sample] = field(default_factory=dict)
    index_samples: Mapping[str, Sample] = field(default_factory=dict)

    @property
    def operator(self) -> str:
        """Name of the operator's method without underscores; empty for a plain function."""
        return self.method or (self.name if self.sign else "")

    @property
    def spelled(self) -> tuple[str, ...]:
        """Names of the functions and methods that are this operation."""
        return () if self.value is None else (self.value.__name__, *self.names)
