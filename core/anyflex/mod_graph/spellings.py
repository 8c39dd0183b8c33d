"""How users write operations: torch functions, Tensor methods and operators -> graph nodes.

Importing this module fills `anyflex.mod_graph.symbol.SPELLINGS` and gives `Symbol` its operators
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

from anyflex.fixed import fixed
from anyflex.mod_graph import activations
from anyflex.mod_graph.operations import DTYPE_NAMES
from anyflex.mod_graph.refusal import REFUSED, refuse, refuse_function
from anyflex.mod_graph.symbol import (
    BOOL,
    CATEGORY,
    FLOAT,
    INT,
    SPELLINGS,
    PartialRead,
    Symbol,
    Tracer,
    spell,
)

__all__ = ["FACTORIES"]


def add(t: Tracer, x: Any, y: Any, *, alpha: Any = 1) -> Symbol:
    if not (isinstance(alpha, int) and alpha == 1):
        y = multiply(t, y, alpha)
    x, y = t.operand(x), t.operand(y)
    kind = t.common_kind(x, y)
    return t.binary("or" if kind == "bool" else "add", x, y, kind)


def subtract(t: Tracer, x: Any, y: Any, *, alpha: Any = 1) -> Symbol:
    if not (isinstance(alpha, int) and alpha == 1):
        y = multiply(t, y, alpha)
    x, y = t.operand(x), t.operand(y)
    kind = t.common_kind(x, y)
    if kind == "bool":
        refuse("bool minus bool", "-", "Use `^` or torch.logical_xor.")
    return t.binary("sub", x, y, kind)


def reversed_subtract(t: Tracer, x: Any, y: Any, *, alpha: Any = 1) -> Symbol:
    return subtract(t, y, x, alpha=alpha)


def multiply(t: Tracer, x: Any, y: Any) -> Symbol:
    x, y = t.operand(x), t.operand(y)
    kind = t.common_kind(x, y)
    return t.binary("and" if kind == "bool" else "mul", x, y, kind)


def floating_kind(t: Tracer, x: Any, y: Any) -> str:
    kind = t.common_kind(x, y)
    return kind if CATEGORY[kind] == FLOAT else t.default_float


def divide(t: Tracer, x: Any, y: Any, *, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode == "floor":
        return floor_divide(t, x, y)
    x, y = t.operand(x), t.operand(y)
    if rounding_mode == "trunc":
        kind = integer_kind(t, x, y, "torch.div(rounding_mode='trunc')")
        if CATEGORY[kind] == FLOAT:
            return t.unary("trunc", t.binary("truediv", x, y, kind))
        # x - fmod(x, y) is a multiple of y, so rounding down is exact.
        remainder = t.binary("fmod", x, y, kind)
        return t.binary("floordiv", t.binary("sub", x, remainder, kind), y, kind)
    if rounding_mode is not None:
        refuse(f"rounding_mode={rounding_mode!r}", "torch.div", "Use None, 'floor' or 'trunc'.")
    return t.binary("truediv", x, y, floating_kind(t, x, y))


def true_divide(t: Tracer, x: Any, y: Any) -> Symbol:
    return divide(t, x, y)


def integer_kind(t: Tracer, x: Any, y: Any, operation: str) -> str:
    """Kind of a division that keeps integers; an integer divided by the constant 0 is refused."""
    kind = t.common_kind(x, y)
    if kind == "bool":
        refuse(f"{operation} of bools", operation, "Convert with `.int()`.")
    if CATEGORY[kind] == INT and not isinstance(y, Symbol) and y == 0:
        refuse(f"{operation}: an integer divided by zero", operation, "Use a nonzero divisor.")
    return kind


def floor_divide(t: Tracer, x: Any, y: Any) -> Symbol:
    x, y = t.operand(x), t.operand(y)
    return t.binary("floordiv", x, y, integer_kind(t, x, y, "//"))


def remainder(t: Tracer, x: Any, y: Any) -> Symbol:
    x, y = t.operand(x), t.operand(y)
    return t.binary("mod", x, y, integer_kind(t, x, y, "%"))


def fmod(t: Tracer, x: Any, y: Any) -> Symbol:
    x, y = t.operand(x), t.operand(y)
    return t.binary("fmod", x, y, integer_kind(t, x, y, "torch.fmod"))


def power(t: Tracer, x: Any, y: Any, modulus: Any = None) -> Symbol:
    if modulus is not None:
        refuse("pow() with three arguments", "pow()", "Use `x ** y % z`.")
    x, y = t.operand(x), t.operand(y)
    kind = t.common_kind(x, y)
    if CATEGORY[kind] == INT and not isinstance(y, Symbol) and y < 0:
        refuse("an integer to a negative power", "**", "Use `1.0 / x`.")
    if kind == "bool":
        kind = "i64"
    return t.binary("pow", x, y, kind)


def float_power(t: Tracer, x: Any, y: Any) -> Symbol:
    return t.binary("pow", t.operand(x), t.operand(y), "f64")


def negative(t: Tracer, x: Any) -> Symbol:
    x = t.symbol(x)
    if x.kind == "bool":
        refuse("minus on a bool", "-", "Use `~`.")
    return t.unary("neg", x)


def positive(t: Tracer, x: Any) -> Symbol:
    return t.symbol(x)


def absolute(t: Tracer, x: Any) -> Symbol:
    x = t.symbol(x)
    if x.kind == "bool":
        refuse("abs of a bool", "abs", "Convert with `.int()`.")
    return t.unary("abs", x)


def square(t: Tracer, x: Any) -> Symbol:
    return multiply(t, x, x)


def bitwise(operation: str, sign: str) -> Callable[..., Symbol]:
    def spelled(t: Tracer, x: Any, y: Any) -> Symbol:
        x, y = t.operand(x), t.operand(y)
        kind = t.common_kind(x, y)
        if CATEGORY[kind] == FLOAT:
            refuse(f"`{sign}` on a float", sign, "Compare first: `&`, `|`, `^` join conditions.")
        return t.binary(operation, x, y, kind)

    return spelled


def shift(operation: str, sign: str) -> Callable[..., Symbol]:
    def spelled(t: Tracer, x: Any, y: Any) -> Symbol:
        x, y = t.operand(x), t.operand(y)
        kind = t.common_kind(x, y)
        if CATEGORY[kind] != INT:
            refuse(f"`{sign}` on a {kind}", sign, "Shifts take integers.")
        return t.binary(operation, x, y, kind)

    return spelled


def bitwise_not(t: Tracer, x: Any) -> Symbol:
    x = t.symbol(x)
    if CATEGORY[x.kind] == FLOAT:
        refuse("`~` on a float", "~", "Compare first: `~` negates a condition.")
    return t.unary("not", x)


def comparison(operation: str) -> Callable[..., Symbol]:
    def spelled(t: Tracer, x: Any, y: Any) -> Symbol:
        x, y = t.operand(x), t.operand(y)
        return t.binary(operation, x, y, t.common_kind(x, y), "bool")

    return spelled


def truth(t: Tracer, x: Any) -> Symbol:
    """Nonzero is True."""
    return t.as_kind(t.symbol(x), "bool")


def logical(operation: str) -> Callable[..., Symbol]:
    def spelled(t: Tracer, x: Any, y: Any) -> Symbol:
        return t.binary(operation, truth(t, x), truth(t, y), "bool")

    return spelled


def logical_not(t: Tracer, x: Any) -> Symbol:
    return t.unary("not", truth(t, x))


def where(t: Tracer, condition: Any, x: Any = None, y: Any = None) -> Symbol:
    if x is None or y is None:
        refuse("torch.where with one argument", "torch.where", "Give both values.")
    condition = t.symbol(condition)
    if condition.kind != "bool":
        refuse(f"a {condition.kind} as torch.where's condition", "torch.where", "Use `x != 0`.")
    return t.where(condition, t.operand(x), t.operand(y))


def where_method(t: Tracer, x: Any, condition: Any, y: Any) -> Symbol:
    return where(t, condition, x, y)


def masked_fill(t: Tracer, x: Any, mask: Any, value: Any) -> Symbol:
    x, mask = t.symbol(x), t.symbol(mask)
    if mask.kind != "bool":
        refuse(f"a {mask.kind} as masked_fill's mask", "masked_fill", "Use a condition.")
    return t.where(mask, t.operand(value), x, x.kind)


def clamp(t: Tracer, x: Any, min: Any = None, max: Any = None) -> Symbol:
    if min is None and max is None:
        refuse("torch.clamp without bounds", "torch.clamp", "Give min, max or both.")
    x = t.symbol(x)
    kind = x.kind
    bounds = [("maximum", "lt", min), ("minimum", "gt", max)]
    for _, _, bound in bounds:
        if bound is not None:
            kind = t.common_kind(t.add("const", kind, "-", "0"), t.operand(bound))
    for operation, outside, bound in bounds:
        if bound is None:
            continue
        bound = t.operand(bound)
        if isinstance(bound, Symbol):
            # At a bound the whole gradient is x's, as torch has it; maximum would halve it.
            x, bound = t.as_kind(x, kind), t.as_kind(bound, kind)
            x = t.where(t.binary(outside, x, bound, kind, "bool"), bound, x, kind)
        else:
            x = t.binary(operation, x, bound, kind)
    return x


def clamp_min(t: Tracer, x: Any, min: Any) -> Symbol:
    return clamp(t, x, min)


def clamp_max(t: Tracer, x: Any, max: Any) -> Symbol:
    return clamp(t, x, None, max)


def extremum(operation: str, on_bools: str) -> Callable[..., Symbol]:
    def spelled(t: Tracer, x: Any, y: Any = None, *, dim: Any = None) -> Symbol:
        x = t.operand(x)
        if y is None or dim is not None:
            refuse(f"a reduction: torch.{operation} of one tensor", operation, "Give two.")
        y = t.operand(y)
        if not isinstance(x, Symbol) or not isinstance(y, Symbol):
            refuse(
                f"torch.{operation} of a Python number",
                f"torch.{operation}",
                "Use torch.clamp(x, min=...) or torch.clamp(x, max=...).",
            )
        kind = t.common_kind(x, y)
        return t.binary(on_bools if kind == "bool" else operation, x, y, kind)

    return spelled


maximum = extremum("maximum", "or")
minimum = extremum("minimum", "and")


def unary_float(operation: str) -> Callable[..., Symbol]:
    def spelled(t: Tracer, x: Any) -> Symbol:
        return t.floating(operation, x)

    return spelled


def rounding(operation: str) -> Callable[..., Symbol]:
    def spelled(t: Tracer, x: Any) -> Symbol:
        x = t.symbol(x)
        return x if CATEGORY[x.kind] == INT else t.unary(operation, x)

    return spelled


def round_to(t: Tracer, x: Any, *, decimals: int = 0) -> Symbol:
    x = t.symbol(x)
    if CATEGORY[x.kind] != FLOAT:
        return x
    if isinstance(decimals, int) and decimals == 0:
        return t.unary("round", x)
    power_of_ten = t.constant(float(10 ** fixed(decimals)), x.kind)
    return divide(t, t.unary("round", multiply(t, x, power_of_ten)), power_of_ten)


def sign(t: Tracer, x: Any) -> Symbol:
    x = t.symbol(x)
    return x if x.kind == "bool" else t.unary("sign", x)


def atan2(t: Tracer, x: Any, y: Any) -> Symbol:
    x, y = t.operand(x), t.operand(y)
    return t.binary("atan2", x, y, floating_kind(t, x, y))


def is_nan(t: Tracer, x: Any) -> Symbol:
    x = t.symbol(x)
    return t.binary("ne", x, x, x.kind, "bool")


def is_infinite(which: str) -> Callable[..., Symbol]:
    def spelled(t: Tracer, x: Any) -> Symbol:
        x = t.symbol(x)
        if CATEGORY[x.kind] != FLOAT:
            return t.constant(False, "bool")
        value = t.unary("abs", x) if which == "both" else x
        bound = t.constant(float("-inf") if which == "negative" else float("inf"), x.kind)
        return t.binary("eq", value, bound, x.kind, "bool")

    return spelled


def is_finite(t: Tracer, x: Any) -> Symbol:
    x = t.symbol(x)
    if CATEGORY[x.kind] != FLOAT:
        return t.constant(True, "bool")
    return t.binary("lt", t.unary("abs", x), t.constant(float("inf"), x.kind), x.kind, "bool")


def is_close(
    t: Tracer, x: Any, y: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Symbol:
    x, y = t.symbol(x), t.symbol(y)
    difference = absolute(t, subtract(t, x, y))
    allowed = add(t, multiply(t, absolute(t, y), rtol), atol)
    near = bitwise("and", "&")(t, comparison("le")(t, difference, allowed), is_finite(t, y))
    near = bitwise("or", "|")(t, near, comparison("eq")(t, x, y))
    if equal_nan:
        near = bitwise("or", "|")(t, near, bitwise("and", "&")(t, is_nan(t, x), is_nan(t, y)))
    return near


# --- types and copies ------------------------------------------------------------------------


def cast_to(dtype: torch.dtype) -> Callable[..., Symbol]:
    kind = DTYPE_NAMES[dtype]

    def spelled(t: Tracer, x: Any) -> Symbol:
        return t.as_kind(t.symbol(x), kind)

    return spelled


def kind_named(dtype: Any) -> str:
    kind = DTYPE_NAMES.get(dtype)
    if kind is None:
        refuse(f"a cast to {dtype}", "to", "Scores are real; see the table of types.")
    return kind


def to(t: Tracer, x: Any, *args: Any, **kwargs: Any) -> Symbol:
    x = t.symbol(x)
    for target in [*args, *kwargs.values()]:
        if isinstance(target, torch.dtype):
            x = t.as_kind(x, kind_named(target))
        elif isinstance(target, (Symbol, Tensor)):
            x = t.as_kind(x, kind_named(target.dtype))
        elif isinstance(target, (str, torch.device)) and torch.device(target) != t.device:
            refuse(f"moving a symbol to {target}", "to", "Move captured tensors before the call.")
    return x


def type_of(t: Tracer, x: Any, dtype: Any = None) -> Symbol:
    return t.as_kind(t.symbol(x), kind_named(dtype))


def type_as(t: Tracer, x: Any, other: Any) -> Symbol:
    return to(t, x, other)


def same(t: Tracer, x: Any, *args: Any, **kwargs: Any) -> Symbol:
    return t.symbol(x)


def detach(t: Tracer, x: Any) -> Symbol:
    return t.unary("detach", x)


def like(value: float | None) -> Callable[..., Symbol]:
    def spelled(
        t: Tracer, x: Any, fill_value: Any = None, *, dtype: Any = None, **_: Any
    ) -> Symbol:
        x = t.symbol(x)
        kind = x.kind if dtype is None else kind_named(dtype)
        return filled(t, kind, fill_value if value is None else value, value is not None)

    return spelled


def new(value: float | None) -> Callable[..., Symbol]:
    def spelled(
        t: Tracer, x: Any, size: Any = (), fill_value: Any = None, **options: Any
    ) -> Symbol:
        if isinstance(size, int) or len(size) != 0:
            refuse("a new tensor that is not a scalar", "new_full", "A mod computes a scalar.")
        return like(value)(t, x, fill_value, dtype=options.get("dtype"))

    return spelled


def filled(t: Tracer, kind: str, value: Any, structural: bool) -> Symbol:
    value = t.operand(value)
    if isinstance(value, Symbol):
        refuse("a new tensor filled with a symbol", "full_like", "Use the symbol itself.")
    if CATEGORY[kind] == BOOL:
        return t.constant(bool(value), kind)
    if CATEGORY[kind] == INT and isinstance(value, float):
        value = int(value)
    return t.constant(value, kind) if structural else t.number(value, kind)


# --- constants made inside a mod ---------------------------------------------------------------


def factory(value: float | None) -> Callable[..., Any]:
    def spelled(t: Tracer, *args: Any, dtype: Any = None, **named: Any) -> Any:
        args = (*args, *[named[n] for n in ("data", "size", "s", "fill_value") if n in named])
        if value is None and len(args) == 1:  # torch.tensor(3.0), torch.scalar_tensor(3.0)
            content = args[0]
        else:
            size = args[0] if args else ()
            if isinstance(size, int) or len(size) != 0 or len(args) > (2 if value is None else 1):
                return NotImplemented
            content = args[1] if value is None else value
        if not isinstance(content, (bool, int, float)):
            return NotImplemented
        if dtype is not None:
            kind = kind_named(dtype)
        elif value is not None:
            kind = t.default_float
        else:
            kind = t.weak_kind("bool", content)
        return filled(t, kind, content, value is not None)

    return spelled


FACTORIES: dict[Any, Callable[..., Any]] = {
    torch.tensor: factory(None),
    torch.scalar_tensor: factory(None),
    torch.full: factory(None),
    torch.zeros: factory(0),
    torch.ones: factory(1),
}
"""Functions that make a scalar constant; they answer NotImplemented for anything else."""


def dropout(
    t: Tracer, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if training:
        refuse(
            "a random number in a mod: torch.nn.functional.dropout",
            "torch.nn.functional.dropout",
            "Read a captured table of random numbers instead.",
        )
    return t.symbol(x)


def get_item(t: Tracer, tensor: Any, index: Any) -> Any:
    if isinstance(tensor, (Symbol, PartialRead)):
        return tensor[index]
    return t.read(tensor, index)


def select(t: Tracer, tensor: Any, dim: int, index: Any) -> Any:
    return t.read(tensor, (*([slice(None)] * (dim % tensor.dim())), index))


# --- the tables --------------------------------------------------------------------------------

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
    for name, spelled in {"neg": negative, "pos": positive, "abs": absolute}.items():
        SPELLINGS[getattr(operator, name)] = spelled
        SPELLINGS[getattr(Tensor, f"__{name}__")] = spelled
        setattr(Symbol, f"__{name}__", _method(spelled))
    SPELLINGS[operator.invert] = SPELLINGS[Tensor.__invert__] = bitwise_not
    setattr(Symbol, "__invert__", _method(bitwise_not))  # noqa: B010
    for name, spelled in _NAMED.items():
        if hasattr(Tensor, name) and not hasattr(Symbol, name):
            setattr(Symbol, name, _method(where_method if name == "where" else spelled))
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
