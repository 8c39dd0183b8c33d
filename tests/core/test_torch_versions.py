"""Private names of torch: all in one module."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from anyflex.tensors import torch_versions
from anyflex.tensors.torch_versions import TESTED, is_tested
from tests.soak import SOAK

ROOT = Path(__file__).resolve().parents[2]

WITHOUT = """
import sys, torch
{}
import anyflex
query = torch.zeros(1, 1, 4, 8, requires_grad=True)
mask = anyflex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 4, 4)
out = anyflex.flex_attention(query, query, query, None, mask, backend="reference")
out.sum().backward()
print(query.grad.shape == query.shape)
"""


MISSING = (
    "del torch._C._len_torch_dispatch_stack, torch._C._is_fwd_grad_enabled",
    "del torch._C._functorch.maybe_current_level, torch._C._functorch.maybe_get_level",
    "del torch._C._functorch.peek_interpreter_stack",
    "import torch.compiler._cache as c; del torch.compiler._cache, c.CacheArtifact",
    "import torch.compiler._cache as c; del c.CacheArtifactFactory._artifact_types",
    "sys.modules['torch.compiler._cache'] = None",
    "get = torch._C._get_fp32_precision_getter; del torch._C._get_fp32_precision_getter\n"
    "torch.backends._FP32Precision.__getattr__ = lambda self, name: get(self.backend, self.op)",
)


# Together they take one process, each alone one of its own.
@pytest.mark.parametrize("missing", ["\n".join(MISSING), *(MISSING if SOAK else [])])
def test_a_torch_without_a_private_name_is_imported_and_used(missing: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing)], capture_output=True, text=True
    )
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize(
    ("version", "covered"),
    [
        (f"{TESTED[0]}.0", True),
        (f"{TESTED[1]}.1+cu130", True),
        ("2.10.2", False),
        ("3.0.0a0+git1234", False),
    ],
)
def test_a_version_is_covered_by_the_tests_or_not(version: str, covered: bool) -> None:
    assert is_tested(version) is covered


def _private(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each use of a private name of torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(name.startswith("_") for name in names):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch.") and "._" in alias.name:
                    yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            known = text.startswith("torch.") and re.search(r"\._[a-zA-Z]", text)
            if known or node.attr in _OF_TENSORS:
                yield node.lineno, text
        elif isinstance(node, ast.Constant) and str(node.value).startswith(_IN_TEXT):
            yield node.lineno, str(node.value)


_IN_TEXT = ("torch._C", "torch._dynamo", "torch._inductor")
_OF_TENSORS = {
    "_base",
    "_current_level",
    "_dynamo_marked_constant",
    "_is_view",
    "_make_subclass",
    "_schema",
    "_version",
}


def test_no_other_module_names_what_is_private_in_torch() -> None:
    found = []
    for folder in ("core/anyflex", "backends", "plugins"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            inside = file.relative_to(ROOT)
            if "tests" in inside.parts or file == Path(torch_versions.__file__):
                continue
            tree = ast.parse(file.read_text(encoding="utf-8"))
            found += [f"{inside}:{line}: {text}" for line, text in _private(tree)]
    assert found == []


def test_the_package_and_its_pages_name_the_versions_that_are_tested() -> None:
    oldest, newest = TESTED
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'dependencies = ["torch>={oldest}", ' in project
    for page in ("README.md", "docs/install.md", "docs/status.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert f"torch {oldest} to {newest}" in text, page
