"""A kernel's workspace: used again by the next launch on the CPU, never by two at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from anyflex.plugin import TensorSpec
from anyflex.runtime import workspace

CPU = torch.device("cpu")
MIB = 1 << 20


def of_bytes(*sizes: int) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec((size,), torch.uint8) for size in sizes)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(workspace, "_kept", [])
    monkeypatch.setattr(workspace, "_kept_small", [])
    yield


def test_the_next_launch_gets_the_same_memory() -> None:
    first = workspace.take(CPU, of_bytes(3 * MIB))
    address = first.tensors[0].data_ptr()
    workspace.give_back(first)
    again = workspace.take(CPU, of_bytes(3 * MIB))
    assert again.tensors[0].data_ptr() == address
    workspace.give_back(again)
    smaller = workspace.take(CPU, of_bytes(2 * MIB))
    assert smaller.tensors[0].data_ptr() == address
    assert smaller.tensors[0].shape == (2 * MIB,)
    workspace.give_back(smaller)
    # The content that the largest launch left is still there.
    assert workspace.take(CPU, of_bytes(3 * MIB)).tensors[0].data_ptr() == address


def test_two_launches_at_a_time_have_memory_of_their_own() -> None:
    first = workspace.take(CPU, of_bytes(2 * MIB))
    second = workspace.take(CPU, of_bytes(2 * MIB))
    first.tensors[0].fill_(1)
    second.tensors[0].fill_(2)
    assert int(first.tensors[0].max()) == 1
    workspace.give_back(first)
    workspace.give_back(second)
    assert len(workspace._kept) == 1


def test_threads_never_share_memory() -> None:
    mixed: list[int] = []
    start = threading.Barrier(4)

    def launches(mark: int) -> None:
        start.wait()
        for size in (MIB, 2 * MIB, MIB, 100, 100) * 10:
            taken = workspace.take(CPU, of_bytes(size))
            tensor = taken.tensors[0]
            tensor.fill_(mark)
            if not bool((tensor == mark).all()):
                mixed.append(mark)
            workspace.give_back(taken)

    threads = [threading.Thread(target=launches, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not mixed


def test_tensors_have_their_shapes_and_dont_overlap() -> None:
    specs = (
        TensorSpec((3, 5), torch.float32),
        TensorSpec((), torch.float64),
        TensorSpec((0, 4), torch.int16),
        TensorSpec((MIB,), torch.bfloat16),
    )
    taken = workspace.take(CPU, specs)
    for tensor, spec in zip(taken.tensors, specs, strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype)
        assert tensor.is_contiguous()
    for i, tensor in enumerate(taken.tensors):
        tensor.fill_(i)
    for i, tensor in enumerate(taken.tensors):
        assert bool((tensor == i).all())


def test_zeroed_means_zeroed() -> None:
    used = workspace.take(CPU, of_bytes(2 * MIB))
    used.tensors[0].fill_(7)
    workspace.give_back(used)
    fresh = workspace.take(CPU, (TensorSpec((2 * MIB,), torch.uint8, zeroed=True),))
    assert int(fresh.tensors[0].max()) == 0
    workspace.give_back(fresh)
    again = workspace.take(CPU, of_bytes(2 * MIB))
    assert again.tensors[0].data_ptr() == used.tensors[0].data_ptr()


def test_what_is_huge_is_not_kept() -> None:
    workspace.give_back(workspace.take(CPU, of_bytes(workspace.KEPT_BYTES + 1)))
    assert not workspace._kept
    assert not workspace._kept_small


def test_a_small_launch_gets_the_tensors_of_the_last_one_that_asked_for_the_same() -> None:
    first = workspace.take(CPU, of_bytes(100, MIB - 1024))
    workspace.give_back(first)
    assert workspace.take(CPU, of_bytes(100, MIB - 1024)) is first
    # Taken: a second launch meanwhile has tensors of its own.
    second = workspace.take(CPU, of_bytes(100, MIB - 1024))
    assert second.tensors[0].data_ptr() != first.tensors[0].data_ptr()
    workspace.give_back(first)
    workspace.give_back(second)
    other = workspace.take(CPU, of_bytes(200))
    assert other.tensors[0].shape == (200,)
    workspace.give_back(other)
    assert workspace._kept_small == [other]
    assert not workspace._kept


def test_small_and_large_launches_leave_each_other_what_is_kept() -> None:
    small, large = (workspace.take(CPU, of_bytes(size)) for size in (100, 2 * MIB))
    workspace.give_back(small)
    workspace.give_back(large)
    for _ in range(2):
        for kept, size in ((small, 100), (large, 2 * MIB)):
            again = workspace.take(CPU, of_bytes(size))
            assert again is kept
            workspace.give_back(again)


def test_small_and_zeroed_means_zeroed() -> None:
    specs = (TensorSpec((100,), torch.uint8, zeroed=True),)
    for _ in range(2):
        taken = workspace.take(CPU, specs)
        assert int(taken.tensors[0].max()) == 0
        taken.tensors[0].fill_(7)
        workspace.give_back(taken)


def test_a_huge_launch_leaves_what_is_kept() -> None:
    usual = workspace.take(CPU, of_bytes(2 * MIB))
    workspace.give_back(usual)
    workspace.give_back(workspace.take(CPU, of_bytes(workspace.KEPT_BYTES + 1)))
    assert workspace._kept == [usual]


def test_memory_of_inference_mode_is_written_outside_of_it() -> None:
    with torch.inference_mode():
        workspace.give_back(workspace.take(CPU, of_bytes(2 * MIB)))
        workspace.give_back(workspace.take(CPU, of_bytes(MIB)))
        workspace.give_back(workspace.take(CPU, of_bytes(100)))
    for size in (100, MIB, 2 * MIB):
        taken = workspace.take(CPU, of_bytes(size))
        assert not taken.tensors[0].is_inference()
        taken.tensors[0].fill_(1)
        workspace.give_back(taken)


def test_other_devices_have_allocators_of_their_own() -> None:
    workspace.give_back(workspace.take(CPU, of_bytes(100)))
    kept_small = list(workspace._kept_small)
    meta = torch.device("meta")
    for size in (100, 2 * MIB):
        taken = workspace.take(meta, of_bytes(size))
        assert taken.tensors[0].device == meta
        workspace.give_back(taken)
    assert workspace._kept_small == kept_small
    assert not workspace._kept
