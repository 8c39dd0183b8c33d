"""What torch.compile would not leave to a symbol: ``~x``, four activations, is it a tensor.

Dynamo (2.13) has no ``~`` for objects, knows nothing of ``__torch_function__`` for the functions
of `NOT_OVERRIDABLE`, and answers ``isinstance(x, torch.Tensor)`` and ``torch.is_tensor(x)`` by an
object's type. Its tables get entries that speak up for a `Symbol` alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from anyflex.tensors.torch_versions import dynamo_constant, dynamo_name
from anyflex.tracing.dynamo_refusals import is_symbol

__all__ = ["NOT_OVERRIDABLE", "mend_symbols"]

NOT_OVERRIDABLE = (F.hardsigmoid, F.hardswish, F.sigmoid, F.tanh)
_state = {"mended": False}


@dynamo_constant
def mend_symbols() -> None:
    """Add the entries, once a process. Dynamo runs this while it traces, instead of tracing it."""
    if _state["mended"]:
        return
    _state["mended"] = True
    try:
        builtin = dynamo_name("variables.builtin.BuiltinVariable")
        TorchInGraphFunctionVariable = dynamo_name("variables.torch.TorchInGraphFunctionVariable")
        handlers: dict[Any, Any] = TorchInGraphFunctionVariable._get_handlers()
        for function in NOT_OVERRIDABLE:
            handlers[function] = _overridden
        handlers[torch.is_tensor] = _is_tensor(handlers[torch.is_tensor])
        builtin.call_isinstance = _is_instance(builtin.call_isinstance)
        builtin.call_invert = _invert(getattr(builtin, "call_invert", None))
        builtin.call_function_handler_cache.clear()
    except (ImportError, AttributeError, KeyError) as error:
        warnings.warn(
            f"torch {torch.__version__} compiles `~x`, F.sigmoid(x), F.tanh(x), F.hardsigmoid(x), "
            f"F.hardswish(x) and isinstance(x, torch.Tensor) in a way that anyflex doesn't know "
            f"({error}): under torch.compile, write torch.logical_not(x), torch.sigmoid(x) and "
            "torch.tanh(x) instead.",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_symbol(variable: Any) -> bool:
    # Rows of captured tensors, which `is_symbol` takes for symbols too, are no tensors.
    from anyflex.tracing.symbol import Symbol

    return is_symbol(variable) and variable.value_type is Symbol


def _true() -> Any:
    return dynamo_name("variables.ConstantVariable").create(True)


def _overridden(function: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    if any(map(_is_symbol, (*args, *kwargs.values()))):
        dispatch = dynamo_name("variables.torch_function.dispatch_torch_function")
        return dispatch(tx, function, args, kwargs)
    return None


def _is_tensor(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    def answer(function: Any, tx: Any, value: Any) -> Any:
        return _true() if _is_symbol(value) else otherwise(function, tx, value)

    return answer


def _is_instance(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    def call_isinstance(self: Any, tx: Any, value: Any, kind: Any) -> Any:
        if _is_symbol(value):
            kinds = kind.as_python_constant()
            if torch.Tensor in (kinds if isinstance(kinds, tuple) else (kinds,)):
                return _true()
        return otherwise(self, tx, value, kind)

    return call_isinstance


def _invert(otherwise: Callable[..., Any] | None) -> Callable[..., Any]:
    def call_invert(self: Any, tx: Any, value: Any) -> Any:
        if _is_symbol(value):
            return value.call_method(tx, "__invert__", [], {})
        return None if otherwise is None else otherwise(self, tx, value)

    return call_invert
