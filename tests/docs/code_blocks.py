"""Finder of the code blocks of a markdown page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CodeBlock", "code_blocks"]

FENCE = re.compile(
    r"(?:^<!-- raises (?P<error>\w+): (?P<message>[^\n]*) -->\n)?"
    r"^```python\n(?P<code>.*?)^```$",
    flags=re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class CodeBlock:
    """A python block of a page.

    Args:
        line: of the page, where the code begins, from 1.
        code: its text.
        error: name of the error that it must raise, from the comment above it; or None.
        message: what the error's message must match.
    """

    line: int
    code: str
    error: str | None
    message: str


def code_blocks(page: Path) -> list[CodeBlock]:
    """Return the python blocks of `page`, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        CodeBlock(
            text.count("\n", 0, match.start("code")) + 1,
            match["code"],
            match["error"],
            match["message"] or "",
        )
        for match in FENCE.finditer(text)
    ]
