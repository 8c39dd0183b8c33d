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

from anyflex.tracing import activations
from anyflex.tracing.arithmetic import (
    absolute,
    add,
    atan2,
    bitwise,
    bitwise_not,
    clamp,
    clamp_max,
    clamp_min,
    comparison,
    divide,
    float_power,
    floor_divide,
    fmod,
    is_close,
    is_finite,
    is_infinite,
    is_nan,
    logical,
    logical_not,
    masked_fill,
    maximum,
    minimum,
    multiply,
    negative,
    positive,
    power,
    remainder,
    reversed_subtract,
    round_to,
    rounding,
    shift,
    sign,
    square,
    subtract,
    true_divide,
    unary_float,
    where,
    where_method,
)
from anyflex.tracing.conversions import (
    cast_to,
    detach,
    dropout,
    elements,
    get_item,
    is_floating,
    like,
    never,
    new,
    new_tensor,
    same,
    select,
    to,
    type_as,
    type_of,
)
from anyflex.tracing.symbol import SPELLINGS, Symbol, spell
from anyflex.tracing.trace_errors import NUMPY, REFUSED, refuse, refuse_function
from anyflex.tracing.tracer import Tracer

__all__ = ["FACTS", "OPERATORS", "SPELLINGS"]


_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": add,
    "sub": subtract,
    "mul": multiply,
    "truediv": true_divide,
    "floordiv": floor_divide,
    "mod": remainder,
    "pow": power,
    "and": bitwise("and", "&"),
    "or": bitwise("or", "|"),
    "xor": bitwise("xor", "^"),
    "lshift": shift("shl", "<<"),
    "rshift": shift("shr", ">>"),
}
_COMPARISONS = {name: comparison(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}

_UNARY: dict[str, Callable[..., Any]] = {"neg": negative, "pos": positive, "abs": absolute}

_SIGNS = (
    "add + sub - mul * truediv / floordiv // mod % pow ** and & or | xor ^ lshift << rshift >> "
    "eq == ne != lt < le <= gt > ge >= neg -x pos +x abs abs(x) invert ~x"
).split()
OPERATORS = {
    name: sign
    for name, sign in zip(_SIGNS[::2], _SIGNS[1::2], strict=True)
    if name in _OPERATORS or name in _COMPARISONS or name in _UNARY or name == "invert"
}
"""Operators of a symbol: Python's name -> how it is written, for the documentation."""

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
    **_COMPARISONS,
    "add": add,
    "sub": subtract,
    "subtract": subtract,
    "rsub": reversed_subtract,
    "mul": multiply,
    "multiply": multiply,
    "div": divide,
    "divide": divide,
    "true_divide": true_divide,
    "floor_divide": floor_divide,
    "remainder": remainder,
    "fmod": fmod,
    "pow": power,
    "float_power": float_power,
    "neg": negative,
    "negative": negative,
    "positive": positive,
    "abs": absolute,
    "absolute": absolute,
    "square": square,
    "bitwise_and": _OPERATORS["and"],
    "bitwise_or": _OPERATORS["or"],
    "bitwise_xor": _OPERATORS["xor"],
    "bitwise_not": bitwise_not,
    "bitwise_left_shift": _OPERATORS["lshift"],
    "bitwise_right_shift": _OPERATORS["rshift"],
    "not_equal": _COMPARISONS["ne"],
    "less": _COMPARISONS["lt"],
    "less_equal": _COMPARISONS["le"],
    "greater": _COMPARISONS["gt"],
    "greater_equal": _COMPARISONS["ge"],
    "logical_and": logical("and"),
    "logical_or": logical("or"),
    "logical_xor": logical("xor"),
    "logical_not": logical_not,
    "where": where,
    "masked_fill": masked_fill,
    "clamp": clamp,
    "clip": clamp,
    "clamp_min": clamp_min,
    "clamp_max": clamp_max,
    "maximum": maximum,
    "minimum": minimum,
    "max": maximum,
    "min": minimum,
    **{
        name: unary_float(name)
        for name in (
            "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh "
            "tanh asinh acosh atanh sigmoid erf erfc"
        ).split()
    },
    **{"arc" + name: unary_float("a" + name) for name in "sin cos tan sinh cosh tanh".split()},
    "expit": unary_float("sigmoid"),
    **{name: rounding(name) for name in ("floor", "ceil", "trunc")},
    "fix": rounding("trunc"),
    "round": round_to,
    "sign": sign,
    "sgn": sign,
    "atan2": atan2,
    "arctan2": atan2,
    "isnan": is_nan,
    "isinf": is_infinite("both"),
    "isposinf": is_infinite("positive"),
    "isneginf": is_infinite("negative"),
    "isfinite": is_finite,
    "isclose": is_close,
    "clone": same,
    "contiguous": same,
    "detach": detach,
    "zeros_like": like(0),
    "ones_like": like(1),
    "full_like": like(None),
    "new_zeros": new(0),
    "new_ones": new(1),
    "new_full": new(None),
    "to": to,
    "type": type_of,
    "type_as": type_as,
    "float": cast_to(torch.float32),
    "double": cast_to(torch.float64),
    "half": cast_to(torch.float16),
    "bfloat16": cast_to(torch.bfloat16),
    "int": cast_to(torch.int32),
    "long": cast_to(torch.int64),
    "short": cast_to(torch.int16),
    "bool": cast_to(torch.bool),
    "new_tensor": new_tensor,
    "is_floating_point": is_floating,
    "is_complex": never,
    "numel": elements,
    "dropout": dropout,
    "select": select,
    **activations.SPELLED,
}


