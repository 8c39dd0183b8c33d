"""The kit's case of one option at a time, on the example plugin: which refusals pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from anyflex.testing.cases import every_case
from anyflex.testing.runner import Outcome, run_case
from anyflex.testing.session import open_session
from tests.testing.faults.fault import Change, example

_CHOSEN = "        # A spec holds those options that the user gave.\n"


def refusing(condition: str, message: str) -> Change:
    """`make` refuses calls whose options, `given`, meet a condition."""
    text = (
        "        from anyflex.errors import ArgumentError\n"
        "        given = dict(spec.options)\n"
        f"        if {condition}:\n"
        f"            raise ArgumentError({message!r})\n"
    )
    return Change("backend.py", _CHOSEN, text + _CHOSEN)


def outcome(folder: Path, *changes: Change) -> Outcome:
    with (
        example(folder, changes) as backend,
        open_session("cpu.example", backend_class=backend) as session,
    ):
        return run_case(session, every_case()["options/choices"])


LARGEST = "given.get('keys_at_once') == 512"


def test_right_numbers_pass(tmp_path: Path) -> None:
    assert outcome(tmp_path).status == "passed"


def test_a_choice_that_is_refused_by_name_passes(tmp_path: Path) -> None:
    assert outcome(tmp_path, refusing(LARGEST, "keys_at_once needs more")).status == "passed"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (refusing(LARGEST, "too much"), "keys_at_once=512 doesn't name it: too much"),
        (refusing("given", "no keys_at_once"), "every choice of option keys_at_once is refused"),
    ],
)
def test_a_refusal_without_the_name_and_one_of_all_choices_fail(
    change: Change, says: str, tmp_path: Path
) -> None:
    found = outcome(tmp_path, change)
    assert found.status == "failed"
    assert says in found.detail
