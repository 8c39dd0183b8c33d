"""Names of kernels in Triton's cache on disk that don't depend on what was compiled before.

A function's key tells constants that it and all functions it calls read from their modules. Up to
Triton 3.6 those of a called function are told only if somebody has asked for its key before: a
process that makes its calls in another order, or whose threads do, gets other keys, finds nothing
in the cache and compiles again. Later Tritons ask first themselves.

A key that somebody has asked for already stays as it is: so whoever compiles, or hashes one of
these functions, comes here first. Functions are found as a module's names and as attributes of
modules, as this project calls them; not in closures, default arguments or attributes of those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

__all__ = ["ask_for_keys", "has_key"]


def ask_for_keys(functions: Iterable[Any]) -> None:
    """Ask for the key of each of Triton's functions, and before it for those of all that it calls,
    the deepest first."""
    seen: set[int] = set()
    for function in functions:
        _ask(function, seen)


def _ask(function: Any, seen: set[int]) -> None:
    if id(function) not in seen:
        seen.add(id(function))
        for called in _called(function):
            _ask(called, seen)
        function.cache_key  # noqa: B018


def _called(function: Any) -> Iterator[Any]:
    """Triton's functions that `function` names: its module's, and other modules' as attributes,
    but for Triton's own modules, whose functions read no constants."""
    names = function.fn.__code__.co_names
    for name in names:
        found = function.fn.__globals__.get(name)
        if has_key(found):
            yield found
        elif isinstance(found, ModuleType) and not found.__name__.startswith("triton"):
            yield from filter(has_key, (getattr(found, each, None) for each in names))


def has_key(found: object) -> bool:
    """Whether it is a function of Triton's."""
    # To ask the object itself would be to ask for its key.
    return hasattr(type(found), "cache_key")
