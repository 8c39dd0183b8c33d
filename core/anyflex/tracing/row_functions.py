"""Reductions and changes of shape of rows of captured tensors.

Each takes the tracer, then torch's arguments; a row is a read with dimensions left, a captured
tensor, symbols that were stacked, or what was computed of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anyflex.mod_graph.dtypes import DTYPE_NAMES
from anyflex.tracing import arithmetic
from anyflex.tracing.rows import Row, as_row, row_of
from anyflex.tracing.symbol import CATEGORY, FLOAT, Spellings, Symbol
from anyflex.tracing.trace_errors import REFUSED, refuse, refuse_function
from anyflex.tracing.tracer import Tracer

__all__ = ["ROWS"]

ROWS = Spellings()
"""Name in torch, Tensor, torch.linalg or torch.nn.functional -> what it does with rows."""

Fold = Callable[[Tracer, list[Symbol]], Symbol]


def reduced(t: Tracer, name: str, x: Any, dim: Any, keepdim: bool, fold: Fold) -> Any:
    """Fold a row over some dimensions, or all of them."""
    if not t.is_row(x):  # of a score, which to the user is perhaps a matrix
        refuse(*REFUSED[getattr(torch, name)])
    row = as_row(t, x)
    rank = len(row.sizes)
    dims = range(rank) if dim is None or dim == () else dim if isinstance(dim, tuple) else (dim,)
    folded = [d % rank for d in dims]
    groups, inner, shape = [0], [0], []
    for d, size in enumerate(row.sizes):
        if d in folded:
            groups = [offset * size for offset in groups]
            inner = [offset * size + i for offset in inner for i in range(size)]
        else:
            groups = [offset * size + i for offset in groups for i in range(size)]
            inner = [offset * size for offset in inner]
        if d not in folded or keepdim:
            shape.append(1 if d in folded else size)
    items = [fold(t, [row.items[base + i] for i in inner]) for base in groups]
    return row_of(t, shape, items, row.source)


def summed(t: Tracer, items: list[Symbol], operation: str, kind: str) -> Symbol:
    """Add, or multiply, in float32 at least, as torch accumulates."""
    wide = "f32" if kind in ("f16", "bf16") else kind
    if not items:
        return t.constant(1 if operation == "mul" else 0, kind)
    converted = [item if item.kind == wide else t.as_kind(item, wide) for item in items]
    total = converted[0]
    for item in converted[1:]:
        (total,) = t.add_all(operation, wide, [f"{total.position},{item.position} -"])
    return t.as_kind(total, kind)


def sum_kind(items: list[Symbol], dtype: Any) -> str:
    if dtype is not None:
        return DTYPE_NAMES[dtype]
    kind = items[0].kind if items else "f32"
    return kind if CATEGORY[kind] == FLOAT else "i64"


@ROWS.named("sum")
def total(t: Tracer, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    def fold(t: Tracer, items: list[Symbol]) -> Symbol:
        return summed(t, items, "add", sum_kind(items, dtype))

    return reduced(t, "sum", x, dim, keepdim, fold)


@ROWS.named("prod")
def product(
    t: Tracer, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    def fold(t: Tracer, items: list[Symbol]) -> Symbol:
        return summed(t, items, "mul", sum_kind(items, dtype))

    return reduced(t, "prod", x, dim, keepdim, fold)


@ROWS.named("mean")
def mean(t: Tracer, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    def fold(t: Tracer, items: list[Symbol]) -> Symbol:
        kind = sum_kind(items, dtype)
        if CATEGORY[kind] != FLOAT:
            refuse("the mean of integers in a mod", "mean", "Convert with `.float()`.")
        wide = "f32" if kind in ("f16", "bf16") else kind
        quotient = t.binary(
            "truediv", summed(t, items, "add", wide), t.constant(len(items), wide), wide
        )
        return t.as_kind(quotient, kind)

    return reduced(t, "mean", x, dim, keepdim, fold)


def quantifier(name: str, operation: str) -> Callable[..., Any]:
    def fold(t: Tracer, items: list[Symbol]) -> Symbol:
        result = t.constant(operation == "and", "bool")
        for item in items:
            result = t.binary(operation, result, t.as_kind(item, "bool"), "bool")
        return result

    def spelled(t: Tracer, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        return reduced(t, name, x, dim, keepdim, fold)

    return spelled


ROWS["any"] = quantifier("any", "or")
ROWS["all"] = quantifier("all", "and")


@ROWS.named("count_nonzero")
def count_nonzero(t: Tracer, x: Any, dim: Any = None) -> Any:
    def fold(t: Tracer, items: list[Symbol]) -> Symbol:
        return summed(t, [t.as_kind(item, "bool") for item in items], "add", "i64")

    return reduced(t, "count_nonzero", x, dim, False, fold)


def extreme(name: str, operation: str) -> Callable[..., Any]:
    """A largest or smallest element. Elements that are equal to it share its gradient."""

    def fold(t: Tracer, items: list[Symbol]) -> Symbol:
        if not items:
            refuse(f"{name} of an empty row in a mod", name)
        kind = items[0].kind
        if kind == "bool":
            operation_of_bools = "or" if operation == "maximum" else "and"
            return summed(t, items, operation_of_bools, kind)
        if CATEGORY[kind] != FLOAT:
            return summed(t, items, operation, kind)
        apart = [t.unary("detach", item) for item in items]
        most = apart[0]
        for item in apart[1:]:
            most = t.binary(operation, most, item, kind)
        zero = t.constant(0, kind)
        equal = [t.binary("eq", item, most, kind, "bool") for item in apart]
        passed = [
            t.where(same & arithmetic.is_finite(t, item), item - item_apart, zero)
            for same, item, item_apart in zip(equal, items, apart, strict=True)
        ]
        count = summed(t, [t.as_kind(same, kind) for same in equal], "add", kind)
        shared = t.binary("truediv", summed(t, passed, "add", kind), count, kind)
        # A NaN equals nothing, and shares nothing.
        some = t.binary("gt", count, zero, kind, "bool")
        return most + t.where(some, shared, zero)

    def spelled(t: Tracer, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        return reduced(t, name, x, dim, keepdim, fold)

    return spelled


ROWS["amax"] = extreme("amax", "maximum")
ROWS["amin"] = extreme("amin", "minimum")


def extremum_of_one(whole: str, spelled: str) -> Callable[..., Any]:
    def extremum(t: Tracer, x: Any, y: Any = None, *, dim: Any = None, **named: Any) -> Any:
        if y is None and dim is None and t.is_row(x):
            return ROWS[whole](t, x)
        if isinstance(y, int) or dim is not None:  # also the places of the elements are wanted
            refuse_function(getattr(torch, whole), on_rows=t.is_row(x))
        if t.is_row(x) or t.is_row(y):
            return t.over_rows(arithmetic.OWN[spelled], (x, y), {})
        return arithmetic.OWN[spelled](t, x, y)

    return extremum


ROWS["max"] = extremum_of_one("amax", "maximum")
ROWS["min"] = extremum_of_one("amin", "minimum")


@ROWS.named("dot", "inner", "vdot", "__matmul__", "matmul")
def dot(t: Tracer, x: Any, y: Any) -> Any:
    x, y = (as_row(t, side) if t.is_row(side) else side for side in (x, y))
    if not isinstance(x, Row) or not isinstance(y, Row) or len(y.sizes) != 1:
        refuse_function(torch.matmul, on_rows=isinstance(x, Row) and isinstance(y, Row))
    if not x.sizes or x.sizes[-1] != y.sizes[0]:
        refuse(f"a product of rows of shapes {x.sizes} and {y.sizes}", "torch.dot")
    kind = t.common_kind(x.items[0], y.items[0]) if x.items else "f32"
    wide = "f32" if kind in ("f16", "bf16") else kind
    sides = (t.stretched(x, x.sizes), t.stretched(y, x.sizes))
    a, b = ([t.as_kind(item, wide) for item in side] for side in sides)
    both = [f"{m.position},{n.position} -" for m, n in zip(a, b, strict=True)]
    products = Row(t, list(x.sizes), t.add_all("mul", wide, both), x.source)
    return t.over_rows(lambda t, a: t.as_kind(a, kind), (total(t, products, -1, True),), {})[
        (..., 0)
    ]


@ROWS.named("norm", "vector_norm")
def norm(
    t: Tracer, x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, **named: Any
) -> Any:
    order = named.pop("ord", p)
    asked = [value for value in named.values() if value is not None]
    if asked or order not in (2, "fro", None) or not t.is_row(x):
        refuse_function(torch.norm, on_rows=t.is_row(x))
    row = as_row(t, x)
    wide = "f32" if row.items and row.items[0].kind in ("f16", "bf16") else ""

    def fold(t: Tracer, items: list[Symbol]) -> Symbol:
        kind = wide or sum_kind(items, None)
        if CATEGORY[kind] != FLOAT:
            refuse("the norm of integers in a mod", "torch.norm", "Convert with `.float()`.")
        squares = [t.binary("mul", item, item, kind) for item in items]
        squared = summed(t, squares, "add", kind)
        zero = t.constant(0, kind)
        # The gradient at 0 is 0, as torch has it.
        is_zero = t.binary("eq", squared, zero, kind, "bool")
        root = t.floating("sqrt", t.where(is_zero, t.constant(1, kind), squared))
        return t.as_kind(t.where(is_zero, zero, root), items[0].kind if items else kind)

    return reduced(t, "norm", row, dim, keepdim, fold)


@ROWS.named("numel")
def number_of_elements(t: Tracer, x: Any) -> int:
    return len(as_row(t, x).items)


@ROWS.named("unsqueeze")
def unsqueeze(t: Tracer, x: Any, dim: int) -> Any:
    row = as_row(t, x)
    sizes = list(row.sizes)
    sizes.insert(dim % (len(sizes) + 1), 1)
    return Row(t, sizes, row.items, row.source)


@ROWS.named("squeeze")
def squeeze(t: Tracer, x: Any, dim: Any = None) -> Any:
    row = as_row(t, x)
    rank = len(row.sizes)
    dims = range(rank) if dim is None else dim if isinstance(dim, tuple) else (dim,)
    dropped = [d % rank for d in dims]
    sizes = [size for d, size in enumerate(row.sizes) if size != 1 or d not in dropped]
    return row_of(t, sizes, row.items, row.source)


@ROWS.named("view", "reshape")
def reshape(t: Tracer, x: Any, *sizes: Any) -> Any:
    row = as_row(t, x)
    wanted = list(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else list(sizes)
    known = 1
    for size in wanted:
        known *= 1 if size == -1 else size
    if -1 in wanted and known:
        wanted[wanted.index(-1)] = len(row.items) // known
        known *= len(row.items) // known
    if known != len(row.items):
        refuse(f"a row of shape {row.sizes} as one of shape {wanted}", "reshape")
    return row_of(t, wanted, row.items, row.source)


@ROWS.named("flatten")
def flatten(t: Tracer, x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    row = as_row(t, x)
    rank = len(row.sizes)
    first, last = (start_dim % rank, end_dim % rank) if rank else (0, -1)
    return reshape(t, row, *row.sizes[:first], -1, *row.sizes[last + 1 :])


@ROWS.named("expand")
def expand(t: Tracer, x: Any, *sizes: Any) -> Any:
    row = as_row(t, x)
    wanted = list(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else list(sizes)
    own = [1] * (len(wanted) - len(row.sizes)) + list(row.sizes)
    wanted = [size if new == -1 else new for size, new in zip(own, wanted, strict=True)]
    return row_of(t, wanted, t.stretched(row, wanted), row.source)


@ROWS.named("cat", "concat", "concatenate")
def cat(t: Tracer, tensors: Any, dim: int = 0) -> Any:
    rows = [as_row(t, tensor) for tensor in tensors]
    if len({len(row.sizes) for row in rows} | {1}) > 1 or not rows:
        refuse_function(torch.cat, on_rows=True)
    kind = joint_kind(t, rows)
    items = [t.as_kind(item, kind) for row in rows for item in row.items]
    return Row(t, [len(items)], items, rows[0].source)


def joint_kind(t: Tracer, rows: list[Row]) -> str:
    kind = "bool"
    for row in rows:
        if row.items:
            kind = t.common_kind(t.add("const", kind, "-", "0"), row.items[0])
    return kind


@ROWS.named("stack")
def stack(t: Tracer, tensors: Any, dim: int = 0) -> Any:
    rows = [as_row(t, tensor) for tensor in tensors]
    shape = rows[0].sizes
    place = dim % (len(shape) + 1)
    if place != 0 and place != len(shape):
        refuse_function(torch.stack, on_rows=True)
    kind = joint_kind(t, rows)
    columns = [[t.as_kind(item, kind) for item in row.items] for row in rows]
    if place == 0:
        items = [item for column in columns for item in column]
        return Row(t, [len(rows), *shape], items, rows[0].source)
    items = [column[i] for i in range(len(columns[0])) for column in columns]
    return Row(t, [*shape, len(rows)], items, rows[0].source)
