"""The conformance kit's quick subset; `anyflex conformance --backend cpu` runs all, and
`make soak` with interpreted mods."""

from __future__ import annotations

import dataclasses

from soak import SOAK

from anyflex.plugin import Artifacts, Kernel, Spec
from anyflex.testing import Conformance
from anyflex_cpu.backend import CpuBackend


class TestConformance(Conformance):
    backend = "cpu"
    require = ("forward", "backward", "decode")
    quick = True


class Interpreted(CpuBackend):
    """The CPU backend with all mods interpreted."""

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        options = (("mods", "interpreter"),)
        return super().compile(dataclasses.replace(spec, options=options), artifacts)


class TestInterpreted(Conformance):
    backend = "cpu.interpreted"
    backend_class = Interpreted
    require = ("forward", "backward")
    cases = () if SOAK else ("mods/[a-e]*", "operations/*", "backward/[b-d]*")
    quick = not SOAK
