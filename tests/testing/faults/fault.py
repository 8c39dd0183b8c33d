"""A fault: a few lines of the example plugin written differently."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from anyflex.plugin import Backend

__all__ = ["SOURCE", "Change", "Fault", "example"]

SOURCE = Path(__file__).resolve().parents[3] / "plugins" / "example" / "src" / "anyflex_example"


@dataclass(frozen=True)
class Change:
    """In `file`, the only place of `old` becomes `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """One line of the acceptance list.

    Args:
        number: its number there.
        what: describes the defect.
        changes: that make it.
        case: of the quick subset, that must fail.
        says: part of the failure's message.
    """

    number: int
    what: str
    changes: tuple[Change, ...]
    case: str
    says: str = ""


@contextmanager
def example(folder: Path, changes: tuple[Change, ...] = ()) -> Iterator[type[Backend]]:
    """Import a copy of the example plugin that lies in `folder`, with changes."""
    copy = folder / "anyflex_example"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for change in changes:
        path = copy / change.file
        text = path.read_text(encoding="utf-8")
        assert text.count(change.old) == 1, f"{change.file} has {change.old!r} not once"
        path.write_text(text.replace(change.old, change.new), encoding="utf-8")
    mine = {name: sys.modules.pop(name) for name in _names()}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield importlib.import_module("anyflex_example.backend").ExampleBackend
    finally:
        sys.path.remove(str(folder))
        for name in _names():
            del sys.modules[name]
        sys.modules.update(mine)


def _names() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "anyflex_example"]
