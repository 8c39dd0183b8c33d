"""One call's arguments in the C ABI's layout: packed into a block of memory.

A block is one bytearray: the struct of the call, then what its pointers reach beside tensors. The
addresses inside it are fixed when it is made, so that a call only fills in values.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from operator import mul

import torch
from torch import Tensor

from anyflex.plugin import Call, Dropout, MaskViews, PackedRows, Spec
from anyflex_cpu import structs
from anyflex_cpu.index_ranges import LIMITS
from anyflex_cpu.programs import Programs, number_slots

__all__ = [
    "Arguments",
    "Block",
    "packed_values",
    "shared_values",
    "storage_values",
    "tensor_values",
]

_pack_tensors = structs.TENSORS.packer.pack_into
_pack_mods = structs.MODS.packer.pack_into
_pack_sinks = structs.SINKS.packer.pack_into
_SINKS_AT = structs.SINKS.offset
_MODS_AT = structs.MODS.offset
_TABLE_AT = ctypes.sizeof(structs.BackwardArgs)
_NO_RUNS = (0, 0, 0, 0, 0, 0)
_NO_OFFSETS = (0, 0, 0, 0)
_NO_DROPOUT = (0, 0, 0, 1.0)
_NOT_PACKED = (0,) * 14
"""Values for sinks and packed sequences."""


class Block:
    """Memory for one call at a time.

    Attributes:
        memory: the bytes that arguments are packed into.
        address: where `memory` begins.
        error: af_error.
        error_address: where `error` is.
        tables: addresses of the captured tensors' table, ints and floats, 0 where there are none.
        dims: addresses of each captured tensor's sizes and strides.
        grads: addresses of the accumulators' addresses, kinds and sizes.
    """

    __slots__ = ("address", "dims", "error", "error_address", "grads", "memory", "tables")

    def __init__(self, arguments: Arguments) -> None:
        self.memory = bytearray(arguments.end)
        whole = (ctypes.c_char * arguments.end).from_buffer(self.memory)
        self.address = ctypes.addressof(whole)
        self.error = structs.Error()
        self.error_address = ctypes.addressof(self.error)
        base = self.address
        self.tables = tuple(base + at if at else 0 for at in arguments.table_offsets)
        self.dims = tuple((base + at, base + at + 8 * rank) for at, rank in arguments.dim_offsets)
        self.grads = tuple(base + at if at else 0 for at in arguments.grad_offsets)
        arguments.write_mods(self, arguments.narrow)


class Arguments:
    """How a spec's calls are packed.

    Args:
        spec: its captured tensors and number slots fix the layout.
        programs: its mods.
    """

    def __init__(self, spec: Spec, programs: Programs) -> None:
        self.programs = programs
        self.narrow = programs.addresses
        self.limited = bool(programs.how)
        self.dtype = structs.DTYPE_CODES[spec.dtype]
        self.masked = spec.mask_kind == "runs"
        self.dims = (spec.head_dim, spec.value_head_dim)
        reads = frozenset() if spec.mask_graph is None else spec.mask_graph.inputs()
        self.mask_facts = (int(self.masked), *spec.block_size, int(not reads & {"b", "h"}))
        self.wanted = sum(1 << "qkv".index(name) for name in spec.gradients)
        self.shared = spec.kv_broadcast
        self.keys = shared_values if self.shared else tensor_values
        self.types = tuple((structs.TYPE_CODES[c.dtype], c.rank) for c in spec.captured)
        self.ints, self.floats = number_slots(spec)
        self.reads = bool(self.types or self.ints or self.floats)
        self.plain = not (self.masked or self.limited or self.reads or spec.dropout)

        count = len(self.types)
        entry = ctypes.sizeof(structs.Captured)
        at = _TABLE_AT
        dims_at = at + count * entry
        offsets = []
        for _, rank in self.types:
            offsets.append((dims_at, rank))
            dims_at += 16 * rank
        ints_at = dims_at
        floats_at = ints_at + 8 * self.ints
        grads_at = floats_at + 8 * self.floats
        self.dim_offsets = tuple(offsets)
        self.table_offsets = (
            at if count else 0,
            ints_at if self.ints else 0,
            floats_at if self.floats else 0,
        )
        # Addresses first, then sizes, then the flags, whose 4 bytes each would misalign the
        # others.
        self.grad_offsets = (
            (grads_at, grads_at + 16 * count, grads_at + 8 * count) if count else (0, 0, 0)
        )
        self.end = grads_at + 20 * count
        ranks = sum(rank for _, rank in self.types)
        table = "PPPii" * count + "q" * (2 * ranks + self.ints) + "d" * self.floats
        self._table = struct.Struct(table)
        self._grads = struct.Struct("P" * count + "q" * count + "i" * count)

    def write_problem(
        self, call: Call, threads: int, block: Block, *, backward: bool = False
    ) -> None:
        """Write af_problem, and what the mods read, into `block`."""
        query, key, value = call.query, call.key, call.value
        batch, heads, length, _ = query.shape
        _, kv_heads, kv_length, _ = key.shape
        # One batch that serves all has stride 0.
        keys = (0, *key.stride()[1:]) if self.shared else key.stride()
        values = (0, *value.stride()[1:]) if self.shared else value.stride()
        _pack_tensors(
            block.memory,
            0,
            self.dtype,
            threads,
            batch,
            heads,
            kv_heads,
            length,
            kv_length,
            *self.dims,
            query.data_ptr(),
            *query.stride(),
            key.data_ptr(),
            *keys,
            value.data_ptr(),
            *values,
            call.scale,
        )
        # Without mask and mods the values written when the block was made hold for every call.
        if self.plain:
            if call.sinks is not None:
                _pack_sinks(block.memory, _SINKS_AT, call.sinks.data_ptr())
            return
        mask = call.mask
        runs: tuple[int, ...] = _NO_RUNS
        transposed: tuple[int, ...] = _NO_RUNS
        if mask is not None:
            runs = _runs(mask)
            if backward:
                transposed = _runs(mask.transposed())
        programs = self.narrow
        wide = self.limited and (
            batch > LIMITS.heads
            or heads > LIMITS.heads
            or length > LIMITS.length
            or kv_length > LIMITS.length
            or (call.packed is not None and _may_be_wide(call.packed))
        )
        if self.reads:
            entries: list[object] = []
            shapes: list[int] = []
            for tensor, facts, addresses in zip(
                call.captured, self.types, block.dims, strict=True
            ):
                sizes, strides = tensor.shape, tensor.stride()
                entries += (tensor.data_ptr(), *addresses, *facts)
                shapes += sizes
                shapes += strides
                # Elements from the first to the last that the tensor addresses.
                wide = wide or (self.limited and sum(map(mul, sizes, strides)) > LIMITS.captured)
            self._table.pack_into(
                block.memory,
                _TABLE_AT,
                *entries,
                *shapes,
                *call.ints[: self.ints],
                *call.floats[: self.floats],
            )
        if wide:
            programs = self.programs.wide_addresses()
        self.write_mods(block, programs, runs, transposed, call.index_offsets, call.dropout)
        if call.sinks is not None:
            _pack_sinks(block.memory, _SINKS_AT, call.sinks.data_ptr())

    def write_mods(
        self,
        block: Block,
        programs: tuple[int, int, int],
        runs: tuple[int, ...] = _NO_RUNS,
        transposed: tuple[int, ...] = _NO_RUNS,
        offsets: tuple[int, int, int, int] = _NO_OFFSETS,
        dropout: Dropout | None = None,
    ) -> None:
        """Write `structs.MODS`."""
        _pack_mods(
            block.memory,
            _MODS_AT,
            *self.mask_facts,
            *runs,
            *transposed,
            *programs,
            *block.tables,
            *offsets,
            self.wanted,
            self.shared,
            self.programs.owned.by,
            *(
                _NO_DROPOUT
                if dropout is None
                else (*dropout.words, dropout.threshold, dropout.scale)
            ),
            *_NOT_PACKED,
        )

    def write_gradients(self, targets: Sequence[Tensor | None], block: Block) -> None:
        """Write into `block` where the captured tensors' gradients are summed."""
        addresses = [0 if each is None else each.data_ptr() for each in targets]
        sizes = [0 if each is None else each.numel() for each in targets]
        kinds = [
            (each is not None and each.dtype is torch.float64) * structs.GRAD_DOUBLE
            + (position in self.programs.owned.tensors) * structs.GRAD_OWNED
            for position, each in enumerate(targets)
        ]
        at = self.end - self._grads.size
        self._grads.pack_into(block.memory, at, *addresses, *sizes, *kinds)