def _install() -> None:
    spaces = (torch, Tensor, F, torch.special)
    for name, spelled in _NAMED.items():
        for space in spaces:
            function = getattr(space, name, None)
            if callable(function) and not isinstance(function, type):
                SPELLINGS[function] = spelled
    SPELLINGS[Tensor.where] = where_method
    SPELLINGS[Tensor.__getitem__] = get_item
    SPELLINGS[operator.getitem] = get_item
    for name, spelled in _OPERATORS.items():
        _install_operator(name, spelled)
    for name, spelled in _COMPARISONS.items():
        SPELLINGS[getattr(operator, name)] = spelled
        SPELLINGS[getattr(Tensor, f"__{name}__")] = spelled
        setattr(Symbol, f"__{name}__", _method(spelled))
    for name, spelled in _UNARY.items():
        SPELLINGS[getattr(operator, name)] = spelled
        SPELLINGS[getattr(Tensor, f"__{name}__")] = spelled
        setattr(Symbol, f"__{name}__", _method(spelled))
    SPELLINGS[operator.invert] = SPELLINGS[Tensor.__invert__] = bitwise_not
    setattr(Symbol, "__invert__", _method(bitwise_not))  # noqa: B010
    for name, spelled in _NAMED.items():
        if hasattr(Tensor, name) and not hasattr(Symbol, name):
            setattr(Symbol, name, _method(where_method if name == "where" else spelled))
    setattr(Symbol, "__array__", _refusal(*NUMPY))  # noqa: B010
    for name in dir(Tensor):
        if not name.startswith("_") and not hasattr(Symbol, name):
            function = getattr(Tensor, name)
            if callable(function) and function not in REFUSED:
                setattr(Symbol, name, _unknown(function))
    for function, (problem, named, hint) in REFUSED.items():
        name = named.removeprefix("Tensor.")
        if name != named and not hasattr(Symbol, name):
            setattr(Symbol, name, _refusal(problem, named, hint))
        if function is not F.dropout:  # an identity outside of training
            SPELLINGS.pop(function, None)


def _install_operator(name: str, spelled: Callable[..., Any]) -> None:
    def reflected(t: Tracer, x: Any, y: Any) -> Any:
        return spelled(t, y, x)

    function = "and_" if name == "and" else "or_" if name == "or" else name
    SPELLINGS[getattr(operator, function)] = spelled
    for method, target in ((f"__{name}__", spelled), (f"__r{name}__", reflected)):
        if hasattr(Tensor, method):
            SPELLINGS[getattr(Tensor, method)] = target
        setattr(Symbol, method, _method(target))


def _method(spelled: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Symbol, *args: Any, **kwargs: Any) -> Any:
        return spell(self.tracer, spelled, (self, *args), kwargs)

    return method


def _refusal(problem: str, named: str, hint: str) -> Callable[..., Any]:
    def method(self: Symbol, *args: Any, **kwargs: Any) -> Any:
        refuse(problem, named, hint)

    return method


def _unknown(function: Any) -> Callable[..., Any]:
    def method(self: Symbol, *args: Any, **kwargs: Any) -> Any:
        refuse_function(function)

    return method


_install()
