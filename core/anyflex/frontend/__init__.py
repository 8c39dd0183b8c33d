"""From the public functions to the run time."""

from __future__ import annotations
