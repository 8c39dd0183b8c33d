"""Frames of the user's code, which messages and warnings point at."""

from __future__ import annotations

import functools
import os
import sys
import types

import torch

__all__ = ["error_location", "user_location", "user_stacklevel"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_MODS = tuple(
    os.path.join(_PACKAGE, name) + os.sep for name in ("masks", "mods", "testing", "bench")
)
"""Folders of the package that hold mods, whose lines a message names like a user's."""
_COMPOSITION = os.path.join(_PACKAGE, "mods", "composition.py")


@functools.lru_cache(maxsize=4096)
def _is_own(file: str) -> bool:
    """Whether a source file is torch's or anyflex's own, not a mod's."""
    if file.startswith(_TORCH + os.sep) or file == _COMPOSITION:
        return True
    return file.startswith(_PACKAGE + os.sep) and not file.startswith(_MODS)


def user_location() -> tuple[str | None, int | None]:
    """Return file and line of the innermost frame that is neither anyflex's nor torch's."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_own(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None, None


def error_location(error: BaseException) -> tuple[str | None, int | None]:
    """Return file and line of an error's innermost frame that is neither anyflex's nor torch's."""
    place: tuple[str | None, int | None] = (None, None)
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not _is_own(file):
            place = file, traceback.tb_lineno
        traceback = traceback.tb_next
    return place


def user_stacklevel() -> int:
    """Return the `stacklevel` that makes a warning of the caller point at the first frame outside
    of anyflex."""
    level = 1
    frame = sys._getframe(1)
    while (
        frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "anyflex"
    ):
        frame = frame.f_back
        level += 1
    return level
