"""Outcomes of a case, selection of cases, and those that must be accepted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch

from anyflex.errors import ArgumentError, BackendRefused, PluginError
from anyflex.plugin import Artifacts, Call, Kernel, Outputs, Rejected, Spec
from anyflex.reference.backend import ReferenceBackend
from anyflex.testing.attention_case import AttentionCase
from anyflex.testing.case_types import BehaviourCase
from anyflex.testing.cases import every_case
from anyflex.testing.runner import Outcome, run_case, run_cases
from anyflex.testing.selection import REQUIREMENTS, requirements, select
from anyflex.testing.session import Session, open_session
from tests.cli.backends import Right
from tests.testing.backends import Absent, Broken, Dense, DenseKernel, wrong

PLAIN = AttentionCase("made/plain", "plain", aux=frozenset(), required=frozenset({"forward"}))
MODDED = AttentionCase(
    "made/mod", "a mod", score_mod="softcap", aux=frozenset(), required=frozenset({"forward"})
)


@pytest.fixture
def session() -> Iterator[Session]:
    with open_session("cpu.dense", backend_class=Dense) as opened:
        yield opened


def behaviour(run: Callable[[Session], None]) -> BehaviourCase:
    return BehaviourCase("made/behaviour", "something", run)


def test_a_right_call_passes_and_an_undeclared_one_is_refused(session: Session) -> None:
    assert run_case(session, PLAIN).status == "passed"
    outcome = run_case(session, MODDED)
    assert (outcome.status, outcome.good) == ("refused", True)
    assert "a score mod is not supported" in outcome.detail


@pytest.mark.parametrize("required", ["forward", "all"])
def test_a_required_case_must_not_be_refused(session: Session, required: str) -> None:
    outcome = run_case(session, MODDED, require=frozenset({required}))
    assert (outcome.status, outcome.good) == ("failed", False)
    assert "it is required and was refused" in outcome.detail
    assert outcome.command == (
        f"anyflex conformance --backend cpu.dense --require {required} --case made/mod"
    )
    assert run_case(session, MODDED, require=frozenset({"decode"})).status == "refused"


def test_a_behaviour_that_does_not_apply_is_skipped(session: Session) -> None:
    outcome = run_case(session, behaviour(lambda session: session.needs(False, "no such device")))
    assert (outcome.status, outcome.detail) == ("skipped", "no such device")


def test_whatever_a_case_raises_is_its_failure_with_the_place(session: Session) -> None:
    def explode(session: Session) -> None:
        raise ZeroDivisionError("by zero")

    outcome = run_case(session, behaviour(explode))
    assert outcome.status == "failed"
    assert "ZeroDivisionError: by zero (" in outcome.detail
    assert "test_runner.py:" in outcome.detail


def test_a_kernel_s_own_exception_is_named_and_not_the_wall_around_it() -> None:
    class Exploding(DenseKernel):
        def forward(self, call: Call, out: Outputs) -> None:
            raise MemoryError("no lanes left")

    with open_session("cpu.dense", backend_class=wrong(Exploding)) as session:
        assert "MemoryError: no lanes left (" in run_case(session, PLAIN).detail


def test_a_wrong_number_is_a_failure_that_says_where() -> None:
    class Off(DenseKernel):
        def forward(self, call: Call, out: Outputs) -> None:
            super().forward(call, out)
            out.out[0, 1, 2, 3] += 0.01

    with open_session("cpu.dense", backend_class=wrong(Off)) as session:
        outcome = run_case(session, PLAIN)
    assert outcome.status == "failed"
    assert "out is" in outcome.detail and "at [0, 1, 2, 3]" in outcome.detail


def outcomes(session: Session, expected: dict[str, str]) -> list[Outcome]:
    def fail(session: Session) -> None:
        session.require(False, "it is wrong")

    return list(run_cases(session, [PLAIN, behaviour(fail)], expected=expected))


def test_an_expected_failure_is_expected_and_a_pass_is_not(session: Session) -> None:
    plain, failing = outcomes(session, {"made/behaviour": "known"})
    assert (plain.status, failing.status) == ("passed", "expected")
    assert failing.good and failing.detail == "known: it is wrong"
    plain, failing = outcomes(session, {"made/plain": "was wrong once"})
    assert (plain.status, failing.status) == ("unexpected", "failed")
    assert not plain.good
    assert plain.detail.startswith(
        "it is listed as an expected failure (was wrong once) and passed"
    )


def test_a_session_needs_a_backend_that_can_be_used() -> None:
    with pytest.raises(BackendRefused, match="there is no backend 'cpu.nothing'; registered are"):
        open_session("cpu.nothing").__enter__()
    with pytest.raises(BackendRefused, match="can't be used here: no abacus"):
        open_session("cpu.absent", backend_class=Absent).__enter__()
    with pytest.raises(PluginError, match="libabacus"):
        open_session("cpu.broken", backend_class=Broken).__enter__()


def test_torch_s_threads_are_as_before_after_a_session() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with open_session("cpu.dense", backend_class=Dense) as session:
            assert (torch.get_num_threads(), session.threads) == (1, 2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_cases_are_selected_by_name_pattern_and_subset() -> None:
    cases = every_case()
    assert len(select(cases)) == len(cases)
    assert {case.name for case in select(cases, globs=["options/*", "mods/softcap"])} == {
        name for name in cases if name.startswith("options/") or name == "mods/softcap"
    }
    quick = select(cases, quick=True)
    assert all(case.quick for case in quick) and 0 < len(quick) < len(cases)
    with pytest.raises(ArgumentError, match="no case fits 'options/unknwon'; the nearest is"):
        select(cases, globs=["options/unknwon"])


def test_every_set_that_can_be_required_has_quick_cases() -> None:
    for name in REQUIREMENTS.keys() - {"all"}:
        assert any(name in case.required and case.quick for case in every_case().values()), name
    assert requirements(["forward", "all"]) == {"forward", "all"}
    with pytest.raises(ArgumentError, match="no set of cases 'forwards' to require; there are"):
        requirements(["forwards"])


def test_every_case_has_a_name_of_a_group_and_a_sentence() -> None:
    for name, case in every_case().items():
        assert name == case.name and name.count("/") >= 1
        assert len(case.shows) > 10


def test_cpu_tensors_pose_for_a_device_that_is_not_there() -> None:
    class OfAbacus(Dense):
        def probe(self) -> Rejected:
            return Rejected("no abacus in this machine; buy one")

    with open_session("abacus.beads", "cpu", backend_class=OfAbacus) as session:
        assert (session.device_type, session.device.type) == ("abacus", "cpu")
        for name in (
            "processes/bare",
            "refusals/undeclared",
            "state/split_keys",
            "options/unknown",
        ):
            assert run_case(session, every_case()[name]).status == "passed"
        assert {spec.device_type for spec in session.journal.forwards} <= {"abacus"}
        assert "--device cpu" in run_case(session, PLAIN).command
    with pytest.raises(BackendRefused, match="no abacus"):
        open_session("abacus.beads", backend_class=OfAbacus).__enter__()


@pytest.mark.parametrize(
    ("gradients", "aux"),
    [((), ()), (("q", "k", "v"), ()), (("q", "k", "v"), ("lse",)), (("k", "v"), ("lse",))],
)
def test_a_backend_without_lse_or_its_gradient_passes_what_it_declares(
    gradients: tuple[str, ...], aux: tuple[str, ...]
) -> None:
    honest = type(
        "Honest",
        (ReferenceBackend,),
        {
            "capabilities": dataclasses.replace(
                ReferenceBackend.capabilities,
                gradients=frozenset(gradients),
                aux=frozenset(aux),
                core_backward=False,
            )
        },
    )
    names = ["large_scores/*", "declared/dtypes", "declared/features", "declared/gradients"]
    cases = select(every_case(), globs=[*names, "declared/head_dims"])
    with open_session("cpu.honest", backend_class=honest) as session:
        for outcome in run_cases(session, cases):
            skipped = outcome.case == "declared/gradients" and not gradients
            assert outcome.status == ("skipped" if skipped else "passed"), outcome


def test_an_lse_beside_gradients_that_do_not_reach_it_is_compared() -> None:
    class WrongLse(Right):
        capabilities = dataclasses.replace(
            Right.capabilities, gradients=frozenset({"q", "k", "v"}), core_backward=False
        )

        def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
            return super().compile(spec, artifacts) if spec.needs_backward else Wrong()

    class Wrong(DenseKernel):
        def forward(self, call: Call, out: Outputs) -> None:
            super().forward(call, out)
            assert out.lse is not None and out.max_scores is not None
            out.lse.add_(1)
            out.max_scores.zero_()

    with open_session("cpu.wrong", backend_class=WrongLse) as session:
        outcome = run_case(session, every_case()["declared/dtypes"])
    assert outcome.status == "failed"
    assert outcome.detail.startswith("lse is ")
