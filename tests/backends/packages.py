"""The backends of this repository that install from a folder: their tests, their imports."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.soak import SOAK

__all__ = ["FOLDER", "imported_modules", "run_tests"]

FOLDER = Path(__file__).resolve().parents[2] / "backends"


def run_tests(
    package: str, cache: Path, *arguments: str, cwd: Path | None = None, **variables: str
) -> str:
    """Run a backend's tests as `make test` has installed it; return what pytest prints.

    Args:
        package: name of its folder.
        cache: for its kernels.
        arguments: for pytest.
        cwd: where pytest runs; by default the backend's folder.
        variables: of the environment.
    """
    modules = {point.value for point in entry_points(group="anyflex.backends.v1")}
    if not any(module.startswith(f"anyflex_{package}.") for module in modules):
        pytest.skip(f"anyflex-{package} is not installed: make test")
    environment = {
        n: v for n, v in os.environ.items() if n == "ANYFLEX_SOAK" or not n.startswith("ANYFLEX_")
    }
    environment |= {"ANYFLEX_CACHE_DIR": str(cache), **variables}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=cwd or FOLDER / package,
        env=environment,
        capture_output=True,
        text=True,
        timeout=86_400 if SOAK else 1500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def imported_modules(file: Path) -> list[str]:
    """Return the modules that a file imports, anywhere in it; imports are absolute."""
    modules = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None
            modules.append(node.module)
    return modules
