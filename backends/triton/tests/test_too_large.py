"""Tiles from user options that fit no multiprocessor are refused by the options' names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

import anyflex
from anyflex.plugin import ArgumentError, PluginError, isolated, register
from anyflex.testing import posing
from anyflex_triton.backend import TritonBackend
from anyflex_triton.program import Program


class Ampere(TritonBackend):
    def target(self) -> Any:
        return "ampere"


@pytest.fixture
def too_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Return the set of kernels that fit no multiprocessor. The others compute nothing."""
    kernels: set[str] = set()

    def fit(program: Program, grid: int, device: torch.device, values: Mapping[str, Any]) -> None:
        if program.function.__name__ in kernels:
            raise OutOfResources(300000, 166912, "shared memory")

    monkeypatch.setattr(Program, "launch", fit)
    with isolated(), posing("cuda"):
        register("cuda.mine", Ampere)
        yield kernels


def trained(**options: object) -> None:
    """Make a call and its backward."""
    query = torch.zeros(1, 1, 200, 16, requires_grad=True)
    out = anyflex.flex_attention(
        query, query, query, backend="cuda.mine", kernel_options={"cuda.mine": options}
    )
    out.backward(torch.ones_like(out))


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ("forward_kernel", {"block_m": 128, "num_warps": 4}),
        ("key_kernel", {"dkv_block_n": 128}),
        ("query_kernel", {"dq_block_m": 128, "backward_num_stages": 5}),
    ],
)
def test_the_refusal_names_options_what_they_take_and_what_there_is(
    too_large: set[str], kernel: str, options: dict[str, object]
) -> None:
    trained(**options)
    too_large.add(kernel)
    direction = "forward" if kernel == "forward_kernel" else "backward"
    with pytest.raises(ArgumentError, match=f"make a {direction} kernel") as caught:
        trained(**options)
    told = str(caught.value)
    assert str(dict(sorted(options.items()))) in told
    assert "takes 300000 of this device's shared memory, for head dims 16 and 16" in told
    assert "166912 is what there is: give smaller tiles" in told


def test_options_of_the_other_direction_are_not_to_blame(too_large: set[str]) -> None:
    too_large.add("key_kernel")
    for options in ({}, {"block_m": 128}):
        with pytest.raises(PluginError, match="shared memory"):
            trained(**options)
