"""One call over packed sequences as data, and its inputs: packed rows or pools of pages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import anyflex
from anyflex.plugin import Capabilities
from anyflex.testing.attention_case import AttentionCase, Drawn
from anyflex.testing.mods import MASK_MODS, SCORE_MODS, Entry, Mod, Sizes
from anyflex.testing.mods.kit_mods import KIT_MASKS, KIT_MODS

__all__ = ["Part", "Pool", "Ragged", "RaggedCase", "int32"]

Pool = Literal["heads_first", "rows_first", "slices", "layers", "value_in_key", "far"]
"""Memory of the pools: [P, Hkv, page, E]; [P, page, Hkv, E]; key and value side by side in one
tensor; one of three layers that lie page by page in one tensor; value is the first numbers of key;
pages that lie farther apart than an int32 counts elements."""

_GAP = 3
"""Padding rows behind the packed keys of each sequence."""
_GARBAGE = (2**31 - 1, -1, -(2**31))
"""Page ids behind the last page of a sequence."""


@dataclass(frozen=True)
class RaggedCase:
    """A call of `flex_attention_packed`.

    Args:
        call: what all sequences have in common. Its lengths mean nothing; its mods are drawn for
            as many batches as there are slots, and for the longest sequence.
        lengths: query rows and keys of each sequence.
        slots, starts: as `anyflex.Packed` takes them.
        page: rows of a page; None for packed keys.
        pool: memory of the pages.
        prefix: number of first keys that all sequences share, whole pages.
        twice: the second page of each sequence is its first one again.
        spare: padding query rows behind the last sequence.
        sinks: a number for each query head.
        stored: the type that keys and values are stored in, with scales.
        scales: what a scale belongs to.
    """

    call: AttentionCase
    lengths: tuple[tuple[int, int], ...]
    slots: tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None
    page: int | None = None
    pool: Pool = "heads_first"
    prefix: int = 0
    twice: bool = False
    spare: int = 0
    sinks: tuple[float, ...] | None = None
    stored: torch.dtype | None = None
    scales: Literal["tensor", "head", "token"] = "tensor"

    def fitted(self, can: Capabilities) -> RaggedCase:
        """Return the case with a type and head dims that a backend declares."""
        return dataclasses.replace(self, call=self.call.fitted(can))

    def draw(self, device: torch.device) -> Ragged:
        """Draw the inputs."""
        mods = self._mods()
        scale = _Scales(self) if self.stored is not None else None
        parts: list[Part] = []
        q_ends = kv_ends = 0
        page = self.page or 0
        gap = 0 if self.keys_are_rows else _GAP
        for number, (rows, keys) in enumerate(self.lengths):
            case = dataclasses.replace(
                self.call,
                batch=1,
                q_length=rows,
                kv_length=keys,
                score_mod=None,
                mask_mod=None,
                seed=self.call.seed + number,
            )
            slot = number if self.slots is None else self.slots[number]
            start = keys - rows if self.starts is None else self.starts[number]
            drawn = case.draw(torch.device("cpu"))
            tensors = dict(drawn.tensors)
            if self.pool == "value_in_key":
                tensors["value"] = tensors["key"][..., : case.value_head_dim]
            if self.prefix and parts:
                first = parts[0].drawn.tensors
                for name in ("key", "value"):
                    shared = first[name][:, :, : self.prefix]
                    tensors[name] = torch.cat([shared, tensors[name][:, :, self.prefix :]], 2)
            if self.twice:
                for name in ("key", "value"):
                    again = tensors[name][:, :, :page]
                    tensors[name] = torch.cat([again, again, tensors[name][:, :, 2 * page :]], 2)
            kept: dict[str, Tensor] = {}
            if scale is not None:
                for name in ("key", "value"):
                    tensors[name], kept[name], kept[f"{name}_scale"] = scale.of(
                        name, tensors[name]
                    )
            own = {kind: _in_coordinates(mod, kind, slot, start) for kind, mod in mods.items()}
            drawn = dataclasses.replace(drawn, tensors=tensors, mods=own)
            parts.append(
                Part(
                    case,
                    drawn,
                    slice(q_ends, q_ends + rows),
                    slice(kv_ends, kv_ends + keys),
                    slot,
                    start,
                    number if self.slots is None else slot,
                    kept,
                )
            )
            q_ends, kv_ends = q_ends + rows, kv_ends + keys + gap
        return Ragged(self, device, tuple(parts), mods, self._memory(parts, device))

    @property
    def keys_are_rows(self) -> bool:
        """Whether queries and keys are packed alike, and one tensor says where sequences end."""
        return self.page is None and all(rows == keys for rows, keys in self.lengths)

    def _mods(self) -> dict[str, Mod]:
        slots = range(len(self.lengths)) if self.slots is None else self.slots
        longest = max((max(lengths) for lengths in self.lengths), default=0)
        ends = [
            start + rows for (rows, _), start in zip(self.lengths, self.starts or (), strict=False)
        ]
        positions = max(longest, *ends, 1)
        group = self.call.heads // self.call.kv_heads
        sizes = Sizes(max(slots, default=0) + 1, self.call.heads, group, positions, positions)
        generator = torch.Generator().manual_seed(self.call.seed)
        wide = torch.promote_types(self.call.dtype, torch.float32)
        return {
            kind: table[name].make(sizes, generator, wide)
            for kind, table, name in (
                ("score", {**SCORE_MODS, **KIT_MODS}, self.call.score_mod),
                ("mask", {**MASK_MODS, **KIT_MASKS}, self.call.mask_mod),
            )
            if name is not None
        }

    def _memory(self, parts: Sequence[Part], device: torch.device) -> dict[str, Tensor]:
        """Return the packed call's tensors by the names of their arguments."""
        rows = self.spare + (parts[-1].rows.stop if parts else 0)
        call = self.call
        wide = torch.promote_types(call.dtype, torch.float32)
        memory = {
            "query": torch.full((rows, call.heads, call.head_dim), math.nan, dtype=call.dtype),
            "dout": torch.ones(rows, call.heads, call.value_head_dim, dtype=call.dtype),
            "dlse": torch.ones(rows, call.heads, dtype=wide),
        }
        for part in parts:
            memory["query"][part.rows] = part.drawn.tensors["query"][0].transpose(0, 1)
            memory["dout"][part.rows] = part.drawn.weights["dout"][0].transpose(0, 1)
            memory["dlse"][part.rows] = part.drawn.weights["dlse"][0].T
        if self.stored is not None and self.scales != "token" and parts:
            memory |= {name: parts[0].kept[name] for name in ("key_scale", "value_scale")}
        memory = {name: tensor.to(device) for name, tensor in memory.items()}
        if self.page is None:
            return memory | self._packed_keys(parts, device)
        return memory | self._pools(parts, device)

    def _packed_keys(self, parts: Sequence[Part], device: torch.device) -> dict[str, Tensor]:
        behind = self.spare if self.keys_are_rows else _GAP
        rows = behind + (parts[-1].keys.stop if parts else 0)
        memory: dict[str, Tensor] = {}
        for name, shape, dtype in self._stored_rows():
            whole = _poison((rows, *shape), dtype)
            for part in parts:
                whole[part.keys] = part.stored(name)[0].transpose(0, 1)
            memory[name] = whole.to(device)
        if not self.keys_are_rows:
            ends = [part.keys.stop + _GAP for part in parts]
            memory["kv_offsets"] = int32(0, *ends).to(device)
        return memory

    def _stored_rows(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        """Yield what is stored for each key: argument, shape of a row, dtype."""
        call = self.call
        dtype = self.stored or call.dtype
        yield "key", (call.kv_heads, call.head_dim), dtype
        yield "value", (call.kv_heads, call.value_head_dim), dtype
        if self.stored is not None and self.scales == "token":
            yield "key_scale", (call.kv_heads,), torch.float32
            yield "value_scale", (call.kv_heads,), torch.float32

    def _pools(self, parts: Sequence[Part], device: torch.device) -> dict[str, Tensor]:
        assert self.page is not None
        page, shared = self.page, self.prefix // self.page
        counts = [-(-keys // page) for _, keys in self.lengths]
        needed = sum(counts) - shared * max(len(counts) - 1, 0)
        pages = needed + 3
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).tolist()
        width = max(counts, default=0) + 1
        rows = max((part.table_row for part in parts), default=0) + 1
        # The table is a part of a wider one.
        whole = int32(*_GARBAGE, pages, pages + 1).repeat(rows, width)
        table = whole[:, 2 : 2 + width]
        for number, (part, count) in enumerate(zip(parts, counts, strict=True)):
            ids = table[parts[0].table_row, :shared].tolist() if number else []
            ids += [order.pop() for _ in range(count - len(ids))]
            if self.twice:
                ids[1] = ids[0]
            table[part.table_row, :count] = int32(*ids)
        pools = self._empty_pools(pages, device)
        for name, pool in pools.items():
            for part in parts:
                stored = part.stored(name)[0].to(device)
                for column, begin in enumerate(range(0, stored.shape[1], page)):
                    content = stored[:, begin : begin + page]
                    pool[int(table[part.table_row, column]), :, : content.shape[1]] = content
        return {**pools, "page_table": whole.to(device)[:, 2 : 2 + width]}

    def _empty_pools(self, pages: int, device: torch.device) -> dict[str, Tensor]:
        """Return pools in which every row is poison."""
        assert self.page is not None
        call, page = self.call, self.page
        kv_heads, dim, value_dim = call.kv_heads, call.head_dim, call.value_head_dim
        pools: dict[str, Tensor] = {}
        for name, shape, dtype in self._stored_rows():
            rest = shape[1:]
            if self.pool == "rows_first":
                pool = torch.empty((pages, page, *shape), dtype=dtype, device=device)
                pools[name] = pool.transpose(1, 2)
            elif self.pool == "layers":
                whole = torch.empty((pages, 3, kv_heads, page, *rest), dtype=dtype, device=device)
                pools[name] = whole[:, 1]
            elif self.pool == "slices" and name in ("key", "value"):
                if name == "key":
                    both = torch.empty(
                        (pages, kv_heads, page, dim + value_dim), dtype=dtype, device=device
                    )
                    pools["key"], pools["value"] = both[..., :dim], both[..., dim:]
            elif self.pool == "value_in_key" and name == "value":
                pools["value"] = pools["key"][..., :value_dim]
            elif self.pool == "far":
                inner = (kv_heads * page * dim, page * rest[0], rest[0], 1)
                apart = max(2**31 // (pages - 1) + 64, inner[0])
                memory = torch.empty(apart * (pages - 1) + inner[0], dtype=dtype, device=device)
                pools[name] = memory.as_strided(
                    (pages, kv_heads, page, *rest), (apart, *inner[1:])
                )
            else:
                pools[name] = torch.empty(
                    (pages, kv_heads, page, *rest), dtype=dtype, device=device
                )
        for pool in pools.values():
            pool.copy_(_poison(tuple(pool.shape), pool.dtype))
        return pools


class Part(NamedTuple):
    """One sequence of a call.

    Args:
        case, drawn: the sequence alone, a call of batch 1 whose mods see its coordinates.
        rows, keys: where its query rows and its packed keys lie.
        slot, start: what is added to b and q_idx.
        table_row: its row of the page table.
        kept: stored numbers and their scales, where they aren't the drawn ones.
    """

    case: AttentionCase
    drawn: Drawn
    rows: slice
    keys: slice
    slot: int
    start: int
    table_row: int
    kept: Mapping[str, Tensor]

    def stored(self, name: str) -> Tensor:
        """Return what is stored of the sequence: [1, Hkv, keys, ...]."""
        return self.kept[name] if name in self.kept else self.drawn.tensors[name]


@dataclass(frozen=True)
class Ragged:
    """A case's inputs.

    Args:
        case: it.
        device: of the tensors.
        parts: the sequences.
        mods: "score" and "mask" in the call's coordinates, on the CPU.
        memory: query, key, value, page_table or kv_offsets, and others, by name, on the device.
    """

    case: RaggedCase
    device: torch.device
    parts: tuple[Part, ...]
    mods: Mapping[str, Mod]
    memory: Mapping[str, Tensor]

    def with_mask(self, builder: Callable[..., Any], *numbers: int) -> Ragged:
        """Return the inputs with a mask mod that isn't in the list, which takes the numbers."""
        entry = Entry("M0", "mod", builder, numbers=lambda sizes: numbers)
        mod = Mod(entry, self.parts[0].case.sizes, {})
        parts = [
            part._replace(
                drawn=dataclasses.replace(
                    part.drawn,
                    mods={
                        **part.drawn.mods,
                        "mask": _in_coordinates(mod, "mask", part.slot, part.start),
                    },
                )
            )
            for part in self.parts
        ]
        return dataclasses.replace(self, parts=tuple(parts), mods={**self.mods, "mask": mod})

    def batch(self) -> anyflex.Packed:
        """Return the batch, made of tensors on the device."""
        case, device = self.case, self.device
        offsets = int32(0, *(part.rows.stop for part in self.parts)).to(device)
        lengths = int32(*(keys for _, keys in case.lengths)).to(device)
        slots, starts = (
            None if numbers is None else int32(*numbers).to(device)
            for numbers in (case.slots, case.starts)
        )
        return anyflex.Packed(
            offsets,
            None if case.keys_are_rows else lengths,
            kv_offsets=self.memory.get("kv_offsets"),
            page_table=self.memory.get("page_table"),
            slots=slots,
            q_starts=starts,
        )


class _Scales:
    """Stores numbers of a case as narrow ones with scales."""

    def __init__(self, case: RaggedCase) -> None:
        assert case.stored is not None
        self._dtype = case.stored
        self._by = case.scales
        self._heads = case.call.kv_heads
        self._generator = torch.Generator().manual_seed(7)
        self._shared: dict[str, Tensor] = {}

    def of(self, name: str, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return [1, Hkv, S, E] as it is read, as it is stored, and the scale."""
        stored = (numbers.double() * 40).round().clamp(-127, 127).to(self._dtype)
        shape = {"tensor": (), "head": (self._heads,), "token": tuple(numbers.shape[:3])}[self._by]
        scale = self._shared.get(name)
        if scale is None or self._by == "token":
            scale = torch.rand(shape, generator=self._generator) / 20 + 0.01
            if self._by == "token":
                # A row of zeros may have any scale.
                scale[..., :1] = 0.0
            self._shared[name] = scale
        factor = scale if self._by == "tensor" else scale.view(1, self._heads, -1, 1)
        return stored.float() * factor, stored, scale


def _in_coordinates(mod: Mod, kind: str, slot: int, start: int) -> Mod:
    """Return the mod of a sequence that is alone: b is its slot, q_idx begins at `start`."""
    entry = mod.entry

    def build(*captured: Any) -> Callable[..., Any]:
        function = entry.builder(*captured)
        if kind == "score":
            return lambda s, b, h, q, k: function(s, b + slot, h, q + start, k)
        return lambda b, h, q, k: function(b + slot, h, q + start, k)

    return dataclasses.replace(mod, entry=dataclasses.replace(entry, builder=build))


def _poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """NaN and infinity in turn along the first dimension; an integer type's largest number."""
    if not dtype.is_floating_point:
        return torch.full(shape, torch.iinfo(dtype).max, dtype=dtype)
    poison = torch.full(shape, math.nan)
    if dtype is not getattr(torch, "float8_e4m3fn", None):
        # float8_e4m3fn has no infinity.
        poison[1::2] = math.inf
    return poison.to(dtype)


def int32(*numbers: int) -> Tensor:
    """Return the numbers as an int32 tensor on the CPU."""
    return torch.tensor(numbers, dtype=torch.int32, device="cpu")
