"""Rows of captured tensors in a mod: reads with dimensions left, and small rows as symbols.

``table[h]`` of a matrix is a `PartialRead`. Where it is indexed further it becomes one read; where
it is computed with, it becomes a `Row`, all of whose elements are read. Dynamo inlines this module
as it does `anyflex.tracing.symbol`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from anyflex.mod_graph.dtypes import DTYPES
from anyflex.tensors.symbolic_numbers import INTS
from anyflex.tracing.symbol import Symbol, SymbolTracer, Traced
from anyflex.tracing.trace_errors import (
    BRANCH,
    branch_hint,
    refuse,
    refuse_function,
    refuse_index,
)

__all__ = [
    "MOST",
    "ONE_ELEMENT",
    "PartialRead",
    "Row",
    "as_row",
    "broadcast",
    "offsets_of",
    "row_of",
]

MOST = 64
"""Maximum number of elements of a row that is unrolled into a graph."""

ONE_ELEMENT = "Give one index a dimension, or reduce the row: `.sum(-1)`, `.any(-1)`."
"""Cure for a row that is used as a scalar."""

INDEX_KINDS = {"i8": True, "i16": True, "i32": True, "i64": True}


class PartialRead(Traced):
    """A captured tensor with some of its indices given: ``table[h][q]`` is ``table[h, q]``."""

    def __init__(self, tracer: SymbolTracer, tensor: Tensor, entries: list[str | None]) -> None:
        self.tracer = tracer
        self.tensor = tensor
        self.entries = entries

    def __getitem__(self, index: Any) -> Any:
        items = list(index) if isinstance(index, tuple) else [index]
        free = [d for d, entry in enumerate(self.entries) if entry is None]
        given = 0
        for item in items:
            if item is not Ellipsis and item is not None:
                given += 1
        if given > len(free):
            refuse_index(
                f"{given} indices for the {len(free)} dimensions left of "
                f"{self.tracer.describe(self.tensor)} (rank {len(self.entries)})",
                "Give one index a dimension.",
            )
        rows = [d for d, item in enumerate(items) if self.tracer.is_row(item)]
        if len(rows) == 1 and given == len(free):  # an element for each of the row's indices
            before, after = items[: rows[0]], items[rows[0] + 1 :]
            return self.tracer.over_rows(
                lambda t, each: self.__getitem__((*before, each, *after)), (items[rows[0]],), {}
            )
        entries = list(self.entries)
        # Indices of the row that the other indices leave.
        parts: list[Any] = []
        d = 0
        for item in items:
            if item is Ellipsis:
                parts += [slice(None)] * (len(free) - given)
                d += len(free) - given
            elif item is None:
                parts.append(None)
            elif isinstance(item, slice):
                parts.append(self.part(item))
                d += 1
            else:
                entries[free[d]] = self.entry(item)
                d += 1
        for part in parts:
            if part is None or not (
                part.start is None and part.stop is None and part.step is None
            ):
                return PartialRead(self.tracer, self.tensor, entries).row(parts)
        for entry in entries:
            if entry is None:
                return PartialRead(self.tracer, self.tensor, entries)
        return self.tracer.load(self.tensor, ",".join(entries) or "-")  # type: ignore[arg-type]

    def shape_left(self) -> list[int]:
        """Sizes of the dimensions that have no index yet."""
        sizes = self.tracer.sizes(self.tensor)
        return [sizes[d] for d, entry in enumerate(self.entries) if entry is None]

    def part(self, item: slice) -> slice:
        for end in (item.start, item.stop, item.step):
            if isinstance(end, (Traced, Tensor)):
                refuse(
                    "a slice of a captured tensor from or to a symbol",
                    "slice",
                    "The length of a row is a number: use an index, and torch.where for a range.",
                )
        return item

    def entry(self, item: Any) -> str:
        item = self.tracer.operand(item)
        if isinstance(item, Symbol):
            if item.kind not in INDEX_KINDS:
                refuse_index(
                    f"an index of dtype {DTYPES[item.kind]} into "
                    f"{self.tracer.describe(self.tensor)}",
                    "Indices are signed integers: use `.long()`, or torch.where for a condition.",
                )
        elif isinstance(item, bool) or not isinstance(item, INTS):
            refuse_index(
                f"a {type(item).__name__} as an index into {self.tracer.describe(self.tensor)}",
                "Indices are integers.",
            )
        return str(self.tracer.as_kind(item, "i64").position)

    def row(self, parts: Sequence[Any] = ()) -> Any:
        """Read all elements that the indices and `parts` leave, of which there may be 64."""
        left = self.shape_left()
        shape, offsets = offsets_of(left, parts)
        if len(offsets) > MOST:
            refuse(
                f"a row of shape {shape} of {self.tracer.describe(self.tensor)}, of which a mod "
                f"graph holds at most {MOST} elements",
                "captured tensor",
                "Give one index a dimension.",
                pure=True,
            )
        # Constants of the dimensions that have no index yet, by place.
        most = max(left) if left else 0
        constants = [
            str(constant.position)
            for constant in self.tracer.add_all("const", "i64", [f"- {i}" for i in range(most)])
        ]
        places = []
        for offset in offsets:
            chosen = []
            for size in reversed(left):
                chosen.append(constants[offset % size])
                offset //= size
            places.append(
                ",".join([chosen.pop() if entry is None else entry for entry in self.entries])
            )
        items = self.tracer.load_all(self.tensor, places)
        return row_of(self.tracer, shape, items, self.tensor)

    def problem(self) -> str:
        left = self.shape_left()
        given = len(self.entries) - len(left)
        return (
            f"a row of shape {left} of {self.tracer.describe(self.tensor)} (rank "
            f"{len(self.entries)}, {given} of {len(self.entries)} indices given) where a scalar "
            "is needed"
        )

    def refuse_use(self) -> NoReturn:
        refuse(self.problem(), "captured tensor", ONE_ELEMENT)

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        return getattr(self.row(), name)


class Row(Traced):
    """A small tensor of symbols.

    Args:
        shape: at least one dimension.
        items: symbols, in the order of memory.
        source: the captured tensor that it was read from, for messages; None for symbols.
    """

    def __init__(
        self, tracer: SymbolTracer, shape: list[int], items: list[Symbol], source: Tensor | None
    ) -> None:
        self.tracer = tracer
        self.sizes = shape
        self.items = items
        self.source = source

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.sizes)

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    @property
    def dtype(self) -> torch.dtype:
        return self.items[0].dtype if self.items else torch.float32

    @property
    def device(self) -> torch.device:
        return self.tracer.device

    def dim(self) -> int:
        return len(self.sizes)

    def size(self, dim: int | None = None) -> Any:
        return torch.Size(self.sizes) if dim is None else self.sizes[dim]

    def __len__(self) -> int:
        return self.sizes[0]

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(self.sizes[0])])

    def __getitem__(self, index: Any) -> Any:
        parts = list(index) if isinstance(index, tuple) else [index]
        if len(parts) == 1 and isinstance(parts[0], Symbol) and len(self.sizes) == 1:
            return self.tracer.select(self.items, parts[0])
        for part in parts:
            if isinstance(part, (Traced, Tensor)):
                refuse(
                    "an unrolled row indexed by a symbol",
                    "indexing",
                    "Index the captured tensor itself.",
                    pure=True,
                )
        shape, offsets = offsets_of(self.sizes, parts)
        return row_of(self.tracer, shape, [self.items[i] for i in offsets], self.source)

    def problem(self) -> str:
        of = ""
        if self.source is not None:
            of = f" of {self.tracer.describe(self.source)} (rank {self.source.dim()})"
        return f"a row of shape {self.sizes}{of} where a scalar is needed"

    def refuse_use(self) -> NoReturn:
        refuse(self.problem(), "captured tensor", ONE_ELEMENT)

    def __bool__(self) -> NoReturn:
        refuse(BRANCH, "bool()", branch_hint())

    def __getattr__(self, name: str) -> Any:
        function = getattr(Tensor, name, None)
        if function is None or name[:2] == "__":
            raise AttributeError(name)
        refuse_function(function, on_rows=True)


def row_of(
    tracer: SymbolTracer, shape: list[int], items: list[Symbol], source: Tensor | None
) -> Any:
    """Return a row, or the symbol that one without dimensions is."""
    return Row(tracer, shape, items, source) if shape else items[0]


def as_row(tracer: SymbolTracer, value: Any) -> Row:
    """Return a row, a read with dimensions left, a tensor or a scalar as a row, which may have no
    dimensions."""
    if isinstance(value, PartialRead):
        value = value.row()
    elif isinstance(value, Tensor) and tracer.is_row(value):
        value = PartialRead(tracer, value, [None] * tracer.rank(value)).row()
    if isinstance(value, Row):
        return value
    return Row(tracer, [], [tracer.symbol(value)], None)


def offsets_of(shape: Sequence[int], parts: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Return the shape that constant indices give, and where its elements are in memory.

    Args:
        shape: that is indexed.
        parts: ints, slices, None and one Ellipsis; dimensions without one are kept.
    """
    given = len([part for part in parts if part is not None and part is not Ellipsis])
    if given > len(shape):
        refuse_index(
            f"{given} indices for a row of {len(shape)} dimensions", "Give one index a dimension."
        )
    whole: list[Any] = []
    for part in parts:
        whole += [slice(None)] * (len(shape) - given) if part is Ellipsis else [part]
    taken = len([part for part in whole if part is not None])
    whole += [slice(None)] * (len(shape) - taken)
    kept: list[int] = []
    offsets, d = [0], 0
    for part in whole:
        if part is None:
            kept.append(1)
            continue
        size = shape[d]
        d += 1
        if isinstance(part, slice):
            chosen = list(range(size))[part]
            kept.append(len(chosen))
        else:
            if not -size <= part < size:
                refuse_index(f"index {part} of a row whose dimension has size {size}")
            chosen = [part % size]
        offsets = [offset * size + i for offset in offsets for i in chosen]
    return kept, offsets


