"""The conformance kit's quick subset; `anyflex conformance --backend cpu` runs all."""

from __future__ import annotations

from anyflex.testing import Conformance


class TestConformance(Conformance):
    backend = "cpu"
    require = ("forward", "backward", "decode")
    quick = True
