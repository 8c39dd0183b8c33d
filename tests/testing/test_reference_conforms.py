"""The reference is held to the quick subset like any backend, with everything required."""

from __future__ import annotations

from anyflex.testing import Conformance
from tests.soak import SOAK


class TestReference(Conformance):
    backend = "reference"
    require = ("all",)
    quick = True
    # Without masks, mods and operations: tests/masks, tests/mods and tests/spellings have them.
    cases = () if SOAK else ("[!mo]*", "memory/*", "options/*")
