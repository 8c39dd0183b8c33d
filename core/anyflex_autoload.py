"""Entry point that torch calls at the end of ``import torch`` (its group ``torch.backends``).

It re-routes torch's flex attention where ANYFLEX_TORCH asks for it. torch calls it in every
process, and any exception would abort the import of torch: so it looks at the environment, and
leaves the rest to the moment at which ``torch.nn.attention.flex_attention`` is imported. It stands
beside the package because importing anyflex takes longer than torch's users may notice.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any

__all__ = ["autoload"]

_MODULE = "torch.nn.attention.flex_attention"


def autoload() -> None:
    """Arrange for the re-routing that ANYFLEX_TORCH asks for; without it do nothing."""
    if os.environ.get("ANYFLEX_TORCH", "") in ("", "0"):
        return
    if _MODULE in sys.modules:
        _reroute_or_warn()
    else:
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport:
    """Finder that re-routes once torch's module has been imported by the other finders. Where that
    raises, the module is not imported, and a second attempt raises again."""

    searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return torch's own spec, with a loader that re-routes afterwards; None for other
        modules."""
        if name != _MODULE or self.searching:
            return None
        import importlib.util

        self.searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def run_and_reroute(module: Any) -> None:
                del loader.exec_module
                run(module)
                _reroute()

            loader.exec_module = run_and_reroute
        return spec


def _reroute() -> None:
    from anyflex.torch_routing.rerouting import reroute_from_environment

    reroute_from_environment()


def _reroute_or_warn() -> None:
    try:
        _reroute()
    # Somebody imported torch's module while torch was being imported: raising would abort that.
    except Exception as error:  # noqa: BLE001
        import warnings

        warnings.warn(f"ANYFLEX_TORCH: torch is not re-routed: {error!r}", stacklevel=2)
