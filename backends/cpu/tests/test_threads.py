"""Threads: any number, of torch's and of Python's, gives the same bits; also in a forked child."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import anyflex

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


def test_a_call_lets_other_python_threads_run() -> None:
    torch.set_num_threads(1)
    query = torch.randn(1, 8, 1024, 64)
    ticks = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.001):
            ticks += 1

    ticking = threading.Thread(target=tick)
    ticking.start()
    anyflex.flex_attention(query, query, query, softcap, backend="cpu")
    seen = ticks
    stop.set()
    ticking.join()
    assert seen > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_computes_the_same() -> None:
    torch.set_num_threads(3)
    wanted = [anyflex.flex_attention(*some(2), softcap, backend="cpu")]
    child = os.fork()
    if child == 0:
        # torch's own threads did not come along: only anyflex's operations run here.
        found = [anyflex.flex_attention(*some(2), softcap, backend="cpu")]
        os._exit(0 if same(found, wanted) else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert same([anyflex.flex_attention(*some(2), softcap, backend="cpu")], wanted)
