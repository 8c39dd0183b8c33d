"""Compiled mods in a process whose free memory lies in pieces, gigabytes apart.

Parts of one piece of machine code reach each other by 32 bits. If each gets its memory from the
system by itself, one can fill a hole between a model's weights and another lie beyond them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ctypes, mmap, sys
import torch, anyflex
from importlib.metadata import entry_points
from anyflex.plugin import register
from anyflex_cpu.backend import CpuBackend
if not any(point.name == "cpu" for point in entry_points(group="anyflex.backends.v1")):
    register("cpu", CpuBackend)

query = torch.randn(1, 2, 64, 16)
jit = {"cpu": {"mods": "jit"}}

def attend(number):
    mod = lambda s, b, h, q, k: torch.tanh(s) * number + torch.log1p((q - k).abs().float())
    for _ in range(25 * number):
        mod = (lambda inner: lambda s, b, h, q, k: torch.sigmoid(inner(s, b, h, q, k)))(mod)
    return anyflex.flex_attention(query, query, query, mod, backend="cpu", kernel_options=jit)

attend(0)
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
page, far = mmap.PAGESIZE, 8 << 30

def reserve(size):
    begin = libc.mmap(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, -1, 0)
    assert begin not in (None, ctypes.c_void_p(-1).value)
    return begin

# The system fills the highest hole that is large enough. First those that are there.
lowest = reserve(far)
for pages in (4096, 512, 64, 16, 8, 4, 2, 1):
    while (begin := reserve(pages * page)) > lowest:
        pass
    libc.munmap(begin, pages * page)
# Then 8 GiB, and above them holes of one page; below, the same with holes of two; and so on.
for pages in range(1, 9):
    begin = reserve(far + 24 * (pages + 1) * page)
    for hole in range(24):
        libc.munmap(begin + far + hole * (pages + 1) * page, pages * page)
for number in range(1, 5):
    assert attend(number).isfinite().all()
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="calls mmap as Linux has it")
def test_code_and_its_constants_stay_within_reach(tmp_path: Path) -> None:
    pytest.importorskip("llvmlite")
    environment = os.environ | {
        "ANYFLEX_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr
