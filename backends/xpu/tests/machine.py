"""Simulated machine: distributions as an installer leaves them, and a torch with Intel GPUs."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

__all__ = ["Machine"]


class Machine:
    """Simulated machine for probing, with only those distributions that a test has installed.

    Args:
        patch: fixture that undoes everything.
        site: an empty folder, the only one with distributions.
    """

    def __init__(self, patch: pytest.MonkeyPatch, site: Path) -> None:
        self.patch, self.site = patch, site
        # Keep the interpreter's own modules and sources that are imported from a checkout.
        kept = [each for each in sys.path if not each.endswith(("site-packages", "dist-packages"))]
        patch.setattr(sys, "path", [str(site), *kept])
        # Editable installations find their packages through these; probing only asks for `triton`.
        for name in [*sys.modules]:
            if name.partition(".")[0] in ("triton", "intel_extension_for_pytorch"):
                patch.delitem(sys.modules, name)
        for name in ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR", "ANYFLEX_XPU_IPEX"):
            patch.delenv(name, raising=False)
        self.torch("2.13.0+xpu")

    def put(
        self,
        name: str,
        version: str | None,
        *,
        points: Sequence[str] = (),
        requires: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
        recorded: bool = True,
    ) -> None:
        """Install a distribution over existing files.

        Args:
            name, version: name and version. None: the metadata has no version.
            points: entry points of group ``triton.backends``.
            requires: requirements of the distribution.
            files: path -> content.
            recorded: whether its RECORD lists its files.
        """
        info = self.site / f"{name.replace('-', '_')}-{version or 0}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}"]
        lines += [] if version is None else [f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        text = "".join(f"{point} = triton.backends.{point}\n" for point in points)
        (info / "entry_points.txt").write_text(f"[triton.backends]\n{text}")
        record = []
        for path, content in (files or {}).items():
            (self.site / path).parent.mkdir(parents=True, exist_ok=True)
            (self.site / path).write_text(content)
            record.append(f"{path},sha256=0,{len(content)}\n")
        if recorded:
            (info / "RECORD").write_text("".join(record))
        importlib.invalidate_caches()

    def put_triton(self, name: str, version: str | None, *backends: str, **more: Any) -> None:
        """Install a flavour of Triton."""
        library = f"the library of {name}"
        files = {
            "triton/__init__.py": "raise SystemExit('imported')",
            "triton/_C/libtriton.so": library,
        }
        files |= {f"triton/backends/{each}/compiler.py": "" for each in backends}
        self.put(name, version, points=backends, files=files, **more)

    def torch(self, version: str, *, devices: Sequence[Mapping[str, Any]] = ({},)) -> None:
        """Simulate a torch of that version, with devices of these properties besides the usual
        ones."""
        built = "xpu" in version
        usual = {
            "name": "Intel(R) Data Center GPU Max 1100",
            "driver_version": "1.6.32224",
            "has_subgroup_matrix_multiply_accumulate": True,
        }
        found = [types.SimpleNamespace(**{**usual, **each}) for each in devices] if built else []
        self.patch.setattr(torch, "__version__", version)
        self.patch.setattr(torch.version, "xpu", "20250302" if built else None)
        self.patch.setattr(torch.xpu, "is_available", lambda: bool(found))
        self.patch.setattr(torch.xpu, "device_count", lambda: len(found))
        self.patch.setattr(torch.xpu, "get_device_properties", found.__getitem__)
