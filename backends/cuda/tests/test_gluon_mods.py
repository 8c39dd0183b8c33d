"""Mods for kernels in Gluon: the portable text with four names bound anew."""

from __future__ import annotations

import pytest
from scripts_beside import printed_by

pytest.importorskip("triton", reason="triton is not installed")

from anyflex_cuda.gluon_mods import gluon_source


def test_every_operation_and_everyday_mods_compile_in_a_kernel_of_gluon() -> None:
    lines = printed_by("compiling.py")
    assert len([line for line in lines if " bytes" in line]) == 15


def test_a_constant_a_spread_scalar_and_a_read_are_bound_anew() -> None:
    from compiling import specs

    from anyflex_triton.mods import write_source

    for spec in specs().values():
        text = gluon_source(write_source(spec))
        assert "from anyflex_cuda import mod_operations" in text
        for name in ("tl.full(", "ops.spread(", "ops.load_once(", "ops.tanh_capped("):
            assert name not in text
