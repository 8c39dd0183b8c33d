"""Random typed graphs over all dtypes, of operations with exact results in every type: a program
computes the same bits as torch."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from anyflex.plugin import DTYPES, ModGraph, Node, type_class

__all__ = ["RandomGraph"]

_FLOATS = [dtype for dtype in DTYPES.values() if dtype.is_floating_point]
_INTS = [dtype for dtype in DTYPES.values() if type_class(dtype) == "int"]
_COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]
_INDICES = ["b", "h", "q_idx", "kv_idx"]


class RandomGraph:
    """A graph and the tensors and numbers that it reads.

    Args:
        seed: decides everything that is drawn.
        output: dtype of the result, float32 or bool.
        size: number of operations.
        learns: leave out operations with an inexact slope.
    """

    def __init__(self, seed: int, output: torch.dtype, size: int, *, learns: bool = False) -> None:
        self.draw = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.learns = learns
        self.nodes: list[Node] = []
        self.captured: list[Tensor] = []
        self.ints: list[int] = [self.draw.randint(-300, 300) for _ in range(3)]
        self.floats: list[float] = [self.draw.uniform(-3, 3) for _ in range(3)]
        for name in _INDICES:
            self._add("input", torch.int64, (), name)
        if output is not torch.bool:
            self._add("input", torch.float32, (), "score")
        for dtype in (*_FLOATS, *self.draw.sample(_INTS, 3), torch.bool):
            self._load(dtype)
        for i in range(3):
            self._add("number", torch.int64, (), f"i{i}")
            self._add("number", self.draw.choice(_FLOATS), (), f"f{i}")
            self._const(self.draw.choice([*_INTS, *_FLOATS]))
        for _ in range(size):
            self._step(
                self.draw.choice([*_FLOATS, torch.float32, *_INTS, torch.int64, torch.bool])
            )
        last = self._any(output)
        for _ in range(3):
            last = self._joined(last, self._any(output), output)
        self.graph = ModGraph(tuple(self.nodes), last)

    def _add(
        self,
        operation: str,
        dtype: torch.dtype,
        arguments: tuple[int, ...] = (),
        attribute: str | float | None = None,
    ) -> int:
        self.nodes.append(Node(operation, dtype, arguments, attribute))
        return len(self.nodes) - 1

    def _any(self, dtype: torch.dtype) -> int:
        """A value of a type, preferably a late one; converted where there is none of that type."""
        found = [i for i, node in enumerate(self.nodes) if node.dtype is dtype]
        if not found:
            return self._cast(self.draw.randrange(len(self.nodes)), dtype)
        return found[max(self.draw.randrange(len(found)), self.draw.randrange(len(found)))]

    def _const(self, dtype: torch.dtype) -> int:
        value: float = self.draw.choice([0, 1, 2, 3, 4, 7, 8, 64, 100])
        if dtype.is_floating_point:
            value = self.draw.choice([0.0, -0.0, 0.5, -1.5, 3.0, 1e-3, 1e5, float("inf")])
        return self._add("const", dtype, (), value)

    def _joined(self, x: int, y: int, dtype: torch.dtype) -> int:
        return self._add("xor" if dtype is torch.bool else "add", dtype, (x, y))

    def _cast(self, x: int, dtype: torch.dtype) -> int:
        source = self.nodes[x].dtype
        if source is dtype:
            return x
        if source.is_floating_point and type_class(dtype) == "int":
            # Values beyond the type's range have no defined result.
            low = 0.0 if dtype is torch.uint8 else -100.0
            bounds = [self._add("const", source, (), value) for value in (low, 100.0)]
            above = self._add("ge", torch.bool, (x, bounds[0]))
            below = self._add("le", torch.bool, (x, bounds[1]))
            inside = self._add("and", torch.bool, (above, below))
            x = self._add("where", source, (inside, x, bounds[1]))
        return self._add("cast", dtype, (x,))

    def _load(self, dtype: torch.dtype) -> int:
        rank = self.draw.choice([0, 1, 1, 2, 2, 3])
        shape = [self.draw.randint(1, 9) for _ in range(rank)]
        if self.draw.random() < 0.1 and rank:
            shape[self.draw.randrange(rank)] = 0
        padded = [size + self.draw.choice([0, 0, 2]) for size in shape]
        values = torch.randn(padded, generator=self.generator, dtype=torch.float64) * 3
        table = (values > 0) if dtype is torch.bool else values.abs().to(dtype)
        if dtype.is_floating_point:
            table = values.to(dtype)
        for dim, size in enumerate(shape):
            table = table.narrow(dim, 0, size)
        if rank > 1 and self.draw.random() < 0.4:
            table = table.transpose(0, -1)
        if rank and table.shape[0] and self.draw.random() < 0.2:
            table = table[:1].expand(5, *table.shape[1:])
        self.captured.append(table)
        indices = tuple(self._index() for _ in range(rank))
        return self._add("load", dtype, indices, len(self.captured) - 1)

    def _index(self) -> int:
        choice = self.draw.random()
        if choice < 0.4:
            return self.draw.randrange(len(_INDICES))
        ints = [i for i, node in enumerate(self.nodes) if type_class(node.dtype) == "int"]
        if choice < 0.6:
            q, k = (self.draw.choice(ints) for _ in range(2))
            q, k = self._cast(q, torch.int64), self._cast(k, torch.int64)
            return self._add(self.draw.choice(["add", "sub"]), torch.int64, (q, k))
        return self.draw.choice(ints)

    def _step(self, dtype: torch.dtype) -> int:
        kind = type_class(dtype)
        x, y = self._any(dtype), self._any(dtype)
        choice = self.draw.random()
        if choice < 0.15:
            return self._cast(self.draw.randrange(len(self.nodes)), dtype)
        if choice < 0.25:
            return self._load(dtype)
        if choice < 0.35:
            return self._add("where", dtype, (self._any(torch.bool), x, y))
        if kind == "bool":
            if choice < 0.8:
                other = self.draw.choice([*_FLOATS, *_INTS, torch.bool])
                x, y = self._any(other), self._any(other)
                return self._add(self.draw.choice(_COMPARISONS), dtype, (x, y))
            name = self.draw.choice(["and", "or", "xor", "not"])
            return self._add(name, dtype, (x,) if name == "not" else (x, y))
        if kind == "float":
            exact = "add sub mul truediv minimum maximum neg abs floor ceil round trunc sign"
            if self.learns:
                exact = "add sub mul truediv minimum maximum neg abs floor where"
            name = self.draw.choice(exact.split())
        else:
            name = self.draw.choice(
                "add sub mul minimum maximum neg abs sign and or xor not shl shr "
                "floordiv mod fmod pow".split()
            )
        if name == "where":
            return self._add("where", dtype, (self._any(torch.bool), x, y))
        if name in ("floordiv", "mod", "fmod"):
            # Division by 0 gives an arbitrary value.
            one = self._add("const", dtype, (), 1)
            y = self._add("or", dtype, (y, one))
        if name in ("neg", "abs", "not", "sign", "floor", "ceil", "round", "trunc"):
            return self._add(name, dtype, (x,))
        return self._add(name, dtype, (x, y))
