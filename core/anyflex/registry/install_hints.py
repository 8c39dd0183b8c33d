"""Install lines for backends that aren't there.

Nothing is published on an index yet, so the line is the one for a checkout.
"""

from __future__ import annotations

import torch

from anyflex.registry.discovery import normalized

__all__ = ["EXTRAS", "install_line", "known_names"]

EXTRAS = {"cpu": "cpu", "cuda": "cuda", "cuda.triton": "cuda", "xpu": "xpu", "mps": "mps"}
"""Names of the project's own backends, and the extra of ``anyflex`` that installs each."""


def known_names() -> frozenset[str]:
    """Return the names of the project's own backends, installed or not."""
    return frozenset(EXTRAS)


def install_line(name: str) -> str:
    """Return how to install backend `name` (or the default one of a device type), as the end of a
    sentence: ``'install it: pip install ".[cpu]" in a checkout of anyflex'``."""
    extra = EXTRAS.get(name)
    if name == "cuda" and torch.version.hip is not None:
        extra = "rocm"
    extras = _extras()
    if extra == "cuda" and extra not in extras and "rocm" in extras:
        # The portable kernels without those for one vendor; torch has brought Triton.
        return "install cuda.triton: pip install . ./backends/triton in a checkout of anyflex"
    if extra is None:
        return f"anyflex has no backend {name!r} of its own: install a plugin that has one"
    if extra not in extras:
        return f"backend {name!r} is not in this version of anyflex"
    return f'install it: pip install ".[{extra}]" in a checkout of anyflex'


def _extras() -> frozenset[str]:
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        return frozenset(map(normalized, metadata("anyflex").get_all("Provides-Extra") or ()))
    except PackageNotFoundError:
        return frozenset((*EXTRAS.values(), "rocm"))  # run from a checkout that isn't installed
