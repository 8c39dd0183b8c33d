"""The command lines of the documentation are understood by the command line."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from anyflex.cli.main import _parser

DOCS = Path(__file__).resolve().parents[2] / "docs"
LINES = re.findall(r"^\$ anyflex (.*)$", (DOCS / "cli.md").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("line", LINES)
def test_a_documented_command_line_is_understood(line: str) -> None:
    assert _parser().parse_args(shlex.split(line)).run is not None


def test_every_command_is_documented() -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert LINES
    for command in (
        "doctor",
        "explain",
        "demo",
        "cache",
        "warm",
        "conformance",
        "bench",
        "new-plugin",
    ):
        assert f"`anyflex {command}" in text
