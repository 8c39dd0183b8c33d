"""The reference is held to the quick subset like any backend, with everything required."""

from __future__ import annotations

from anyflex.testing import Conformance


class TestReference(Conformance):
    backend = "reference"
    require = ("all",)
    quick = True
