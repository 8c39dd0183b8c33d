"""Misuses of a mod that torch.compile would answer by itself, without asking the symbol.

Dynamo (2.13) has no way for an object to take part in ``range(q_idx)``, ``min(score, 1)`` or
``math.tanh(score)``: it refuses them in its own words. ``torch.rand_like`` it keeps from
``__torch_function__``, ``table.data = x`` it compiles without a word, ``max(scale, bias)`` of
captured numbers it takes for torch.maximum, and ``1 in [q_idx]`` is False. Its tables get entries
in front: where a symbol takes part, or, for what is done to tensors, where a mod is under trace,
the refusal is the one of an eager call; anything else is left to what was there before. Where a
torch has no such table, its own refusal stays. `anyflex.tracing.dynamo_last_words` has the rest.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from anyflex.tensors.dynamo_errors import fail_while_compiling
from anyflex.tensors.torch_versions import dynamo_name
from anyflex.tracing.conversions import FACTORIES
from anyflex.tracing.trace_errors import (
    BRANCH,
    CUSTOM_FUNCTION,
    MIN_MAX_HINT,
    PLAIN_REFUSED,
    change_in_place,
)

__all__ = ["Handler", "in_mod", "is_symbol", "mend_refusals", "refuse_in_words", "wrap"]

_BUILTINS = {
    # of Dynamo's class of builtins -> what CPython asks an operand for
    "call_range": "__index__",
    "call_bin": "__index__",
    "call_oct": "__index__",
    "call_hex": "__index__",
    "call_chr": "__index__",
    "call_str": "__repr__",
    "call_complex": "__complex__",
    "call_min": "__bool__",
    "call_max": "__bool__",
    "_call_min_max_binary": "__bool__",  # of min and max of a list
}
_OF_TENSORS = {
    # what is asked -> (problem, operation, cure) where a mod asks it of captured tensors alone
    "__bool__": (BRANCH, "bool()", MIN_MAX_HINT),
    "__float__": PLAIN_REFUSED[Tensor.__float__],
}
_ROUNDINGS = {math.floor: "__floor__", math.ceil: "__ceil__", math.trunc: "__trunc__"}

Handler = Callable[..., Any]


def mend_refusals() -> None:
    """Add the entries; called once a process, by Dynamo while it traces."""
    try:
        BuiltinVariable = dynamo_name("variables.builtin.BuiltinVariable")
        TorchInGraphFunctionVariable = dynamo_name("variables.torch.TorchInGraphFunctionVariable")
        for name, asked in _BUILTINS.items():
            before = getattr(BuiltinVariable, name, None)
            _set(BuiltinVariable, name, _asking(before, asked, asked == "__bool__"))
        BuiltinVariable.call_function_handler_cache.clear()
        handlers: dict[Any, Handler] = TorchInGraphFunctionVariable._get_handlers()
        for function in vars(math).values():
            if callable(function):
                asked = _ROUNDINGS.get(function, "__float__")
                handlers[function] = _asking(handlers.get(function), asked, True)
        overridable = dynamo_name("variables.torch.get_overridable_functions")()
        for function in (*PLAIN_REFUSED, *filter(_changes, vars(torch).values())):
            if function not in overridable and function not in handlers:
                handlers[function] = _left_to_mode(None)
        for function in FACTORIES:  # that are not overridable before torch 2.13
            if function not in overridable:
                handlers[function] = _left_to_mode(handlers.get(function))
    except (ImportError, AttributeError):
        pass  # Dynamo says no by itself
    for name in ("sq_contains", "sq_contains_impl"):  # the second one since torch 2.14
        wrap("lists", "BaseListVariable", name, lambda call: _asking(call, "__bool__"))
    wrap("lists", "BaseListVariable", "call_method", _searching)  # before torch 2.13
    wrap("builtin", "SetAttrBuiltinVariable", "_call_setattr", _watching_attributes)
    wrap("builtin", "BuiltinVariable", "call_setattr", _watching_attributes)  # before torch 2.13
    wrap("tensor", "TensorVariable", "mp_ass_subscript_impl", _watching_items)  # since torch 2.14
    wrap("misc", "DelayGraphBreakVariable", "call_function", _watching_calls)
    wrap("misc", "AutogradFunctionVariable", "call_apply", _watching_functions)


def _changes(value: Any) -> bool:
    return isinstance(value, types.BuiltinFunctionType) and change_in_place(value) is not None


def _set(owner: type, name: str, handler: Handler) -> None:
    setattr(owner, name, handler)


def wrap(module: str, owner: str, name: str, wrapper: Callable[[Handler], Handler]) -> None:
    """Put a wrapper around a method of a class of Dynamo, if there is such a one."""
    try:
        found = dynamo_name(f"variables.{module}.{owner}")
        setattr(found, name, wrapper(getattr(found, name)))
    except (ImportError, AttributeError):
        return  # another torch, which does what it did


def _asking(otherwise: Handler | None, asked: str, of_tensors: bool = False) -> Handler:
    """Ask the first symbol among operands, or a list's items, for what CPython would ask it."""

    def call(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        for operand in (*getattr(self, "items", ()), *args, *kwargs.values()):
            if is_symbol(operand):
                return operand.call_method(tx, asked, [], {})
        if of_tensors and in_mod(tx):
            for operand in args:
                if operand.is_tensor():
                    refuse_in_words(*_OF_TENSORS.get(asked, _OF_TENSORS["__float__"]))
        return None if otherwise is None else otherwise(self, tx, *args, **kwargs)

    return call if otherwise is None else functools.wraps(otherwise)(call)


def is_symbol(variable: Any) -> bool:
    """Whether a variable of Dynamo stands for a symbol."""
    # Symbols are made in the trace, so they are never lazy; what is lazy must stay so.
    from anyflex.tracing.symbol import PartialRead, Symbol

    if type(variable) is not dynamo_name("variables.user_defined.UserDefinedObjectVariable"):
        return False
    return variable.value_type in (Symbol, PartialRead)


def in_mod(tx: Any) -> bool:
    """Whether a mod is under trace."""
    from anyflex.tracing.trace import TraceMode

    mode_variable = dynamo_name("variables.torch_function.TorchFunctionModeVariable")
    for mode in tx.symbolic_torch_function_state.mode_stack:
        if type(mode) is mode_variable and mode.python_type() is TraceMode:
            return True
    return False


def _left_to_mode(otherwise: Handler | None) -> Handler:
    def call(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if in_mod(tx):
            dispatch = dynamo_name("variables.torch_function.dispatch_torch_function")
            return dispatch(tx, self, args, kwargs)
        return None if otherwise is None else otherwise(self, tx, *args, **kwargs)

    return call


def _searching(otherwise: Handler) -> Handler:
    """Of methods of lists and tuples: ``in`` compares and branches."""
    asking = _asking(None, "__bool__")

    @functools.wraps(otherwise)
    def call(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "__contains__":
            found = asking(self, tx, *args)
            if found is not None:
                return found
        return otherwise(self, tx, name, args, kwargs)

    return call


def _watching_attributes(otherwise: Handler) -> Handler:
    """Of ``setattr``: refuse one of a tensor's own attributes."""

    @functools.wraps(otherwise)
    def call(self: Any, tx: Any, changed: Any, name: Any, value: Any) -> Any:
        if in_mod(tx) and changed.is_tensor() and name.is_python_constant():
            setter = getattr(getattr(Tensor, name.as_python_constant(), None), "__set__", None)
            if setter is not None:
                _refuse_change(setter)
        return otherwise(self, tx, changed, name, value)

    return call


def _watching_items(otherwise: Handler) -> Handler:
    """Of tensors whose items are set or deleted."""

    @functools.wraps(otherwise)
    def call(self: Any, tx: Any, key: Any, value: Any) -> Any:
        if in_mod(tx):
            _refuse_change(Tensor.__setitem__)
        return otherwise(self, tx, key, value)

    return call


def _watching_calls(otherwise: Handler) -> Handler:
    """Of methods that Dynamo (2.13) knows to be refused when called, as ``table.resize_``."""

    @functools.wraps(otherwise)
    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        method = getattr(Tensor, getattr(self.source, "member", ""), None)
        if method is not None and in_mod(tx):
            _refuse_change(method)
        return otherwise(self, tx, args, kwargs)

    return call


def _watching_functions(otherwise: Handler) -> Handler:
    """Of a custom ``autograd.Function``: as in an eager call."""

    @functools.wraps(otherwise)
    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(map(is_symbol, (*args, *kwargs.values()))):
            # Python would call what it applies to a symbol, and nobody would see it pass.
            refuse_in_words(*CUSTOM_FUNCTION, breaks_graph=False)
        return otherwise(self, tx, args, kwargs)

    return call


def _refuse_change(function: Any) -> None:
    refused = change_in_place(function)
    if refused is not None:
        refuse_in_words(*refused)


def refuse_in_words(
    problem: str, operation: str, hint: str, *, breaks_graph: bool = True
) -> NoReturn:
    """Raise ModTraceError from code that Dynamo calls; see `fail_while_compiling`."""
    attributes = {"operation": operation, "hint": hint}
    fail_while_compiling("ModTraceError", problem, attributes, breaks_graph=breaks_graph)
