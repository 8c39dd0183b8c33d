"""Progress of work: one line of a terminal, lines of time elsewhere."""

from __future__ import annotations

import io
import math

from anyflex.plugin import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_it_is_one_short_line_on_a_terminal() -> None:
    terminal = Terminal()
    progress = ProgressLine(terminal)
    progress.show("1/9 cases")
    progress.show("2/9 cases, now " + "long" * 40)
    progress.clear()
    assert "\n" not in terminal.getvalue()
    shown = terminal.getvalue().split("\r\x1b[K")
    assert shown[1] == "1/9 cases" and shown[2].startswith("2/9 cases, now long")
    assert len(shown[2]) == 79 and shown[3] == ""


def test_elsewhere_it_is_a_line_when_its_time_has_come() -> None:
    file = io.StringIO()
    for seconds in (3600, math.inf):
        ProgressLine(file, seconds).show("1/9 cases")
    assert file.getvalue() == ""
    progress = ProgressLine(file, 0.0)
    progress.show("2/9 cases")
    progress.clear()
    assert file.getvalue() == "2/9 cases\n"
