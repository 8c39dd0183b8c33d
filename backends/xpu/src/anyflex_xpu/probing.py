"""Checks of what the backend needs on this machine, with a cure for everything that is missing.

The checks ask torch and read metadata and file sizes. They don't import Triton, and only `devices`
starts a device.

Triton comes in flavours that all install into the folder ``triton``: the package index's (NVIDIA
and AMD), ROCm's, and Intel's. Intel's is called triton-xpu (pytorch-triton-xpu before torch 2.10)
and is only on PyTorch's own index. The flavour installed last overwrites the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

__all__ = [
    "INDEX",
    "Device",
    "Flavour",
    "devices",
    "missing",
    "torch_problem",
    "triton_flavours",
    "triton_problem",
]

INDEX = "https://download.pytorch.org/whl/xpu"
"""URL of PyTorch's index of builds for Intel GPUs."""

_INTEL = ("triton-xpu", "pytorch-triton-xpu")
_OTHERS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")
_HIDING = ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR")


@dataclass(frozen=True, slots=True)
class Flavour:
    """A distribution that installs into the folder ``triton``.

    Args:
        name, version: name and version of the distribution.
        intel: whether it has the backend for Intel GPUs.
        library: whether the compiled library in the folder is its own, by size; None where its
            metadata doesn't tell.
    """

    name: str
    version: str
    intel: bool
    library: bool | None

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True, slots=True)
class Device:
    """An Intel GPU.

    Args:
        index: torch's index of the device.
        name: name of the product.
        driver: version of the driver.
        matrix_units: whether it has DPAS, which Triton's products run on.
    """

    index: int
    name: str
    driver: str
    matrix_units: bool

    def __str__(self) -> str:
        return f"{self.name}, driver {self.driver}"


def devices() -> tuple[Device, ...]:
    """Return torch's Intel GPUs. This starts them, so a probe must not call it."""
    found = []
    for index in range(torch.xpu.device_count()):
        facts = torch.xpu.get_device_properties(index)
        units = bool(getattr(facts, "has_subgroup_matrix_multiply_accumulate", True))
        found.append(Device(index, str(facts.name), str(facts.driver_version), units))
    return tuple(found)


def missing() -> str | None:
    """Return what keeps the backend from running here, with the cure, or None."""
    return torch_problem() or triton_problem()


def torch_problem() -> str | None:
    """Return why torch offers no Intel GPU, with the cure, or None."""
    if torch.xpu.is_available():
        return None
    if torch.version.xpu is None:
        return (
            f"torch {torch.__version__} is built without support of Intel GPUs, and the package "
            "index has no build with it: pip uninstall torch, then pip install torch "
            f"--index-url {INDEX}"
        )
    hiding = [f"{name}={os.environ[name]}" for name in _HIDING if os.environ.get(name)]
    cure = (
        f"{' and '.join(hiding)} may hide it"
        if hiding
        else "install the GPU's driver (Intel's compute runtime with Level Zero); on Linux this "
        "user must be allowed to open /dev/dri/renderD*, as members of the group render are"
    )
    return f"torch {torch.__version__} supports Intel GPUs and sees none: {cure}"


def triton_problem() -> str | None:
    """Return why Triton can't compile for an Intel GPU, with the cure, or None."""
    if _loaded_backends() is not None:
        if "intel" in (_loaded_backends() or ()):
            return None
        problem = "the Triton that this process has imported has no backend for Intel GPUs"
        found = triton_flavours()
        return _with_cure(f"{problem} ({_listed(found)})", found)
    folders = _folders()
    found = triton_flavours()
    if not folders:
        return _with_cure("there is no Triton, which compiles the kernels", found)
    in_folder = any((folder / "backends" / "intel").is_dir() for folder in folders)
    if not in_folder and not any(flavour.intel for flavour in found):
        return _with_cure(f"Triton has no backend for Intel GPUs here ({_listed(found)})", found)
    return _overwritten(found)


def triton_flavours() -> tuple[Flavour, ...]:
    """Return the installed distributions that install into the folder ``triton``."""
    found = []
    for name in (*_INTEL, *_OTHERS):
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        points = distribution.entry_points.select(group="triton.backends")
        intel = name in _INTEL or any(point.name == "intel" for point in points)
        # Damaged metadata has no version.
        version = distribution.version or "of no version"
        found.append(Flavour(name, version, intel, _has_library(distribution)))
    return tuple(found)


def _overwritten(found: Sequence[Flavour]) -> str | None:
    """Return why Intel's flavour doesn't work beside others, which may have overwritten its
    library, with the cure, or None."""
    if len(found) < 2 or not any(flavour.intel for flavour in found):
        return None
    owners = [flavour for flavour in found if flavour.library]
    if len(owners) == 1 and owners[0].intel:
        return None
    what = f"{' and '.join(map(str, found))} are installed into the same folder"
    if len(owners) == 1:
        return _with_cure(f"{what}, and {owners[0]}, without Intel GPUs, was the last", found)
    return _with_cure(f"{what}, and which was the last can't be told", found)


def _with_cure(problem: str, found: Sequence[Flavour]) -> str:
    # Uninstall all of them: uninstalling one removes files of the others.
    remove = f"pip uninstall {' '.join(each.name for each in found)}, then " if found else ""
    return f"{problem}: {remove}pip install '{_wanted()}' --index-url {INDEX}"


def _listed(found: Sequence[Flavour]) -> str:
    return ", ".join(map(str, found)) if found else "of no distribution that pip knows"


def _wanted() -> str:
    """Return torch's requirement of Intel's Triton, or its name where torch declares none."""
    try:
        lines = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        lines = []
    asked = [line.partition(";")[0].strip() for line in lines]
    return next((line for line in asked if line.startswith(_INTEL)), _INTEL[0])


def _loaded_backends() -> frozenset[str] | None:
    """Return the names of the backends of an already imported Triton."""
    module = sys.modules.get("triton.backends")
    backends = getattr(module, "backends", None)
    return None if backends is None else frozenset(backends)


def _folders() -> list[Path]:
    try:
        spec = find_spec("triton")
    except ValueError:  # a module without a spec stands in sys.modules
        return []
    return [Path(each) for each in (spec.submodule_search_locations or ())] if spec else []


def _has_library(distribution: metadata.Distribution) -> bool | None:
    for file in distribution.files or ():
        if file.parent.name == "_C" and file.name.startswith("libtriton"):
            if file.size is None:
                return None
            try:
                return Path(str(distribution.locate_file(file))).stat().st_size == file.size
            except OSError:
                return False
    return None
