"""Opt-in to Blackwell's forward, which has never run on a device."""

from __future__ import annotations

import os

__all__ = ["VARIABLE", "blackwell_refused", "unread_value"]

VARIABLE = "ANYFLEX_CUDA_BLACKWELL"


def blackwell_refused() -> str | None:
    """Return why no spec takes Blackwell's forward, or None where the user asks for it."""
    if os.environ.get(VARIABLE) == "1":
        return None
    return f"compiled, and never run by the project; {VARIABLE}=1 takes it"


def unread_value() -> str | None:
    """Return doctor's note on an invalid value of the variable, or None."""
    text = os.environ.get(VARIABLE, "")
    if text in ("", "0", "1"):
        return None
    return f"{VARIABLE}={text!r} is not 0 or 1, and counts as unset"
