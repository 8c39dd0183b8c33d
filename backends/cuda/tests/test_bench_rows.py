"""What `anyflex bench` checks before it times a row is computed by the kernels that it times."""

from __future__ import annotations

import dataclasses
import re

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


def variant_of(case: BenchCase) -> str:
    """What explain says of a case's kernels on a Hopper, without a number that decoding's splits
    follow."""
    mask_mod = make_mask_mod(case.masks, (case.q_shape[2], case.kv_shape[2]), CPU)
    mask = None
    if mask_mod is not None:
        lengths = (case.q_shape[2], case.kv_shape[2])
        mask = anyflex.create_block_mask(mask_mod, None, None, *lengths)
    # Nothing is written to them: of large ones the system gives no memory.
    tensors = (
        torch.empty(shape, dtype=case.torch_dtype).requires_grad_("backward" in case.directions)
        for shape in (case.q_shape, case.kv_shape, case.kv_shape)
    )
    with isolated():
        register("cuda", OnHopper)
        with recording():
            found = anyflex.explain(
                *tensors,
                make_score_mod(case.mods, case.q_shape[1], CPU),
                mask,
                enable_gqa=case.gqa,
                backend="cuda",
            )
    return re.sub(r"programs=\d+", "programs", found.variant)


@pytest.mark.parametrize("case", PRESETS["h200"], ids=lambda case: case.name)
def test_a_row_s_check_has_the_kernels_that_are_timed(case: BenchCase) -> None:
    for directions in ("forward",), ("forward", "backward"):
        row = dataclasses.replace(case, directions=directions)
        found = variant_of(row)
        assert "hopper" in found
        assert variant_of(row.small()) == found


def test_rows_take_each_number_of_consumers() -> None:
    variants = " ".join(variant_of(case) for case in PRESETS["h200"])
    assert all(tiles in variants for tiles in ("64x128", "128x128", "192x128"))
