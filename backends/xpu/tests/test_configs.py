"""Intel's entries of the config table are valid for its compiler, by its public source."""

from __future__ import annotations

from typing import get_args

import pytest

pytest.importorskip("triton", reason="there is no Triton on this machine")

import torch

from anyflex.plugin import Spec
from anyflex_triton.building import KernelInputs, Programs, write_source
from anyflex_triton.configs import KernelName, Traits, config_for
from anyflex_xpu.backend import XpuBackend

GRF_MODES = ("default", "128", "256", "512", "auto")


@pytest.mark.parametrize("kernel", get_args(KernelName))
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("width", [16, 64, 128, 256])
def test_a_configuration_fits_dpas(kernel: KernelName, itemsize: int, width: int) -> None:
    config = config_for("xpu", kernel, Traits(width, itemsize))
    # DPAS multiplies up to 8 rows by 16 columns at a time.
    assert config.block_m % 8 == 0 and config.block_n % 16 == 0
    keywords = config.options.keywords()
    assert keywords.pop("num_warps") in (1, 2, 4, 8, 16, 32)
    # num_stages is how far ahead keys are prefetched into L1; no copy of them is kept.
    assert 1 <= keywords.pop("num_stages") <= 3
    assert keywords.pop("grf_mode", "default") in GRF_MODES
    # Intel's compiler has this option too.
    assert keywords == {"enable_fp_fusion": True}


@pytest.mark.parametrize("mode", GRF_MODES)
def test_grf_mode_reaches_every_kernel(mode: str) -> None:
    assert mode in XpuBackend.options["grf_mode"].choices
    spec = Spec("xpu", "pvc", torch.bfloat16, 64, 64, options=(("grf_mode", mode),))
    made = Programs(KernelInputs(spec, write_source(spec), "xpu", dict(spec.options)))
    for kernel in get_args(KernelName):
        assert made.config(kernel).options.keywords()["grf_mode"] == mode
