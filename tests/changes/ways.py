"""Ways in which a mod comes by a value, and how that value is changed between calls.

Each function returns the score mod and the steps that change it. A mod may be replaced by a step:
then the step returns the new one.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch

from tests.changes import settings

__all__ = ["WAYS", "ScoreMod", "Step"]

ScoreMod = Callable[..., Any]
Step = Callable[[], ScoreMod | None]

WAYS: dict[str, Callable[[], tuple[ScoreMod, list[Step]]]] = {}


def way(function: Callable[[], tuple[ScoreMod, list[Step]]]) -> Any:
    """Enter a way under its name."""
    WAYS[function.__name__] = function
    return function


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
def an_attribute_of_a_module() -> tuple[ScoreMod, list[Step]]:
    settings.WEIGHT = 0.5
    return (
        lambda s, b, h, q, k: s * settings.WEIGHT,
        [lambda: setattr(settings, "WEIGHT", 0.25)],
    )


@way
def a_tensor_of_a_module() -> tuple[ScoreMod, list[Step]]:
    settings.BIAS = torch.zeros(40)
    return (
        lambda s, b, h, q, k: s + settings.BIAS[k],
        [lambda: setattr(settings, "BIAS", torch.linspace(0.0, 2.0, 40))],
    )


@way
def a_function_of_a_module() -> tuple[ScoreMod, list[Step]]:
    settings.transform = settings.halved
    return (
        lambda s, b, h, q, k: settings.transform(s),
        [lambda: setattr(settings, "transform", settings.tripled)],
    )


@way
def an_attribute_of_an_object() -> tuple[ScoreMod, list[Step]]:
    config = types.SimpleNamespace(weight=0.5)
    return lambda s, b, h, q, k: s * config.weight, [lambda: setattr(config, "weight", 0.75)]


@way
def an_attribute_two_objects_deep() -> tuple[ScoreMod, list[Step]]:
    config = types.SimpleNamespace(inner=types.SimpleNamespace(weight=0.5))
    return (
        lambda s, b, h, q, k: s * config.inner.weight,
        [lambda: setattr(config, "inner", types.SimpleNamespace(weight=0.75))],
    )


@way
def a_field_of_a_dataclass() -> tuple[ScoreMod, list[Step]]:
    @dataclasses.dataclass
    class Config:
        weight: float

    config = Config(0.5)
    return lambda s, b, h, q, k: s * config.weight, [lambda: setattr(config, "weight", 0.75)]


@way
def a_class_attribute() -> tuple[ScoreMod, list[Step]]:
    class Config:
        weight = 0.5

    return lambda s, b, h, q, k: s * Config.weight, [lambda: setattr(Config, "weight", 0.75)]


@way
def a_property() -> tuple[ScoreMod, list[Step]]:
    class Config:
        hidden = 0.5

        @property
        def weight(self) -> float:
            return self.hidden * 2.0

    config = Config()
    return lambda s, b, h, q, k: s * config.weight, [lambda: setattr(config, "hidden", 0.75)]


@way
def a_list_item() -> tuple[ScoreMod, list[Step]]:
    weights = [0.5, 1.0]
    return lambda s, b, h, q, k: s * weights[0], [lambda: weights.__setitem__(0, 0.75)]


@way
def a_dict_item() -> tuple[ScoreMod, list[Step]]:
    weights = {"score": 0.5}
    return (
        lambda s, b, h, q, k: s * weights["score"],
        [lambda: weights.__setitem__("score", 0.75)],
    )


@way
def a_tuple_of_a_list() -> tuple[ScoreMod, list[Step]]:
    weights = ([0.5], 2.0)
    return lambda s, b, h, q, k: s * weights[0][0], [lambda: weights[0].__setitem__(0, 0.75)]


@way
def another_tuple_in_the_cell() -> tuple[ScoreMod, list[Step]]:
    weights: tuple[float, ...] = (0.5, 1.0)

    def change() -> None:
        nonlocal weights
        weights = (0.5, 3.0)

    return lambda s, b, h, q, k: s * weights[0] + weights[1] * k, [change]


@way
def a_named_tuple_in_the_cell() -> tuple[ScoreMod, list[Step]]:
    pair = namedtuple("pair", ("weight", "bias"))
    weights = pair(0.5, 0.0)

    def change() -> None:
        nonlocal weights
        weights = pair(0.5, 0.125)

    return lambda s, b, h, q, k: s * weights.weight + weights.bias * k, [change]


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
def the_arguments_of_a_partial() -> tuple[ScoreMod, list[Step]]:
    def mod(weight: float, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * weight

    return functools.partial(mod, 0.5), [lambda: functools.partial(mod, 0.75)]


@way
def the_keywords_of_a_partial() -> tuple[ScoreMod, list[Step]]:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any, *, weight: float) -> Any:
        return s * weight

    bound = functools.partial(mod, weight=0.5)
    return bound, [lambda: bound.keywords.__setitem__("weight", 0.75)]


@way
def an_attribute_of_a_callable_object() -> tuple[ScoreMod, list[Step]]:
    class Scaled:
        def __init__(self, weight: float) -> None:
            self.weight = weight

        def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s * self.weight

    mod = Scaled(0.5)
    return mod, [lambda: setattr(mod, "weight", 0.75)]


@way
def an_attribute_of_a_bound_methods_object() -> tuple[ScoreMod, list[Step]]:
    class Layer:
        weight = 0.5

        def mod(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s * self.weight

    layer = Layer()
    return layer.mod, [lambda: setattr(layer, "weight", 0.75)]


@way
def the_call_of_a_callable_objects_class() -> tuple[ScoreMod, list[Step]]:
    class Scaled:
        def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s * 0.5

    def other(self: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * 0.75

    return Scaled(), [lambda: setattr(Scaled, "__call__", other)]


@way
def a_buffer_swapped_in_a_module() -> tuple[ScoreMod, list[Step]]:
    layer = torch.nn.Module()
    layer.register_buffer("bias", torch.zeros(40))
    return (
        lambda s, b, h, q, k: s + layer.bias[k],
        [lambda: setattr(layer, "bias", torch.linspace(0.0, 2.0, 40))],
    )


@way
def a_parameter_loaded_from_a_state() -> tuple[ScoreMod, list[Step]]:
    layer = torch.nn.Linear(1, 40)

    def change() -> None:
        layer.load_state_dict({"weight": torch.ones(40, 1), "bias": torch.linspace(0.0, 2.0, 40)})

    return lambda s, b, h, q, k: s + layer.bias[k], [change]


@way
def a_write_in_place() -> tuple[ScoreMod, list[Step]]:
    table = torch.zeros(40)

    def change() -> None:
        table.copy_(torch.arange(40.0))

    return lambda s, b, h, q, k: s + table[k], [change]


@way
def a_write_into_a_view() -> tuple[ScoreMod, list[Step]]:
    base = torch.zeros(40, 2)
    table = base[:, 1]

    def change() -> None:
        base.fill_(0.5)

    return lambda s, b, h, q, k: s + table[k] * q, [change]


@way
def a_zero_dimensional_tensor_filled() -> tuple[ScoreMod, list[Step]]:
    weight = torch.tensor(0.5)

    def change() -> None:
        weight.fill_(0.75)

    return lambda s, b, h, q, k: s * weight, [change]


@way
def the_data_of_a_tensor() -> tuple[ScoreMod, list[Step]]:
    table = torch.zeros(40)

    def change() -> None:
        table.data = torch.linspace(0.0, 1.0, 50)

    return lambda s, b, h, q, k: s + table[k], [change]


@way
def the_dtype_of_a_table() -> tuple[ScoreMod, list[Step]]:
    table = torch.linspace(0.0, 3.0, 40)

    def change() -> None:
        nonlocal table
        table = table.to(torch.int32)

    return lambda s, b, h, q, k: s + table[k] * 0.3, [change]


@way
def the_rank_of_a_table() -> tuple[ScoreMod, list[Step]]:
    table = torch.linspace(0.0, 3.0, 40)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + (table[k] if table.ndim == 1 else table[q, k])

    def change() -> None:
        nonlocal table
        table = torch.linspace(0.0, 3.0, 1600).reshape(40, 40)

    return mod, [change]


@way
def the_length_of_a_table() -> tuple[ScoreMod, list[Step]]:
    table = torch.linspace(0.0, 3.0, 40)

    def change() -> None:
        nonlocal table
        table = torch.linspace(0.0, 3.0, 60)

    return lambda s, b, h, q, k: s + table[k - 1] / table.shape[0], [change]


@way
def a_tensor_for_a_number() -> tuple[ScoreMod, list[Step]]:
    weight: Any = 0.5

    def change() -> None:
        nonlocal weight
        weight = torch.tensor(0.75)

    return lambda s, b, h, q, k: s * weight, [change]


@way
def one_then_one_point_zero_then_true() -> tuple[ScoreMod, list[Step]]:
    divisor: Any = 1

    def become(value: Any) -> Step:
        def change() -> None:
            nonlocal divisor
            divisor = value

        return change

    # bool + True is a bool or, bool + 1 an int; k * 1 is an int and k * 1.0 a float.
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        shift = 2.0 * q if (k * divisor).is_floating_point() else 0.0
        return s + ((k == q) + divisor) * 0.5 + shift * k

    return mod, [become(1.0), become(True), become(1)]


@way
def zero_then_negative_zero() -> tuple[ScoreMod, list[Step]]:
    zero = 0.0

    def become(value: float) -> Step:
        def change() -> None:
            nonlocal zero
            zero = value

        return change

    # copysign by division: 1 / 0.0 is inf and 1 / -0.0 is -inf.
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where(torch.atan2(s * 0.0 + zero, -1.0 - k * 1.0) > 0, s, s + 2.0)

    return mod, [become(-0.0), become(0.0)]


@way
def a_flag_that_picks_a_branch() -> tuple[ScoreMod, list[Step]]:
    flag = False

    def change() -> None:
        nonlocal flag
        flag = True

    return lambda s, b, h, q, k: s * 2.0 if flag else s, [change]


@way
def a_string_that_picks_a_branch() -> tuple[ScoreMod, list[Step]]:
    settings.MODE = "half"
    return (
        lambda s, b, h, q, k: s * 0.5 if settings.MODE == "half" else s + k,
        [lambda: setattr(settings, "MODE", "shift")],
    )


@way
def a_list_that_grows() -> tuple[ScoreMod, list[Step]]:
    weights = [0.5]

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for weight in weights:
            s = s + weight * k
        return s

    return mod, [lambda: weights.append(0.25)]


@way
def none_for_a_table() -> tuple[ScoreMod, list[Step]]:
    table: Any = None

    def change() -> None:
        nonlocal table
        table = torch.linspace(0.0, 3.0, 40)

    return lambda s, b, h, q, k: s if table is None else s + table[k], [change]


@way
def a_constant_made_in_the_mod() -> tuple[ScoreMod, list[Step]]:
    weight = 0.5

    def change() -> None:
        nonlocal weight
        weight = 0.75

    return lambda s, b, h, q, k: s * torch.tensor(weight) + torch.full((), weight), [change]


@way
def a_builtin_that_is_shadowed() -> tuple[ScoreMod, list[Step]]:
    def restore() -> None:
        del globals()["abs"]

    return lambda s, b, h, q, k: abs(s), [lambda: set_global("abs", replacement), restore]


@way
def what_wraps_the_function() -> tuple[ScoreMod, list[Step]]:
    def inner(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * 0.5

    @functools.wraps(inner)
    def mod(*arguments: Any) -> Any:
        return settings.transform(mod.__wrapped__(*arguments))  # type: ignore[attr-defined]

    def other(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * 0.75

    settings.transform = settings.halved
    return mod, [
        lambda: setattr(mod, "__wrapped__", other),
        lambda: setattr(settings, "transform", settings.tripled),
    ]


@way
def an_attribute_of_a_function() -> tuple[ScoreMod, list[Step]]:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * mod.weight  # type: ignore[attr-defined]

    mod.weight = 0.5  # type: ignore[attr-defined]
    return mod, [lambda: setattr(mod, "weight", 0.75)]


@way
def the_default_dtype() -> tuple[ScoreMod, list[Step]]:
    # In float32 a third is another number than in float64.
    return (
        lambda s, b, h, q, k: s + (k + 1) / 3,
        [
            lambda: torch.set_default_dtype(torch.float32),
            lambda: torch.set_default_dtype(torch.float64),
        ],
    )


@way
def a_gradient_that_becomes_wanted() -> tuple[ScoreMod, list[Step]]:
    table = torch.linspace(0.0, 3.0, 40)

    def change() -> None:
        table.requires_grad_()

    return lambda s, b, h, q, k: s + table[k], [change]
