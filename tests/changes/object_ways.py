"""Changes of values that a mod reads through objects: attributes, items, partials, callables."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import torch

from tests.changes import settings
from tests.changes.mod_change import ScoreMod, Step, way

__all__: list[str] = []


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
def an_attribute_of_a_captured_tensor() -> tuple[ScoreMod, list[Step]]:
    table: Any = torch.linspace(0.0, 1.0, 40)
    table.gamma = 0.5  # a name that the math module has too
    return (
        lambda s, b, h, q, k: s * table.gamma + table[k],
        [lambda: setattr(table, "gamma", 0.25)],
    )


@way
def an_attribute_of_a_captured_tensor_that_need_not_be_there() -> tuple[ScoreMod, list[Step]]:
    table: Any = torch.linspace(0.0, 1.0, 40)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        try:
            weight = table.gamma
        except AttributeError:
            weight = 0.5
        return s * weight + table[k]

    return mod, [lambda: setattr(table, "gamma", 0.25)]


@way
def which_of_two_functions_of_one_code() -> tuple[ScoreMod, list[Step]]:
    def scaled(weight: float) -> Any:
        return lambda s: s * weight

    half, triple = scaled(0.5), scaled(3.0)

    def make(first: Any, second: Any, chosen: Any) -> ScoreMod:
        return lambda s, b, h, q, k: chosen(s) + 0 * (first(s) + second(s))

    return make(half, triple, half), [lambda: make(half, triple, triple)]
