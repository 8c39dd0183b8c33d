"""Symbols: what a mod is called with while it is traced.

A symbol stands for one scalar. Every operation on it appends a node to its tracer. Torch functions
on a symbol arrive at ``__torch_function__``; those whose first operand is a plain tensor
(``captured[q_idx]``, ``zero_dim * score``) arrive at `TraceMode`.

Dynamo inlines this module under ``torch.compile``: it is plain Python on local data, without
locks, logging or frame inspection, and finds operations in a dictionary keyed by function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from anyflex.errors import ModTraceError
from anyflex.mod_graph.dtypes import DTYPES
from anyflex.tensors.symbolic_numbers import INTS
from anyflex.tracing.trace_errors import (
    BRANCH,
    branch_hint,
    refuse,
    refuse_function,
    refuse_index,
    torch_function,
)

__all__ = [
    "CATEGORY",
    "SPELLINGS",
    "PartialRead",
    "Spellings",
    "Symbol",
    "SymbolTracer",
    "dispatch",
    "find_tracer",
    "refuse_out",
    "refusing",
    "spell",
]

BOOL, INT, FLOAT = 0, 1, 2
CATEGORY = {
    name: FLOAT if dtype.is_floating_point else BOOL if dtype is torch.bool else INT
    for name, dtype in DTYPES.items()
}
INDEX_KINDS = {"i8": True, "i16": True, "i32": True, "i64": True}


SPELLINGS: dict[Any, Callable[..., Any]] = {}
"""Torch function -> what it appends; filled by `anyflex.tracing.torch_functions`."""

Spelling = TypeVar("Spelling", bound=Callable[..., Any])


class Spellings(dict[str, Callable[..., Any]]):
    """Table of spellings by name, to which functions enter themselves."""

    def named(self, *names: str) -> Callable[[Spelling], Spelling]:
        """Return a decorator that enters a function under these names."""

        def enter(function: Spelling) -> Spelling:
            self.update(dict.fromkeys(names, function))
            return function

        return enter


class SymbolTracer(Protocol):
    """The part of `anyflex.tracing.tracer.Tracer` that symbols use.

    Attributes:
        device: of the call.
        refused: the last refusal, which the mod, or torch, may have caught.
    """

    device: torch.device
    refused: ModTraceError | None

    def describe(self, tensor: Tensor, /) -> str:
        """Return a captured tensor's name for an error message."""
        ...

    def load(self, tensor: Tensor, arguments: str, /) -> Symbol:
        """Append a read of a captured tensor."""
        ...

    def operand(self, value: Any, /) -> Any:
        """Return a value as an operand: a symbol or a number."""
        ...

    def as_kind(self, value: Any, kind: str, /) -> Symbol:
        """Return a value as a symbol of a type."""
        ...


