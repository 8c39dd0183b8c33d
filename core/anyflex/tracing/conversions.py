"""Casts, copies, constants made in a mod, and reads of captured tensors, as users call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyflex.mod_graph.dtypes import DTYPE_NAMES
from anyflex.tensors.symbolic_numbers import INTS, NUMBERS, SYMBOLIC
from anyflex.tracing.rows import PartialRead, Row
from anyflex.tracing.symbol import BOOL, CATEGORY, FLOAT, INT, Spellings, Symbol
from anyflex.tracing.trace_errors import NUMPY, refuse
from anyflex.tracing.tracer import Tracer

__all__ = ["FACTORIES", "SPELLED", "get_item", "select"]

SPELLED = Spellings()
"""Name in torch, Tensor or torch.nn.functional -> its spelling."""


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


@SPELLED.named("to", "type_as")
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


@SPELLED.named("type")
def type_of(t: Tracer, x: Any, dtype: Any = None) -> Symbol:
    return t.as_kind(t.symbol(x), kind_named(dtype))


@SPELLED.named("clone", "contiguous", "positive")
def same(t: Tracer, x: Any, *args: Any, **kwargs: Any) -> Symbol:
    return t.symbol(x)


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
        if isinstance(size, INTS) or len(size) != 0:
            refuse("a new tensor that is not a scalar", "new_full", "A mod computes a scalar.")
        return like(value)(t, x, fill_value, dtype=options.get("dtype"))

    return spelled


def filled(t: Tracer, kind: str, value: Any, structural: bool) -> Symbol:
    value = t.operand(value)
    if isinstance(value, Symbol):
        refuse("a new tensor filled with a symbol", "full_like", "Use the symbol itself.")
    if CATEGORY[kind] != FLOAT and isinstance(value, SYMBOLIC):  # bool() would ask for its value
        return t.as_kind(t.symbol(value), kind)
    if CATEGORY[kind] == BOOL:
        return t.constant(bool(value), kind)
    t.must_hold(kind, value, "a new tensor")
    if CATEGORY[kind] == INT and isinstance(value, float):
        value = int(value)
    return t.constant(value, kind) if structural else t.number(value, kind)


def factory(value: float | None) -> Callable[..., Any]:
    def spelled(t: Tracer, *args: Any, dtype: Any = None, **named: Any) -> Any:
        args = (*args, *[named[n] for n in ("data", "size", "s", "fill_value") if n in named])
        if value is None and len(args) == 1:  # torch.tensor(3.0), torch.scalar_tensor(3.0)
            content = args[0]
        else:
            size = args[0] if args else ()
            if isinstance(size, INTS) or len(size) != 0 or len(args) > (2 if value is None else 1):
                return NotImplemented
            content = args[1] if value is None else value
        if not isinstance(content, NUMBERS):
            return NotImplemented
        if dtype is not None:
            kind = kind_named(dtype)
        elif value is not None:
            kind = t.default_float
        else:
            kind = t.weak_kind("bool", content)
        return filled(t, kind, content, value is not None)

    return spelled


SPELLED.update(
    zeros_like=like(0),
    ones_like=like(1),
    full_like=like(None),
    new_zeros=new(0),
    new_ones=new(1),
    new_full=new(None),
    float=cast_to(torch.float32),
    double=cast_to(torch.float64),
    half=cast_to(torch.float16),
    bfloat16=cast_to(torch.bfloat16),
    int=cast_to(torch.int32),
    long=cast_to(torch.int64),
    short=cast_to(torch.int16),
    bool=cast_to(torch.bool),
    is_floating_point=lambda t, x: CATEGORY[t.symbol(x).kind] == FLOAT,
    is_complex=lambda t, x: False,
    numel=lambda t, x: 1,
)

FACTORIES: dict[Any, Callable[..., Any]] = {
    torch.tensor: factory(None),
    torch.scalar_tensor: factory(None),
    torch.full: factory(None),
    torch.zeros: factory(0),
    torch.ones: factory(1),
}
"""Functions that make a scalar constant; they answer NotImplemented for anything else."""


@SPELLED.named("new_tensor")
def new_tensor(t: Tracer, x: Any, data: Any, *, dtype: Any = None, **_: Any) -> Symbol:
    if isinstance(data, Symbol):
        refuse("a copy of a symbol by new_tensor", "new_tensor", "Use `.clone()`.")
    return new(None)(t, x, (), data, dtype=dtype)


@SPELLED.named("dropout")
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
    # Dynamo of torch 2.15 swaps a NumPy array and the symbol that indexes it.
    if isinstance(tensor, Symbol) and type(index).__name__ == "ndarray":
        refuse(*NUMPY)
    if isinstance(tensor, (Symbol, PartialRead, Row)):
        return tensor[index]
    return t.read(tensor, index)


def select(t: Tracer, tensor: Any, dim: int, index: Any) -> Any:
    return get_item(t, tensor, (*([slice(None)] * (dim % tensor.dim())), index))
