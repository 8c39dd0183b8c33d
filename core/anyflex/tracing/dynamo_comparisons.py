"""Comparisons of a symbol with a number that torch.compile took for a variable.

Dynamo (2.13) answers every comparison of its variable numbers with an object by itself, as that of
an object with None: ``kv_idx == n`` is False, ``kv_idx < n`` an internal error. So a window that
changes between calls would silently be another one. Its table of comparisons gets entries in front
that leave those with a `Symbol` to the symbol, as those of constants are.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch

from anyflex.tensors.torch_versions import dynamo_constant, dynamo_name
from anyflex.tracing.dynamo_last_words import mend_last_words
from anyflex.tracing.dynamo_refusals import mend_refusals

__all__ = ["mend_comparisons"]

_REFLECTED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
_state = {"mended": False}


@dynamo_constant
def mend_comparisons() -> None:
    """Add the entries, once a process. Dynamo runs this while it traces, instead of tracing it."""
    if _state["mended"]:
        return
    _state["mended"] = True
    mend_refusals()
    mend_last_words()
    try:
        BuiltinVariable = dynamo_name("variables.builtin.BuiltinVariable")
        SymNodeVariable = dynamo_name("variables.tensor.SymNodeVariable")
        UserDefinedObjectVariable = dynamo_name("variables.user_defined.UserDefinedObjectVariable")
        table: dict[Any, list[Any]] = BuiltinVariable._binop_handlers()
        for name, reflected in _REFLECTED.items():
            entries = table[getattr(operator, name)]
            entries.insert(0, ((UserDefinedObjectVariable, SymNodeVariable), _on_left(name)))
            entries.insert(0, ((SymNodeVariable, UserDefinedObjectVariable), _on_right(reflected)))
        BuiltinVariable.call_function_handler_cache.clear()
    except (ImportError, AttributeError, KeyError) as error:
        warnings.warn(
            f"torch {torch.__version__} compiles comparisons in a way that anyflex doesn't know "
            f"({error}): under torch.compile, write torch.lt(kv_idx, n) instead of kv_idx < n "
            "where n is a number that changes between calls.",
            RuntimeWarning,
            stacklevel=2,
        )


def _on_left(name: str) -> Callable[[Any, Any, Any], Any]:
    def compare(tx: Any, left: Any, right: Any) -> Any:
        return _asked(tx, left, name, right)

    return compare


def _on_right(name: str) -> Callable[[Any, Any, Any], Any]:
    def compare(tx: Any, left: Any, right: Any) -> Any:
        return _asked(tx, right, name, left)

    return compare


def _asked(tx: Any, symbol: Any, name: str, number: Any) -> Any:
    """What the symbol answers; None, for the next entry, for other objects."""
    from anyflex.tracing.symbol import PartialRead, Symbol

    if symbol.python_type() not in (Symbol, PartialRead):
        return None
    return symbol.call_method(tx, f"__{name}__", [number], {})
