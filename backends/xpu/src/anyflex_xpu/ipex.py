"""Report on intel-extension-for-pytorch (IPEX): found through metadata, named by `anyflex doctor`,
not used.

Its development ended with 2.8; since then torch itself supports Intel GPUs. What IPEX has beyond
torch, attention over paged and packed keys, is of no use yet: contract 1 reserves those layouts,
and no spec has them. So nothing is delegated to it. This module only tells users which IPEX they
have and why it is not used.

Importing an IPEX for another torch fails, and not with an ImportError: 2.8.0 prints an error and
then raises AttributeError. So versions are compared first, and IPEX is imported only where they
agree and ``ANYFLEX_XPU_IPEX=1`` asks for it.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

import torch

__all__ = ["VARIABLE", "Ipex", "find", "notes"]

VARIABLE = "ANYFLEX_XPU_IPEX"
DISTRIBUTION = "intel-extension-for-pytorch"
MODULE = "intel_extension_for_pytorch"
_LAYERS = ("PagedAttention", "VarlenAttention")


@dataclass(frozen=True, slots=True)
class Ipex:
    """An installed IPEX.

    Args:
        version: version by its metadata (``"2.8.10+xpu"``), or by the imported module; "" where
            damaged metadata has none.
        build: device that it is compiled for. CPU builds on the package index have no local
            version.
        for_torch: major and minor version of the torch that it is built for.
        imported: whether this process has imported it already.
    """

    version: str
    build: Literal["xpu", "cpu"]
    for_torch: str
    imported: bool

    @property
    def fits(self) -> bool:
        """Whether it is built for the running torch."""
        return self.for_torch == _major_minor(torch.__version__)

    def __str__(self) -> str:
        return f"{DISTRIBUTION} {self.version}".rstrip()


def find() -> Ipex | None:
    """Return the installed IPEX, or None. Imports nothing."""
    module = sys.modules.get(MODULE)
    version = getattr(module, "__version__", None)
    if not isinstance(version, str):
        try:
            version = metadata.version(DISTRIBUTION) or ""
        except metadata.PackageNotFoundError:
            return None
    local = version.partition("+")[2]
    build: Literal["xpu", "cpu"] = "xpu" if local.startswith("xpu") else "cpu"
    return Ipex(version, build, _major_minor(version), module is not None)


def notes() -> list[str]:
    """Return doctor's notes on IPEX: one line, or none where there is nothing to say.

    Under ``ANYFLEX_XPU_IPEX=1`` an XPU build for this torch is imported, to find out whether that
    works.
    """
    text = os.environ.get(VARIABLE, "")
    lines = []
    if text not in ("", "0", "1"):
        lines.append(f"{VARIABLE}={text!r} is not 0 or 1, and counts as unset")
    asked, found = text == "1", find()
    if found is not None:
        lines.append(_verdict(found, asked=asked))
    elif asked:
        lines.append(f"{VARIABLE}=1 is set, and {DISTRIBUTION} is not installed: without effect")
    return lines


def _verdict(found: Ipex, *, asked: bool) -> str:
    what = f"{found} is {'imported already' if found.imported else 'present'}"
    if not found.version:
        return (
            f"{what}, and its metadata names no version. It is not used; its development has "
            f"ended: pip uninstall {DISTRIBUTION}"
        )
    if found.build == "cpu":
        return f"{what}, a CPU build: it has nothing for Intel GPUs and is not used"
    if not found.fits:
        breaks = "" if found.imported else ": it would break at its import"
        return (
            f"{what}, for torch {found.for_torch}, and this is torch {torch.__version__}{breaks}. "
            f"It is not used; its development has ended: pip uninstall {DISTRIBUTION}"
        )
    if not asked:
        return f"{what} and fits torch {torch.__version__}; it is not used unless {VARIABLE}=1"
    try:
        layers = importlib.import_module(f"{MODULE}.llm.modules")
    # A failing import must not end doctor. Releases fail in different ways, so every exception is
    # caught.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"{what}, but can't be imported ({reason}): it is not used"
    there = [name for name in _LAYERS if hasattr(layers, name)]
    return (
        f"{what} and has {' and '.join(there) or 'neither ' + ' nor '.join(_LAYERS)}; it computes "
        "nothing: contract 1 has no paged or packed calls to hand it"
    )


def _major_minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])
