"""Backends import each other by the public modules of `anyflex_triton` alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__: list[str] = []

ROOT = Path(__file__).parents[2]
BACKENDS = {path.parent.name: path.parent for path in ROOT.glob("backends/*/src/*/__init__.py")}
PUBLIC = ("anyflex_triton", "anyflex_triton.building", "anyflex_triton.device_functions")


def imported(text: str) -> Iterator[tuple[str, str | None]]:
    """Modules that a source imports anywhere in it, each with a name of it, or None for itself."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def public_names(module: str) -> set[str]:
    """Return ``__all__`` of a module of `PUBLIC`."""
    _, _, name = module.partition(".")
    path = BACKENDS["anyflex_triton"] / f"{name or '__init__'}.py"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{module} has no __all__")


def violations(own: str, text: str) -> list[str]:
    """Return what a source of the package `own` imports of another backend and may not."""
    found = []
    for module, name in imported(text):
        package = module.partition(".")[0]
        if package not in BACKENDS or package == own:
            continue
        if own == "anyflex" or module not in PUBLIC or name not in public_names(module):
            found.append(f"{module}: {name}")
    return found


def test_sources_import_other_backends_by_their_public_names() -> None:
    folders = {**BACKENDS, "anyflex": ROOT / "core/anyflex"}
    names = ("cpu", "cuda", "triton", "xpu", "mps")
    assert set(folders) >= {f"anyflex_{name}" for name in names}
    found = {
        str(file.relative_to(ROOT)): lines
        for own, folder in folders.items()
        for file in folder.rglob("*.py")
        if (lines := violations(own, file.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("own", "line", "found"),
    [
        ("anyflex_cuda", "from anyflex_triton.building import Program", 0),
        ("anyflex_cuda", "from anyflex_triton import TritonBackend", 0),
        ("anyflex_cuda", "from anyflex_triton.device_functions import mask_row", 0),
        ("anyflex_triton", "from anyflex_triton.tiles import mask_row", 0),
        ("anyflex_cuda", "from anyflex_triton.tiles import mask_row", 1),
        ("anyflex_cuda", "from anyflex_triton import tiles", 1),
        ("anyflex_cuda", "import anyflex_triton.building", 1),
        ("anyflex_cuda", "def f():\n    from anyflex_triton.building import annotations", 1),
        ("anyflex_xpu", "from anyflex_cuda.kernel import CudaKernel", 1),
        ("anyflex_mps", "from anyflex_triton.lowering import TRITON", 1),
        ("anyflex_triton", "import anyflex_cpu", 1),
        ("anyflex", "from anyflex_triton.building import Program", 1),
    ],
)
def test_other_imports_are_found(own: str, line: str, found: int) -> None:
    assert len(violations(own, line)) == found
