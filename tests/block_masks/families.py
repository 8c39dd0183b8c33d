"""Random mask mods of every family that users write, and their combinations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

__all__ = ["FAMILIES", "Sizes", "Source", "mask_mods", "sizes"]

Mask = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True)
class Sizes:
    """A mask's batch, heads, lengths and block size."""

    batch: int
    heads: int
    q: int
    kv: int
    block: tuple[int, int]

    @property
    def longest(self) -> int:
        return max(self.q, self.kv)


@st.composite
def sizes(draw: Any) -> Sizes:
    """Lengths 1..700, square or not; block sizes 16..256, powers of two or not."""
    q = draw(st.integers(1, 700))
    kv = q if draw(st.booleans()) else draw(st.integers(1, 700))
    side = st.sampled_from([16, 32, 48, 64, 100, 128, 160, 256])
    block = draw(side)
    blocks = (block, block if draw(st.booleans()) else draw(side))
    return Sizes(draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4])), q, kv, blocks)


class Source:
    """Source of random values: parameters by hypothesis, tensors by a drawn seed."""

    def __init__(self, draw: Any, of: Sizes) -> None:
        self.of = of
        self._draw = draw
        self.generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))

    def number(self, low: int, high: int) -> int:
        return int(self._draw(st.integers(low, max(low, high))))

    def one_of(self, *values: Any) -> Any:
        return self._draw(st.sampled_from(values))

    def ints(self, high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator)

    def floats(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def flags(self, share: float, *shape: int) -> Tensor:
        return self.floats(*shape) < share

    def documents(self, *shape: int) -> Tensor:
        """Sorted ids; the tensor may be longer than the lengths."""
        most = 1 + self.of.longest // self.one_of(3, 20, 90)
        return self.ints(most, *shape).sort(-1).values

    def length(self) -> int:
        return self.of.longest + self.one_of(0, 0, 1, 37)


def causal(s: Source) -> Mask:
    offset = s.one_of(0, 0, s.number(-60, 60))
    return lambda b, h, q, k: q + offset >= k


def window(s: Source) -> Mask:
    left, right = s.number(0, 200), s.number(-5, 200)
    return lambda b, h, q, k: (q - k <= left) & (k - q <= right)


def head_window(s: Source) -> Mask:
    widths = s.ints(s.of.longest + 1, s.of.heads)
    return lambda b, h, q, k: (q - k).abs() <= widths[h]


def prefix(s: Source) -> Mask:
    length = s.number(0, s.of.kv)
    return lambda b, h, q, k: (k < length) | (q >= k)


def batch_prefix(s: Source) -> Mask:
    lengths = s.ints(s.of.kv + 1, s.of.batch).to(torch.int32)
    return lambda b, h, q, k: (k < lengths[b]) | (k <= q)


def padding(s: Source) -> Mask:
    lengths = s.ints(s.of.longest + 1, s.of.batch)
    return lambda b, h, q, k: (q < lengths[b]) & (k < lengths[b])


def documents(s: Source) -> Mask:
    ids = s.documents(s.length())
    return lambda b, h, q, k: ids[q] == ids[k]


def permuted_documents(s: Source) -> Mask:
    ids = s.documents(s.length())
    named = torch.randperm(int(ids.max()) + 1, generator=s.generator)[ids] * 7 - 3
    return lambda b, h, q, k: named[q] == named[k]


def shuffled_ids(s: Source) -> Mask:
    ids = s.ints(s.one_of(2, 5, 200, 5000), s.length())
    if s.one_of(False, True):
        return lambda b, h, q, k: ids[q] != ids[k]
    return lambda b, h, q, k: ids[q] == ids[k]


def batch_documents(s: Source) -> Mask:
    ids = s.documents(s.of.batch, s.length())
    if s.one_of(False, True):
        ids = ids[:, torch.randperm(ids.shape[1], generator=s.generator)]
    return lambda b, h, q, k: ids[b, q] == ids[b, k]


def two_tables(s: Source) -> Mask:
    ours, theirs = s.documents(s.of.batch, s.length()), s.documents(s.length())
    return lambda b, h, q, k: ours[b, q] == theirs[k]


def document_starts(s: Source) -> Mask:
    start = s.ints(s.of.longest, s.length()).to(torch.int32)
    if s.one_of(False, True):
        start = start.sort().values
    return lambda b, h, q, k: k >= start[q]


def spans(s: Source) -> Mask:
    low, length = s.ints(s.of.kv, s.of.q), s.ints(60, s.of.q)
    high = low + length
    return lambda b, h, q, k: (low[q] <= k) & (k < high[q])


def dilated(s: Source) -> Mask:
    step, phase = s.number(1, 40), s.number(0, 3)
    return lambda b, h, q, k: (q - k) % step == phase


def head_dilated(s: Source) -> Mask:
    steps = s.ints(9, s.of.heads, low=1)
    return lambda b, h, q, k: ((q - k) % steps[h] == 0) & (q - k < 8 * steps[h])


def stepped(s: Source) -> Mask:
    of, factor = s.number(2, 40), s.number(1, 5)
    return lambda b, h, q, k: (factor * q + k) % of < of // 2


def chunks(s: Source) -> Mask:
    size = s.number(1, 200)
    return lambda b, h, q, k: q // size == k // size


def shifted_chunks(s: Source) -> Mask:
    bits = s.number(0, 7)
    return lambda b, h, q, k: (q >> bits) - (k >> bits) == 1


def neighbourhood(s: Source) -> Mask:
    width, reach = s.one_of(7, 16, 32, 37), s.number(0, 3)
    rows = max(reach, s.of.longest // width - 1 - reach)

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        row = ((q // width).clamp(reach, rows) - k // width).abs() <= reach
        low, high = reach, max(reach, width - 1 - reach)
        return row & (((q % width).clamp(low, high) - k % width).abs() <= reach)

    return mask


def global_tokens(s: Source) -> Mask:
    chosen = s.flags(s.one_of(0.02, 0.3, 0.98), s.length())
    if s.one_of(False, True):
        return lambda b, h, q, k: chosen[k]
    return lambda b, h, q, k: chosen[q] | chosen[k]


def block_table(s: Source) -> Mask:
    side = s.one_of(16, 50, 64)
    shape = (-(-s.of.q // side), -(-s.of.kv // side))
    if s.one_of(False, True):
        table = s.flags(0.4, *shape)
        return lambda b, h, q, k: table[q // side, k // side]
    by_head = s.flags(0.4, s.of.heads, *shape)
    return lambda b, h, q, k: by_head[h, q // side, k // side]


def dense_table(s: Source) -> Mask:
    table = s.flags(s.one_of(0.01, 0.5, 0.999), s.of.q, s.of.kv)
    return lambda b, h, q, k: table[q, k]


def transposed_table(s: Source) -> Mask:
    table = s.flags(0.9, s.of.kv, s.of.q).t()
    return lambda b, h, q, k: table[q, k]


def batch_table(s: Source) -> Mask:
    table = s.ints(4, s.of.batch, s.of.q, s.of.kv).to(torch.int8)
    return lambda b, h, q, k: table[b, q, k] > 0


def bits(s: Source) -> Mask:
    bit = 1 << s.number(0, 8)
    kind = s.one_of("xor", "and", "or", "not")
    if kind == "xor":
        return lambda b, h, q, k: ((q ^ k) & bit) == 0
    if kind == "and":
        return lambda b, h, q, k: (q & k) < bit
    if kind == "or":
        return lambda b, h, q, k: (q | k) >= bit
    return lambda b, h, q, k: (~q + k) & bit != 0


def hashed(s: Source) -> Mask:
    most = s.number(0, 97)
    return lambda b, h, q, k: (q * 7919 + k * 104729) % 97 < most


def wrapping(s: Source) -> Mask:
    # int32 products past 2^31 wrap, as torch's do.
    factor = torch.tensor(s.number(1, 1 << 30), dtype=torch.int32)
    return lambda b, h, q, k: q.to(torch.int32) * factor > k.to(torch.int32)


def small_types(s: Source) -> Mask:
    levels = s.ints(200, s.length()).to(s.one_of(torch.uint8, torch.int16, torch.int32))
    return lambda b, h, q, k: levels[q] - levels[k] < 3


def floats(s: Source) -> Mask:
    places = s.floats(s.length())
    bound = 0.1 * s.number(0, 12)
    return lambda b, h, q, k: places[q] + places[k] * 0.5 > bound


def float_order(s: Source) -> Mask:
    places = s.floats(s.length()).sort().values
    return lambda b, h, q, k: (places[q] - places[k]).abs() < 0.3


def special_floats(s: Source) -> Mask:
    values = s.floats(s.length())
    special = s.one_of(float("nan"), float("inf"), -float("inf"))
    values.masked_fill_(s.flags(0.1, values.numel()), special)
    if s.one_of(False, True):
        return lambda b, h, q, k: values[q] > values[k]
    return lambda b, h, q, k: torch.log(values[q] - 0.5) < 1.0


def float_distance(s: Source) -> Mask:
    kind, bound = s.one_of("sqrt", "log2", "exp", "tanh", "sin", "square"), s.number(0, 20) / 7
    functions = {
        "sqrt": lambda x: torch.sqrt(x.abs()) * 0.3,
        "log2": lambda x: torch.log2(x + 1),
        "exp": lambda x: torch.exp(-x.abs() * 0.01) * 3,
        "tanh": lambda x: torch.tanh(x * 0.02) * 2,
        "sin": lambda x: torch.sin(x * 0.1) * 2,
        "square": lambda x: (x * 0.05) ** 2,
    }
    function = functions[kind]
    return lambda b, h, q, k: function((q - k).float()) < bound


def rounded(s: Source) -> Mask:
    scale = s.number(1, 40) * 0.37
    kind = s.one_of("int", "floor", "round")
    if kind == "int":
        return lambda b, h, q, k: ((q - k) / scale).to(torch.int32) == 0
    function = torch.floor if kind == "floor" else torch.round
    return lambda b, h, q, k: function((q - k) / scale) >= 1


def extremes(s: Source) -> Mask:
    width = s.number(1, 200)
    return lambda b, h, q, k: (
        torch.maximum(q, k) - torch.minimum(q, k) < torch.where(h % 2 == 0, width, 2 * width)
    )


def choices(s: Source) -> Mask:
    split, width = s.number(0, s.of.longest), s.number(0, 200)
    kind = s.one_of("bools", "ints")
    if kind == "bools":
        return lambda b, h, q, k: torch.where(q < split, q >= k, (q - k).abs() < width)
    return lambda b, h, q, k: torch.where(k < split, q - k, k - q) > -width // 2


def indices(s: Source) -> Mask:
    return lambda b, h, q, k: (q + h) % (b + 2) == k % (b + 2)


def products(s: Source) -> Mask:
    return lambda b, h, q, k: q * (h + 1) >= 2 * k


def squares(s: Source) -> Mask:
    radius = s.number(0, 500)
    return lambda b, h, q, k: q**2 + (k - 100) ** 2 < radius**2


def truncating(s: Source) -> Mask:
    of = s.number(1, 30)
    return lambda b, h, q, k: torch.fmod(q - k, of) < of // 2


def signs(s: Source) -> Mask:
    return lambda b, h, q, k: torch.sign(q - k) + torch.sign(k - 50) == 0


def from_the_end(s: Source) -> Mask:
    ids = s.documents(s.of.longest)
    back = s.number(0, s.of.longest)
    return lambda b, h, q, k: ids[q - back] == ids[k]


def parents(s: Source) -> Mask:
    count = s.of.longest
    parent = (torch.rand(count, generator=s.generator) * torch.arange(count)).long()
    return lambda b, h, q, k: (k == q) | (k == parent[q]) | (k == parent[parent[q]])


def pages(s: Source) -> Mask:
    page = torch.randperm(-(-s.of.kv // 16), generator=s.generator).to(torch.int32)
    return lambda b, h, q, k: page[k // 16] * 16 + k % 16 <= q


def everything(s: Source) -> Mask:
    return lambda b, h, q, k: q >= 0


def nothing(s: Source) -> Mask:
    return lambda b, h, q, k: q < k - 1000


def bool_numbers(s: Source) -> Mask:
    width = s.number(1, 100)
    return lambda b, h, q, k: (q >= k).int() + (q - k < width).int() + (k % 2 == 0).int() >= 2


def constant_index(s: Source) -> Mask:
    table = s.ints(s.of.longest, 5)
    at = s.number(-5, 4)
    return lambda b, h, q, k: k < table[at] + q // 2


FAMILIES = {
    function.__name__: function
    for function in (
        causal, window, head_window, prefix, batch_prefix, padding, documents,
        permuted_documents, shuffled_ids, batch_documents, two_tables, document_starts, spans,
        dilated, head_dilated, stepped, chunks, shifted_chunks, neighbourhood, global_tokens,
        block_table, dense_table, transposed_table, batch_table, bits, hashed, wrapping,
        small_types, floats, float_order, special_floats, float_distance, rounded, extremes,
        choices, indices, products, squares, truncating, signs, from_the_end, parents, pages,
        everything, nothing, bool_numbers, constant_index,
    )
}  # fmt: skip
"""Name -> maker of a random mask mod of a family."""


@st.composite
def mask_mods(draw: Any, of: Sizes, depth: int = 2) -> Mask:
    """A family, or a combination of two or three."""
    kind = draw(st.sampled_from(["family", "and", "or", "not", "xor", "where"])) if depth else ""
    if kind in ("", "family"):
        return FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))](Source(draw, of))
    x = draw(mask_mods(of, depth - 1))
    if kind == "not":
        return lambda b, h, q, k: ~x(b, h, q, k)
    y = draw(mask_mods(of, depth - 1))
    if kind == "and":
        return lambda b, h, q, k: x(b, h, q, k) & y(b, h, q, k)
    if kind == "or":
        return lambda b, h, q, k: x(b, h, q, k) | y(b, h, q, k)
    if kind == "xor":
        return lambda b, h, q, k: x(b, h, q, k) ^ y(b, h, q, k)
    z = draw(mask_mods(of, 0))
    return lambda b, h, q, k: torch.where(z(b, h, q, k), x(b, h, q, k), y(b, h, q, k))
