"""Budgets of a case: their size, the right kernels that pass, the text of differences."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from anyflex.plugin import Capabilities
from anyflex.testing.attention_case import AttentionCase
from anyflex.testing.budgets import Budgets, by_oracle
from anyflex.testing.case_types import Case
from anyflex.testing.cases import every_case, gradients, inputs, mods, operations, precision
from anyflex.testing.comparison import mismatches
from anyflex.testing.runner import run_cases
from anyflex.testing.session import open_session
from tests.soak import SOAK
from tests.testing.faults.fault import Change, example

CPU = torch.device("cpu")
PLAIN = AttentionCase("plain", "", q_length=9, kv_length=30, gradients=frozenset("qkv"), dlse=True)


def budgets(case: AttentionCase) -> Budgets:
    return by_oracle(case, case.draw(CPU))


def differences(case: AttentionCase, found: dict[str, torch.Tensor]) -> list[str]:
    drawn = case.draw(CPU)
    return mismatches(found, by_oracle(case, drawn), case, drawn)


def right(case: AttentionCase) -> dict[str, torch.Tensor]:
    """The exact results in a backend's types."""
    wide = torch.promote_types(case.dtype, torch.float32)
    return {
        name: value.to(wide if name in ("lse", "max_scores") else case.dtype)
        for name, value in budgets(case).exact.items()
    }


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [
        (torch.float64, 1e-16, 1e-12),
        (torch.float32, 1e-8, 1e-4),
        (torch.float16, 1e-5, 0.03),
        (torch.bfloat16, 1e-4, 0.3),
    ],
)
def test_budgets_are_some_steps_of_the_type(dtype: torch.dtype, least: float, most: float) -> None:
    found = budgets(dataclasses.replace(PLAIN, dtype=dtype))
    for name in ("out", "dq", "dk", "dv"):
        size = found.exact[name].abs().amax()
        share = (found.allowed[name] / size).amax()
        assert least < share < most, name


def test_only_what_was_asked_for_is_compared() -> None:
    case = dataclasses.replace(PLAIN, aux=frozenset({"lse"}), gradients=frozenset("k"))
    assert list(budgets(case).exact) == ["out", "lse", "dk"]


def test_exact_results_pass() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        case = dataclasses.replace(PLAIN, dtype=dtype)
        assert differences(case, right(case)) == []


def test_a_missing_result_is_named() -> None:
    found = right(PLAIN)
    del found["dk"]
    assert differences(PLAIN, found) == ["dk is missing"]


def test_a_wrong_type_and_a_wrong_shape_are_named() -> None:
    found = right(PLAIN)
    found["lse"] = found["lse"].half()
    found["dv"] = found["dv"][..., :-1]
    assert differences(PLAIN, found) == [
        "lse has dtype torch.float16, wanted torch.float32",
        "dv has shape [1, 2, 30, 15], wanted [1, 2, 30, 16]",
    ]


def test_the_worst_element_is_named() -> None:
    found = right(PLAIN)
    found["out"] = found["out"].clone()
    found["out"][0, 1, 3, 2] += 0.5
    found["out"][0, 1, 4, 2] += 0.1
    (line,) = differences(PLAIN, found)
    assert line.startswith("out is ")
    assert " at [0, 1, 3, 2], wanted " in line
    assert "off by 0.5, allowed " in line
    assert line.endswith("(2 of 288 elements)")


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_must_be_so_in_both(strange: float) -> None:
    found = right(PLAIN)
    found["lse"] = found["lse"].clone()
    found["lse"][0, 0, 0] = strange
    (line,) = differences(PLAIN, found)
    assert line.startswith(f"lse is {strange} at [0, 0, 0], wanted ")
    assert "1 of 18 elements are not finite alike" in line


def test_a_result_that_float16_can_not_hold_is_infinite() -> None:
    def large(tensors: dict[str, torch.Tensor]) -> None:
        tensors["value"].fill_(60000.0)
        tensors["dout"].fill_(60000.0)

    case = dataclasses.replace(PLAIN, kv_length=1, dtype=torch.float16, values=large)
    found = right(case)
    assert found["dv"].isinf().any()
    assert differences(case, found) == []


def test_equal_seeds_draw_equal_inputs() -> None:
    first, again = PLAIN.draw(CPU), PLAIN.draw(CPU)
    other = dataclasses.replace(PLAIN, seed=1).draw(CPU)
    assert torch.equal(first.tensors["key"], again.tensors["key"])
    assert not torch.equal(first.tensors["key"], other.tensors["key"])


