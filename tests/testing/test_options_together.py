"""The kit's case of two options at once, on the example plugin with an option more."""

from __future__ import annotations

from pathlib import Path

import pytest

from anyflex.testing.cases import every_case
from anyflex.testing.runner import Outcome, run_case
from anyflex.testing.session import open_session
from tests.testing.faults.fault import Change, example

ANOTHER = Change(
    "backend.py",
    "            choices=(16, 32, 64, 128, 256, 512),\n        )\n",
    "            choices=(16, 32, 64, 128, 256, 512),\n        ),\n"
    '        "calm": Option(bool, False, "nothing"),\n',
)
_CHOSEN = "        # A spec holds those options that the user gave.\n"


def with_both(*lines: str) -> Change:
    """Lines that `make` runs first where both options are given."""
    text = "".join(f"            {line}\n" for line in lines)
    return Change("backend.py", _CHOSEN, f"        if len(spec.options) == 2:\n{text}{_CHOSEN}")


def refusing(message: str) -> Change:
    return with_both(
        "from anyflex.errors import ArgumentError", f"raise ArgumentError({message!r})"
    )


HALVING = with_both(
    "class Halving(ExampleKernel):",
    "    def forward(self, call, out):",
    "        super().forward(call, out)",
    "        out.out.mul_(0.5)",
    "return Halving(spec, load_source(stored.decode()), keys_at_once=64)",
)


def outcome(folder: Path, *changes: Change) -> Outcome:
    with (
        example(folder, changes) as backend,
        open_session("cpu.example", backend_class=backend) as session,
    ):
        return run_case(session, every_case()["options/together"])


@pytest.mark.parametrize("changes", [(ANOTHER,), (ANOTHER, refusing("not calm with 512 keys"))])
def test_right_numbers_or_a_refusal_by_name_pass(
    changes: tuple[Change, ...], tmp_path: Path
) -> None:
    assert outcome(tmp_path, *changes).status == "passed"


@pytest.mark.parametrize(
    ("change", "says"),
    [(HALVING, "out is "), (refusing("too much"), "names neither: too much")],
)
def test_wrong_numbers_and_a_refusal_without_names_fail(
    change: Change, says: str, tmp_path: Path
) -> None:
    found = outcome(tmp_path, ANOTHER, change)
    assert found.status == "failed"
    assert says in found.detail


def test_one_option_is_skipped(tmp_path: Path) -> None:
    found = outcome(tmp_path)
    assert found.status == "skipped"
    assert "fewer than two options" in found.detail
