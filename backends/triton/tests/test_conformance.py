"""The kit on the kernels in Triton's interpreter: float32 and float16, for it multiplies the bits
of bfloat16 as integers. `anyflex conformance --backend cuda.triton` does the same on a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import os

import pytest
import torch

from anyflex.testing import Conformance
from anyflex_triton.backend import TritonBackend

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no Triton to interpret with", allow_module_level=True)

WHOLE = os.environ.get("ANYFLEX_WHOLE_KIT") == "1"
"""The whole quick subset: minutes."""

# numpy says so of each -inf and NaN that a kernel computes with.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Interpreted(TritonBackend):
    capabilities = dataclasses.replace(
        TritonBackend.capabilities, dtypes=frozenset({torch.float32, torch.float16})
    )


class TestInInterpreter(Conformance):
    backend = "cuda.triton"
    backend_class = Interpreted
    device = "cpu"
    quick = True
    expected = "expected_interpreter.txt"
    cases = (
        ()
        if WHOLE
        else (
            "decode/*",
            "inputs/*nan*",
            "inputs/infinity*",
            "backward/[a-s]*",
        )
    )