ROUNDED = ".to(self.spec.dtype).to(self.dtype)"
BASE_2 = "1.4426950408889634"
KERNEL = "kernel.py"
RIGHT = {
    # Operands as matrix units take them: weights and their gradients in the inputs' type.
    "rounded_operands": (
        Change(KERNEL, "_product(weights, value,", f"_product(weights{ROUNDED}, value,"),
        Change(KERNEL, "_product(weights.mT, dout,", f"_product(weights{ROUNDED}.mT, dout,"),
        Change(KERNEL, "_product(passed.mT, query,", f"_product(passed{ROUNDED}.mT, query,"),
        Change(KERNEL, "_product(passed, key,", f"_product(passed{ROUNDED}, key,"),
    ),
    "exponentials_of_two": (
        Change(
            KERNEL,
            "weights = torch.exp(scores - shift)",
            f"weights = torch.exp2(scores * {BASE_2} - shift * {BASE_2})",
        ),
        Change(
            KERNEL,
            "factor = torch.exp(maximum - shift)",
            f"factor = torch.exp2(maximum * {BASE_2} - shift * {BASE_2})",
        ),
        Change(
            KERNEL,
            "lse = _finite_shift(maximum) + total.log()",
            f"lse = (_finite_shift(maximum) * {BASE_2} + total.log2()) / {BASE_2}",
        ),
        Change(
            KERNEL,
            "weights = torch.exp(scores - lse)",
            f"weights = torch.exp2(scores * {BASE_2} - lse * {BASE_2})",
        ),
    ),
    "narrow_tiles_and_tables": (
        Change("backend.py", "KEYS_AT_ONCE = 128", "KEYS_AT_ONCE = 16"),
        Change(
            KERNEL,
            "TensorSpec(tuple(tensor.shape), torch.float64, zeroed=True)",
            "TensorSpec(tuple(tensor.shape), torch.promote_types(tensor.dtype, self.dtype), "
            "zeroed=True)",
        ),
    ),
    "approximate_exponentials": (
        Change(
            KERNEL,
            "weights = torch.exp(scores - shift)",
            "weights = torch.exp(scores - shift)\n"
            "                noise = (torch.rand_like(weights) - 0.5) * 4\n"
            "                weights = weights * (1 + noise * torch.finfo(self.dtype).eps)",
        ),
    ),
}
QUICK: dict[str, Case] = {
    name: case
    for group in (gradients, inputs, operations, precision)
    for name, case in group.CASES.items()
    if case.quick
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_that_rounds_elsewhere_passes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYFLEX_CACHE_DIR", str(tmp_path / "cache"))
    with (
        example(tmp_path, RIGHT[name]) as backend,
        open_session("cpu.example", backend_class=backend) as session,
    ):
        # In make test each case is one kernel's.
        part = slice(None) if SOAK else slice(list(RIGHT).index(name), None, len(RIGHT))
        failed = [
            o for o in run_cases(session, list(QUICK.values())[part]) if o.status != "passed"
        ]
    assert failed == []


def test_cases_without_a_type_of_their_own_run_in_a_declared_one() -> None:
    can = Capabilities(dtypes=frozenset({torch.bfloat16}), head_dim_min=32, head_dim_multiple=32)
    case = mods.CASES["mods/softcap"]
    assert isinstance(case, AttentionCase)
    fitted = case.fitted(can)
    assert (fitted.dtype, fitted.head_dim, fitted.value_head_dim) == (torch.bfloat16, 32, 32)
    insisting = precision.CASES["precision/tanh"]
    assert isinstance(insisting, AttentionCase)
    assert insisting.fitted(can).dtype is torch.float32


def test_what_is_not_declared_is_left_out_of_a_reduced_case() -> None:
    forward_only = Capabilities(dtypes=frozenset({torch.float32}), aux=frozenset({"lse"}))
    (reduced,) = PLAIN.reduced(forward_only)
    assert (reduced.gradients, reduced.aux, reduced.dlse) == (frozenset(), {"lse"}, False)
    core_backward = dataclasses.replace(forward_only, core_backward=True)
    (reduced,) = PLAIN.reduced(core_backward)
    assert reduced.gradients == PLAIN.gradients


def test_an_lse_at_which_no_gradient_arrives_is_compared_without_gradients() -> None:
    can = Capabilities(
        dtypes=frozenset({torch.float32}), aux=frozenset({"lse"}), gradients=frozenset({"q", "k"})
    )
    backward, forward = PLAIN.reduced(can)
    assert (backward.gradients, backward.aux) == ({"q", "k"}, frozenset())
    assert (forward.gradients, forward.aux) == (frozenset(), {"lse"})


def test_a_float32_function_of_a_float64_mod_may_be_off_by_its_own_last_bit() -> None:
    case = every_case()["mods/log_distance/float64"]
    assert isinstance(case, AttentionCase)
    drawn = case.draw(CPU)
    decay = drawn.mods["score"].leaves["decay"].detach().abs().max()
    distance = torch.tensor(float(max(case.q_length, case.kv_length)))
    step = float(decay * distance.log1p()) * torch.finfo(torch.float32).eps
    allowed = by_oracle(case, drawn).allowed["max_scores"]
    assert step <= float(allowed.max()) < 64 * step
    other = every_case()["mods/softcap/float64"]
    assert isinstance(other, AttentionCase)
    assert float(budgets(other).allowed["max_scores"].max()) < 1e-11
