"""Decode and prefill steps that `serving_targets.py` and `serving_cpu_targets.py` time."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

__all__ = ["ROWS", "Problem", "Row", "causal", "problem", "sample_error"]

WINDOW, CAP, PREFIX = 1024, 30.0, 700


@dataclass(frozen=True)
class Row:
    """One step.

    Args:
        name: of the row. group: rows with one target.
        lengths: (query rows, keys) of each sequence.
        heads: of queries, of keys and values.
        page: rows of a page, or 0 for packed keys.
        mod: "" (causal), "softcap", "alibi", "window", "prefix", "tree".
        storage: "" for bfloat16, or "int8", "fp8_e4m3": scales by token and head.
    """

    name: str
    group: str
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (32, 8)
    dim: int = 128
    page: int = 64
    mod: str = ""
    storage: str = ""

    @property
    def read_bytes(self) -> int:
        """Bytes of keys and values, each read once."""
        size = 2 if self.storage == "" else 1
        return sum(keys for _, keys in self.lengths) * self.heads[1] * self.dim * 2 * size

    @property
    def decodes(self) -> bool:
        return all(rows == 1 for rows, _ in self.lengths)

    @property
    def uniform(self) -> bool:
        return len(set(self.lengths)) == 1


def _uniform() -> list[Row]:
    rows = []
    for sequences, keys in ((1, 32768), (16, 8192), (64, 4096), (256, 1024)):
        for page in (16, 64, 256):
            name = f"decode {sequences} x {keys}"
            rows.append(Row(name, "uniform", ((1, keys),) * sequences, page=page))
    for heads, dim in (((64, 8), 128), ((28, 4), 128), ((16, 16), 64)):
        rows.append(Row("decode 64 x 4096", "uniform", ((1, 4096),) * 64, heads, dim))
    return rows


def _ragged() -> list[Row]:
    draw = random.Random(7)
    lengths = tuple((1, 250 + int(draw.lognormvariate(5.3, 1.0))) for _ in range(256))
    long = ((1, 65536), *((1, 1024),) * 63)
    return [
        Row(name, "ragged", of, page=page)
        for name, of in (("decode 256 lognormal", lengths), ("decode 64k beside 63 x 1k", long))
        for page in (16, 64)
    ]


def _all_rows() -> list[Row]:
    draw = random.Random(9)
    decodes = tuple((1, draw.randrange(1024, 8192)) for _ in range(63))
    mixed = [
        Row("a prefill of 2048 at 8k, 63 decodes", "mixed", ((2048, 8192), *decodes)),
        Row("8 chunks of 512 at 8k", "mixed", ((512, 8192),) * 8),
    ]
    some = ((1, 8192),) * 16
    mods = [
        Row("decode 16 x 8192", "mods", some, mod=mod)
        for mod in ("softcap", "alibi", "window", "prefix")
    ]
    mods.append(Row("drafts 64 x 8 at 2k", "mods", ((8, 2048),) * 64, mod="tree"))
    stored = [
        replace(row, group="quantised", storage=storage)
        for row in (
            Row("decode 64 x 4096", "", ((1, 4096),) * 64),
            Row("decode 16 x 8192", "", some),
        )
        for storage in ("int8", "fp8_e4m3")
    ]
    documents = []
    while sum(documents) < 32768 - 1800:
        documents.append(draw.randrange(200, 1800))
    packed = Row("packed prefill, documents", "packed", tuple((n, n) for n in documents), page=0)
    return [*_uniform(), *_ragged(), *mixed, *mods, *stored, packed]


ROWS = _all_rows()


@dataclass
class Problem:
    """A row's tensors, on one device.

    Args:
        query: [T, Hq, D]. key, value: [sequences' keys, Hkv, D], sequence after sequence.
        pools: key and value in pages, [P, Hkv, page, D]; None where keys are packed.
        table: int32 [N, W].
        kept: what contenders keep, by name.
    """

    row: Row
    query: Tensor
    key: Tensor
    value: Tensor
    q_offsets: Tensor
    kv_offsets: Tensor
    kv_lengths: Tensor
    pools: tuple[Tensor, Tensor] | None
    table: Tensor | None
    slopes: Tensor
    parents: Tensor
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def max_q(self) -> int:
        return max(rows for rows, _ in self.row.lengths)

    @property
    def max_kv(self) -> int:
        return max(keys for _, keys in self.row.lengths)

    def mods(self) -> tuple[Any, Any]:
        """The row's (score mod, mask mod)."""
        slopes, parents = self.slopes, self.parents

        def softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return CAP * torch.tanh(score / CAP)

        def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + slopes[h] * (kv_idx - q_idx)

        def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (q_idx >= kv_idx) & (q_idx - kv_idx <= WINDOW)

        def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (q_idx >= kv_idx) & ((kv_idx < PREFIX) | (q_idx - kv_idx <= WINDOW))

        def tree(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            # The last 8 keys are a tree of drafts: a row sees its ancestors' bits.
            kept = 2048 - 8
            bit = (parents[(q_idx - kept).clamp(0, 7)] >> (kv_idx - kept).clamp(0, 7)) & 1
            return (kv_idx < kept) | (bit == 1)

        return {
            "softcap": (softcap, causal),
            "alibi": (alibi, causal),
            "window": (None, window),
            "prefix": (None, prefix),
            "tree": (None, tree),
        }.get(self.row.mod, (None, causal))


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def problem(row: Row, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Problem:
    """Draw a row's numbers; pages are scattered over their pool."""
    generator = torch.Generator(device).manual_seed(len(row.lengths))
    heads, kv_heads = row.heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def int32(numbers: Any) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.int32, device=device)

    rows, keys = zip(*row.lengths, strict=True)
    total = sum(keys)
    key, value = normal(total, kv_heads, row.dim), normal(total, kv_heads, row.dim)
    pools = table = None
    if row.page:
        counts = [-(-count // row.page) for count in keys]
        width, pages = max(counts), sum(counts)
        order = torch.randperm(pages, generator=generator, device=device).to(torch.int32)
        table = torch.zeros(len(keys), width, dtype=torch.int32, device=device)
        pools = tuple(
            torch.zeros(pages, kv_heads, row.page, row.dim, device=device, dtype=each.dtype)
            for each in (key, value)
        )
        page = first = 0
        for i, (count, length) in enumerate(zip(counts, keys, strict=True)):
            own = order[page : page + count]
            table[i, :count] = own
            for pool, packed in zip(pools, (key, value), strict=True):
                padded = torch.zeros(
                    count * row.page, kv_heads, row.dim, device=device, dtype=key.dtype
                )
                padded[:length] = packed[first : first + length]
                pool[own.long()] = padded.view(count, row.page, kv_heads, row.dim).transpose(1, 2)
            page, first = page + count, first + length
    drafts = [0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101, 0b1001011, 0b10001011]
    return Problem(
        row, normal(sum(rows), heads, row.dim), key, value,
        int32(itertools.accumulate(rows, initial=0)), int32(itertools.accumulate(keys, initial=0)),
        int32(keys), pools, table,
        2.0 ** torch.linspace(-0.25, -8, heads, device=device), int32(drafts),
    )  # fmt: skip


def sample_error(given: Problem, out: Tensor) -> float:
    """Largest error of three sequences, beside the formula in float64."""
    score_mod, mask_mod = given.mods()
    rows = given.row.lengths
    worst = 0.0
    for i in sorted({0, len(rows) // 2, len(rows) - 1}):
        q0, q1 = given.q_offsets[i : i + 2].tolist()
        k0, k1 = given.kv_offsets[i : i + 2].tolist()
        q0 = max(q0, q1 - 64)
        group = given.row.heads[0] // given.row.heads[1]
        query = given.query[q0:q1].transpose(0, 1).double()
        key, value = (
            each[k0:k1].transpose(0, 1).double().repeat_interleave(group, 0)
            for each in (given.key, given.value)
        )
        score = query @ key.transpose(1, 2) / given.row.dim**0.5
        length, count = k1 - k0, q1 - q0
        q_idx = torch.arange(length - count, length, device=out.device)[:, None]
        kv_idx = torch.arange(length, device=out.device)
        h = torch.arange(score.shape[0], device=out.device)[:, None, None]
        if score_mod is not None:
            score = score_mod(score, i, h, q_idx, kv_idx)
        score = score.masked_fill(~mask_mod(i, h, q_idx, kv_idx), -torch.inf)
        wanted = score.softmax(-1) @ value
        got = out[q0:q1].transpose(0, 1).double()
        worst = max(worst, float((got - wanted).abs().max()))
    return worst
