"""Plugins as an editable installation leaves them, without pip: metadata in a folder, sources
where they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.registry.packages import install

__all__ = ["EXAMPLE", "PLUGINS", "ROOT", "entry_points", "run_tests"]

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "plugins"
EXAMPLE = PLUGINS / "example"


def entry_points(plugin: Path) -> str:
    """The entry points that a plugin's pyproject.toml names, as ``entry_points.txt`` has them."""
    text = (plugin / "pyproject.toml").read_text(encoding="utf-8")
    table = text.partition('[project.entry-points."anyflex.backends.v1"]\n')[2]
    lines = table.partition("\n\n")[0]
    return f"[anyflex.backends.v1]\n{lines.replace(chr(34), '')}\n"


def run_tests(plugin: Path, folder: Path, *arguments: str) -> str:
    """Run a plugin's own tests as its author does; return what pytest prints.

    Args:
        plugin: its folder.
        folder: an empty one, for metadata and the cache.
        arguments: for pytest.
    """
    site = folder / "site"
    install(site, plugin.name, entry_points(plugin))
    environment = {n: v for n, v in os.environ.items() if not n.startswith("ANYFLEX_")}
    environment |= {"ANYFLEX_SOAK": os.environ.get("ANYFLEX_SOAK", "")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (site, plugin / "src", ROOT / "core")))
    environment |= {"ANYFLEX_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=plugin,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
