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

THREADS = (
    PREPARE
    + """
import threading
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
print("equal")
"""
)

FORK = (
    PREPARE
    + """
import os
wanted = attend()
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(attend(), wanted) else 3)
assert os.waitpid(child, 0)[1] == 0
print("equal")
"""
)

# Later than this, in finalizers of module globals, torch's own functions abort the process.
SHUTDOWN = (
    PREPARE
    + """
import atexit
atexit.register(lambda: print(tuple(attend().shape)))
"""
)


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )


def test_first_call_from_sixteen_threads_at_once() -> None:
    done = run(THREADS)
    assert done.stdout.split() == ["equal"], done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_call_after_a_fork() -> None:
    done = run(FORK)
    assert done.stdout.split() == ["equal"], done.stderr


def test_a_call_during_interpreter_shutdown() -> None:
    done = run(SHUTDOWN)
    assert done.returncode == 0, done.stderr
    assert "(1, 2, 40, 8)" in done.stdout
