"""The CPU backend agrees with the dense formula, in its own types, forward and backward.

The same configurations as the reference's, in turn in each type, mods compiled and interpreted.
How far a result may be from the formula comes from the data: see `budgets_of`.
"""

from __future__ import annotations

import functools
from importlib.metadata import entry_points

import pytest
import torch

import anyflex
from anyflex.testing.attention_case import AttentionCase, Drawn, Layout
from anyflex.testing.comparison import Budgets, by_backend, by_oracle, mismatches
from anyflex.testing.mods import SCORE_MODS
from tests.random_configurations.configuration import Configuration

__all__: list[str] = []

pytestmark = pytest.mark.skipif(
    not any(point.name == "cpu" for point in entry_points(group="anyflex.backends.v1")),
    reason="anyflex-cpu is not installed: make test, or pip install -e backends/cpu",
)

DTYPES = (torch.float32, torch.bfloat16, torch.float32, torch.float16)
WAYS = ("auto", "interpreter", "interpreter")
LAYOUTS: dict[str, Layout] = {
    "contiguous": "dense",
    "transposed": "heads_last",
    "every_second": "last_stride_2",
    "expanded_heads": "expanded_heads",
    "expanded_batch": "offset",
    "column": "mixed",
}


def case_of(configuration: Configuration) -> AttentionCase:
    """The configuration as a case of the conformance kit, without memory layouts and origins of
    block masks that the kit lacks."""
    c = configuration
    learns = c.score is not None and SCORE_MODS[c.score].learns
    return AttentionCase(
        name=str(c),
        shows="random configuration",
        batch=c.sizes.batch,
        heads=c.sizes.heads,
        kv_heads=c.sizes.kv_heads,
        q_length=c.sizes.q_length,
        kv_length=c.sizes.kv_length,
        head_dim=c.head_dim,
        value_head_dim=c.value_head_dim,
        kv_batch=c.kv_batch,
        dtype=DTYPES[c.number % len(DTYPES)],
        score_mod=c.score,
        mask_mod=c.mask,
        block_size=c.block_size,
        scale=c.scale,
        gradients=frozenset(c.wanted) | ({"captured"} if learns else frozenset()),
        aux=frozenset(c.aux),
        dout=c.arrives != "lse",
        dlse=c.arrives != "out",
        of_sums=c.expanded_dout,
        layout=LAYOUTS[next((m for m in c.memory if m != "contiguous"), "contiguous")],
        form=c.score_form,
        seed=c.number,
    )


def budgets_of(case: AttentionCase, drawn: Drawn) -> Budgets:
    """The kit's budgets, plus allowances for cases among hundreds that the kit's own don't meet:
    sums whose exact result is 0, the logarithm of a sum of weights that is 1 but for its last bit,
    and in bfloat16 weights of 13 bits where nothing else of the call is rounded."""
    plain = by_oracle(case, drawn)
    allowed = {}
    for name, limit in plain.allowed.items():
        size = plain.exact[name].abs().nan_to_num(0.0, 0.0, 0.0)
        share = 2.0**-13 if case.dtype is torch.bfloat16 else 0.0
        largest = size.amax() if size.numel() else size.new_zeros(())
        allowed[name] = 2 * limit + share * largest + 2.0**-23
    return Budgets(plain.exact, allowed)


def test_random_configuration(configuration: Configuration) -> None:
    case = case_of(configuration)
    drawn = case.draw(torch.device("cpu"))
    mods = {"cpu": {"mods": WAYS[configuration.number % len(WAYS)]}}
    attention = functools.partial(anyflex.flex_attention, kernel_options=mods)
    found = by_backend(case, drawn, "cpu", torch.device("cpu"), attention)
    assert mismatches(found, budgets_of(case, drawn), case, drawn) == []
