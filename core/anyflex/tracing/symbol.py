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
from anyflex.tracing.trace_errors import (
    BRANCH,
    branch_hint,
    refuse,
    refuse_function,
    torch_function,
)

__all__ = [
    "CATEGORY",
    "REFLECTED",
    "SPELLINGS",
    "WHOLE",
    "Spellings",
    "Symbol",
    "SymbolTracer",
    "Traced",
    "dispatch",
    "find_tracer",
    "in_place",
    "refuse_out",
    "refusing",
    "spell",
]

BOOL, INT, FLOAT = 0, 1, 2
CATEGORY = {
    name: FLOAT if dtype.is_floating_point else BOOL if dtype is torch.bool else INT
    for name, dtype in DTYPES.items()
}
SPELLINGS: dict[Any, Callable[..., Any]] = {}
"""Torch function -> what it appends; filled by `anyflex.tracing.torch_functions`."""

REFLECTED: dict[str, Callable[..., Any]] = {}
"""Name of a method such as ``__rsub__`` -> its spelling. Dynamo calls these functions for
``score - captured``, and finds them in no dictionary."""

WHOLE: dict[Any, Callable[..., Any]] = {}
"""Torch function -> its spelling, which takes rows of captured tensors as they are: indexing,
reductions, changes of shape. `SPELLINGS` are applied to each element of rows."""

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

    def add_all(self, operation: str, kind: str, each: list[str], /) -> list[Symbol]:
        """Append an operation many times."""
        ...

    def rank(self, tensor: Tensor, /) -> int:
        """Return a captured tensor's number of dimensions."""
        ...

    def sizes(self, tensor: Tensor, /) -> list[int]:
        """Return a captured tensor's sizes, which the graph will depend on."""
        ...

    def load_all(self, tensor: Tensor, arguments: list[str], /) -> list[Symbol]:
        """Append reads of a captured tensor at several places."""
        ...

    def operand(self, value: Any, /) -> Any:
        """Return a value as an operand: a symbol or a number."""
        ...

    def as_kind(self, value: Any, kind: str, /) -> Symbol:
        """Return a value as a symbol of a type."""
        ...

    def symbol(self, value: Any, /) -> Symbol:
        """Return a value as a symbol of its own type."""
        ...

    def constant(self, value: Any, kind: str, /) -> Symbol:
        """Return a constant of the structure."""
        ...

    def is_row(self, value: Any, /) -> bool:
        """Tell whether an operand has dimensions."""
        ...

    def select(self, items: list[Symbol], index: Symbol, /) -> Symbol:
        """Return the item that a symbol numbers."""
        ...

    def over_rows(self, spelling: Callable[..., Any], args: Any, kwargs: dict[str, Any], /) -> Any:
        """Apply a spelling to each element of rows."""
        ...


class Traced:
    """Base of what a mod under trace computes with: torch functions on it go to its tracer."""

    tracer: SymbolTracer

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


def find_tracer(values: Any) -> SymbolTracer | None:
    """Return the tracer of the first symbol among `values`, one level of lists deep."""
    for value in values:
        if isinstance(value, Traced):
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
    if kwargs:
        args, kwargs = in_place(args, kwargs)
    for value in (*args, *kwargs.values()):
        if tracer.is_row(value):
            return tracer.over_rows(spelling, args, kwargs)
    return spelling(tracer, *args, **kwargs)


def in_place(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with leading operands by position. Raises ModTraceError for ``out=``."""
    refuse_out(kwargs)
    given = [kwargs[name] for name in OPERANDS if name in kwargs]
    rest = {name: kwargs[name] for name in kwargs if name not in OPERANDS and name != "out"}
    return (*args, *given), rest


def refuse_out(kwargs: dict[str, Any]) -> None:
    if kwargs.get("out") is not None:
        refuse("a result written to out= in a mod", "out=", "Mods are pure: use the result.")


def dispatch(
    tracer: SymbolTracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Append what `func` does to at least one symbol."""
    reflected = REFLECTED.get(getattr(func, "__name__", ""))
    if reflected is not None:
        return spell(tracer, reflected, args, kwargs)
    spelling, whole = SPELLINGS.get(func), WHOLE.get(func)
    if spelling is None and whole is None:
        func = torch_function(func)
        spelling, whole = SPELLINGS.get(func), WHOLE.get(func)
    if whole is not None:
        args, kwargs = in_place(args, kwargs)
        return whole(tracer, *args, **kwargs)
    if spelling is None:
        rows = [value for value in (*args, *kwargs.values()) if tracer.is_row(value)]
        refuse_function(func, on_rows=len(rows) > 0)
    return spell(tracer, spelling, args, kwargs)
