"""Threads, forks and shutdown: the process-wide lines of the misuse list."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

__all__: list[str] = []

PREPARE = """
import torch
import anyflex
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
query, key, value = (torch.randn(1, 2, 40, 8, generator=generator) for _ in range(3))
mask = anyflex.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 40, 40, BLOCK_SIZE=16)
table = torch.linspace(0.0, 1.0, 40)
def attend():
    return anyflex.flex_attention(query, key, value, lambda s, b, h, q, k: s + table[k], mask)
"""

# One process for all: starting one takes longer than what it does.
SCRIPT = (
    PREPARE
    + """
import atexit, os, threading
barrier = threading.Barrier(16)
results = [None] * 16
def work(i):
    barrier.wait()
    results[i] = attend()
threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
wanted = attend()
assert all(torch.equal(result, wanted) for result in results)
print("threads equal", flush=True)
if hasattr(os, "fork"):
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(attend(), wanted) else 3)
    print("child", os.waitpid(child, 0)[1], flush=True)
# Later than this, in finalizers of module globals, torch's own functions abort the process.
atexit.register(lambda: print(tuple(attend().shape)))
"""
)


@pytest.fixture(scope="module")
def done() -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )


def test_first_call_from_sixteen_threads_at_once(done: subprocess.CompletedProcess[str]) -> None:
    assert done.stdout.startswith("threads equal\n"), done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_call_after_a_fork(done: subprocess.CompletedProcess[str]) -> None:
    assert "child 0\n" in done.stdout, done.stderr


def test_a_call_during_interpreter_shutdown(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("(1, 2, 40, 8)\n")
