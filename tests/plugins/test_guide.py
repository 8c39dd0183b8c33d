"""A reader who follows the guide has a backend that the conformance kit accepts."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.code_blocks import code_blocks
from tests.plugins.installed import ROOT, entry_points
from tests.registry.packages import install
from tests.soak import SOAK

PAGE = ROOT / "docs" / "plugins.md"
TUTORIAL = ROOT / "docs" / "plugin-tutorial.md"


def steps() -> str:
    """The code of the steps without the trials: imports, functions, classes and tables."""
    code = [block.code for block in code_blocks(TUTORIAL) if block.error is None]
    kept = [node for node in ast.parse("\n".join(code)).body if _is_definition(node)]
    return "\n\n".join(ast.unparse(node) for node in kept)


def _is_definition(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        return all(isinstance(name, ast.Name) and name.id.isupper() for name in node.targets)
    return isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package of the guide as an editable installation leaves it."""
    page = PAGE.read_text(encoding="utf-8")
    project = re.search(r"```toml\n(\[build-system\].*?)```", page, flags=re.DOTALL)
    assert project is not None
    folder = tmp_path / "anyflex-mine"
    (folder / "anyflex_mine").mkdir(parents=True)
    (folder / "anyflex_mine" / "__init__.py").write_text(steps(), encoding="utf-8")
    (folder / "pyproject.toml").write_text(project[1], encoding="utf-8")
    install(tmp_path / "site", "anyflex-mine", entry_points(folder))
    return folder


def test_the_backend_of_the_guide_passes_the_quick_subset(package: Path, tmp_path: Path) -> None:
    environment = {n: v for n, v in os.environ.items() if not n.startswith("ANYFLEX_")}
    paths = (tmp_path / "site", package, ROOT / "core")
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    environment |= {"ANYFLEX_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = "conformance --quick --backend cpu.mine --require forward,backward".split()
    if not SOAK:
        command += ["--case", "forward/*", "--case", "backward/*"]
    done = subprocess.run(
        [sys.executable, "-m", "anyflex", *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Undeclared calls are refused: a few operations and types, no more.
    counts = re.search(r"(\d+) passed", done.stdout)
    assert counts is not None and int(counts[1]) > (350 if SOAK else 30), done.stdout
