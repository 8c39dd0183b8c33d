"""Modules that are named by strings, which import-linter can't see."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import anyflex

__all__: list[str] = []

PACKAGE = Path(anyflex.__file__).parent
NAMED = re.compile(r"(anyflex(?:\.[a-z_0-9]+)+)(?::\w+)?")
ALLOWED = {
    "__init__.py": "public names whose modules `import anyflex` doesn't pay for",
    "registry/backend_table.py": "the reference, which stands below the registry",
    "tensors/static_ops.py": "implementations that are imported when an op is called first",
    "testing/__init__.py": "public names whose modules need more than torch",
    "testing/fresh_process.py": "the module whose import is measured",
}
"""File -> what it names by strings, and why not by an import statement."""


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def strings(path: Path) -> set[str]:
    """Modules of the package that a file's string constants name and nothing else."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = NAMED.fullmatch(node.value)
            if match is not None and is_module(match[1]):
                found.add(match[1])
    return found


def test_modules_are_named_by_strings_in_few_places_only() -> None:
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in PACKAGE.rglob("*.py")
        if (names := strings(path))
    }
    assert found.keys() - ALLOWED.keys() == set(), found
    assert found.keys() >= ALLOWED.keys(), "an entry that nothing needs any more"
