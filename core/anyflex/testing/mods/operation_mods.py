"""A score mod for each operation of the mod graph, with its slope where it has one.

Operations that jump take a function of indices, of which every backend has the same exact value,
ties and negative numbers included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anyflex.testing.mods.mod import Entry

__all__ = ["OPERATION_MODS"]

Formula = Callable[[Any, Any, Any], Any]
"""Function of the score, q_idx and kv_idx."""

_SMOOTH: dict[str, Formula] = {
    "exp": lambda s, q, k: torch.exp(s * 0.3),
    "exp2": lambda s, q, k: torch.exp2(s * 0.3),
    "expm1": lambda s, q, k: torch.expm1(s * 0.3),
    "log": lambda s, q, k: torch.log(s * s + 0.5),
    "log2": lambda s, q, k: torch.log2(s * s + 0.5),
    "log10": lambda s, q, k: torch.log10(s * s + 0.5),
    "log1p": lambda s, q, k: torch.log1p(s * s),
    "sqrt": lambda s, q, k: torch.sqrt(s * s + 0.5),
    "rsqrt": lambda s, q, k: torch.rsqrt(s * s + 0.5),
    "sin": lambda s, q, k: torch.sin(s * 2.0),
    "cos": lambda s, q, k: torch.cos(s * 2.0),
    "tan": lambda s, q, k: torch.tan(torch.tanh(s)),
    "asin": lambda s, q, k: torch.asin(torch.tanh(s) * 0.9),
    "acos": lambda s, q, k: torch.acos(torch.tanh(s) * 0.9),
    "atan": lambda s, q, k: torch.atan(s * 2.0),
    "sinh": lambda s, q, k: torch.sinh(s * 0.5),
    "cosh": lambda s, q, k: torch.cosh(s * 0.5),
    "tanh": lambda s, q, k: torch.tanh(s * 0.5),
    "asinh": lambda s, q, k: torch.asinh(s * 2.0),
    "acosh": lambda s, q, k: torch.acosh(s * s + 1.5),
    "atanh": lambda s, q, k: torch.atanh(torch.tanh(s) * 0.9),
    "sigmoid": lambda s, q, k: torch.sigmoid(s * 2.0),
    "erf": lambda s, q, k: torch.erf(s),
    "erfc": lambda s, q, k: torch.erfc(s),
    "atan2": lambda s, q, k: torch.atan2(s, s * 0.5 + 3.0),
    "pow": lambda s, q, k: torch.pow(s * s + 0.5, s * 0.5),
    "pow_of_negatives": lambda s, q, k: torch.pow(s, 3.0) * 0.1,
    "truediv": lambda s, q, k: s / (2.0 + s * s),
    "neg": lambda s, q, k: -s * 2.0,
    "abs": lambda s, q, k: (s + 20.0).abs() + (s - 20.0).abs() * 0.5,
    "minimum": lambda s, q, k: torch.minimum(s, (q - k) * 0.5 + 0.3),
    "maximum": lambda s, q, k: torch.maximum(s, (q - k) * 0.5 + 0.3),
    "where": lambda s, q, k: torch.where(q > k, s * s, torch.sin(s)),
    "detach": lambda s, q, k: s * s.detach() * 0.5,
}
_OF_INDICES: dict[str, Formula] = {
    "floor": lambda s, q, k: torch.floor((q - k) * 0.5),
    "ceil": lambda s, q, k: torch.ceil((q - k) * 0.5),
    "round": lambda s, q, k: torch.round((q - k) * 0.5),
    "trunc": lambda s, q, k: torch.trunc((q - k) * 0.5),
    "sign_of_floats": lambda s, q, k: torch.sign((q - k) * 0.5),
    "sign_of_ints": lambda s, q, k: torch.sign(q - k) * 0.5,
    "floordiv_of_floats": lambda s, q, k: ((q - k) * 0.5) // 0.75,
    "mod_of_floats": lambda s, q, k: ((q - k) * 0.5) % 0.75,
    "fmod_of_floats": lambda s, q, k: torch.fmod((q - k) * 0.5, 0.75),
    "floordiv_of_ints": lambda s, q, k: ((q - k) // 3 + (q - k) // -4) * 0.5,
    "mod_of_ints": lambda s, q, k: ((q - k) % 3 + (q - k) % -4) * 0.5,
    "fmod_of_ints": lambda s, q, k: torch.fmod(q - k, 3) * 0.5,
    "pow_of_ints": lambda s, q, k: ((q - k) ** 3) * 0.01,
    "and": lambda s, q, k: ((q - k) & 5) * 0.5,
    "or": lambda s, q, k: ((q - k) | 5) * 0.1,
    "xor": lambda s, q, k: ((q - k) ^ 5) * 0.1,
    "not": lambda s, q, k: (~(q - k)) * 0.1,
    "shl": lambda s, q, k: ((q - k) << 2) * 0.1,
    "shr": lambda s, q, k: ((q - k) >> 1) * 0.3,
    "logic": lambda s, q, k: (((q > k) & (k > 2)) | ~(q < 5) ^ (k == 1)).float(),
    "comparisons": lambda s, q, k: (
        (q == k) * 0.5
        + (q != k + 1) * 0.25
        + (q < k) * 0.125
        + (q <= k + 2) * 0.0625
        + (q > k - 3) * 1.5
        + (q >= k - 5) * 0.75
    ),
    "comparisons_of_floats": lambda s, q, k: (
        ((q - k) * 0.5 == 1.0) * 0.5
        + ((q - k) * 0.5 < 1.0) * 0.25
        + ((q - k) * 0.5 <= -1.0) * 0.125
        + ((q - k) * 0.5 > 2.0) * 0.75
        + ((q - k) * 0.5 >= 2.0) * 1.5
        + ((q - k) * 0.5 != 0.0) * 0.3
    ),
    "minimum_of_ints": lambda s, q, k: torch.minimum(q, k + 2) * 0.3,
    "maximum_of_ints": lambda s, q, k: torch.maximum(q, k - 2) * 0.3,
    "abs_of_ints": lambda s, q, k: (q - k).abs() * 0.3,
    "float_to_int": lambda s, q, k: ((q - k) * 0.75).int() * 0.3,
    "int_to_bool": lambda s, q, k: (q - k).bool() * 0.5,
    "int_to_narrow": lambda s, q, k: ((q - k) * 40).to(torch.int8) * 0.01,
    "float_to_half": lambda s, q, k: ((q - k) * 0.3).half().float(),
}

OPERATION_MODS: dict[str, Entry] = {}


def _enter(name: str, builder: Callable[[], Callable[..., Any]]) -> None:
    OPERATION_MODS[name] = Entry(
        "S+", name, builder, {}, None, lambda sizes: (), batched=False, headed=False, smooth=True
    )


def _alone(formula: Formula) -> Callable[[], Callable[..., Any]]:
    return lambda: lambda s, b, h, q, k: formula(s, q, k)


def _added(formula: Formula) -> Callable[[], Callable[..., Any]]:
    return lambda: lambda s, b, h, q, k: s + formula(s, q, k)


for _name, _formula in _SMOOTH.items():
    _enter(f"operation_{_name}", _alone(_formula))
for _name, _formula in _OF_INDICES.items():
    _enter(f"operation_{_name}", _added(_formula))
