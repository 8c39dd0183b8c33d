"""Lookups in rows of captured tensors: gathering, membership, binary search."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.tracing import arithmetic
from anyflex.tracing.conversions import get_item, select
from anyflex.tracing.row_functions import unsqueeze
from anyflex.tracing.rows import PartialRead, Row, as_row
from anyflex.tracing.symbol import Spellings, Symbol
from anyflex.tracing.trace_errors import refuse_function
from anyflex.tracing.tracer import Tracer

__all__ = ["LOOKUPS"]

LOOKUPS = Spellings()
"""Name in torch, Tensor or torch.nn.functional -> what it reads."""

LOOKUPS["select"] = select


def at(t: Tracer, x: Any, index: Any) -> Any:
    """Return ``x[index]`` of a row with one dimension; of a row of indices, a row."""
    if t.is_row(index):
        return t.over_rows(lambda t, i: at(t, x, i), (index,), {})
    if isinstance(x, (PartialRead, Row)):
        return x[index]
    return t.read(x, index)


@LOOKUPS.named("gather", "take_along_dim")
def gather(t: Tracer, x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    if rank_of(t, x) != 1:
        refuse_function(torch.gather, on_rows=True)
    return at(t, x, index)


@LOOKUPS.named("take")
def take(t: Tracer, x: Any, index: Any) -> Any:
    if rank_of(t, x) == 1:
        return at(t, x, index)
    if t.is_row(index) or not isinstance(x, Tensor) or isinstance(x, Symbol):
        refuse_function(torch.take, on_rows=True)
    places: list[Any] = []
    for size in reversed(t.sizes(x)[1:]):
        places.insert(0, arithmetic.OWN["mod"](t, index, size))
        index = arithmetic.OWN["floordiv"](t, index, size)
    return t.read(x, (index, *places))


@LOOKUPS.named("index_select")
def index_select(t: Tracer, x: Any, dim: int, index: Any) -> Any:
    if t.is_row(index):
        return at(t, x, index) if rank_of(t, x) == 1 else refuse_function(torch.take, on_rows=True)
    return unsqueeze(t, get_item(t, x, (*[slice(None)] * (dim % rank_of(t, x)), index)), dim)


@LOOKUPS.named("embedding")
def embedding(
    t: Tracer,
    index: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if padding_idx is not None or max_norm is not None or scale_grad_by_freq or t.is_row(index):
        refuse_function(torch.nn.functional.embedding, on_rows=max_norm is None)
    return t.read(weight, index)


def rank_of(t: Tracer, x: Any) -> int:
    if isinstance(x, PartialRead):
        return len(x.shape_left())
    return len(x.sizes) if isinstance(x, Row) else t.rank(x) if isinstance(x, Tensor) else 0


@LOOKUPS.named("isin")
def is_in(
    t: Tracer,
    elements: Any,
    test_elements: Any,
    *,
    assume_unique: bool = False,
    invert: bool = False,
) -> Any:
    tested = as_row(t, test_elements)

    def each(t: Tracer, x: Any) -> Symbol:
        x = t.symbol(x)
        found = t.constant(False, "bool")
        for item in tested.items:
            kind = t.common_kind(x, item)
            found = t.binary("or", found, t.binary("eq", x, item, kind, "bool"), "bool")
        return t.unary("not", found) if invert else found

    return t.over_rows(each, (elements,), {}) if t.is_row(elements) else each(t, elements)


@LOOKUPS.named("searchsorted")
def searchsorted(
    t: Tracer,
    sorted_sequence: Any,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    if sorter is not None or rank_of(t, sorted_sequence) != 1:
        refuse_function(torch.searchsorted, on_rows=True)
    passing = "gt" if right or side == "right" else "ge"
    if isinstance(sorted_sequence, PartialRead):
        (length,) = sorted_sequence.shape_left()
    else:
        (length,) = t.sizes(sorted_sequence)

    def each(t: Tracer, x: Any) -> Symbol:
        # The number of elements that don't pass: a bit each step, the highest first.
        x, count = t.symbol(x), t.constant(0, "i64")
        step = 1
        while step * 2 <= length:
            step *= 2
        while step > 0 and length > 0:
            reached = t.binary("add", count, t.constant(step, "i64"), "i64")
            last = t.binary("minimum", reached, length, "i64")
            element = at(t, sorted_sequence, t.binary("sub", last, t.constant(1, "i64"), "i64"))
            kind = t.common_kind(element, x)
            stays = t.unary("not", t.binary(passing, element, x, kind, "bool"))
            inside = t.binary("le", reached, length, "i64", "bool")
            count = t.where(t.binary("and", stays, inside, "bool"), reached, count)
            step //= 2
        return t.as_kind(count, "i32") if out_int32 else count

    return t.over_rows(each, (x,), {}) if t.is_row(x) else each(t, x)


@LOOKUPS.named("bucketize")
def bucketize(
    t: Tracer, x: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False
) -> Any:
    return searchsorted(t, boundaries, x, out_int32=out_int32, right=right)
