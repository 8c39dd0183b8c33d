"""The kit as tests in a plugin's own pytest suite."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from anyflex.errors import ArgumentError, BackendRefused
from anyflex.plugin import Backend
from anyflex.testing.cases import every_case
from anyflex.testing.expected import read_expected
from anyflex.testing.runner import Outcome, run_cases
from anyflex.testing.selection import requirements, select
from anyflex.testing.session import Session, open_session

__all__ = ["Conformance"]


class Conformance:
    """Subclass it in a test module: every case of the kit becomes one test of pytest.

    The class's name must begin with ``Test``. The backend is put under inspection once for the
    class. A case that it refuses, as its declaration says, or that doesn't apply is a skipped
    test; an expected failure is an xfailed one. Where the backend's probe refuses the machine all
    tests are skipped. pytest is imported when a test runs, and not before.

    Attributes:
        backend: the registered name.
        backend_class: the class for that name; None for the registered one.
        device: where tensors are; None for the name's device type.
        require: names of the sets that must be accepted: "forward", "backward", "decode", "all".
        quick: only the quick subset.
        cases: patterns of case names; none for all.
        expected: the file of expected failures; a relative path counts from the test module.

    Examples:
        >>> class TestMine(Conformance):
        ...     backend = "cpu.mine"
        ...     require = ("forward", "backward")
    """

    backend: ClassVar[str] = ""
    backend_class: ClassVar[type[Backend] | None] = None
    device: ClassVar[str | None] = None
    require: ClassVar[Collection[str]] = ()
    quick: ClassVar[bool] = False
    cases: ClassVar[Collection[str]] = ()
    expected: ClassVar[str | Path | None] = None

    _stack: ClassVar[ExitStack]
    _session: ClassVar[Session]

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test a case, with the case's name as its id."""
        if "conformance_case" in metafunc.fixturenames:
            chosen = select(every_case(), quick=self.quick, globs=_listed(self.cases))
            metafunc.parametrize("conformance_case", [case.name for case in chosen])

    @classmethod
    def setup_class(cls) -> None:
        """Put the backend under inspection."""
        import pytest

        if not cls.backend:
            raise ArgumentError(
                f"{cls.__qualname__}: set the attribute backend to the backend's name, for "
                "example 'cpu.mine'"
            )
        requirements(_listed(cls.require))
        cls._stack = ExitStack()
        try:
            cls._session = cls._stack.enter_context(
                open_session(cls.backend, cls.device, backend_class=cls.backend_class)
            )
        except BackendRefused as error:
            pytest.skip(f"not run: {error}")

    @classmethod
    def teardown_class(cls) -> None:
        """Put the registry back."""
        cls._stack.close()

    def test_case(self, conformance_case: str) -> None:
        """Run one case."""
        import pytest

        outcome = self._outcome(conformance_case)
        if outcome.status in ("refused", "skipped"):
            pytest.skip(f"{outcome.status}: {outcome.detail}")
        if outcome.status == "expected":
            pytest.xfail(outcome.detail)
        if not outcome.good:
            pytest.fail(f"{outcome.shows}\n{outcome.detail}", pytrace=False)

    def _outcome(self, name: str) -> Outcome:
        cases = every_case()
        expected = None
        if self.expected is not None:
            folder = Path(inspect.getfile(type(self))).parent
            expected = read_expected(folder / self.expected, cases)
        (outcome,) = run_cases(
            self._session,
            [cases[name]],
            require=requirements(_listed(self.require)),
            expected=expected,
        )
        return outcome


def _listed(words: Collection[str]) -> list[str]:
    return [words] if isinstance(words, str) else list(words)
