"""The kernels that `anyflex bench` checks before it times a row are those that it times."""

from __future__ import annotations

import dataclasses
import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import anyflex
from anyflex.bench.case import BenchCase
from anyflex.bench.patterns import make_mask_mod, make_score_mod
from anyflex.bench.presets import PRESETS
from anyflex.plugin import isolated, register
from tests.soak import SOAK

pytestmark = pytest.mark.skipif(
    find_spec("anyflex_cuda") is None or find_spec("triton") is None,
    reason="anyflex-cuda is not installed, or no Triton",
)
CPU = torch.device("cpu")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The made-up GPU of the CUDA backend's tests."""
    folder = Path(__file__).parents[2] / "backends" / "cuda" / "tests"
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("recording")


def kernels_of(case: BenchCase, hopper: Any) -> list[tuple[str, dict[str, object]]]:
    """Name and constants of each kernel that a case launches on a Hopper, functions by their
    text."""
    call = case.pattern_call(CPU)
    mask_mod = make_mask_mod(case.masks, call)
    mask = None
    if mask_mod is not None:
        mask = anyflex.create_block_mask(mask_mod, None, *call.shape[1:])
    learns = "backward" in case.directions
    # Never written to, because the system gives no memory for large ones.
    tensors = [
        torch.empty(shape, dtype=case.torch_dtype).requires_grad_(learns)
        for shape in (case.q_shape, case.kv_shape, case.v_shape)
    ]
    with isolated():
        register("cuda", hopper.OnHopper)
        with hopper.recording() as launched:
            out = anyflex.flex_attention(
                *tensors,
                make_score_mod(case.mods, call),
                mask,
                enable_gqa=case.gqa,
                backend="cuda",
            )
            assert isinstance(out, torch.Tensor)
            if learns:
                torch.autograd.grad(out, tensors, torch.empty_like(out))
    return [
        (
            program.function.fn.__name__,
            {
                name: getattr(value, "src", value)
                for name, value in program.constants.items()
                # Decoding kernels, by the number of splits and steps.
                if not program.function.fn.__module__.endswith("decode")
            },
        )
        for program, _, _ in launched
    ]


ROWS = (*PRESETS["h200"], *PRESETS["h200-strangers"])


@pytest.mark.parametrize("case", ROWS[:: 1 if SOAK else 5], ids=lambda case: case.name)
def test_a_row_s_check_has_the_kernels_that_are_timed(case: BenchCase, hopper: Any) -> None:
    for direction in case.directions:
        row = dataclasses.replace(case, directions=("forward", direction))
        assert kernels_of(row.small(), hopper) == kernels_of(row, hopper)


def test_rows_take_each_number_of_consumers(hopper: Any) -> None:
    forwards = [
        constants
        for case in PRESETS["h200"]
        for name, constants in kernels_of(
            dataclasses.replace(case, directions=("forward",)), hopper
        )
        if name == "forward_kernel"
    ]
    assert {constants["CONSUMERS"] for constants in forwards} == {1, 2, 3}
