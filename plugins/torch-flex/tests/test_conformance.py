"""Cases of the conformance kit that torch's own code fails, and their mending here.

torch's compiler takes seconds a case. The README says how to run them all.
"""

from __future__ import annotations

import torch

from anyflex.testing import Conformance

AVX2 = torch.backends.cpu.get_cpu_capability() == "AVX2"


class TestConformanceOnCpu(Conformance):
    backend = "cpu.torch"
    expected = "expected_cpu.txt"
    cases = (
        "mods/ignores_score",
        "mods/nan_one_pair",
        "operations/pow_of_ints",
        # The code that torch 2.13 compiles for AVX2 leaves some of out unwritten, which is right
        # in some runs and 0 in others: neither a pass nor an expected failure.
        *(() if AVX2 else ("run_time/captured_strides",)),
    )


class TestConformanceOnCuda(Conformance):
    backend = "cuda.torch"
    expected = "expected_cuda.txt"
    cases = (
        "aux/lse_dlse",
        "compiled/*",
        "declared/head_dims",
        "devices/no_synchronisation",
        "mods/ignores_score",
        "mods/nan_one_pair",
        "operations/pow_of_ints",
        "options/*",
        "processes/compiling_threads",
        "refusals/*",
        "shapes/many_batches",
    )
