"""Checks of the arguments of `anyflex.masks` and `anyflex.mods`, and how a mod reads them.

A number is closed over as it is, so that mod graphs keep it in a slot; a tensor of numbers is read
at b or h. The choice is made here, once, and not inside of the mod. Dynamo follows all of
it, so that a model may make its mods in `forward`.

``argument`` is how messages name an argument, ``"causal_window: size"``. A wrong type or dtype
raises ArgumentTypeError, a wrong value, rank or device ArgumentError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from anyflex.tensors.dynamo_errors import fail
from anyflex.tracing.trace import check_signature

__all__ = [
    "check_callable",
    "check_mods",
    "check_one_device",
    "check_tensor",
    "checked_bool",
    "checked_each",
    "checked_int",
    "number_at",
    "query_position",
    "table_at",
]

Checked = TypeVar("Checked")

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""dtypes of ids, which are only compared."""

INDICES = (torch.int64, torch.int32)
"""dtypes of numbers that are computed with: narrower ones would wrap."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def checked_int(argument: str, value: Any, least: int | None = None) -> int:
    """Return `value`, an int that is at least `least`. A bool is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        cure = " Use int(...) of it." if isinstance(value, Tensor) else ""
        fail("ArgumentTypeError", f"{argument} must be an int, got {type(value).__name__}.{cure}")
    if least is not None and value < least:
        fail("ArgumentError", f"{argument} must be at least {least}, got {value}.")
    return value


def checked_bool(argument: str, value: Any) -> bool:
    """Return `value`, a bool."""
    if not isinstance(value, bool):
        fail("ArgumentTypeError", f"{argument} must be a bool, got {type(value).__name__}.")
    return value


def checked_each(
    argument: str, value: Any, count: int, check: Callable[[str, Any], Checked]
) -> tuple[Checked, ...]:
    """Return what `check` returns for `count` values, from a tuple or from one value for all."""
    if not isinstance(value, (tuple, list)):
        return (check(argument, value),) * count
    if len(value) != count:
        fail(
            "ArgumentError",
            f"{argument} must be one value or {count}, one for each dimension of the grid, got "
            f"{len(value)}.",
        )
    return tuple([check(argument, item) for item in value])


def check_tensor(
    argument: str,
    value: Any,
    shapes: tuple[str, ...],
    dtypes: tuple[torch.dtype, ...],
    alternative: str = "",
) -> None:
    """Check that `value` is a dense tensor of one of the ranks and dtypes.

    Args:
        shapes: ``("[S]", "[B, S]")``: names its dimensions, and so allows its rank.
        alternative: what else the argument may be, for the message: ``"an int or "``.
    """
    wanted = " or ".join(shapes)
    if not isinstance(value, Tensor):
        fail(
            "ArgumentTypeError",
            f"{argument} must be {alternative}a tensor {wanted}, got {type(value).__name__}.",
        )
    if value.is_nested or value.layout is not torch.strided:
        fail("ArgumentTypeError", f"{argument} must be a dense tensor (layout torch.strided).")
    if value.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        fail("ArgumentTypeError", f"{argument} must have dtype {names}; got {value.dtype}.")
    for shape in shapes:
        rank = 0 if shape == "[]" else shape.count(",") + 1
        if value.dim() == rank:
            return
    fail("ArgumentError", f"{argument} must have shape {wanted}, got {list(value.shape)}.")


def check_callable(argument: str, value: Any, kind: str) -> None:
    """Check that `value` may be a mod. `kind`: ``"mask mod"``."""
    if not callable(value):
        fail("ArgumentTypeError", f"{argument} must be a {kind}, got {type(value).__name__}.")


def check_mods(function: str, mods: Sequence[Any], kind: Literal["score", "mask"]) -> None:
    """Check the mods that `function` combines, naming their positions: one that takes other
    arguments raises BlockMaskError, or ModTraceError if it is a score mod."""
    for position, mod in enumerate(mods):
        argument = f"{function}: argument {position}"
        check_callable(argument, mod, f"{kind} mod")
        check_signature(mod, kind, argument)


def check_one_device(function: str, **tensors: Any) -> None:
    """Check that those of `tensors` that are tensors are on one device."""
    first = ""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            continue
        if not first:
            first, device = name, tensor.device
        elif tensor.device != device:
            fail(
                "ArgumentError",
                f"{function}: {first} is on {device} and {name} on {tensor.device}; they must be "
                "on one device.",
            )


def number_at(
    argument: str, value: Any, letter: str, least: int | None = None
) -> Callable[[Tensor], Any]:
    """Return ``read(index)``, what a mod calls to get a number at index b or h.

    Args:
        value: int, also a symbolic one where any value is allowed; or int32 or int64 tensor, []
            or one entry for each batch entry or head.
        letter: ``"B"`` or ``"H"``.
        least: the smallest allowed int. Values of tensors aren't looked at.
    """
    if isinstance(value, Tensor):
        check_tensor(argument, value, ("[]", f"[{letter}]"), INDICES, "an int or ")
        if value.dim() == 0:
            return lambda index: value
        return lambda index: value[index]
    symbolic = least is None and isinstance(value, torch.SymInt)
    number = value if symbolic else checked_int(argument, value, least)
    return lambda index: number


def query_position(argument: str, offset: Any) -> Callable[[Tensor, Tensor], Any]:
    """Return ``position(b, q_idx)``, the query's place among the keys: q_idx + offset, which is an
    int, or an int32 or int64 tensor, [] or [B]."""
    read = number_at(argument, offset, "B")
    if isinstance(offset, int) and offset == 0:
        return lambda b, q_idx: q_idx
    return lambda b, q_idx: q_idx + read(b)


def table_at(
    argument: str, value: Any, dtypes: tuple[torch.dtype, ...], letter: str = "S"
) -> Callable[[Tensor, Tensor], Any]:
    """Return ``read(b, index)`` of a tensor [S], or [B, S], over positions."""
    check_tensor(argument, value, (f"[{letter}]", f"[B, {letter}]"), dtypes)
    if value.dim() == 1:
        return lambda b, index: value[index]
    return lambda b, index: value[b, index]
