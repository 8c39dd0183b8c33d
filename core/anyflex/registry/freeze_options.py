"""``kernel_options`` made hashable: the part of its policy that belongs to the traced half of the
front end. Plain Python on local data, so that Dynamo can inline it."""

from __future__ import annotations

from typing import Any

from anyflex.tensors.dynamo_errors import fail
from anyflex.tensors.symbolic_numbers import fixed

__all__ = ["KernelOptions", "freeze_options"]

KernelOptions = tuple[tuple[str, object], ...]
"""Sorted pairs; a backend's own options are again pairs under its name."""


_OR_OWN = ", or under a backend's name a dict with its own options"


def freeze_options(kernel_options: object) -> KernelOptions:
    """Return ``kernel_options`` as sorted, hashable pairs; () for None.

    Raises:
        ArgumentTypeError: it is not a dict, a key is not a str, or a value is not a number, str or
            dict of them.
        ArgumentError: a key that can't be a name, or a number that isn't finite.
    """
    if kernel_options is None:
        return ()
    if not isinstance(kernel_options, dict):
        fail(
            "ArgumentTypeError",
            f"kernel_options must be a dict or None, got {type(kernel_options).__name__}",
        )
    pairs: list[tuple[str, object]] = []
    for key in _sorted_keys(kernel_options, "kernel_options"):
        value = kernel_options[key]
        if isinstance(value, dict):
            where = f"kernel_options[{key!r}]"
            own = [(name, _atom(value[name], where, name)) for name in _sorted_keys(value, where)]
            pairs.append((key, tuple(own)))
        else:
            pairs.append((key, _atom(value, "kernel_options", key, _OR_OWN)))
    return tuple(pairs)


def _sorted_keys(options: dict[Any, object], where: str) -> list[str]:
    for key in options:
        if not isinstance(key, str):
            fail("ArgumentTypeError", f"{where}: each key must be a str, got {key!r}")
        if "=" in key or "\n" in key:
            fail("ArgumentError", f"{where}: there is no option {key!r}")
    return sorted(options)


def _atom(value: object, where: str, key: str, more: str = "") -> object:
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        fail("ArgumentError", f"{where}[{key!r}] must be finite, got {value}")
    if isinstance(value, int) and not isinstance(value, bool):
        return fixed(value)
    if isinstance(value, (bool, float, str)):
        return value
    fail(
        "ArgumentTypeError",
        f"{where}[{key!r}] must be an int, float, bool or str{more}, got {type(value).__name__}",
    )
