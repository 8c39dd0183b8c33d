"""File of expected failures, which a plugin's authors own."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path

from anyflex.errors import ArgumentError

__all__ = ["read_expected"]


def read_expected(path: str | Path, known: Collection[str]) -> dict[str, str]:
    """Read a file of expected failures: one ``case = reason`` a line, ``#`` begins a comment line.

    Args:
        path: of the file, UTF-8.
        known: names of all cases of the kit, selected or not.

    Returns:
        Case -> reason.

    Raises:
        ArgumentError: the file can't be read, a line has another form, a case is there
            twice or doesn't exist.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"the file of expected failures {path} can't be read: {error}") from (
            error
        )
    expected: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, sign, reason = (part.strip() for part in line.partition("="))
        where = f"{path}, line {number}"
        if not sign or not name or not reason:
            raise ArgumentError(f"{where}: expected `case = reason`, got {line!r}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ArgumentError(f"{where}: there is no case {name!r}{hint}")
        if name in expected:
            raise ArgumentError(f"{where}: case {name!r} stands in the file twice")
        expected[name] = reason
    return expected
