"""The reference is held to the quick subset like any backend, with everything required."""

from __future__ import annotations

from anyflex.testing import Conformance
from tests.soak import SOAK


class TestReference(Conformance):
    backend = "reference"
    require = ("all",)
    quick = True
    # Without masks, mods and operations, which tests/masks, tests/mods and tests/spellings have;
    # compiled calls and processes are those of tests/compile and tests/misuse, and ragged calls
    # those of tests/packed and tests/paging.
    cases = (
        ()
        if SOAK
        else ("[!cmoprs]*", "options/*", "precision/*", "r[!a]*", "s[!h]*", "shapes/*_1*")
    )
