"""Misuses of a mod that torch.compile would refuse by itself: lists, strings, NumPy, and the rest.

Sorting, formatting and NumPy's functions ask a symbol in Dynamo (2.13) what they ask it in an
eager call, and ``print`` is refused with what to do instead. Whatever else Dynamo can't do with a
symbol, as ``torch.nn.Parameter(score)``, it still refuses, but as a `ModTraceError`: the wrappers
here step in only after Dynamo itself has given up. Other programs are compiled as before.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Iterable, Iterator
from typing import Any

from anyflex.errors import AnyflexError
from anyflex.tensors.torch_versions import dynamo_name
from anyflex.tracing.dynamo_refusals import Handler, in_mod, is_symbol, refuse_in_words, wrap
from anyflex.tracing.trace_errors import BRANCH, BRANCH_HINT

__all__ = ["mend_last_words"]


def mend_last_words() -> None:
    """Add the wrappers; called once a process, by Dynamo while it traces."""
    wrap("lists", "ListVariable", "call_method", _sorting)
    wrap("builtin", "BuiltinVariable", "call_format", _formatting)
    for owner, module in (
        ("NumpyVariable", "misc"),
        ("TorchInGraphFunctionVariable", "torch"),
        ("UserDefinedClassVariable", "user_defined"),
        ("BuiltinVariable", "builtin"),
    ):
        wrap(module, owner, "call_function", _after_dynamo)
    wrap("misc", "NumpyVariable", "call_function", _asking_for_array)
    wrap("builtin", "BuiltinVariable", "call_function", _printing)


def _flat(variables: Iterable[Any]) -> Iterator[Any]:
    """Operands, and the items of those that are lists or tuples."""
    BaseListVariable = dynamo_name("variables.lists.BaseListVariable")
    for variable in variables:
        yield variable
        if isinstance(variable, BaseListVariable):
            yield from _flat(variable.items)


def _symbols(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Any]:
    return [operand for operand in _flat((*args, *kwargs.values())) if is_symbol(operand)]


def _sorting(otherwise: Handler) -> Handler:
    """Of a list's methods: sorting compares and branches."""

    @functools.wraps(otherwise)
    def call(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "sort" and "key" not in kwargs and len(self.items) > 1:
            in_graph = in_mod(tx) and any(item.is_tensor() for item in self.items)
            if in_graph or any(map(is_symbol, self.items)):
                refuse_in_words(BRANCH, "bool()", BRANCH_HINT)
        return otherwise(self, tx, name, args, kwargs)

    return call


def _formatting(otherwise: Handler) -> Handler:
    """Of ``str.format``, which f-strings are: a symbol's ``__format__`` makes its part."""

    @functools.wraps(otherwise)
    def call(self: Any, tx: Any, text: Any, *args: Any, **kwargs: Any) -> Any:
        if is_symbol(text):  # format(score, ".2f")
            return text.call_method(tx, "__format__", list(args), {})
        if not _symbols(args, kwargs):
            return otherwise(self, tx, text, *args, **kwargs)
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for position, (_, field, wanted, _) in enumerate(_fields(text.as_python_constant())):
            name = int(field) if field.isdigit() else field or position
            if wanted and is_symbol(given.get(name)):
                given[name].call_method(tx, "__format__", [_constant(wanted)], {})
        shown = {
            name: value.call_method(tx, "__repr__", [], {}) if is_symbol(value) else value
            for name, value in given.items()
        }
        positional = [shown.pop(position) for position in range(len(args))]
        return otherwise(self, tx, text, *positional, **shown)

    return call


def _fields(text: str) -> list[tuple[str, str, str | None, str | None]]:
    return [
        (literal, field, wanted, conversion)
        for literal, field, wanted, conversion in string.Formatter().parse(text)
        if field is not None
    ]


def _constant(value: str) -> Any:
    return dynamo_name("variables.ConstantVariable").create(value)


def _printing(otherwise: Handler) -> Handler:
    """Of builtins: an eager mod may print, while nothing is printed in a compiled graph."""

    @functools.wraps(otherwise)
    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn is print and in_mod(tx):
            refuse_in_words(
                "print() in a mod under torch.compile(fullgraph=True)",
                "print()",
                "Print in an eager call, or leave fullgraph out.",
            )
        return otherwise(self, tx, args, kwargs)

    return call


def _asking_for_array(otherwise: Handler) -> Handler:
    """Of NumPy's functions: they turn a symbol into an array first."""

    @functools.wraps(otherwise)
    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        for symbol in _symbols(args, kwargs):
            return symbol.call_method(tx, "__array__", [], {})
        return otherwise(self, tx, args, kwargs)

    return call


def _after_dynamo(otherwise: Handler) -> Handler:
    """Of functions: name what Dynamo could not do with a symbol."""

    @functools.wraps(otherwise)
    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        try:
            return otherwise(self, tx, args, kwargs)
        except dynamo_name("exc.Unsupported") as error:
            if isinstance(error, AnyflexError) or not _symbols(args, kwargs):
                raise
            name = getattr(getattr(self, "fn", None) or self.value, "__name__", "a function")
            refuse_in_words(
                f"{name} is given a symbol, which torch.compile(fullgraph=True) does not follow",
                name,
                "Write it with the operations of the table in the documentation.",
            )

    return call
