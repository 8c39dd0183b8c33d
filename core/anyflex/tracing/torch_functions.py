"""How users write operations: torch functions, Tensor methods and operators -> graph nodes.

Importing this module fills `anyflex.tracing.symbol.SPELLINGS` and gives `Symbol` its operators
and methods. Each entry is a function ``(tracer, *operands, **options) -> Symbol`` with torch's
signature after the tracer; operands are symbols, 0-d captured tensors or Python numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anyflex.mod_graph.operations import RECORDS
from anyflex.tracing import activations, arithmetic, conversions, row_functions, row_lookups
from anyflex.tracing.rows import Row
from anyflex.tracing.symbol import (
    REFLECTED,
    SPELLINGS,
    WHOLE,
    Symbol,
    in_place,
    refusing,
    spell,
)
from anyflex.tracing.trace_errors import NUMPY, REFUSED, refuse_function
from anyflex.tracing.tracer import Tracer

__all__ = ["FACTS", "OPERATORS", "ROW_FUNCTIONS", "SPELLINGS"]


_SPELLED = {
    operation: arithmetic.OWN.get(operation)
    or arithmetic.spelled_by(operation, record.operands, record.reading, record.sign)
    for operation, record in RECORDS.items()
    if record.spelled
}
_METHODS = {
    record.operator: _SPELLED[operation]
    for operation, record in RECORDS.items()
    if record.operator
}
_METHODS["pos"] = conversions.SPELLED["positive"]
"""Python's name of an operator -> its spelling."""

OPERATORS = [
    record.sign + "x" * (record.operands == 1) if record.sign else f"{record.operator}(x)"
    for record in RECORDS.values()
    if record.operator
]
OPERATORS.append("+x")
"""Operators of a symbol as they are written, for the documentation."""

FACTS = (
    "dtype",
    "device",
    "shape",
    "ndim",
    "requires_grad",
    "dim()",
    "size()",
    "numel()",
    "is_floating_point()",
)
"""Attributes of a symbol, for the documentation."""

_NAMED: dict[str, Callable[..., Any]] = {
    **{
        name: spelled
        for operation, spelled in _SPELLED.items()
        for name in RECORDS[operation].spelled
    },
    **arithmetic.SPELLED,
    **conversions.SPELLED,
    **activations.SPELLED,
}


ROW_FUNCTIONS = {**row_functions.ROWS, **row_lookups.LOOKUPS}
"""Name -> spelling of what takes rows of captured tensors whole."""


def _install() -> None:
    spaces = (torch, Tensor, F, torch.special)
    for name, spelled in _NAMED.items():
        for space in spaces:
            function = getattr(space, name, None)
            if callable(function) and not isinstance(function, type):
                SPELLINGS[function] = spelled
    SPELLINGS[Tensor.where] = arithmetic.where_method
    WHOLE[Tensor.__getitem__] = conversions.get_item
    WHOLE[operator.getitem] = conversions.get_item
    for name, spelled in _METHODS.items():
        _install_operator(name, spelled)
    for name, spelled in ROW_FUNCTIONS.items():
        for space in (*spaces, torch.linalg):
            function = getattr(space, name, None)
            if callable(function):
                WHOLE[function] = spelled
        if hasattr(Tensor, name):
            for kind in (Symbol, Row):
                setattr(kind, name, _whole_method(spelled))
    for name, spelled in _NAMED.items():
        for kind in (Symbol, Row):
            made_new = kind is Row and name.startswith("new_")  # of another shape
            if hasattr(Tensor, name) and name not in vars(kind) and not made_new:
                method = _method(arithmetic.where_method if name == "where" else spelled)
                setattr(kind, name, method)
    setattr(Symbol, "__array__", refusing(*NUMPY))  # noqa: B010
    for name in dir(Tensor):
        if not name.startswith("_") and not hasattr(Symbol, name):
            function = getattr(Tensor, name)
            if callable(function) and function not in REFUSED:
                setattr(Symbol, name, _unknown(function))
    for function, (problem, named, hint) in REFUSED.items():
        name = named.removeprefix("Tensor.")
        if name != named and not hasattr(Symbol, name):
            setattr(Symbol, name, refusing(problem, named, hint))
        if function is not F.dropout:  # an identity outside of training
            SPELLINGS.pop(function, None)


def _install_operator(name: str, spelled: Callable[..., Any]) -> None:
    def reflected(t: Tracer, x: Any, y: Any) -> Any:
        return spelled(t, y, x)

    SPELLINGS[getattr(operator, f"__{name}__")] = spelled
    for method, target in ((f"__{name}__", spelled), (f"__r{name}__", reflected)):
        function = getattr(Tensor, method, None)
        if function is not None:
            SPELLINGS[function] = target
            if target is reflected:
                REFLECTED[function.__name__] = target
        if target is spelled or hasattr(int, method):
            setattr(Symbol, method, _method(target))
            setattr(Row, method, _method(target))


def _method(spelled: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Symbol, *args: Any, **kwargs: Any) -> Any:
        return spell(self.tracer, spelled, (self, *args), kwargs)

    return method


def _whole_method(spelled: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = in_place(args, kwargs)
        return spelled(self.tracer, self, *args, **kwargs)

    return method


def _unknown(function: Any) -> Callable[..., Any]:
    def method(self: Symbol, *args: Any, **kwargs: Any) -> Any:
        refuse_function(function)

    return method


_install()
