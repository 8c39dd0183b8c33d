"""The conformance kit's quick subset; `anyflex conformance --backend cpu.example` runs all."""

from __future__ import annotations

from anyflex.testing import Conformance


class TestConformance(Conformance):
    backend = "cpu.example"
    require = ("forward", "backward", "decode")
    quick = True
