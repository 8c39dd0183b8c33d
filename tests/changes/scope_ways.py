"""Changes of values that a mod reads by name: globals, cells, defaults, code."""

from __future__ import annotations

from typing import Any

import torch

from tests.changes.mod_change import ScoreMod, Step, way

__all__: list[str] = []

FACTOR = 0.5
TABLE = torch.linspace(-1.0, 1.0, 40, dtype=torch.float64)


def helper(s: Any) -> Any:
    return s * FACTOR


def replacement(s: Any) -> Any:
    return s * 0.25 + 1.0


def set_global(name: str, value: Any) -> None:
    """Rebind a global of this module."""
    globals()[name] = value


@way
def a_global_number() -> tuple[ScoreMod, list[Step]]:
    set_global("FACTOR", 0.5)
    return (
        lambda s, b, h, q, k: s * FACTOR,
        [lambda: set_global("FACTOR", 0.75), lambda: set_global("FACTOR", -2.0)],
    )


@way
def a_global_tensor() -> tuple[ScoreMod, list[Step]]:
    set_global("TABLE", torch.linspace(-1.0, 1.0, 40))
    return lambda s, b, h, q, k: s + TABLE[k], [lambda: set_global("TABLE", torch.arange(40.0))]


@way
def a_helper_functions_global() -> tuple[ScoreMod, list[Step]]:
    set_global("FACTOR", 0.5)
    return lambda s, b, h, q, k: helper(s), [lambda: set_global("FACTOR", 0.75)]


@way
def a_rebound_helper() -> tuple[ScoreMod, list[Step]]:
    before = helper
    return (
        lambda s, b, h, q, k: helper(s),
        [lambda: set_global("helper", replacement), lambda: set_global("helper", before)],
    )


@way
def a_nonlocal_number() -> tuple[ScoreMod, list[Step]]:
    weight = 0.5

    def change() -> None:
        nonlocal weight
        weight = 0.75

    return lambda s, b, h, q, k: s * weight, [change]


@way
def a_nested_functions_cell() -> tuple[ScoreMod, list[Step]]:
    weight = 0.5

    def inner(s: Any) -> Any:
        return s * weight

    def change() -> None:
        nonlocal weight
        weight = 0.75

    return lambda s, b, h, q, k: inner(s), [change]


@way
def a_nested_function_in_the_cell() -> tuple[ScoreMod, list[Step]]:
    def inner(s: Any) -> Any:
        return s * 0.5

    def change() -> None:
        nonlocal inner
        inner = replacement

    return lambda s, b, h, q, k: inner(s), [change]


@way
def a_default_argument() -> tuple[ScoreMod, list[Step]]:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any, weight: float = 0.5) -> Any:
        return s * weight

    return mod, [lambda: setattr(mod, "__defaults__", (0.75,))]


@way
def a_keyword_default() -> tuple[ScoreMod, list[Step]]:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any, *, weight: float = 0.5) -> Any:
        return s * weight

    return mod, [lambda: setattr(mod, "__kwdefaults__", {"weight": 0.75})]


@way
def a_default_argument_that_is_a_list() -> tuple[ScoreMod, list[Step]]:
    weights = [0.5]

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any, w: list[float] = weights) -> Any:
        return s * w[0]

    return mod, [lambda: weights.__setitem__(0, 0.75)]


@way
def the_code_of_a_function() -> tuple[ScoreMod, list[Step]]:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * 0.5

    def other(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * 0.75 + k

    return mod, [lambda: setattr(mod, "__code__", other.__code__)]


@way
def a_constant_of_otherwise_equal_code() -> tuple[ScoreMod, list[Step]]:
    return lambda s, b, h, q, k: s + 1.0 * k, [lambda: lambda s, b, h, q, k: s + 2.0 * k]


@way
def a_builtin_that_is_shadowed() -> tuple[ScoreMod, list[Step]]:
    def restore() -> None:
        del globals()["abs"]

    return lambda s, b, h, q, k: abs(s), [lambda: set_global("abs", replacement), restore]
