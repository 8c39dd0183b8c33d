"""Long calls: launches in parts give the same results, and command buffers are committed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulator import compile_shader
from kernel_faults import kernel_of
from matrix_units import Shuffled
from packed_calls import CALLS as PACKED_CALLS
from packed_calls import PackedCall
from small_calls import CALLS as DENSE_CALLS
from small_calls import Poisoned, SmallCall, wrong_results

import anyflex
from anyflex.plugin import isolated, register
from anyflex.testing import posing
from anyflex_mps import command_buffers
from anyflex_mps.arguments import place
from anyflex_mps.command_buffers import BufferedWork, part_of
from anyflex_mps.shaders import CompileShader

CALLS: dict[str, SmallCall | PackedCall] = {
    name: {**DENSE_CALLS, **PACKED_CALLS}[name]
    for name in ("training", "repeatable training", "packed", "paged", "decoding")
}
LONG = {"forward": ("training", "packed"), "keys": ("training",), "queries": ("training",)}
"""Calls whose launches of a kernel are made in parts, by the kernel."""


@pytest.fixture
def short_buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """Let a place of a grid be a part of its own, and record commits."""
    commits: list[torch.device] = []
    monkeypatch.setattr(command_buffers, "_MOST_WORK", 1)
    monkeypatch.setattr(command_buffers, "_LEAST_GROUPS", 0)
    monkeypatch.setattr(command_buffers, "_commit", commits.append)
    with isolated(), posing("mps"):
        yield commits


def launches_of(call: str, seeded: str = "") -> tuple[dict[str, list[int]], list[str]]:
    """Run a call, and return the numbers of threads of each kernel's launches, and the names of
    wrong results.

    Args:
        seeded: kernel that forgets where its part begins.
    """
    launches: dict[str, list[int]] = {}

    class Recorded(Poisoned):
        def compile_shader(self) -> CompileShader:
            def compiler(source: str) -> Any:
                name = kernel_of(source)
                if name == seeded:
                    axis = "z" if "sequences" in source else "x"
                    first = f"(int)group.{axis} + (int){place('first_group')}"
                    assert first in source
                    source = source.replace(first, f"(int)group.{axis}")
                kernel = getattr(compile_shader(source, race=True), name)

                def run(*arguments: Any, threads: list[int], group_size: list[int]) -> None:
                    launches.setdefault(name, []).append(math.prod(threads))
                    kernel(*arguments, threads=threads, group_size=group_size)

                run.__dict__.update(max_threads_per_threadgroup=1024, thread_execution_width=32)
                return SimpleNamespace(**{name: run})

            return compiler

    register("mps", Recorded)
    return launches, wrong_results(CALLS[call])


@pytest.mark.parametrize("call", CALLS)
def test_launches_in_parts_give_right_results(
    call: str, short_buffers: list[torch.device]
) -> None:
    launches, wrong = launches_of(call)
    assert wrong == []
    cut = {name: len(numbers) for name, numbers in launches.items() if name != "self_test"}
    passes = 2 if call == "repeatable training" else 1
    wanted = {
        # Blocks of 40 rows are 2 tiles each; 3 of 24 keys are a tile each.
        "training": {"forward": 4, "rows": 1, "keys": 3, "queries": 4 * passes},
        # The host's bound of the number of blocks of rows.
        "packed": {"forward": 7},
        "decoding": {"decode": 1, "combine": 1},
    }
    wanted["paged"] = wanted["packed"]
    wanted["repeatable training"] = {**wanted["training"], "totals": 2}
    assert cut == wanted[call]
    assert len(short_buffers) == sum(
        cut.get(name, 0) for name in ("forward", "keys", "queries", "decode")
    )


@pytest.mark.parametrize(("kernel", "call"), [(k, call) for k in LONG for call in LONG[k]])
def test_a_kernel_that_forgets_where_its_part_begins_is_found(
    kernel: str, call: str, short_buffers: list[torch.device]
) -> None:
    assert launches_of(call, kernel)[1]


def test_matrix_units_take_parts_too(short_buffers: list[torch.device]) -> None:
    query = torch.randn(1, 2, 80, 16, generator=torch.Generator().manual_seed(0)).half()
    register("mps", Shuffled)
    with posing("mps", arch="apple10"):
        out = anyflex.flex_attention(
            query, query, query, backend="mps", kernel_options={"mps": {"mpp": True}}
        )
    wanted = torch.nn.functional.scaled_dot_product_attention(*[query.double()] * 3)
    torch.testing.assert_close(out.double(), wanted, atol=4e-3, rtol=0)
    assert len(short_buffers) == 3


def test_parts_are_short_and_leave_no_core_idle() -> None:
    most = command_buffers._MOST_WORK * 8
    # 512 tiles of 32 heads: 16,384 tokens of head dim 128, without a mask.
    work = 32 * 16_384**2 * 256
    part = part_of(work, 512, 32, 8)
    assert 1 <= part < 512 and work * part // 512 <= most
    assert part_of(most, 512, 32, 8) == 512
    # A long single head: a few threadgroups for each core.
    assert part_of((1 << 20) ** 2 * 256, 1 << 15, 1, 8) == 32
    assert part_of(1 << 60, 3, 1, 8) == 3
    assert part_of(0, 1, 1, 8) == 1


def test_short_calls_gather_in_a_buffer_until_it_has_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commits: list[torch.device] = []
    monkeypatch.setattr(command_buffers, "_commit", commits.append)
    device, work = torch.device("mps"), BufferedWork(8)
    for _ in range(25):
        work.add(command_buffers._MOST_WORK, device)
    assert commits == [device] * 3


def test_a_commit_records_an_event_on_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []
    event = SimpleNamespace(record=lambda: recorded.append(1))
    monkeypatch.setattr(torch.mps, "Event", lambda: event)
    command_buffers._commit(torch.device("cpu"))
    assert recorded == []
    command_buffers._commit(torch.device("mps"))
    assert recorded == [1]
