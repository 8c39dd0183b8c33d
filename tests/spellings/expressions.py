"""Random score mods as source text over random captured tensors.

Values stay where functions are smooth and small in most places, so that float64 rounding stays
far below the tolerance; kinks, NaN and infinities come in at random nonetheless.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.spellings.surroundings import function_of

__all__ = ["PAIRS", "STOPS", "RandomMod", "Table", "random_mod"]

PAIRS = 12
SIZE = 9
"""Bound of the indices; also of the values of tables that are used as indices."""

FLOATS = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16}
INTEGERS = {
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
}

# One operand x. Those of the first group may be nested without bound.
SMOOTH = """
torch.tanh(x) | torch.sin(x) | torch.cos(x) | x * 0.5 | -x | x / 3 | torch.atan(x) | x + 1.5
torch.sigmoid(x) | x.erf() | torch.erfc(x) | F.softsign(x) | torch.exp(torch.sin(x)) | abs(x)
torch.exp2(torch.tanh(x)) | torch.expm1(torch.sin(x)) | torch.log(x.abs() + 0.5) | x.relu()
torch.log2(x ** 2 + 0.5) | torch.log10(x.abs() + 0.5) | torch.log1p(x.abs()) | torch.sinc(x)
torch.sqrt(x.abs() + 0.1) | torch.rsqrt(x * x + 0.3) | torch.asin(torch.tanh(x) * 0.9)
torch.acos(torch.sin(x) * 0.9) | torch.asinh(x) | torch.acosh(x.abs() + 1.2) | F.mish(x)
torch.atanh(torch.tanh(x) * 0.8) | torch.sinh(torch.tanh(x)) | torch.cosh(torch.sin(x))
F.silu(x) | torch.tan(torch.tanh(x)) | F.gelu(x) | F.gelu(x, approximate='tanh') | F.softplus(x)
F.elu(x) | F.logsigmoid(x) | F.tanhshrink(x) | F.leaky_relu(x, 0.2) | F.selu(x)
torch.square(torch.sin(x)) | x.clamp(-1.2, 0.9) | torch.clamp(x, min=0.2)
torch.clamp_max(x, 0.4) | F.hardtanh(x) | 1.0 - x | F.relu6(x) | F.hardswish(x)
F.softshrink(x, 0.3) | F.threshold(x, 0.1, 0.0) | torch.frac(x) | torch.floor(x) * 0.25
torch.round(x, decimals=1) | x.ceil() + x | torch.trunc(x) - x | x.sign() + x
torch.special.ndtr(x) | torch.special.entr(x.abs() + 0.1) | x * x
torch.logit(torch.sigmoid(x) * 0.9 + 0.04) | torch.reciprocal(x * x + 0.7)
torch.nan_to_num(x, 0.0) | x.detach() * x | 2.0 ** torch.tanh(x)
(x + 0.3).float().double() | torch.rad2deg(x) * 0.01 | x % 0.75 | torch.fmod(x, 0.6)
x ** 3 * 0.1
"""
# Operations that may give NaN, infinities, and slopes of both.
WILD = """
torch.log(x) | torch.sqrt(x) | x ** 0.5 | torch.exp(x * 4) | 1 / x | torch.rsqrt(x)
torch.asin(x) | torch.where(x > 0, torch.sqrt(x), 0.0) | torch.acosh(x) | x / 0
torch.where(x == x, x, 0.0)
"""
TWO = """
x + y | x - y | x * torch.tanh(y) | torch.sub(x, y, alpha=2) | torch.maximum(x, y)
torch.fmin(x, y) | torch.minimum(x, y) | torch.fmax(x, y) | torch.atan2(x, y + 0.3)
x / (y.abs() + 0.4) | x.lerp(y, 0.3) | torch.hypot(x, y + 0.2) | torch.logaddexp(x, y)
torch.copysign(x, y.nan_to_num()) | x % (y.abs() + 0.5) | torch.clamp(x, min=y)
torch.pow(x.abs() + 0.5, torch.sin(y)) | torch.fmod(x, y.abs() + 0.5) | torch.where(C, x, y)
x.where(C, y) | x.masked_fill(C, 0.25) + y | torch.xlogy(x.abs(), torch.sigmoid(y) * 3 + 0.2)
torch.where(C, x, float('-inf')).clamp(min=-3.0) + y | torch.add(x, y, alpha=0.5) | x * C + y
"""
INTEGER = """
i + j | i - j | i * 2 - j | i // 3 | j % 4 | i & 5 | i ^ j | i|j | (i - j).abs() | -i | ~j
i >> 1 | i << 1 | (i - j).clamp(-4, 6) | torch.where(C, i, j) | torch.minimum(i, j)
torch.maximum(i, 2 * j) | torch.div(i - j, 2, rounding_mode='trunc') | torch.fmod(i - j, 3)
i.int() * 3 | torch.sign(i - j) | (i * 0.7).int() | i // (j.abs() + 1) | torch.square(i % 7)
7 - i | torch.where(C, i, 3) | i ** 2 % 11
"""
CONDITION = """
i >= j | i < j | i == j | i != 3 | i % 2 == 0 | i - j <= 2 | x > y | x <= 0.3 | C & D | C|D | ~C
C ^ D | torch.logical_and(C, i > 1) | torch.logical_or(C, D) | torch.isclose(x, y)
torch.logical_not(C) | torch.isnan(x) | torch.isfinite(x) | (i & 1).bool()
torch.signbit(x.nan_to_num()) | x != x | 2.5 > i
"""


STOPS = re.compile(r"floor|ceil|round|trunc|sign|//|copysign|frac|nan_to_num")
"""Operations that stop a gradient here, and multiply it by 0 in torch: where the slope behind them
is infinite or NaN, torch's gradient is NaN."""

