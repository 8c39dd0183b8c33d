"""What `anyflex bench` checks before it times a row is computed by the kernels that it times."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton to launch with")

from recording import OnHopper, recording

import anyflex
from anyflex.bench.case import BenchCase
from anyflex.bench.patterns import make_mask_mod, make_score_mod
from anyflex.bench.presets import PRESETS
from anyflex.plugin import isolated, register

CPU = torch.device("cpu")


def kernels_of(case: BenchCase) -> list[tuple[str, dict[str, object]]]:
    """Name and constants of each that a case launches on a Hopper, functions by their text."""
    lengths = (case.q_shape[2], case.kv_shape[2])
    mask_mod = make_mask_mod(case.masks, lengths, CPU)
    mask = None
    if mask_mod is not None:
        mask = anyflex.create_block_mask(mask_mod, None, None, *lengths)
    learns = "backward" in case.directions
    # Nothing is written to them: of large ones the system gives no memory.
    tensors = [
        torch.empty(shape, dtype=case.torch_dtype).requires_grad_(learns)
        for shape in (case.q_shape, case.kv_shape, case.kv_shape)
    ]
    with isolated():
        register("cuda", OnHopper)
        with recording() as launched:
            out = anyflex.flex_attention(
                *tensors,
                make_score_mod(case.mods, case.q_shape[1], CPU),
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
                # Of decoding, by how many splits and steps there are.
                if not program.function.fn.__module__.endswith("decode")
            },
        )
        for program, _, _ in launched
    ]


@pytest.mark.parametrize("case", PRESETS["h200"], ids=lambda case: case.name)
def test_a_row_s_check_has_the_kernels_that_are_timed(case: BenchCase) -> None:
    for direction in case.directions:
        row = dataclasses.replace(case, directions=("forward", direction))
        assert kernels_of(row.small()) == kernels_of(row)


def test_rows_take_each_number_of_consumers() -> None:
    forwards = [
        constants
        for case in PRESETS["h200"]
        for name, constants in kernels_of(dataclasses.replace(case, directions=("forward",)))
        if name == "forward_kernel"
    ]
    assert {constants["CONSUMERS"] for constants in forwards} == {1, 2, 3}
