"""The search for a read outside of a captured tensor, which compiled code calls."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import anyflex
from anyflex_cpu import library

PROGRAM = """
import ctypes, mmap
import torch
from anyflex.plugin import parse_graph
from anyflex_cpu import library, structs
from anyflex_cpu.bytecode import score_program
from anyflex_cpu.bytecode_steps import numbers

graph = parse_graph("input i64 - kv_idx;input f32 - score;load f32 0 0;add f32 1,2 -;=3")
code = score_program(graph, numbers(library.load().operations()))
words = (ctypes.c_int64 * -(-len(code) // 8)).from_buffer_copy(code)
table, size, stride = (ctypes.c_float * 8)(), ctypes.c_int64(8), ctypes.c_int64(1)
addresses = map(ctypes.addressof, (table, size, stride))
captured = structs.Captured(*addresses, structs.TYPE_CODES[torch.float32], 1)
inputs = structs.ModInputs(ctypes.addressof(captured), None, None, (ctypes.c_int64 * 4)())
error = structs.Error()
places = ctypes.addressof(inputs), None, None, ctypes.addressof(error)

def find(score, ld, rows, columns):
    tile = structs.Tile(score, None, None, ld, 0, rows, columns, 0, 0, 0, 0, *places)
    program = structs.Program(None, ctypes.addressof(words), len(code), 0)
    address = library.load().address("af_find_read_outside")
    search = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(address)
    error.code = error.index = 0
    search(ctypes.addressof(program), ctypes.addressof(tile))
    print(error.code, error.index)
"""


def found(calls: str) -> str:
    """Return what a process prints that makes the calls; a failure ends that process alone."""
    path = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + calls],
        env=os.environ | {"PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="calls mprotect as Linux has it")
def test_no_memory_for_copies_is_a_status_and_nothing_behind_the_last_row_is_read() -> None:
    # The second tile is the last 16 columns of two rows of half a page; the next page can't be
    # read.
    calls = """
find(ctypes.addressof(table), 2**30, 2**20, 2**30)
memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
ld = mmap.PAGESIZE // 8
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin + 8 * ld), mmap.PAGESIZE, 0) == 0
find(begin + 4 * (ld - 16), ld, 2, 16)
"""
    assert found(calls).splitlines() == ["4 0", "1 8"]


def test_no_memory_to_find_a_read_outside_is_no_fault_of_the_plugin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query = torch.randn(1, 1, 9, 8)
    monkeypatch.setattr(library.load(), "forward", lambda *_: 4)
    with pytest.raises(anyflex.AllocationError, match="ran out of memory") as caught:
        anyflex.flex_attention(query, query, query, backend="cpu")
    assert "which index is outside" in str(caught.value.__cause__)
