"""The inspector reports each broken promise of a kernel and of `supports`, and no kept one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.plugin import Accepted, Call, Kernel, Outputs, Rejected, Spec, TensorSpec
from anyflex.testing.guarded_tensors import Guarded, same_bytes
from anyflex.testing.inspector import Journal, ask
from anyflex.testing.session import ConformanceFailure, Session, open_session
from tests.testing.backends import Dense, DenseKernel, wrong

QUERY = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(0))


def violations(kernel: type[Kernel], query: Tensor = QUERY) -> list[str]:
    """Violations that the inspector notes in one call of a kernel."""
    with open_session("cpu.dense", backend_class=wrong(kernel)) as session:
        anyflex.flex_attention(query, query, query, return_lse=True, backend="cpu.dense")
        return session.journal.violations


class After(DenseKernel):
    def forward(self, call: Call, out: Outputs) -> None:
        super().forward(call, out)
        out.out.as_strided((2,), (1,), out.out.storage_offset() + out.out.numel()).zero_()


class Before(DenseKernel):
    def forward(self, call: Call, out: Outputs) -> None:
        super().forward(call, out)
        out.out.as_strided((1,), (1,), out.out.storage_offset() - 3).zero_()


class Unwritten(DenseKernel):
    def forward(self, call: Call, out: Outputs) -> None:
        super().forward(call, Outputs(torch.empty_like(out.out), out.lse, None))
        out.out[..., :3] = 0


class Replaced(DenseKernel):
    def forward(self, call: Call, out: Outputs) -> None:
        out.out.data = torch.empty_like(out.out)
        super().forward(call, out)


class Restrided(DenseKernel):
    def forward(self, call: Call, out: Outputs) -> None:
        super().forward(call, out)
        out.out.as_strided_((1, 2, 9, 8), (144, 8, 16, 1))


class InputWritten(DenseKernel):
    def forward(self, call: Call, out: Outputs) -> None:
        super().forward(call, out)
        call.key[0, 0, 0, 0] += 1
        call.key[0, 0, 0, 0] -= 3


class Undescribed(DenseKernel):
    def describe(self, call: Call) -> str:
        raise OSError("no name")


class Misdescribed(DenseKernel):
    def describe(self, call: Call) -> str:
        return 3  # type: ignore[return-value]


class NoWorkspace(DenseKernel):
    def workspace(self, call: Call, direction: str) -> tuple[TensorSpec, ...]:
        return None  # type: ignore[return-value]


class Returning(DenseKernel):
    def forward(self, call: Call, out: Outputs) -> None:
        super().forward(call, out)
        return out.out  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (Undescribed, "describe() raised OSError: no name"),
        (Misdescribed, "describe() must return a str, got 3"),
        (NoWorkspace, "workspace() must return a tuple of TensorSpec objects, got None"),
        (Returning, "a kernel must return None, got a Tensor"),
        (After, "forward: out: 8 bytes after its end were written, 0 bytes away"),
        (Before, "forward: out: 4 bytes before its end were written, 9 bytes away"),
        (Unwritten, "forward: 90 of 144 elements of out were not written"),
        (Replaced, "forward: out: it was given other memory instead of being filled"),
        (Restrided, "forward: out: its strides were changed from (144, 72, 8, 1) to"),
        (InputWritten, "forward: key was written to"),
    ],
)
def test_a_broken_promise_of_a_kernel_is_noted(kernel: type[Kernel], says: str) -> None:
    assert any(says in violation for violation in violations(kernel, QUERY.clone()))


def test_a_kernel_that_keeps_its_promises_is_left_alone() -> None:
    assert violations(DenseKernel) == []
    assert violations(DenseKernel, QUERY.transpose(1, 2).contiguous().transpose(1, 2)) == []


def test_results_pass_through_the_inspector_unchanged() -> None:
    with open_session("cpu.dense", backend_class=Dense) as session:
        watched = anyflex.flex_attention(QUERY, QUERY, QUERY, backend="cpu.dense")
        with session.unwatched():
            bare = anyflex.flex_attention(QUERY, QUERY, QUERY, backend="cpu.dense")
        assert same_bytes(watched, bare)
        assert [name for name, _ in session.journal.launches] == ["cpu.dense", "cpu.dense"]
        assert len(session.journal.forwards) == 2


def test_a_kernel_that_lets_another_backend_compute_is_noted() -> None:
    class Handing(DenseKernel):
        def forward(self, call: Call, out: Outputs) -> None:
            asked = (call.query, call.key, call.value)
            out.out.copy_(anyflex.flex_attention(*asked, backend="reference"))

    with open_session("cpu.dense", backend_class=wrong(Handing)) as session:
        anyflex.flex_attention(QUERY, QUERY, QUERY, backend="cpu.dense")
        with pytest.raises(ConformanceFailure, match="was computed by 'reference' too"):
            session.check_journal()


@pytest.fixture
def session() -> Iterator[Session]:
    with open_session("cpu.dense", backend_class=Dense) as opened:
        yield opened


SPEC = Spec("cpu", "", torch.float32, 16, 16, fp32_precision="highest")


def notes(backend: Dense, spec: Spec = SPEC) -> str:
    journal = Journal()
    ask(backend, spec, journal)
    return "; ".join(journal.violations)


def test_answers_that_agree_with_the_declaration_are_left_alone(session: Session) -> None:
    backend = Dense("cpu.dense", "cpu")
    assert notes(backend) == ""
    assert notes(backend, dataclasses.replace(SPEC, dtype=torch.float64)) == ""
    assert isinstance(session.ask(SPEC), Accepted)


def test_supports_that_contradicts_the_declaration_is_noted() -> None:
    class Refusing(Dense):
        def supports(self, spec: Spec) -> Rejected:
            return Rejected("never")

    class Accepting(Dense):
        def supports(self, spec: Spec) -> Accepted:
            return Accepted()

    assert "refuses what the capabilities declare: never" in notes(Refusing("a", "cpu"))
    found = notes(Accepting("a", "cpu"), dataclasses.replace(SPEC, dtype=torch.float64))
    assert "accepts what the capabilities don't declare: dtype float64" in found
    found = notes(Accepting("a", "cpu"), dataclasses.replace(SPEC, gradients=("q",)))
    assert "accepts a backward that the capabilities don't declare" in found


def test_supports_that_changes_its_mind_or_raises_is_noted() -> None:
    class Moody(Dense):
        asked = 0

        def supports(self, spec: Spec) -> Accepted | Rejected:
            self.asked += 1
            return Accepted() if self.asked % 2 else Rejected("not now")

    class Raising(Dense):
        def supports(self, spec: Spec) -> Accepted:
            raise KeyError("layout")

    assert "asked again, Rejected(reason='not now')" in notes(Moody("a", "cpu"))
    journal = Journal()
    with pytest.raises(KeyError):
        ask(Raising("a", "cpu"), SPEC, journal)
    assert "supports() raised KeyError instead of refusing" in journal.violations[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int32])
def test_guarded_memory_tells_what_was_written_where(dtype: torch.dtype) -> None:
    guarded = Guarded(torch.empty(3, 5, dtype=dtype).t())
    assert guarded.tensor.stride() == (1, 5)
    assert (guarded.unwritten(), guarded.trespass(), guarded.replaced()) == (15, None, None)
    guarded.tensor[0] = 0
    assert guarded.unwritten() == 12
    guarded.tensor = torch.zeros_like(guarded.tensor)
    assert guarded.replaced() == "it was given other memory instead of being filled"
