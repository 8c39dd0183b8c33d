"""Threads: any number, of torch's and of Python's, gives the same bits; also in a forked child."""

from __future__ import annotations

import ctypes
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from soak import SOAK
from torch import Tensor

import anyflex
from anyflex_cpu import library
from anyflex_cpu.index_ranges import LIMITS, Limits
from anyflex_cpu.programs import Programs

pytestmark = pytest.mark.usefixtures("threads")


def some(seed: int, *, learn: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, 4, length, 32, generator=generator).requires_grad_(learn)
        for length in (150, 170, 170)
    )
    return query, key, value


def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 5 * torch.tanh(score / 5)


def forward_and_backward(seed: int) -> list[Tensor]:
    inputs = some(seed, learn=True)
    slopes = torch.linspace(0.1, 0.4, 4).requires_grad_()
    out = anyflex.flex_attention(*inputs, lambda s, b, h, q, k: s * slopes[h], backend="cpu")
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (*inputs, slopes))]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_the_number_of_threads_changes_no_bit() -> None:
    torch.set_num_threads(1)
    wanted = forward_and_backward(0)
    for count in (2, 3, 7, 1, 4):
        torch.set_num_threads(count)
        for _ in range(3):
            assert same(forward_and_backward(0), wanted)


# Tensors that are large enough for several threads, with sums that several jobs add to: dQ of many
# tiles of keys, a table that many pairs read, splits of a long sequence.
def prefill(dtype: torch.dtype, mods: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 700, 32, generator=generator).to(dtype).requires_grad_()
        for heads in (4, 2, 2)
    )
    table = torch.randn(4, 41, generator=generator).requires_grad_()
    documents = torch.arange(700) // 150
    mask = anyflex.create_block_mask(
        lambda b, h, q, k: (documents[q] == documents[k]) | (k < 200), None, None, 700, 700
    )

    def relative(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return 5 * torch.tanh(s / 5) + table[h, torch.clamp(q - k, -20, 20) + 20]

    out, aux = anyflex.flex_attention(
        query, key, value, relative, mask, enable_gqa=True, backend="cpu",
        return_aux=anyflex.AuxRequest(lse=True), kernel_options={"cpu": {"mods": mods}},
    )  # fmt: skip
    loss = out.float().square().sum() + aux.lse.sin().sum()
    gradients = torch.autograd.grad(loss, (query, key, value, table))
    return [out.detach(), aux.lse.detach(), *gradients]


def decoding(dtype: torch.dtype, mods: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(2, heads, length, 64, generator=generator).to(dtype).requires_grad_()
        for heads, length in ((8, 2), (2, 9000), (2, 9000))
    )
    slopes = torch.linspace(0.1, 0.4, 8).requires_grad_()
    out = anyflex.flex_attention(
        query, key, value, lambda s, b, h, q, k: s + slopes[h] * (k - q) / 9000,
        enable_gqa=True, backend="cpu", kernel_options={"cpu": {"mods": mods}},
    )  # fmt: skip
    loss = out.float().square().sum()
    return [out.detach(), *torch.autograd.grad(loss, (query, key, value, slopes))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("call", [prefill, decoding])
def test_one_two_three_and_eight_threads_give_the_same_bits(
    call: Callable[[torch.dtype, str], list[Tensor]], dtype: torch.dtype, level: str
) -> None:
    # The interpreter computes on float32 whatever the tensors' type is.
    all_mods = ("auto", "interpreter") if SOAK or dtype is torch.float32 else ("auto",)
    for mods in all_mods:
        torch.set_num_threads(1)
        wanted = call(dtype, mods)
        assert all(each.isfinite().all() for each in wanted)
        for count in (2, 3, 8):
            torch.set_num_threads(count)
            assert same(call(dtype, mods), wanted), (mods, count)


def test_calls_of_many_python_threads_share_nothing() -> None:
    torch.set_num_threads(2)
    wanted = [forward_and_backward(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            for found, expected in zip(
                pool.map(forward_and_backward, range(8)), wanted, strict=True
            ):
                assert same(found, expected)


def test_the_number_of_threads_may_change_while_calls_run() -> None:
    wanted = forward_and_backward(1)
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            for count in (1, 4, 2):
                torch.set_num_threads(count)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(20):
            assert same(forward_and_backward(1), wanted)
    finally:
        stop.set()
        changing.join()


def test_a_call_lets_other_python_threads_run(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    query = torch.randn(1, 8, 1024, 64)
    ticks = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.001):
            ticks += 1

    during: list[int] = []
    loaded = library.load()
    plain = loaded.forward

    def counted(arguments: int, error: int) -> int:
        before = ticks
        status = plain(arguments, error)
        during.append(ticks - before)
        return status

    def ticks_of_a_call() -> float:
        during.clear()
        for _ in range(11):
            anyflex.flex_attention(query, query, query, softcap, backend="cpu")
        return statistics.median(during)

    def holding_the_lock(arguments: int, error: int) -> int:
        return held.af_forward(ctypes.c_void_p(arguments), ctypes.c_void_p(error))

    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        monkeypatch.setattr(loaded, "forward", counted)
        released = ticks_of_a_call()
        # The same function through a handle that keeps the lock: a tick or two, at the end of the
        # call.
        held = ctypes.PyDLL(str(library.find()))
        plain = holding_the_lock
        kept = ticks_of_a_call()
    finally:
        stop.set()
        ticking.join()
    assert released >= 5
    assert kept <= 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_computes_the_same() -> None:
    torch.set_num_threads(3)
    wanted = [anyflex.flex_attention(*some(2), softcap, backend="cpu")]
    child = os.fork()
    if child == 0:
        # torch's own threads don't survive the fork: only anyflex's operations run here.
        found = [anyflex.flex_attention(*some(2), softcap, backend="cpu")]
        os._exit(0 if same(found, wanted) else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert same([anyflex.flex_attention(*some(2), softcap, backend="cpu")], wanted)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_forked_while_programs_for_any_size_are_made_makes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small, large = (torch.ones(1, heads, 1, 4) for heads in (1, LIMITS.heads + 1))
    anyflex.flex_attention(small, small, small, softcap, backend="cpu")
    begun, go_on = threading.Event(), threading.Event()
    make = Programs._make

    def make_late(programs: Programs, limits: Limits) -> Any:
        if threading.current_thread() is making:
            begun.set()
            go_on.wait()
        return make(programs, limits)

    monkeypatch.setattr(Programs, "_make", make_late)
    making = threading.Thread(
        target=anyflex.flex_attention, args=(large,) * 3 + (softcap,), kwargs={"backend": "cpu"}
    )
    making.start()
    assert begun.wait(timeout=30)
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(30)
            out = anyflex.flex_attention(large, large, large, softcap, backend="cpu")
            os._exit(0 if same([out], [large]) else 1)
        finally:
            os._exit(2)
    go_on.set()
    making.join()
    _, status = os.waitpid(child, 0)
    assert status == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_forked_while_calls_run_computes_the_same() -> None:
    torch.set_num_threads(2)
    wanted = [anyflex.flex_attention(*some(3), softcap, backend="cpu")]
    stop = threading.Event()

    def keep_calling() -> None:
        while not stop.is_set():
            anyflex.flex_attention(*some(4), softcap, backend="cpu")

    calling = [threading.Thread(target=keep_calling) for _ in range(2)]
    for thread in calling:
        thread.start()
    try:
        statuses = []
        for _ in range(5):
            child = os.fork()
            if child == 0:
                try:
                    found = [anyflex.flex_attention(*some(3), softcap, backend="cpu")]
                    os._exit(0 if same(found, wanted) else 1)
                finally:
                    os._exit(2)
            statuses.append(os.waitpid(child, 0)[1])
    finally:
        stop.set()
        for thread in calling:
            thread.join()
    assert statuses == [0] * 5


class Attend(torch.autograd.Function):
    """Attention inside another operation's forward and backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return anyflex.flex_attention(query, key, value, softcap, backend="cpu")

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        leaves = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            out = anyflex.flex_attention(*leaves, softcap, backend="cpu")
        return torch.autograd.grad(out, leaves, dout)


def test_calls_nest() -> None:
    torch.set_num_threads(3)
    inputs = some(5, learn=True)
    plain = anyflex.flex_attention(*inputs, softcap, backend="cpu")
    wanted = [plain.detach(), *torch.autograd.grad(plain.square().sum(), inputs)]
    nested = Attend.apply(*inputs)
    found = [nested.detach(), *torch.autograd.grad(nested.square().sum(), inputs)]
    assert same(found, wanted)


FRESH = """
import os, time, torch, anyflex
from importlib.metadata import entry_points
from anyflex.plugin import register
from anyflex_cpu.backend import CpuBackend
if not any(point.name == "cpu" for point in entry_points(group="anyflex.backends.v1")):
    register("cpu", CpuBackend)

def attend(length, heads=8):
    query = torch.randn(1, heads, length, 32, requires_grad=True)
    out = anyflex.flex_attention(query, query, query, lambda s, b, h, q, k: s * 2, backend="cpu")
    out.sum().backward()

def tasks():
    return len(os.listdir("/proc/self/task"))
"""


PROCESS = """
torch.set_num_threads(4)
query = torch.randn(1, 1, 16, 16)
before = tasks()
anyflex.flex_attention(query, query, query, backend="cpu")
print(tasks() - before)

# No torch operation that makes threads of its own has run.
query = torch.randn(1, 8, 600, 32)
before = tasks()
for count in (4, 2, 6):
    torch.set_num_threads(count)
    anyflex.flex_attention(query, query, query, backend="cpu")
    # Threads that are no longer wanted need time to leave.
    for _ in range(500):
        if tasks() - before == count - 1:
            break
        time.sleep(0.01)
    print(tasks() - before)

def runtimes():
    paths = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
    return sorted(p for p in paths if "omp" in os.path.basename(p).split(".so")[0])

torch.set_num_threads(2)
torch.randn(600, 600) @ torch.randn(600, 600)
before = runtimes()
attend(300)
print(runtimes() == before)
"""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """Lines that a program prints in a process of its own."""
    if not Path("/proc/self/task").exists():
        pytest.skip("needs Linux's /proc")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", FRESH + PROCESS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_a_tiny_call_wakes_nobody(printed: list[str]) -> None:
    assert printed[0] == "0"


def test_the_pool_is_as_large_as_torch_says(printed: list[str]) -> None:
    assert printed[1:4] == ["3", "1", "5"]


def test_no_second_openmp_runtime_is_loaded(printed: list[str]) -> None:
    assert printed[4:] == ["True"]


FORKS_WHILE_COMPILING = """
import itertools, os, signal, threading
import torch, anyflex

torch.set_num_threads(1)
query = torch.randn(1, 1, 40, 16)
options = {"cpu": {"mods": "jit"}}
stop = threading.Event()


def call(factor):
    anyflex.flex_attention(
        query, query, query, lambda s, b, h, q, k: torch.cos(s * factor),
        backend="cpu", kernel_options=options,
    )


def compile_on():
    for number in itertools.count():
        if stop.is_set():
            return
        steps = [torch.sin, torch.tanh, torch.exp, torch.abs]
        def mod(s, b, h, q, k):
            for place in range(2 + number % 9):
                s = steps[(number >> 2 * (place % 5)) % 4](s)
            return s
        anyflex.flex_attention(query, query, query, mod, backend="cpu", kernel_options=options)


call(0.5)
thread = threading.Thread(target=compile_on)
thread.start()
found = []
for number in range(8):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        call(float(number + 2) / 8)
        os._exit(0)
    found.append(os.waitpid(child, 0)[1])
stop.set()
thread.join()
print(found)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_compiles_whatever_its_parent_compiled_at_the_fork(tmp_path: Path) -> None:
    pytest.importorskip("llvmlite", reason="llvmlite is not installed")
    environment = os.environ | {
        "ANYFLEX_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, "-c", FORKS_WHILE_COMPILING],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.split("\n")[0] == str([0] * 8), done.stderr[-2000:]
