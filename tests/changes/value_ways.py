"""Changes of captured tensors, numbers, and other contents of a cell or a module."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch

from tests.changes.mod_change import ScoreMod, Step, way

__all__: list[str] = []


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
def the_default_dtype() -> tuple[ScoreMod, list[Step]]:
    # A third has other bits in float32 than in float64.
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
