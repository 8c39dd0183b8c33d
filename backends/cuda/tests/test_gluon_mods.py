"""Mods for kernels in Gluon: the portable text with six names bound anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scripts_beside import SOAK, printed_by

pytest.importorskip("triton", reason="triton is not installed")

from anyflex_cuda.gluon_kernels import gluon_source


def test_every_operation_and_everyday_mods_compile_in_a_kernel_of_gluon() -> None:
    lines = printed_by("compiling.py")
    assert len([line for line in lines if line.endswith(" bytes")]) == (13 if SOAK else 3)


def test_every_name_that_needs_a_layout_is_bound_anew() -> None:
    from compiling import specs

    from anyflex_triton.building import mask_scores_source, write_source

    rebound = {
        "tl.full(", "ops.spread(", "ops.load_once(", "ops.along(", "ops.tanh_capped(",
        "ops.accumulate(", "ops.choose(", "ops.choose_by(",
    }  # fmt: skip
    made = specs()
    # 16-bit types have a soft cap function of their own.
    made["half"] = replace(made["softcap"], dtype=torch.bfloat16)
    seen = set()
    for spec in made.values():
        portable = write_source(spec) + mask_scores_source(spec)
        seen |= {name for name in rebound if name in portable}
        text = gluon_source(portable)
        assert "from anyflex_cuda import mask_select_ptx, mod_operations" in text
        assert not [name for name in rebound if name in text]
    assert seen == rebound
