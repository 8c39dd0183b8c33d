"""Entries in Dynamo's tables, so that torch.compile leaves to a symbol what is the symbol's.

Symbols are plain objects under ``torch.compile``, and Dynamo inlines what they do. It answers some
operations by itself, up to torch 2.15:

* a comparison with a variable number as one with None: ``kv_idx == n`` would silently be False;
* ``autograd.Function.apply`` on a symbol by inlining its forward alone: gradients would silently
  be those of forward and not those of the Function's backward;
* the functions of `NOT_OVERRIDABLE`, which don't ask ``__torch_function__``,
  ``isinstance(x, torch.Tensor)``, ``torch.is_tensor(x)`` and, before torch 2.15, ``~x``;
* before torch 2.13, ``torch.tensor(3.0)`` in a mod as a tensor on the CPU, not as a number.

`torch.compiler.substitute_in_graph` takes none of these functions, for Dynamo has rules for them.
The entries answer for a `Symbol` alone; other programs are compiled as before. Dynamo refuses what
a mod may not do in its own words, where it doesn't ask the symbol.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from anyflex.tensors.dynamo_errors import fail_while_compiling
from anyflex.tensors.torch_versions import dynamo_constant, dynamo_name, release
from anyflex.tracing.conversions import FACTORIES
from anyflex.tracing.trace_errors import CUSTOM_FUNCTION

__all__ = ["NOT_OVERRIDABLE", "register_symbols"]

NOT_OVERRIDABLE = (F.hardsigmoid, F.hardswish, F.sigmoid, F.tanh)
REFLECTED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
_state = {"registered": False}

Handler = Callable[..., Any]


@dynamo_constant
def register_symbols(mode: type) -> None:
    """Add the entries, once a process. Dynamo runs this while it traces, instead of tracing it.

    Args:
        mode: kind of the TorchFunctionMode in which mods are traced.
    """
    if _state["registered"]:
        return
    _state["registered"] = True
    try:
        # First: without it the gradient of a Function in a mod is silently forward's alone.
        applied = dynamo_name("variables.misc.AutogradFunctionVariable")
        applied.call_apply = _refuse_apply(applied.call_apply)
        builtin = dynamo_name("variables.builtin.BuiltinVariable")
        number = dynamo_name("variables.tensor.SymNodeVariable")
        instance = dynamo_name("variables.user_defined.UserDefinedObjectVariable")
        comparisons: dict[Any, list[Any]] = builtin._binop_handlers()
        for name, reflected in REFLECTED.items():
            entries = comparisons[getattr(operator, name)]
            entries.insert(0, ((instance, number), _compare_from_left(f"__{name}__")))
            entries.insert(0, ((number, instance), _compare_from_right(f"__{reflected}__")))
        functions = dynamo_name("variables.torch.TorchInGraphFunctionVariable")._get_handlers()
        for function in NOT_OVERRIDABLE:
            functions[function] = _overridden
        if release(torch.__version__) < (2, 13):
            for function in FACTORIES:
                functions[function] = _made_in_mod(mode, functions.get(function))
        functions[torch.is_tensor] = _is_tensor(functions[torch.is_tensor])
        builtin.call_isinstance = _is_instance(builtin.call_isinstance)
        if not hasattr(builtin, "call_invert"):
            builtin.call_invert = _invert
        builtin.call_function_handler_cache.clear()
    except (ImportError, AttributeError, KeyError) as error:
        warnings.warn(
            f"torch {torch.__version__} compiles mods in a way that anyflex doesn't know "
            f"({error}). Under torch.compile, write torch.lt(kv_idx, n) instead of kv_idx < n "
            "where n is a number that changes between calls, torch.logical_not(x), "
            "torch.sigmoid(x) and torch.tanh(x) instead of ~x, F.sigmoid(x) and F.tanh(x), and no "
            "autograd.Function.",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_symbol(variable: Any, *, or_row: bool = False) -> bool:
    """Whether a variable of Dynamo stands for a symbol or, if asked, a captured tensor's row."""
    from anyflex.tracing.rows import PartialRead, Row
    from anyflex.tracing.symbol import Symbol

    # Symbols are made in the trace, so they are never lazy; what is lazy must stay so.
    if type(variable) is not dynamo_name("variables.user_defined.UserDefinedObjectVariable"):
        return False
    return variable.value_type is Symbol or (or_row and variable.value_type in (PartialRead, Row))


def _compare_from_left(method: str) -> Handler:
    def compare(tx: Any, symbol: Any, number: Any) -> Any:
        """None, for the next entry, where the object is no symbol."""
        if not _is_symbol(symbol, or_row=True):
            return None
        return symbol.call_method(tx, method, [number], {})

    return compare


def _compare_from_right(method: str) -> Handler:
    compare = _compare_from_left(method)
    return lambda tx, number, symbol: compare(tx, symbol, number)


def _overridden(function: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    if any(map(_is_symbol, (*args, *kwargs.values()))):
        dispatch = dynamo_name("variables.torch_function.dispatch_torch_function")
        return dispatch(tx, function, args, kwargs)
    return None


def _made_in_mod(mode: type, otherwise: Handler | None) -> Handler:
    """Leave a factory to the mode of the mod under trace, if one is."""

    def make(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        kind = dynamo_name("variables.torch_function.TorchFunctionModeVariable")
        for entered in tx.symbolic_torch_function_state.mode_stack:
            if type(entered) is kind and entered.python_type() is mode:
                dispatch = dynamo_name("variables.torch_function.dispatch_torch_function")
                return dispatch(tx, self, args, kwargs)
        return None if otherwise is None else otherwise(self, tx, *args, **kwargs)

    return make


def _true() -> Any:
    return dynamo_name("variables.ConstantVariable").create(True)


def _is_tensor(otherwise: Handler) -> Handler:
    def answer(function: Any, tx: Any, value: Any) -> Any:
        return _true() if _is_symbol(value) else otherwise(function, tx, value)

    return answer


def _is_instance(otherwise: Handler) -> Handler:
    def call_isinstance(self: Any, tx: Any, value: Any, kind: Any) -> Any:
        if _is_symbol(value):
            kinds = kind.as_python_constant()
            if torch.Tensor in (kinds if isinstance(kinds, tuple) else (kinds,)):
                return _true()
        return otherwise(self, tx, value, kind)

    return call_isinstance


def _invert(self: Any, tx: Any, value: Any) -> Any:
    return value.call_method(tx, "__invert__", [], {}) if _is_symbol(value) else None


def _refuse_apply(otherwise: Handler) -> Handler:
    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(
            _is_symbol(value, or_row=True) for value in (*args, *kwargs.values())
        ):
            # Not left to Python: it would apply the Function to a symbol, unseen by the tracer.
            problem, operation, hint = CUSTOM_FUNCTION
            attributes = {"operation": operation, "hint": hint}
            fail_while_compiling("ModTraceError", problem, attributes, breaks_graph=False)
        return otherwise(self, tx, args, kwargs)

    return call_apply