# Operands stand alone: the x of `x.exp()`, not that of `exp`.
_WORD = re.compile(r"(?<![\w.'])([xyijCD])(?!\w)")


def _alternatives(text: str) -> list[str]:
    return [part.strip() for line in text.strip().splitlines() for part in line.split(" | ")]


@dataclass(frozen=True)
class Table:
    """A captured tensor: the name in the source, the leaf that owns its values, how it reads."""

    name: str
    value: Tensor
    leaf: Tensor
    kind: str


@dataclass
class RandomMod:
    """A random score mod."""

    seed: int
    source: str
    tables: list[Table]
    inputs: dict[str, Tensor]

    @property
    def function(self) -> Callable[..., Any]:
        return function_of(self.source, {table.name: table.value for table in self.tables})

    def __str__(self) -> str:
        shapes = ", ".join(
            f"{t.name}: {t.value.dtype} {list(t.value.shape)} stride {t.value.stride()}"
            for t in self.tables
        )
        return f"seed {self.seed}: {self.source}\n{shapes}"


def random_mod(seed: int) -> RandomMod:
    """The mod of a seed."""
    return _Draft(seed).made()


@dataclass
class _Draft:
    seed: int
    draw: random.Random = field(init=False)
    generator: torch.Generator = field(init=False)
    tables: list[Table] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)

    def made(self) -> RandomMod:
        for _ in range(self.draw.randint(1, 4)):
            self.tables.append(self.table("float"))
        for _ in range(self.draw.randint(0, 2)):
            self.tables.append(self.table("index"))
        if self.draw.random() < 0.4:
            self.tables.append(self.table("bool"))
        source = self.real(self.draw.randint(1, 6))
        score = torch.randn(PAIRS, generator=self.generator, dtype=torch.float64)
        # Exact values, where comparisons tie and kinks lie.
        score[:4] = torch.tensor(self.draw.sample([0.0, 1.0, -1.0, 0.5, 2.5, -3.0, 6.0, 30.0], 4))
        names = ("b", "h", "q_idx", "kv_idx")
        indices = {
            name: torch.randint(0, SIZE, (PAIRS,), generator=self.generator) for name in names
        }
        return RandomMod(self.seed, source, self.tables, {"score": score, **indices})

    def table(self, use: str) -> Table:
        """A captured tensor of any rank and stride."""
        letter = {"float": "w", "index": "n", "bool": "c"}[use]
        name = f"{letter}{len(self.tables)}"
        rank = self.draw.choice([0, 1, 1, 2, 2, 3]) if use == "float" else self.draw.choice([1, 2])
        way = self.draw.choice(["plain", "plain", "transposed", "expanded", "sliced", "offset"])
        if rank == 0:
            way = "plain"
        shape = [SIZE] * rank
        if way == "sliced":
            shape[-1] *= 2
        if way == "offset":
            shape = [SIZE + 2, *shape[1:]]
        if way == "expanded":
            shape[0] = 1
        if use == "float":
            kind = self.draw.choice(["f64", "f64", "f64", "f32", "bf16"])
            leaf = torch.randn(shape, generator=self.generator, dtype=torch.float64)
            leaf = leaf.to(FLOATS[kind]).requires_grad_(self.draw.random() < 0.8)
        elif use == "index":
            kind = self.draw.choice(list(INTEGERS))
            low = 0 if kind == "u8" else -SIZE
            leaf = torch.randint(low, SIZE, shape, generator=self.generator).to(INTEGERS[kind])
        else:
            kind = "bool"
            leaf = torch.rand(shape, generator=self.generator) < 0.5
        value = leaf
        if way == "transposed":
            value = leaf.transpose(0, -1)
        elif way == "expanded":
            value = leaf.expand(SIZE, *shape[1:])
        elif way == "sliced":
            value = leaf[..., 1::2]
        elif way == "offset":
            value = leaf[2:]
        return Table(name, value, leaf, kind)

    def read(self, table: Table, depth: int) -> str:
        """A read of a table, by one index a dimension, given at once or one after the other."""
        rank = table.value.dim()
        if rank == 0:
            return table.name
        indices = [self.index(depth) for _ in range(rank)]
        if rank == 1 or self.draw.random() < 0.6:
            return f"{table.name}[{', '.join(indices)}]"
        if self.draw.random() < 0.5:
            return table.name + "".join(f"[{index}]" for index in indices)
        *front, last = indices
        return f"{table.name}[..., {last}][{', '.join(front)}]"

    def index(self, depth: int) -> str:
        """An integer in -SIZE .. SIZE-1."""
        choice = self.draw.random()
        tables = [table for table in self.tables if table.name[0] == "n"]
        if choice < 0.45 or depth <= 0:
            return self.draw.choice(["q", "k", "b", "h", "q", "k", "3", "-2", "q - k"])
        if choice < 0.65 and tables:
            read = self.read(self.draw.choice(tables), depth - 1)
            return f"{read}.long()"
        if choice < 0.85:
            return f"({self.integer(depth - 1)}) % {SIZE}"
        return f"({self.integer(depth - 1)}).clamp({-SIZE}, {SIZE - 1})"

    def integer(self, depth: int) -> str:
        tables = [table for table in self.tables if table.name[0] == "n"]
        if depth <= 0 or self.draw.random() < 0.2:
            if tables and self.draw.random() < 0.4:
                return self.read(self.draw.choice(tables), depth - 1) + ".long()"
            return self.draw.choice(["q", "k", "b", "h"])
        return self.filled(INTEGER, depth)

    def condition(self, depth: int) -> str:
        tables = [table for table in self.tables if table.kind == "bool"]
        if tables and self.draw.random() < 0.3:
            return self.read(self.draw.choice(tables), depth - 1)
        if depth <= 0:
            return self.draw.choice(["q >= k", "m", "k < 4"])
        return self.filled(CONDITION, depth)

    def real(self, depth: int) -> str:
        choice = self.draw.random()
        if depth <= 0 or choice < 0.05:
            return self.leaf(depth)
        if choice < 0.45:
            return self.filled(SMOOTH, depth)
        if choice < 0.5:
            return self.filled(WILD, depth)
        return self.filled(TWO, depth)

    def leaf(self, depth: int) -> str:
        choice = self.draw.random()
        if choice < 0.4:
            return "s"
        if choice < 0.5:
            return f"({self.integer(1)}) * 0.25"
        table = self.draw.choice([table for table in self.tables if table.name[0] == "w"])
        read = self.read(table, 2)
        # float32 functions have float32's rounding: they are tested one by one.
        return read if table.kind == "f64" else f"{read}.to(s.dtype)"

    def filled(self, text: str, depth: int) -> str:
        """One of the alternatives with its operands filled in."""
        template = self.draw.choice(_alternatives(text))
        makers = {
            "x": self.real,
            "y": self.real,
            "i": self.integer,
            "j": self.integer,
            "C": self.condition,
            "D": self.condition,
        }
        made = {name: f"({make(depth - 1)})" for name, make in makers.items() if name in template}
        words = _WORD.split(template)
        return "".join(made.get(word, word) for word in words)
