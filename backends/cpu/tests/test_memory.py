"""The workspace that the library asks for keeps to the formula of docs/cpu.md, at every level."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

import anyflex
from anyflex_cpu import library, structs

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
NOWHERE = ctypes.create_string_buffer(64)
"""What sizes are asked about isn't read."""


def up(n: int, step: int) -> int:
    return -(-n // step) * step


class Asked:
    """A problem, and what the library and the formula say of it.

    The names are those of docs/cpu.md; dimensions are rounded up to 32 as there.
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
        masked: bool = False,
    ) -> None:
        self.threads, self.batch, self.heads, self.kv_heads = threads, batch, heads, kv_heads
        self.length, self.keys, self.scratch = length, keys, scratch
        self.kv_batch = 1 if shared else batch
        self.dim, self.value_dim = (up(dim, 32) for dim in dims)
        pairs = dtype is torch.bfloat16 and ("bf16" in level or "fp16" in level)
        self.width = 2 if pairs else 4
        self.tiles = level in ("amx_bf16", "avx512_fp16")
        self.masked = masked
        problem = structs.Problem()
        problem.dtype, problem.threads = structs.DTYPE_CODES[dtype], threads
        problem.batch, problem.q_heads, problem.kv_heads = batch, heads, kv_heads
        problem.q_length, problem.kv_length = length, keys
        problem.head_dim, problem.value_head_dim = dims
        problem.kv_batch_is_shared = shared and batch > 1
        problem.wanted = 7
        if masked:
            problem.has_mask, problem.q_block, problem.kv_block = 1, 128, 128
            problem.runs.offsets = problem.transposed.offsets = ctypes.addressof(NOWHERE)
            problem.runs.batch = problem.runs.heads = 1
            problem.runs.blocks = -(-length // 128)
            problem.transposed.batch = problem.transposed.heads = 1
            problem.transposed.blocks = -(-keys // 128)
        for name in ("query", "key", "value"):
            getattr(problem, name).data = ctypes.addressof(NOWHERE)
        self.program = structs.Program(ctypes.addressof(NOWHERE), None, 0, scratch)
        if scratch:
            problem.score = ctypes.addressof(self.program)
        self.problem = problem

    def forward(self) -> int:
        return library.load().forward_workspace(ctypes.addressof(self.problem))

    def backward(self, learned: int) -> int:
        return library.load().backward_workspace(ctypes.addressof(self.problem), learned)

    def decodes(self) -> bool:
        rows = self.heads // self.kv_heads * self.length
        return self.length <= 4 or rows <= 16

    def forward_formula(self) -> int:
        if self.decodes():
            return self.decode_formula()
        head = up(self.keys, 32) * ((self.dim + self.value_dim) * self.width + 1)
        heads = self.kv_batch * self.kv_heads
        jobs = self.batch * self.heads // heads * -(-self.length // 128)
        wanted = 1 if self.threads == 1 else -(-64 * self.threads // jobs)
        packed = min(head * min(heads, wanted), max(64 * MIB, head))
        thread = 4 * 128 * (self.dim + self.value_dim) + 96 * KIB + self.scratch
        live = min(16 * KIB * -(-self.length // 64), 4 * MIB) if self.masked else 0
        return packed + live + self.threads * thread + self.order_formula() + KIB

    def order_formula(self) -> int:
        """Of all heads, of which those in flight are a part."""
        heads = 64 * self.kv_batch * self.kv_heads
        return heads + 4 * self.batch * self.heads * -(-self.length // 64)

    def decode_formula(self) -> int:
        group = self.heads // self.kv_heads
        units = self.batch * self.kv_heads
        splits = min(-(-128 // units), -(-max(self.keys, 1) // 1024))
        records = self.batch * self.heads * self.length * splits * 4 * (4 + self.value_dim)
        rows = up(group * self.length, 16)
        row_bytes = 2560 + 6 * self.dim + 8 * self.value_dim
        thread = rows * row_bytes + up(rows, 32) * 2 * self.dim + KIB + self.scratch
        return records + self.threads * thread + KIB

    def backward_formula(self, learned: int) -> int:
        units = self.kv_batch * self.kv_heads
        tiles = self.batch * self.heads // units * -(-self.length // 128)
        dq = 4 * 128 * self.dim
        rows = 128
        if self.tiles and self.width == 2 and self.dim + self.value_dim >= 192:
            rows = 256
        kv_tiles = -(-self.keys // rows)
        parts = min(-(-64 // units), kv_tiles // 2, GIB // (units * max(tiles, 1) * dq))
        parts = max(parts, 1)
        jobs = 64 if learned else 8 * self.threads if self.threads > 1 else 1
        in_flight = min(units, -(-jobs // parts))
        operands = 4 * 128 * (self.dim + self.value_dim) + 2 * KIB
        unit = tiles * (operands + parts * (dq + 64))
        thread = rows // 128 * (1536 * (self.dim + self.value_dim) + 256 * KIB) + self.scratch
        partials = min(16, in_flight * parts, GIB // (8 * learned)) if learned else 0
        tables = 64 * (kv_tiles + in_flight * (parts + 2)) + KIB
        return in_flight * unit + self.threads * thread + 8 * partials * learned + tables


def drawn(draw: random.Random, level: str) -> Asked:
    kv_heads = draw.choice([1, 2, 8, 32])
    return Asked(
        dtype=draw.choice([torch.float32, torch.bfloat16, torch.float16]),
        level=level,
        threads=draw.choice([1, 2, 7, 16, 64]),
        batch=draw.choice([1, 2, 16, 256]),
        heads=kv_heads * draw.choice([1, 1, 4, 8]),
        kv_heads=kv_heads,
        length=draw.choice([1, 2, 5, 128, 200, 1024, 4000, 65536]),
        keys=draw.choice([0, 1, 100, 1024, 4096, 30000, 262144]),
        dims=(draw.choice([1, 16, 64, 72, 128, 256, 512]), draw.choice([1, 64, 128, 512])),
        shared=draw.random() < 0.2,
        scratch=draw.choice([0, 0, 64 * KIB]),
        masked=draw.random() < 0.3,
    )


def test_forward_and_decode_keep_to_the_formula(level: str) -> None:
    draw = random.Random(0)
    for _ in range(500):
        asked = drawn(draw, level)
        found, formula = asked.forward(), asked.forward_formula()
        assert 0 <= found <= formula, vars(asked)
        # The formula isn't a bound that says nothing, once there is much to hold.
        formula -= asked.order_formula()
        if formula > 16 * MIB and asked.problem.value_head_dim > 1:
            assert found >= formula / 4, vars(asked)


def test_backward_keeps_to_the_formula(level: str) -> None:
    draw = random.Random(1)
    for _ in range(500):
        asked, learned = drawn(draw, level), draw.choice([0, 0, 32, 10**6])
        found, formula = asked.backward(learned), asked.backward_formula(learned)
        assert 0 <= found <= formula, vars(asked) | {"learned": learned}
        if formula > 16 * MIB:
            assert found >= formula / 4, vars(asked) | {"learned": learned}


def test_nothing_grows_with_queries_times_keys(level: str) -> None:
    def asked(length: int) -> tuple[int, int]:
        long = Asked(
            dtype=torch.float32,
            level=level,
            threads=1,
            batch=1,
            heads=1,
            kv_heads=1,
            length=length,
            keys=length,
            dims=(64, 64),
        )
        return long.forward(), long.backward(0)

    short, long = asked(1 << 17), asked(1 << 20)
    for before, after in zip(short, long, strict=True):
        assert after <= 8.5 * before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_call_takes_its_workspace_and_no_more(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that grows with the problem is allocated beside what core hands in."""
    from anyflex_cpu import kernel

    sizes: list[int] = []
    plain = kernel.CpuKernel.workspace

    def noting(self: kernel.CpuKernel, call: object, direction: str) -> object:
        found = plain(self, call, direction)  # type: ignore[arg-type]
        sizes.append(found[0].shape[0])
        return found

    monkeypatch.setattr(kernel.CpuKernel, "workspace", noting)
    query, key, value = (torch.randn(1, 4, 512, 64).to(dtype).requires_grad_() for _ in range(3))
    out = anyflex.flex_attention(query, key, value, backend="cpu")
    torch.autograd.grad(out.sum(), (query, key, value))
    forward, backward = sizes
    asked = Asked(
        dtype=dtype,
        level=library.load().level,
        threads=torch.get_num_threads(),
        batch=1,
        heads=4,
        kv_heads=4,
        length=512,
        keys=512,
        dims=(64, 64),
    )
    assert forward == asked.forward() + 64
    assert backward == asked.backward(0) + 64


def resident() -> int:
    """Peak resident memory of this process in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


def test_a_long_call_stays_within_its_workspace() -> None:
    pytest.importorskip("resource")
    length = 16384
    query = torch.randn(1, 1, length, 64)
    anyflex.flex_attention(query[:, :, :256], query, query, backend="cpu")
    before = resident()
    mask = anyflex.create_block_mask(
        lambda b, h, q, k: (q - k).abs() < 64, None, None, length, length
    )
    anyflex.flex_attention(query, query, query, None, mask, backend="cpu")
    # The score matrix would be 1 GiB.
    assert resident() - before < 96 * MIB


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_workspace_that_fits_nowhere_is_no_fault_of_the_plugin(
    monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    from anyflex_cpu.kernel import CpuKernel

    plain = CpuKernel._workspace_bytes

    def asked(self: CpuKernel, call: object, which: str, *rest: object) -> int:
        return 2**55 if which == direction else plain(self, call, which, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(CpuKernel, "_workspace_bytes", asked)
    # Sizes that nothing else computes: they are kept.
    query = torch.randn(1, 1, 9, 8 if direction == "forward" else 16, requires_grad=True)
    with pytest.raises(
        anyflex.AllocationError, match=rf"workspace: {2**55 + 64} bytes \(32 PiB\)"
    ):
        anyflex.flex_attention(query, query, query, backend="cpu").sum().backward()
