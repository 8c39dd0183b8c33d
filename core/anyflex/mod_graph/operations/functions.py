"""Records of the elementary functions and of rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyflex.mod_graph.operations.bounds import Bounds, End, rising, sign_of
from anyflex.mod_graph.operations.record import Gradient, Operation
from anyflex.mod_graph.operations.terms import Term, call

__all__ = ["FUNCTIONS", "ROUNDING"]


def _function(
    name: str,
    gradient: Gradient,
    sample: Callable[[Any], Any],
    *names: str,
    rises: bool = False,
    exact: bool = False,
    bounds: Bounds | None = None,
) -> Operation:
    """Return the record of torch's function of this name.

    Args:
        sample: a score mod, of the score alone.
        names: more names that torch has for it.
        rises: it rises everywhere.
        exact: torch rounds it correctly.
    """
    value: Callable[[Any], Any] = getattr(torch, name)
    return Operation(
        name,
        value,
        types=("float",),
        names=names,
        reading="floats",
        gradients=(gradient,),
        bounds=rising(value, exact=exact) if rises else bounds,
        approximate=not exact,
        samples={name: lambda s, q, k: sample(s)},
    )


def _wave(a: Tensor, b: Tensor) -> tuple[End, End]:
    return torch.full_like(a, -1), torch.full_like(b, 1)


def _between_poles(a: Tensor, b: Tensor) -> tuple[End, End]:
    inside = (a > -1.5) & (b < 1.5)
    return torch.where(inside, torch.tan(a), math.nan), torch.where(inside, torch.tan(b), math.nan)


def _bell(x: Term) -> Term:
    return call("exp", -(x * x)) * (2.0 / math.sqrt(math.pi))


def _inverse_root(x: Term) -> Term:
    return call("rsqrt", x)


FUNCTIONS = (
    _function("exp", lambda g, r, x: g * r, lambda s: torch.exp(s * 0.3), rises=True),
    _function(
        "exp2", lambda g, r, x: g * r * math.log(2), lambda s: torch.exp2(s * 0.3), rises=True
    ),
    _function("expm1", lambda g, r, x: g * (r + 1.0), lambda s: torch.expm1(s * 0.3), rises=True),
    _function("log", lambda g, r, x: g / x, lambda s: torch.log(s * s + 0.5), rises=True),
    _function(
        "log2",
        lambda g, r, x: g / (x * math.log(2)),
        lambda s: torch.log2(s * s + 0.5),
        rises=True,
    ),
    _function(
        "log10",
        lambda g, r, x: g / (x * math.log(10)),
        lambda s: torch.log10(s * s + 0.5),
        rises=True,
    ),
    _function("log1p", lambda g, r, x: g / (x + 1.0), lambda s: torch.log1p(s * s), rises=True),
    _function(
        "sqrt",
        lambda g, r, x: g / (r * 2.0),
        lambda s: torch.sqrt(s * s + 0.5),
        rises=True,
        exact=True,
    ),
    _function(
        "rsqrt", lambda g, r, x: g * -0.5 * (r * (r * r)), lambda s: torch.rsqrt(s * s + 0.5)
    ),
    _function(
        "sin", lambda g, r, x: g * call("cos", x), lambda s: torch.sin(s * 2.0), bounds=_wave
    ),
    _function(
        "cos", lambda g, r, x: g * -call("sin", x), lambda s: torch.cos(s * 2.0), bounds=_wave
    ),
    _function(
        "tan",
        lambda g, r, x: g * (r * r + 1.0),
        lambda s: torch.tan(torch.tanh(s)),
        bounds=_between_poles,
    ),
    _function(
        "asin",
        lambda g, r, x: g * _inverse_root(-(x * x) + 1.0),
        lambda s: torch.asin(torch.tanh(s) * 0.9),
        "arcsin",
    ),
    _function(
        "acos",
        lambda g, r, x: -(g * _inverse_root(-(x * x) + 1.0)),
        lambda s: torch.acos(torch.tanh(s) * 0.9),
        "arccos",
    ),
    _function(
        "atan",
        lambda g, r, x: g / (x * x + 1.0),
        lambda s: torch.atan(s * 2.0),
        "arctan",
        rises=True,
    ),
    _function(
        "sinh", lambda g, r, x: g * call("cosh", x), lambda s: torch.sinh(s * 0.5), rises=True
    ),
    _function("cosh", lambda g, r, x: g * call("sinh", x), lambda s: torch.cosh(s * 0.5)),
    _function(
        "tanh", lambda g, r, x: g * (-(r * r) + 1.0), lambda s: torch.tanh(s * 0.5), rises=True
    ),
    _function(
        "asinh",
        lambda g, r, x: g * _inverse_root(x * x + 1.0),
        lambda s: torch.asinh(s * 2.0),
        "arcsinh",
        rises=True,
    ),
    _function(
        "acosh",
        lambda g, r, x: g * _inverse_root(x * x + -1.0),
        lambda s: torch.acosh(s * s + 1.5),
        "arccosh",
    ),
    _function(
        "atanh",
        lambda g, r, x: g / (-(x * x) + 1.0),
        lambda s: torch.atanh(torch.tanh(s) * 0.9),
        "arctanh",
        rises=True,
    ),
    _function(
        "sigmoid",
        lambda g, r, x: g * (-r + 1.0) * r,
        lambda s: torch.sigmoid(s * 2.0),
        "expit",
        rises=True,
    ),
    _function("erf", lambda g, r, x: g * _bell(x), torch.erf, rises=True),
    _function("erfc", lambda g, r, x: -(g * _bell(x)), torch.erfc),
)
"""Floating operand, floating result."""


def _rounding(name: str, *names: str) -> Operation:
    value: Callable[[Any], Any] = getattr(torch, name)
    return Operation(
        name,
        value,
        types=("float",),
        names=names,
        reading="rounding",
        bounds=rising(value, exact=True),
        index_samples={name: lambda s, q, k: value((q - k) * 0.5)},
    )


ROUNDING = (
    _rounding("floor"),
    _rounding("ceil"),
    _rounding("round"),  # halves to even
    _rounding("trunc", "fix"),
    Operation(
        "sign",
        torch.sign,
        types=("int", "float"),
        names=("sgn",),
        bounds=lambda a, b: (sign_of(a), sign_of(b)),
        keeps_steps=1,
        index_samples={
            "sign_of_floats": lambda s, q, k: torch.sign((q - k) * 0.5),
            "sign_of_ints": lambda s, q, k: torch.sign(q - k) * 0.5,
        },
    ),
)
"""The derivative of each is 0."""