class Traced:
    """Base of what a mod under trace computes with: torch functions on it go to its tracer."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        tracer = find_tracer(args)
        if tracer is None:
            tracer = find_tracer(tuple((kwargs or {}).values()))
        assert tracer is not None
        return dispatch(tracer, func, args, kwargs or {})


class Symbol(Traced):
    """One scalar of a mod under trace. Methods and operators are those of a 0-d tensor; they are
    installed by `anyflex.tracing.torch_functions`; what would need a value refuses."""

    if TYPE_CHECKING:  # installed by spellings

        def __add__(self, other: Any) -> Symbol: ...
        def __radd__(self, other: Any) -> Symbol: ...
        def __sub__(self, other: Any) -> Symbol: ...
        def __rsub__(self, other: Any) -> Symbol: ...
        def __mul__(self, other: Any) -> Symbol: ...
        def __rmul__(self, other: Any) -> Symbol: ...
        def __truediv__(self, other: Any) -> Symbol: ...
        def __rtruediv__(self, other: Any) -> Symbol: ...
        def __floordiv__(self, other: Any) -> Symbol: ...
        def __mod__(self, other: Any) -> Symbol: ...
        def __pow__(self, other: Any) -> Symbol: ...
        def __and__(self, other: Any) -> Symbol: ...
        def __or__(self, other: Any) -> Symbol: ...
        def __xor__(self, other: Any) -> Symbol: ...
        def __lt__(self, other: Any) -> Symbol: ...
        def __le__(self, other: Any) -> Symbol: ...
        def __gt__(self, other: Any) -> Symbol: ...
        def __ge__(self, other: Any) -> Symbol: ...
        def __eq__(self, other: Any) -> Symbol: ...  # type: ignore[override]
        def __ne__(self, other: Any) -> Symbol: ...  # type: ignore[override]
        def __neg__(self) -> Symbol: ...
        def __invert__(self) -> Symbol: ...
        def __getitem__(self, index: object) -> NoReturn: ...

    # A NumPy number on the left leaves the operation to the symbol, as it does for a tensor.
    __array_priority__ = 1000

    def __init__(self, tracer: SymbolTracer, position: int, kind: str) -> None:
        self.tracer = tracer
        self.position = position
        self.kind = kind

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.kind]

    @property
    def device(self) -> torch.device:
        return self.tracer.device

    @property
    def shape(self) -> torch.Size:
        return torch.Size(())

    @property
    def ndim(self) -> int:
        return 0

    @property
    def requires_grad(self) -> bool:
        return False

    def dim(self) -> int:
        return 0

    def size(self) -> torch.Size:
        return torch.Size(())

    def numel(self) -> int:
        return 1

    def is_floating_point(self) -> bool:
        return CATEGORY[self.kind] == FLOAT

    def __getattr__(self, name: str) -> Any:
        # Only symbols under torch.compile come here: those of an eager trace are tensors.
        if hasattr(Tensor, name):
            refuse(
                f"a tensor's attribute under torch.compile: Tensor.{name}",
                f"Tensor.{name}",
                "A symbol has dtype, device, shape and ndim.",
                pure=True,
            )
        raise AttributeError(name)

    def __repr__(self) -> str:
        return f"<{self.kind} symbol %{self.position}>"

    def __bool__(self) -> NoReturn:
        refuse(BRANCH, "bool()", branch_hint())

    def __format__(self, specification: str) -> str:
        if specification:
            refuse("formatting a symbol", "format()", "A symbol has no value yet.")
        return repr(self)


def refusing(problem: str, named: str, hint: str) -> Callable[..., NoReturn]:
    """Return a method that refuses; see `refuse`."""

    def method(self: Symbol, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(problem, named, hint)

    return method


for _name, _refused in {
    "hash": (
        "a symbol is used as a key of a dict or set",
        "hash()",
        "A symbol has no value yet: index a captured tensor instead.",
    ),
    "index": (
        "a symbol is used as a Python integer",
        "int()",
        "Index a captured tensor instead of a list or dict, and loop over Python numbers; "
        "`.int()` converts a symbol.",
    ),
    "int": ("int() of a symbol", "int()", "Use `.int()` or `.long()`."),
    "float": (
        "float() or a math function of a symbol",
        "float()",
        "Use `.float()`, and torch.tanh, torch.sqrt ... for math.tanh, math.sqrt ....",
    ),
    "round": ("round() of a symbol", "round()", "Use torch.round."),
    "floor": ("math.floor of a symbol", "math.floor", "Use torch.floor."),
    "ceil": ("math.ceil of a symbol", "math.ceil", "Use torch.ceil."),
    "trunc": ("math.trunc of a symbol", "math.trunc", "Use torch.trunc."),
    "divmod": ("divmod() of a symbol", "divmod()", "Use // and %."),
    "len": ("len() of a symbol", "len()", "A symbol is a scalar."),
    "iter": ("a loop over a symbol", "iter()", "A symbol is a scalar."),
    "reversed": ("a loop over a symbol", "reversed()", "A symbol is a scalar."),
    "getitem": ("indexing a symbol", "indexing", "A symbol is a scalar; index captured tensors."),
    "setitem": ("item assignment to a symbol", "__setitem__", "Use torch.where."),
}.items():
    setattr(Symbol, f"__{_name}__", refusing(*_refused))


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
            if item is not Ellipsis:
                given += 1
        if given > len(free):
            refuse_index(
                f"{given} indices for the {len(free)} dimensions left of "
                f"{self.tracer.describe(self.tensor)} (rank {len(self.entries)})",
                "Give one index a dimension.",
            )
        entries = list(self.entries)
        d = 0
        for item in items:
            if item is Ellipsis:
                d += len(free) - given
            else:
                entries[free[d]] = self.entry(item)
                d += 1
        for entry in entries:
            if entry is None:
                return PartialRead(self.tracer, self.tensor, entries)
        return self.tracer.load(self.tensor, ",".join(entries) or "-")  # type: ignore[arg-type]

    def shape_left(self) -> list[int]:
        """Sizes of the dimensions that have no index yet."""
        return [self.tensor.shape[d] for d, entry in enumerate(self.entries) if entry is None]

    def entry(self, item: Any) -> str | None:
        if isinstance(item, slice):
            if item.start is None and item.stop is None and item.step is None:
                return None
            refuse(
                "a slice of a captured tensor",
                "slice",
                "A mod reads one element: use an index, and torch.where for a range.",
            )
        if item is None:
            refuse("None as an index", "indexing", "A mod reads one element.")
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

    def refuse_use(self) -> NoReturn:
        left = self.shape_left()
        given = len(self.entries) - len(left)
        refuse(
            f"a row of shape {left} of {self.tracer.describe(self.tensor)} (rank "
            f"{len(self.entries)}, {given} of {len(self.entries)} indices given) where a scalar "
            "is needed",
            "captured tensor",
            "Give one index a dimension.",
        )

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        self.refuse_use()


def _refuse_use(self: PartialRead, *operands: Any) -> NoReturn:
    self.refuse_use()


# Python's defaults would be silent: any two objects are unequal, any object is true, and a loop
# over one with __getitem__ has no end.
for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow and rand or "
    "ror xor rxor lshift rlshift rshift rrshift matmul rmatmul divmod rdivmod lt le gt ge eq ne "
    "neg pos abs invert bool int float index complex round len iter contains hash"
).split():
    setattr(PartialRead, f"__{_name}__", _refuse_use)


def find_tracer(values: Any) -> SymbolTracer | None:
    """Return the tracer of the first symbol among `values`, one level of lists deep."""
    for value in values:
        if isinstance(value, (Symbol, PartialRead)):
            return value.tracer
        if isinstance(value, slice):
            value = (value.start, value.stop, value.step)
        if isinstance(value, (tuple, list)):
            inner = find_tracer(value)
            if inner is not None:
                return inner
    return None


OPERANDS = ("condition", "input", "other", "exponent", "end")
"""torch's names of leading operands, in the order in which functions take them."""


def spell(
    tracer: SymbolTracer,
    spelling: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a spelling, which takes leading operands by position only."""
    if not kwargs:
        return spelling(tracer, *args)
    refuse_out(kwargs)
    given = [kwargs[name] for name in OPERANDS if name in kwargs]
    rest = {name: kwargs[name] for name in kwargs if name not in OPERANDS and name != "out"}
    return spelling(tracer, *args, *given, **rest)


def refuse_out(kwargs: dict[str, Any]) -> None:
    if kwargs.get("out") is not None:
        refuse("a result written to out= in a mod", "out=", "Mods are pure: use the result.")


def dispatch(
    tracer: SymbolTracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Append what `func` does to at least one symbol."""
    spelling = SPELLINGS.get(func)
    if spelling is None:
        func = torch_function(func)
        spelling = SPELLINGS.get(func)
    if spelling is None:
        refuse_function(func)
    return spell(tracer, spelling, args, kwargs)
