"""File of expected failures: allowed and refused content."""

from __future__ import annotations

from pathlib import Path

import pytest

from anyflex.errors import ArgumentError
from anyflex.testing.expected import read_expected

KNOWN = ("masks/causal", "mods/softcap", "options/unknown")


def written(folder: Path, text: str) -> Path:
    path = folder / "expected.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_cases_and_their_reasons_are_read(tmp_path: Path) -> None:
    text = "# known\n\nmods/softcap = tanh is coarse, a = b\n  masks/causal=later  \n"
    assert read_expected(written(tmp_path, text), KNOWN) == {
        "mods/softcap": "tanh is coarse, a = b",
        "masks/causal": "later",
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mods/softcap", "line 1: expected `case = reason`"),
        ("mods/softcap =", "line 1: expected `case = reason`"),
        ("= why", "line 1: expected `case = reason`"),
        ("\nmods/softcapp = why", "line 2: there is no case 'mods/softcapp'; the nearest is"),
        ("mods/* = why", "there is no case"),
        ("mods/softcap = a\nmods/softcap = b", "line 2: case 'mods/softcap' stands in the file"),
    ],
)
def test_anything_else_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ArgumentError, match=says.replace("*", r"\*")):
        read_expected(written(tmp_path, text), KNOWN)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="can't be read"):
        read_expected(tmp_path / "nothing.txt", KNOWN)
