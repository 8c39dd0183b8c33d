"""The workspace that the library asks for keeps to the formula of docs/cpu.md, at every level."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch
from workspace_formula import KIB, MIB, Asked

import anyflex
from anyflex_cpu import library

DRAWN = 2000
"""Number of problems drawn per level and direction."""
BLOCKS = (None, None, (128, 128), (16, 64), (160, 32), (200, 48), (4096, 128), (1, 1))
"""Sizes of a block mask's blocks."""


def drawn(draw: random.Random, level: str) -> Asked:
    kv_heads = draw.choice([1, 2, 3, 8, 32])
    return Asked(
        dtype=draw.choice([torch.float32, torch.bfloat16, torch.float16]),
        level=level,
        threads=draw.choice([1, 2, 7, 16, 64]),
        batch=draw.choice([1, 2, 5, 16, 256]),
        heads=kv_heads * draw.choice([1, 1, 4, 8, 13]),
        kv_heads=kv_heads,
        length=draw.choice([1, 2, 5, 128, 200, 1024, 4000, 65536, draw.randint(1, 9000)]),
        keys=draw.choice([0, 1, 100, 1024, 4096, 30000, 262144, draw.randint(1, 9000)]),
        dims=(
            draw.choice([1, 16, 64, 72, 128, 256, 512, draw.randint(1, 512)]),
            draw.choice([1, 64, 128, 257, 512, draw.randint(1, 512)]),
        ),
        shared=draw.random() < 0.2,
        scratch=draw.choice([0, 0, 64 * KIB]),
        blocks=draw.choice(BLOCKS),
    )


def test_forward_and_decode_keep_to_the_formula(level: str) -> None:
    draw = random.Random(0)
    kinds = {"decode": 0, "prefill": 0}
    for _ in range(DRAWN):
        asked = drawn(draw, level)
        kinds["decode" if asked.decodes() else "prefill"] += 1
        found, formula = asked.forward(), asked.forward_formula()
        assert 0 <= found <= formula, vars(asked)
        # Once a workspace is large, the formula must be tight too.
        if formula > 16 * MIB and asked.has_whole_tiles() and asked.problem.value_head_dim > 1:
            assert found >= formula / 4, vars(asked)
    assert min(kinds.values()) > DRAWN / 8, kinds


def test_backward_keeps_to_the_formula(level: str) -> None:
    draw = random.Random(1)
    for _ in range(DRAWN):
        asked, learned = drawn(draw, level), draw.choice([0, 0, 32, 10**6])
        asked.problem.wanted = wanted = draw.choice([7, 7, 7, 1, 6])
        owned = draw.choice([0, learned // 2, learned])
        asked.problem.captured_owner = draw.choice([0, 1, 2, 3])
        found, formula = asked.backward(learned, owned), asked.backward_formula(learned, owned)
        assert 0 <= found <= formula, vars(asked) | {"learned": learned, "wanted": wanted}
        if formula > 16 * MIB and wanted & 1:
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
    # The computed sizes are cached, so these sizes must be unique to this test.
    query = torch.randn(1, 1, 9, 8 if direction == "forward" else 16, requires_grad=True)
    with pytest.raises(anyflex.AllocationError, match=rf"{2**55 + 64} bytes \(32 PiB\)"):
        anyflex.flex_attention(query, query, query, backend="cpu").sum().backward()


PEAK_OF_BACKWARD = """
import re, sys, torch, anyflex
from importlib.metadata import entry_points
from pathlib import Path
from anyflex.plugin import register
from anyflex_cpu.backend import CpuBackend
if not any(point.name == "cpu" for point in entry_points(group="anyflex.backends.v1")):
    register("cpu", CpuBackend)

def kibibytes(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

def gradients(length):
    inputs = [torch.randn(1, 1, length, 64).requires_grad_() for _ in range(3)]
    out = anyflex.flex_attention(*inputs, backend="cpu")
    dout = torch.randn(out.shape)
    # The peak so far becomes what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = kibibytes("VmRSS")
    torch.autograd.grad(out, inputs, dout)
    return kibibytes("VmHWM") - before

torch.set_num_threads(2)
gradients(200)
print(gradients(int(sys.argv[1])) * 1024)
"""


def test_the_peak_of_a_large_backward_is_what_the_formula_says() -> None:
    """Measures all memory of a process of its own, as the operating system counts it."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system doesn't let a process forget its peak")
    length = 8192
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", PEAK_OF_BACKWARD, str(length)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    asked = Asked(
        dtype=torch.float32,
        level=library.load().level,
        threads=2,
        batch=1,
        heads=1,
        kv_heads=1,
        length=length,
        keys=length,
        dims=(64, 64),
    )
    found, formula = int(done.stdout), asked.backward_formula(0)
    gradients = 3 * 4 * length * 64
    # Half of the score matrix, 256 MiB in all, would be too much. The slack is for Python and
    # torch.
    assert 0.5 * formula < found < formula + gradients + 16 * MIB
    assert formula < 96 * MIB
