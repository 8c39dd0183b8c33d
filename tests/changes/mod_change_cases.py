"""All ways, by name."""

from __future__ import annotations

# Imported for the ways that they enter.
from tests.changes import object_ways, scope_ways, value_ways
from tests.changes.mod_change import WAYS, ScoreMod

__all__ = ["WAYS", "ScoreMod", "object_ways", "scope_ways", "value_ways"]
