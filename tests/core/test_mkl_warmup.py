"""Elementary functions are called once by one thread before threads share a call of theirs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.soak import SOAK

__all__: list[str] = []

FIRST_CALL = """
import torch
import anyflex
from anyflex.mod_graph.operations.functions import FUNCTIONS

names = [record.name for record in FUNCTIONS]
x = torch.ones(1, 2, 40, 8)
with torch.autograd.profiler.profile(record_shapes=True) as profile:
    EXPRESSION
alone, shared = dict.fromkeys(names, 0), []
for event in sorted(profile.function_events, key=lambda event: event.time_range.start):
    name = event.name.removeprefix("aten::").rstrip("_")
    if name in names:
        if event.input_shapes == [[1]]:
            alone[name] += 1
        elif alone[name] < 2:  # float32 and float64
            shared.append(name)
print([name for name, calls in alone.items() if calls < 2], shared)
"""

EXPRESSIONS = {
    "no mod": "anyflex.flex_attention(x, x, x, backend='reference')",
    "score mod": (
        "anyflex.flex_attention(x, x, x, lambda s, b, h, q, k: torch.tanh(s), backend='reference')"
    ),
    "opaque mod": "anyflex.flex_attention(x, x, x, lambda s, b, h, q, k: torch.special.i0(s))",
    "block mask": (
        "anyflex.create_block_mask(lambda b, h, q, k: torch.exp(q - 3.0) > k, 1, 1, 300, 300)"
    ),
}


@pytest.mark.parametrize("case", EXPRESSIONS if SOAK else ["score mod"])
def test_no_function_is_first_called_on_a_tensor_that_threads_share(case: str) -> None:
    program = FIRST_CALL.replace("EXPRESSION", EXPRESSIONS[case])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split("\n")[-2:] == ["[] []", ""], done.stdout + done.stderr
