"""Versions of vLLM that the plugin was run with: data and a check, which need no vLLM."""

from __future__ import annotations

import anyflex

__all__ = ["TESTED", "check_version"]

TESTED = ("0.32",)
"""Minor versions that all tests were run with. Each release of vLLM changes what backends are."""


def check_version(version: str) -> None:
    """Check that a version of vLLM is one of those that were tested.

    Raises:
        ArgumentError: it is not.
    """
    if ".".join(version.split(".")[:2]) not in TESTED:
        raise anyflex.ArgumentError(
            f"anyflex-vllm must run with vLLM {' or '.join(TESTED)}, the versions it was tested "
            f"with, got vLLM {version}: install one of those, or leave the plugin out by "
            "`pip uninstall anyflex-vllm` or by a VLLM_PLUGINS that doesn't name anyflex"
        )
