"""User options, ``kernel_options["mps"]``."""

from __future__ import annotations

from collections.abc import Mapping

from anyflex.plugin import Option, Spec

__all__ = ["OPTIONS", "wants_mpp"]

OPTIONS: Mapping[str, Option] = {
    "mpp": Option(
        bool,
        False,
        "compute forward on the matrix units of an M5, by Metal Performance Primitives",
    ),
}


def wants_mpp(spec: Spec) -> bool:
    """Return whether forward shall run on matrix units."""
    return bool(dict(spec.options).get("mpp", OPTIONS["mpp"].default))
