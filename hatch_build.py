"""Makes the extras of the distribution `anyflex`, when it is built or installed.

In a checkout an extra names the folders beside this file by absolute `file://` URIs, so that
`pip install ".[cpu]"` installs the backend of this very checkout, from any directory and with
old and new pips. With `ANYFLEX_RELEASE=1` it names released versions instead: the package index
refuses URIs in metadata.

The tables are in pyproject.toml, `tool.hatch.metadata.hooks.custom`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

__all__ = ["ExtrasHook", "SdistGuard", "make_extras"]


class ExtrasHook(MetadataHookInterface):
    """Fills `optional-dependencies`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the extras in the project's metadata (not called where an sdist recorded them)."""
        release = os.environ.get("ANYFLEX_RELEASE") == "1"
        metadata["optional-dependencies"] = make_extras(
            self.config, Path(self.root), release=release
        )


class SdistGuard(BuildHookInterface[Any]):
    """Keeps this machine's folders out of an sdist: every wheel made from it would name them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Raise ValueError if an extra is a URI."""
        extras = self.metadata.core.optional_dependencies
        for name, lines in extras.items():
            if any(" @ " in line for line in lines):
                raise ValueError(
                    f"the extra {name!r} names a folder of this checkout; build the sdist with "
                    "ANYFLEX_RELEASE=1"
                )


def make_extras(config: Mapping[str, Any], root: Path, *, release: bool) -> dict[str, list[str]]:
    """Return extra -> requirements.

    Args:
        config: the hook's tables `tools`, `folders`, `backends`, `unions` and `index-range`.
        root: the checkout; the folders of `folders` count from here.
        release: name released versions instead of folders.

    Raises:
        ValueError: an extra names a package that `folders` lacks, or a union an unknown extra.
    """
    folders: Mapping[str, str] = config["folders"]
    backends: Mapping[str, list[str]] = config["backends"]

    def folder(package: str) -> Path:
        return root / folders[package.partition("[")[0]]

    def requirement(package: str) -> str:
        if release:
            return f"{package}{config['index-range']}"
        return f"{package} @ {folder(package).resolve().as_uri()}"

    extras = {name: list(wanted) for name, wanted in config["tools"].items()}
    for name, packages in backends.items():
        if unknown := [each for each in packages if each.partition("[")[0] not in folders]:
            raise ValueError(f"extra {name!r} names {unknown}, which `folders` does not list")
        if all((folder(each) / "pyproject.toml").is_file() for each in packages):
            extras[name] = [requirement(package) for package in packages]
    for name, members in config["unions"].items():
        if unknown := [member for member in members if member not in backends]:
            raise ValueError(f"union {name!r} names {unknown}, which are no extras of `backends`")
        lines = [line for member in members for line in extras.get(member, [])]
        if lines:
            extras[name] = list(dict.fromkeys(lines))
    return extras
