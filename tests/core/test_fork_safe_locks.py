"""A process that is forked while another thread holds one of anyflex's locks goes on."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from anyflex.plugin import free_in_child

__all__: list[str] = []

REPOSITORY = Path(__file__).parents[2]
OTHERWISE = {
    "anyflex/process/fork_safe_locks.py": "makes them",
    "anyflex/runtime/kernel_cache.py": "of running compiles, forgotten after a fork",
    "anyflex/testing/stand_in_device.py": "with the blocks that the lock guards",
    "anyflex/testing/child_process.py": "of a child, which belongs to the process that started it",
    "anyflex/testing/kit_pool.py": "of a pool, which belongs to the process that made it",
    "anyflex_cpu/jit_engine.py": "taken before a fork, for llvmlite has one too",
}
"""Locks that aren't given to `free_in_child`, with the reason."""

CHILD = """
import os, signal, threading
import torch
import anyflex
from anyflex.process import fork_safe_locks

torch.set_num_threads(1)
query = torch.ones(1, 1, 1, 4)

def attend(factor):
    mask = anyflex.create_block_mask(lambda b, h, q, k: q * factor >= k, None, None, 1, 1)
    return anyflex.flex_attention(query, query, query, lambda s, b, h, q, k: s * factor, mask)

attend(1.0), attend(2.0)
held = threading.Event()

def hold():
    for owner, names in list(fork_safe_locks._owners.items()):
        for name in names:
            getattr(owner, name).acquire()
    held.set()
    threading.Event().wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if not child:
    signal.alarm(20)
    attend(3.0)
    anyflex.flex_attention(query, query, query, lambda s, b, h, q, k: torch.special.i0(s))
    os._exit(0)
_, status = os.waitpid(child, 0)
print(len(fork_safe_locks._owners), status)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_goes_on_whatever_locks_were_held() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD], capture_output=True, text=True, timeout=120
    )
    owners, status = map(int, done.stdout.split())
    assert owners > 4 and status == 0, done.stderr


SEVERAL = """
import os, signal, threading
from anyflex.plugin import free_in_child

class Base:
    def __init__(self):
        self._lock = threading.Lock()
        free_in_child(self)

class Derived(Base):
    def __init__(self):
        super().__init__()
        self._first, self._again = threading.Lock(), threading.RLock()
        free_in_child(self, "_first", "_again")

owner = Derived()
names = "_lock", "_first", "_again"
held = threading.Event()

def hold():
    for name in names:
        getattr(owner, name).acquire()
    held.set()
    threading.Event().wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if not child:
    signal.alarm(20)
    free = [getattr(owner, name).acquire(timeout=5) for name in names]
    os._exit(0 if all(free) and owner._again.acquire(timeout=5) else 1)
print(os.waitpid(child, 0)[1])
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_all_of_an_owner_s_locks_are_free_and_keep_their_kind() -> None:
    command = [sys.executable, "-W", "ignore", "-c", SEVERAL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0"], done.stderr


def test_what_is_no_lock_is_refused_where_it_is_named() -> None:
    owner = SimpleNamespace(_lock=None)
    with pytest.raises(AttributeError, match="_look"):
        free_in_child(owner, "_look")
    with pytest.raises(TypeError, match="'_lock' of .* must be a lock of threading's, got None"):
        free_in_child(owner)


def test_each_lock_is_free_in_a_child() -> None:
    found = 0
    for root in (REPOSITORY / "core", *sorted(REPOSITORY.glob("backends/*/src"))):
        for path in sorted(root.rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
            locks = sum(_called(call) in ("Lock", "RLock") for call in calls)
            freed = sum(
                max(len(call.args) - 1, 1) for call in calls if _called(call) == "free_in_child"
            )
            name = path.relative_to(root).as_posix()
            if locks and name not in OTHERWISE:
                assert locks == freed, name
                found += locks
    assert found > 12


def _called(call: ast.Call) -> str:
    function = call.func
    return getattr(function, "attr", getattr(function, "id", ""))
