"""Sets that `--require` names ask for no more than they promise; a backend that declares little
can pass."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from anyflex.plugin import Backend, Capabilities
from anyflex.testing.cases import gradients, inputs, layouts, mods, required, shapes
from anyflex.testing.runner import Outcome, run_cases
from anyflex.testing.session import open_session
from tests.soak import SOAK
from tests.testing.faults.fault import example

LITTLE = Capabilities(
    dtypes=frozenset({torch.bfloat16}),
    head_dim_min=32,
    head_dim_max=64,
    head_dim_multiple=32,
    decode=False,
)
BACKWARD_TOO = Capabilities(
    dtypes=frozenset({torch.float16}),
    aux=frozenset({"lse"}),
    gradients=frozenset({"q", "k", "v", "captured", "lse"}),
    decode=False,
)
DECODE_ONLY = Capabilities(
    dtypes=frozenset({torch.float32}), gqa=True, aux=frozenset({"lse"}), head_dim_max=16
)


def outcomes(
    capabilities: Capabilities, require: tuple[str, ...], backend: type[Backend], group: object
) -> list[Outcome]:
    little = type("Little", (backend,), {"capabilities": capabilities})
    cases = [case for case in group.CASES.values() if case.quick]  # type: ignore[attr-defined]
    with open_session("cpu.example", backend_class=little) as session:
        return list(run_cases(session, cases, require=frozenset(require)))


@pytest.mark.parametrize(
    ("capabilities", "require"),
    [(LITTLE, "forward"), (BACKWARD_TOO, "backward"), (DECODE_ONLY, "decode")][
        :: 1 if SOAK else 2
    ],
    ids=["forward", "backward", "decode"][:: 1 if SOAK else 2],
)
def test_a_set_is_satisfied_by_what_it_names(
    capabilities: Capabilities, require: str, tmp_path: Path
) -> None:
    with example(tmp_path) as backend:
        found = outcomes(capabilities, (require,), backend, required)
    assert [outcome for outcome in found if not outcome.good] == []
    passed = {o.case.partition("/")[0] for o in found if o.status == "passed"}
    assert require in passed


def test_sets_are_not_satisfied_by_less(tmp_path: Path) -> None:
    with example(tmp_path) as backend:
        found = outcomes(LITTLE, ("backward", "decode"), backend, required)
    failed = [outcome for outcome in found if not outcome.good]
    assert {outcome.case.partition("/")[0] for outcome in failed} == {"backward", "decode"}
    assert all(outcome.detail.startswith("it is required and was refused") for outcome in failed)


@pytest.mark.parametrize("group", [gradients, inputs, layouts, mods, shapes])
def test_what_is_not_declared_is_refused_and_the_rest_passes(
    group: object, tmp_path: Path
) -> None:
    with example(tmp_path) as backend:
        found = outcomes(LITTLE, ("forward",), backend, group)
    assert [outcome for outcome in found if not outcome.good] == []
    statuses = Counter(outcome.status for outcome in found)
    assert statuses["refused"] > 0
