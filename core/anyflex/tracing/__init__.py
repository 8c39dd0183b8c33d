"""From a user's function to a mod graph or a recording."""

from __future__ import annotations
