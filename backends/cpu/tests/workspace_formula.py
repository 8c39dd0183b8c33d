"""The workspace formulas of docs/cpu.md, and the sizes that the library itself asks for."""

from __future__ import annotations

import ctypes

import torch

from anyflex_cpu import library, structs

__all__ = ["GIB", "KIB", "MIB", "Asked"]

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
NOWHERE = ctypes.create_string_buffer(64)
"""Address for tensors of problems that are only asked for sizes: it is never read."""


def over(n: int, by: int) -> int:
    """n / by, rounded up."""
    return -(-n // by)


def up(n: int, step: int) -> int:
    return over(n, step) * step


class Asked:
    """A problem, with the library's and the formula's sizes for it.

    The names and the formulas are those of docs/cpu.md, term by term; dimensions are rounded up to
    32 as there.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        level: str,
        threads: int,
        batch: int,
        heads: int,
        kv_heads: int,
        length: int,
        keys: int,
        dims: tuple[int, int],
        shared: bool = False,
        scratch: int = 0,
        blocks: tuple[int, int] | None = None,
    ) -> None:
        self.threads, self.batch, self.heads, self.kv_heads = threads, batch, heads, kv_heads
        self.length, self.keys, self.scratch = length, keys, scratch
        self.kv_batch = 1 if shared else batch
        self.dim, self.value_dim = (up(dim, 32) for dim in dims)
        self.keys_padded = up(keys, 32)
        pairs = dtype is torch.bfloat16 and "bf16" in level
        self.width = 2 if pairs else 4
        self.tiles = level == "amx_bf16"
        self.blocks = blocks
        problem = structs.Problem()
        problem.dtype, problem.threads = structs.DTYPE_CODES[dtype], threads
        problem.batch, problem.q_heads, problem.kv_heads = batch, heads, kv_heads
        problem.q_length, problem.kv_length = length, keys
        problem.head_dim, problem.value_head_dim = dims
        problem.kv_batch_is_shared = shared and batch > 1
        problem.wanted = 7
        if blocks is not None:
            problem.has_mask, problem.q_block, problem.kv_block = 1, *blocks
            problem.runs.offsets = problem.transposed.offsets = ctypes.addressof(NOWHERE)
            problem.runs.batch = problem.runs.heads = 1
            problem.runs.blocks = over(length, blocks[0])
            problem.transposed.batch = problem.transposed.heads = 1
            problem.transposed.blocks = over(keys, blocks[1])
        for name in ("query", "key", "value"):
            getattr(problem, name).data = ctypes.addressof(NOWHERE)
        self.program = structs.Program(ctypes.addressof(NOWHERE), None, 0, scratch)
        if scratch:
            problem.score = ctypes.addressof(self.program)
        self.problem = problem

    def forward(self) -> int:
        return library.load().forward_workspace(ctypes.addressof(self.problem))

    def backward(self, learned: int, owned: int = 0) -> int:
        at = ctypes.addressof(self.problem)
        return library.load().backward_workspace(at, learned, owned)

    def has_whole_tiles(self) -> bool:
        """Whether tiles are full: the formula counts a thread's tile with 128 queries, or 32 rows
        of a group, also where there are fewer."""
        if self.decodes():
            return self.heads // self.kv_heads * self.length >= 16
        return min(self.length, self.blocks[0] if self.blocks else self.length) >= 128

    def decodes(self) -> bool:
        rows = self.heads // self.kv_heads * self.length
        in_one_block = self.blocks is None or self.length <= self.blocks[0]
        bfloat16 = structs.DTYPE_CODES[torch.bfloat16]
        most = 16 if self.problem.dtype == bfloat16 or self.keys < 256 else 64
        return (self.length <= 4 or rows <= most) and in_one_block

    def forward_formula(self) -> int:
        formula = self.decode_formula() if self.decodes() else self.prefill_formula()
        return formula + KIB

    def prefill_formula(self) -> int:
        a_head = self.keys_padded * ((self.dim + self.value_dim) * self.width + 1)
        readers = self.batch * self.heads // (self.kv_batch * self.kv_heads)
        heads = 1
        if self.threads > 1:
            heads = over(64 * self.threads, readers * self.query_tiles())
        heads = min(heads, self.kv_batch * self.kv_heads)
        packed = min(heads * a_head, max(64 * MIB, a_head))
        tile = 512 * (self.dim + self.value_dim) + 96 * KIB + self.scratch
        order = heads * (64 + 4 * readers * self.query_tiles())
        live = min(16 * KIB * self.query_tiles(), 4 * MIB) if self.blocks else 0
        return packed + self.threads * tile + order + live

    def query_tiles(self) -> int:
        """Number of q tiles of one head in prefill."""
        rows = 64 if self.value_dim > 256 else 128
        if self.blocks is None:
            return over(self.length, rows)
        block = min(self.blocks[0], self.length)
        return over(self.length, block) * over(block, rows)

    def decode_formula(self) -> int:
        splits = max(min(over(128, self.batch * self.kv_heads), over(self.keys, 1024)), 1)
        rows = up(self.heads // self.kv_heads * self.length, 32)
        records = 4 * self.batch * self.heads * self.length * splits * (4 + self.value_dim)
        row = 4608 + 8 * self.dim + 8 * self.value_dim
        return records + self.threads * rows * row + self.threads * self.scratch

    def backward_formula(self, learned: int, owned: int = 0) -> int:
        kv_heads = self.kv_batch * self.kv_heads
        tiles = self.batch * self.heads // kv_heads * over(self.length, 128)
        wide = self.tiles and self.width == 2 and self.dim + self.value_dim >= 192
        keys = 256 if wide else 128
        all_dq = kv_heads * tiles * 512 * self.dim
        kv_tiles = over(self.keys, keys)
        parts = max(min(over(64, kv_heads), kv_tiles // 2, GIB // max(all_dq, 1)), 1)
        flight = 1
        if learned:
            flight = over(64, parts)
        elif self.threads > 1:
            flight = over(8 * self.threads, parts)
        flight = min(flight, kv_heads)
        dims = 512 * (self.dim + self.value_dim)
        unit = tiles * (dims + 2112 + parts * (512 * self.dim + 1))
        tile = (1536 * (self.dim + self.value_dim) + 256 * KIB) * keys // 128 + self.scratch
        owner = self.problem.captured_owner
        by_batch, by_head = self.kv_batch == 1 or owner & 1, self.kv_heads == 1 or owner & 2
        groups = self.kv_batch if by_batch else self.kv_heads if by_head else 1
        if by_batch and by_head:
            groups = flight * parts
        if groups < (4 if owned > 1 << 18 else 16):
            owned = 0
        others = learned - owned
        partials = max(min(16, flight * parts, GIB // (8 * max(others, 1))), 1)
        captured = 8 * (others * partials + owned)
        lists = 8 * kv_tiles + 48 * flight * (parts + 1)
        return flight * unit + self.threads * tile + captured + lists + KIB
