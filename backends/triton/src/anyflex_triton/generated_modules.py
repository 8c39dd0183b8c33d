"""Generated modules: text that becomes a file, because Triton reads its functions' source."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType

from anyflex.plugin import free_in_child

__all__ = ["load_module"]

_LOCK = threading.Lock()
free_in_child(sys.modules[__name__], "_LOCK")
_loaded: dict[str, ModuleType] = {}
_FOLDER: list[tempfile.TemporaryDirectory[str]] = []


def load_module(text: str) -> ModuleType:
    """Return the module whose source is `text`; equal texts give one object.

    Its file lies in a temporary folder of this process; the text itself is an artifact of the
    spec.
    """
    name = "anyflex_triton_mods_" + hashlib.sha256(text.encode()).hexdigest()[:24]
    with _LOCK:
        found = _loaded.get(name)
        if found is not None:
            return found
        path = _folder() / f"{name}.py"
        # Written to another name and renamed: a forked child shares the folder with its parent,
        # who may be reading.
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(text)
        beside.replace(path)
        loader = importlib.util.spec_from_file_location(name, path)
        assert loader is not None and loader.loader is not None
        module = importlib.util.module_from_spec(loader)
        # Triton looks a function's module up by name.
        sys.modules[name] = module
        try:
            loader.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        # Registered when it is complete; a child forked before makes it anew.
        _loaded[name] = module
        return module


def _folder() -> Path:
    # A forked child must not remove its parent's folder.
    if not _FOLDER or not os.path.isdir(_FOLDER[0].name):
        _FOLDER[:] = [tempfile.TemporaryDirectory(prefix="anyflex-triton-")]
    return Path(_FOLDER[0].name)
