"""Writes plugin packages as an installer would leave them: a module and a dist-info folder."""

from __future__ import annotations

import pathlib
import textwrap

__all__ = ["BACKEND", "HEADER", "install"]

HEADER = """
from __future__ import annotations
import torch
from anyflex.plugin import *
from anyflex.plugin import hookimpl

class NullKernel(Kernel):
    def forward(self, call, out):
        out.out.fill_(7.0)
        if out.lse is not None:
            out.lse.zero_()

class Good(Backend):
    capabilities = Capabilities(
        dtypes=frozenset({torch.float32}), head_dim_max=64, different_value_head_dim=True,
        gqa=True, aux=frozenset({"lse"}), core_backward=True,
    )
    options = {"tile": Option(int, 64, "rows of a tile", (16, 64), torch_key="BLOCK_M")}
    def probe(self):
        return Accepted()
    def compile(self, spec, artifacts):
        return NullKernel()
"""

BACKEND = HEADER + "class Mine(Good):\n    pass\n"


def install(
    folder: pathlib.Path,
    distribution: str,
    entry_points: str,
    modules: dict[str, str] | None = None,
    version: str = "1.0",
) -> None:
    """Put a distribution into `folder`.

    Args:
        folder: to be on ``sys.path``.
        distribution: its name.
        entry_points: text of ``entry_points.txt``.
        modules: module name -> source.
        version: of the distribution.
    """
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    (metadata / "entry_points.txt").write_text(textwrap.dedent(entry_points))
    for name, source in (modules or {}).items():
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
