"""The kit on the kernels in Triton's interpreter, float32 and float16. `anyflex conformance
--backend cuda.triton` does the same on a GPU."""

from __future__ import annotations

import importlib.util

import pytest
from interpreted_backend import Interpreted
from soak import SOAK

from anyflex.testing import Conformance

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no Triton to interpret with", allow_module_level=True)

# numpy warns of each -inf and NaN that a kernel computes with.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class TestInInterpreter(Conformance):
    backend = "cuda.triton"
    backend_class = Interpreted
    device = "cpu"
    quick = not SOAK
    expected = "expected_interpreter.txt"
    cases = (
        ()
        if SOAK
        else (
            "aux/max_scores",
            "forward/*",
            "backward/tails_[36]*_and_lse",
            "backward/documents_of_batches_and_lse",
            "backward/dense_bias_and_lse",
            "decode/*",
            "decoding/*",
            "shapes/lengths_*",
            "shapes/gqa_[456]*",
            "shapes/empty_*",
            "precision/*",
            "structure/dead_then_live*",
            "structure/per_batch*",
            "structure/blocks_of_64",
            "inputs/*nan*",
            "inputs/infinity*",
            "dropout/plain",
            "dropout/one_row",
            "dropout/infinity*",
            "dropout/seeds",
            "large_scores/raised_in_groups",
            "sinks/dead_rows",
            "sinks/few_rows",
            "sinks/half_row",
            "sinks/large",
            "sinks/learned_mods",
            "sinks/learned_near_scores",
            "ragged/alone",
            "ragged/paged",
            "ragged/no_keys",
            "ragged/int8_by_token_in_pages",
            "ragged/more_rows_than_keys",
        )
    )