def _may_be_wide(packed: PackedRows) -> bool:
    """Whether a sequence may have indices outside of `LIMITS`."""
    lowest, highest = packed.lowest, packed.highest
    return lowest is None or highest is None or lowest < 0 or highest >= LIMITS.heads


def storage_values(call: Call, storage: str) -> tuple[int, ...]:
    """Return the values of `structs.STORAGE`."""
    scales = []
    for scale in (call.k_scale, call.v_scale):
        assert scale is not None
        scales += [scale.data_ptr(), *scale.stride()]
    return (structs.STORAGE_CODES[storage], *scales)


def packed_values(call: Call) -> tuple[int, ...]:
    """Return the values of `structs.PACKED`."""
    packed = call.packed
    assert packed is not None
    tensors = packed.q_offsets, packed.q_starts, packed.kv_lengths, packed.slots
    table = packed.page_table
    sizes = (0, 0, 0, 0, 0)
    if table is not None:
        pages, _, page_size, _ = call.key.shape
        sizes = (table.stride(0), table.shape[1], table.shape[0], page_size, pages)
    return (
        packed.q_starts.shape[0],
        *(tensor.data_ptr() for tensor in tensors),
        *(
            0 if tensor is None else tensor.data_ptr()
            for tensor in (packed.kv_offsets, table, packed.table_rows)
        ),
        *sizes,
    )


def tensor_values(tensor: Tensor) -> tuple[int, ...]:
    """Return the values of af_tensor."""
    return (tensor.data_ptr(), *tensor.stride())


def shared_values(tensor: Tensor) -> tuple[int, ...]:
    """Return the values of af_tensor for one batch that serves all."""
    return (tensor.data_ptr(), 0, *tensor.stride()[1:])


def _runs(views: MaskViews) -> tuple[int, ...]:
    """Return the values of af_runs."""
    batch, heads, rows = views.shape
    runs = views.runs
    return (views.offsets.data_ptr(), runs.data_ptr(), batch, heads, rows - 1, runs.shape[0])
