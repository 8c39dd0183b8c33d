"""Copies of core's packed path and of a backend that takes its layouts, with changes."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyflex
import anyflex.packed
from anyflex.plugin import Backend
from tests.testing.faults.fault import Change, example

__all__ = ["MODEL", "packed_path"]

MODEL = "packed_model.py"
_CORE = Path(anyflex.packed.__file__ or "").parent
_PUBLIC = {
    "Packed": "packed",
    "Step": "packed",
    "flex_attention_packed": "attention",
    "merge_attention": "merge",
}


@contextmanager
def packed_path(
    folder: Path, changes: tuple[Change, ...] = (), *, own: bool = False
) -> Iterator[type[Backend]]:
    """Import copies of `anyflex.packed` and of a backend, with changes.

    Args:
        own: the backend takes packed sequences and pages as they are.
    """
    core = folder / "core"
    shutil.copytree(_CORE, core, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(Path(__file__).parent / MODEL, core / MODEL)
    for change in changes:
        path = core / change.file
        text = path.read_text(encoding="utf-8")
        assert text.count(change.old) == 1, f"{change.file} has {change.old!r} not once"
        path.write_text(text.replace(change.old, change.new), encoding="utf-8")
    paths = anyflex.packed.__path__
    # This imports the modules that the copies are to replace.
    public = {name: getattr(anyflex, name) for name in _PUBLIC}
    mine = {name: sys.modules.pop(name) for name in _modules()}
    anyflex.packed.__path__ = [str(core)]
    importlib.invalidate_caches()
    try:
        with example(folder) as backend:
            for name, module in _PUBLIC.items():
                setattr(
                    anyflex,
                    name,
                    getattr(importlib.import_module(f"anyflex.packed.{module}"), name),
                )
            model = importlib.import_module("anyflex.packed.packed_model").PackedBackend
            yield model if own else backend
    finally:
        anyflex.packed.__path__ = paths
        for name in _modules():
            del sys.modules[name]
        sys.modules.update(mine)
        for name, module in mine.items():
            setattr(anyflex.packed, name.rpartition(".")[2], module)
        for name, function in public.items():
            setattr(anyflex, name, function)


def _modules() -> list[str]:
    return [name for name in sys.modules if name.startswith("anyflex.packed.")]
