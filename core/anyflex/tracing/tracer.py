"""Tracer: collects the nodes of one mod as text, and the tensors and numbers that it captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyflex.errors import ModTraceError
from anyflex.mod_graph.dtypes import DTYPE_NAMES, DTYPES
from anyflex.mod_graph.torch_derivatives import integer_clamp_saturates
from anyflex.tensors.dynamo_errors import fail
from anyflex.tensors.symbolic_numbers import INTS, NUMBERS, SYMBOLIC
from anyflex.tracing.rows import MOST, PartialRead, Row, as_row, broadcast, row_of
from anyflex.tracing.symbol import BOOL, CATEGORY, FLOAT, INT, Symbol, Traced
from anyflex.tracing.trace_errors import NUMPY, TRANSFORM, refuse, refuse_custom_function

__all__ = ["Tracer"]

PROMOTED = {
    a: {b: DTYPE_NAMES[torch.promote_types(DTYPES[a], DTYPES[b])] for b in DTYPES} for a in DTYPES
}
LARGEST = 2**63 - 1
LIMITS = {
    name: (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for name, dtype in DTYPES.items()
    if CATEGORY[name] == INT
}


class Tracer:
    """Collects the nodes of one mod as text, and the tensors and numbers that it captured."""

    def __init__(self, default_float: str, device: torch.device) -> None:
        self.default_float = default_float
        self.device = device
        # How an eager trace makes symbols; Dynamo inlines plain ones.
        self.make_symbol: Callable[[Tracer, int, str], Symbol] = Symbol
        self.lines: list[str] = []
        self.positions: dict[str, int] = {}
        self.captured: list[Tensor] = []
        self.ints: list[int] = []
        self.floats: list[float] = []
        # A mod that asks for a captured tensor's shape or type depends on more than its values.
        self.read_facts = False
        # A mod that unrolls or searches a row of a captured tensor depends on its sizes.
        self.read_sizes = False
        # The last refusal, which the mod, or torch, may have caught.
        self.refused: ModTraceError | None = None
        # Names a captured tensor for an error message; Dynamo can't look into frames for it.
        self.name_of: Callable[[Tensor], str] | None = None
        # How deep functorch's transforms are nested, where that can be asked.
        self.transform_level: Callable[[], int | None] | None = None
        # Whether a Function that the mod applies is running; Dynamo follows no such call.
        self.in_custom_function: Callable[[], bool] | None = None
        # Whether gradients are recorded around a score mod; under its own no_grad they are not.
        self.records_gradients = False

    def describe(self, tensor: Tensor) -> str:
        """A captured tensor, for an error message."""
        name = self.name_of(tensor) if self.name_of is not None else ""
        name = f"captured tensor '{name}'" if name else "captured tensor"
        if tensor.is_nested:  # it has no shape
            return name
        return f"{name} of shape {list(tensor.shape)}"

    def add(self, operation: str, kind: str, arguments: str = "-", attribute: str = "-") -> Symbol:
        symbol = self._node(operation, kind, arguments, attribute)
        if not self.records_gradients:
            return symbol
        if self.in_custom_function is not None and self.in_custom_function():
            refuse_custom_function()
        if torch.is_grad_enabled():
            return symbol
        if CATEGORY[kind] != FLOAT or operation in ("const", "number"):
            return symbol
        return self._node("detach", kind, str(symbol.position))

    def add_all(self, operation: str, kind: str, each: list[str]) -> list[Symbol]:
        """Append an operation many times, as `add` does, with ``"arguments attribute"`` of each.

        Dynamo takes some milliseconds for each call that it follows: here is none.
        """
        if self.records_gradients and (
            self.in_custom_function is not None or not torch.is_grad_enabled()
        ):
            return [self.add(operation, kind, *rest.split(" ")) for rest in each]
        symbols = []
        for rest in each:
            line = f"{operation} {kind} {rest}"
            position = self.positions.get(line)
            if position is None:
                position = len(self.lines)
                self.positions[line] = position
                self.lines.append(line)
            symbols.append(self.make_symbol(self, position, kind))
        return symbols

    def _node(
        self, operation: str, kind: str, arguments: str = "-", attribute: str = "-"
    ) -> Symbol:
        line = f"{operation} {kind} {arguments} {attribute}"
        position = self.positions.get(line)
        if position is None:
            position = len(self.lines)
            self.positions[line] = position
            self.lines.append(line)
        return self.make_symbol(self, position, kind)

    def constant(self, value: float | int | bool, kind: str) -> Symbol:
        """A value that is part of the structure, not a closed-over number."""
        if isinstance(value, SYMBOLIC):
            refuse(
                "a symbolic number (of a size under torch.export or make_fx) where a mod needs a "
                "constant",
                type(value).__name__,
                "Give a plain number.",
            )
        category = CATEGORY[kind]
        if category == BOOL:
            return self.add("const", kind, "-", "True" if value else "False")
        return self.add(
            "const", kind, "-", repr(float(value) if category == FLOAT else int(value))
        )

    def number(self, value: Any, kind: str) -> Symbol:
        """A Python number as a slot: its value is no part of the structure."""
        if isinstance(value, bool):
            return self.constant(value, kind)
        if isinstance(value, INTS):
            # A symbolic int has 64 bits; comparing would need its value.
            if not isinstance(value, SYMBOLIC) and (value > LARGEST or value < -LARGEST - 1):
                refuse("an integer of more than 64 bits in a mod", "int", "Write it as a float.")
            slot = f"i{len(self.ints)}"
            self.ints.append(value)  # type: ignore[arg-type]
        else:
            slot = f"f{len(self.floats)}"
            self.floats.append(value)
        return self.add("number", kind, "-", slot)

    def is_number(self, symbol: Symbol) -> bool:
        """Tell whether a symbol is a Python number, converted or not: `graph.is_number`."""
        operation, _, arguments, _ = self.lines[symbol.position].split(" ")
        while operation == "cast":
            operation, _, arguments, _ = self.lines[int(arguments)].split(" ")
        return operation in ("const", "number")

    def must_hold(self, kind: str, value: Any, operation: str) -> None:
        """Refuse a number beyond an integer type where torch does; in arithmetic it wraps."""
        if isinstance(value, Symbol) or kind not in LIMITS:
            return
        if kind == "i64" and isinstance(value, torch.SymInt):
            return
        low, high = LIMITS[kind]
        # To torch a negative number wraps once in an unsigned type.
        if not min(low, -high) <= value <= high:
            refuse(
                f"{operation} with {value}, which {DTYPES[kind]} can't hold",
                operation,
                f"Give a number of {low}..{high}, or convert to torch.int64 first: `x.long()`.",
            )

    def is_no_bound(self, kind: str, value: Any, operation: str) -> bool:
        """Tell whether a clamp of an integer type by a number changes nothing; refuse a number
        that torch refuses."""
        if isinstance(value, Symbol) or kind not in LIMITS:
            return False
        if kind == "i64" and isinstance(value, torch.SymInt):
            return False
        low, high = LIMITS[kind]
        if not integer_clamp_saturates:
            self.must_hold(kind, value, "torch.clamp")
        elif value < low or value > high:
            if (value < low) == (operation == "maximum"):
                return True
            refuse(
                f"torch.clamp to {value}, which {DTYPES[kind]} can't hold",
                "torch.clamp",
                f"Give a number of {low}..{high}, or convert to torch.int64 first: `x.long()`.",
            )
        return False

    def wraps_to_zero(self, kind: str, value: int) -> bool:
        """Tell whether an integer type holds no other bits of a number than zeros."""
        low, high = LIMITS[kind]
        return kind != "i64" and value % (high - low + 1) == 0

    def rank(self, tensor: Tensor) -> int:
        """A captured tensor's rank. That it is asked for here is not the mod's doing."""
        read_facts = self.read_facts
        rank = tensor.dim()
        self.read_facts = read_facts
        return rank

    def sizes(self, tensor: Tensor) -> list[int]:
        """A captured tensor's sizes, which the graph will depend on."""
        read_facts = self.read_facts
        sizes = [*tensor.shape]
        self.read_facts, self.read_sizes = read_facts, True
        return sizes

    def refuse_transform(self) -> None:
        """Raise ModTraceError inside of a transform: what it hands out is no captured tensor."""
        if self.transform_level is not None and self.transform_level() is not None:
            refuse(*TRANSFORM)

    def load(self, tensor: Tensor, arguments: str) -> Symbol:
        return self.load_all(tensor, [arguments])[0]

    def load_all(self, tensor: Tensor, arguments: list[str]) -> list[Symbol]:
        """Append reads of a captured tensor at several places."""
        self.refuse_transform()
        read_facts = self.read_facts
        dtype = tensor.dtype
        kind = DTYPE_NAMES.get(dtype)
        special = tensor.is_nested or tensor.layout is not torch.strided
        self.read_facts = read_facts
        if kind is None or special:
            what = "nested" if special and tensor.is_nested else "sparse" if special else dtype
            fail(
                "ArgumentTypeError",
                f"a mod reads {self.describe(tensor)} that is {what}: mods read dense tensors "
                "of real numbers.",
            )
        for i, known in enumerate(self.captured):
            if known is tensor:
                return self.add_all("load", kind, [f"{each} {i}" for each in arguments])
        self.captured.append(tensor)
        last = len(self.captured) - 1
        return self.add_all("load", kind, [f"{each} {last}" for each in arguments])

    def operand(self, value: Any) -> Any:
        """Return a symbol, or a Python number as it is."""
        if isinstance(value, (Symbol, *NUMBERS)):
            return value
        if isinstance(value, torch.SymBool):
            number: Any = torch.sym_ite(value, 1, 0)  # type: ignore[no-untyped-call]
            return self.as_kind(self.number(number, "i64"), "bool")
        if isinstance(value, (PartialRead, Row)):
            value.refuse_use()
        if isinstance(value, Tensor):
            if self.rank(value) == 0:
                return self.load(value, "-")
            refuse(
                f"{self.describe(value)} is used whole",
                "captured tensor",
                "A mod computes one score: index the tensor with b, h, q_idx or kv_idx.",
            )
        if isinstance(value, complex):
            refuse("a complex number in a mod", "complex", "Scores are real.")
        if hasattr(value, "__array__"):
            if value.ndim == 0:
                return self.operand(value.item())
            refuse(
                f"a {type(value).__name__} as an operand in a mod",
                type(value).__name__,
                "Capture a tensor, torch.from_numpy(...), and index it.",
            )
        if hasattr(value, "__index__"):
            return int(value)
        if hasattr(value, "__float__"):
            return float(value)
        refuse(f"a {type(value).__name__} as an operand in a mod", type(value).__name__)

    def common_kind(self, x: Any, y: Any) -> str:
        """torch's promotion of two operands: Python numbers raise the category only."""
        if isinstance(x, Symbol):
            if isinstance(y, Symbol):
                return PROMOTED[x.kind][y.kind]
            return self.weak_kind(x.kind, y)
        if isinstance(y, Symbol):
            return self.weak_kind(y.kind, x)
        return self.weak_kind(self.weak_kind("bool", x), y)

    def weak_kind(self, kind: str, number: Any) -> str:
        category = CATEGORY[kind]
        if isinstance(number, bool):
            return kind
        if isinstance(number, INTS):
            return kind if category >= INT else "i64"
        return kind if category >= FLOAT else self.default_float

    def as_kind(self, value: Any, kind: str) -> Symbol:
        """Return `value` (symbol or number) as a symbol of `kind`."""
        if isinstance(value, Symbol):
            if value.kind == kind:
                return value
            return self.add("cast", kind, str(value.position))
        return self.number(value, kind)

    def symbol(self, value: Any) -> Symbol:
        """Return `value` as a symbol of its own type."""
        value = self.operand(value)
        if isinstance(value, Symbol):
            return value
        return self.number(value, self.weak_kind("bool", value))

    def unary(self, operation: str, x: Any) -> Symbol:
        x = self.symbol(x)
        return self.add(operation, x.kind, str(x.position))

    def floating(self, operation: str, x: Any) -> Symbol:
        """A function of a float: ints and bools are converted, as torch does."""
        x = self.symbol(x)
        if CATEGORY[x.kind] != FLOAT:
            x = self.as_kind(x, self.default_float)
        return self.add(operation, x.kind, str(x.position))

    def binary(self, operation: str, x: Any, y: Any, kind: str, result: str = "") -> Symbol:
        """`operation` on operands converted to `kind`; the result has it too, unless said."""
        x = self.as_kind(x, kind)
        y = self.as_kind(y, kind)
        return self.add(operation, result or kind, f"{x.position},{y.position}")

    def where(self, condition: Symbol, x: Any, y: Any, kind: str = "") -> Symbol:
        kind = kind or self.common_kind(x, y)
        x = self.as_kind(x, kind)
        y = self.as_kind(y, kind)
        return self.add("where", kind, f"{condition.position},{x.position},{y.position}")

    def read(self, tensor: Tensor, index: Any) -> Any:
        if not isinstance(tensor, Tensor):  # to Dynamo, NumPy's arrays are much like tensors
            refuse(*NUMPY)
        return PartialRead(self, tensor, [None] * self.rank(tensor))[index]

    def is_row(self, value: Any) -> bool:
        """Tell whether an operand has dimensions: a row, or a captured tensor used whole."""
        if isinstance(value, Symbol):
            return False
        return isinstance(value, Traced) or (isinstance(value, Tensor) and self.rank(value) > 0)

    def over_rows(self, spelling: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Apply a spelling to each element of its operands, broadcast as tensors are."""
        given = [*args, *kwargs.values()]
        has_row = [self.is_row(value) for value in given]
        rows = [
            as_row(self, value) for value, is_row in zip(given, has_row, strict=True) if is_row
        ]
        shape = broadcast(rows)
        sources = [row.source for row in rows if row.source is not None]
        count = 1
        for size in shape:
            count *= size
        if count > MOST:
            refuse(
                f"rows of shape {shape} together, of which a mod graph holds at most {MOST} "
                "elements",
                "broadcasting",
                "Reduce the rows one after the other.",
                pure=True,
            )
        stretched = [self.stretched(row, shape) for row in rows]
        results = []
        for i in range(count):
            element = [row[i] for row in reversed(stretched)]
            each = [
                element.pop() if is_row else value
                for value, is_row in zip(given, has_row, strict=True)
            ]
            named = dict(zip(kwargs, each[len(args) :], strict=True))
            results.append(spelling(self, *each[: len(args)], **named))
        if results and not isinstance(results[0], Symbol):  # a fact, as is_floating_point()
            return results[0]
        return row_of(self, shape, results, sources[0] if sources else None)

    def stretched(self, row: Row, shape: list[int]) -> list[Symbol]:
        """Return the elements of a row in a shape that it broadcasts to."""
        sizes = [1] * (len(shape) - len(row.sizes)) + list(row.sizes)
        offsets = [0]
        for size, wanted in zip(sizes, shape, strict=True):
            step = 0 if size == 1 else 1
            offsets = [offset * size + i * step for offset in offsets for i in range(wanted)]
        return [row.items[offset] for offset in offsets]

    def select(self, items: list[Symbol], index: Symbol) -> Symbol:
        """Return the item that a symbol numbers, from either end."""
        result = items[0]
        for i in range(1, len(items)):
            chosen = self.binary("eq", index, self.constant(i, index.kind), index.kind, "bool")
            last = self.constant(i - len(items), index.kind)
            chosen = chosen | self.binary("eq", index, last, index.kind, "bool")
            result = self.where(chosen, items[i], result)
        return result

    def text(self, output: Symbol) -> str:
        return ";".join(self.lines) + f";={output.position}"