def broadcast(rows: Sequence[Row]) -> list[int]:
    """Return the shape that rows have together. Raises ModTraceError if they have none."""
    shape: list[int] = []
    for row in rows:
        sizes = list(row.sizes)
        while len(sizes) < len(shape):
            sizes.insert(0, 1)
        while len(shape) < len(sizes):
            shape.insert(0, 1)
        for d, size in enumerate(sizes):
            if size != shape[d] and size != 1 and shape[d] != 1:
                refuse(
                    f"rows of shapes {shape} and {row.sizes}, which don't broadcast",
                    "broadcasting",
                    "Sizes are equal, or 1.",
                )
            if shape[d] == 1:
                shape[d] = size
    return shape


def _of_row(name: str) -> Any:
    def method(self: PartialRead, *operands: Any) -> Any:
        return getattr(self.row(), name)(*operands)

    return method


def _refuse_use(self: Row, *operands: Any) -> NoReturn:
    self.refuse_use()


# Python's defaults would be silent: any two objects are unequal, any object is true, and a loop
# over one with __getitem__ has no end. The operators of rows are installed with those of symbols.
for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow and rand or "
    "ror xor rxor lshift rlshift rshift rrshift matmul rmatmul divmod rdivmod lt le gt ge eq ne "
    "neg pos abs invert bool int float index complex round len iter contains hash"
).split():
    setattr(PartialRead, f"__{_name}__", _of_row(f"__{_name}__"))
    if _name not in ("bool", "len", "iter"):
        setattr(Row, f"__{_name}__", _refuse_use)
