"""From a user's function to a mod graph."""

from __future__ import annotations
