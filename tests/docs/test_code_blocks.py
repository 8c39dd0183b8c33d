"""Python blocks of the documentation run unchanged, each page from top to bottom."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import anyflex
from anyflex import registry
from tests.docs.code_blocks import CodeBlock, code_blocks
from tests.soak import SOAK

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))) if code_blocks(page)
]


@pytest.fixture
def compiler_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`torch.compile` traces as usual, and runs its graphs without Inductor, which needs a C++
    compiler. tests/compile partitions graphs and compiles them."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.usefixtures("compiler_without_a_compiler")
def test_the_code_of_a_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem == "transformers" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers isn't installed; its newest needs Python 3.11")
    # A module of its own, because Dynamo imports the module that a function names.
    module = ModuleType("documentation_" + page.stem.replace("-", "_"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.manual_seed(0)
    with registry.isolated(), warnings.catch_warnings():
        warnings.simplefilter("error", anyflex.PerformanceWarning)
        for block in code_blocks(page):
            # AOTInductor can't run without a C++ compiler. tests/compile/test_aoti.py makes one
            # package in CI.
            if "aoti_compile" in block.code and not (SOAK and shutil.which("g++")):
                continue
            run(block, page, vars(module))


def run(block: CodeBlock, page: Path, names: dict[str, object]) -> None:
    # Empty lines in front: a traceback then names the line of the page.
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
    if block.error is None:
        exec(code, names)
        return
    with pytest.raises(getattr(anyflex, block.error), match=block.message):
        exec(code, names)


def test_the_page_of_errors_lists_them_all() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    for name in anyflex.errors.__all__:
        assert re.search(rf"(─ |^){name}\b", text, flags=re.MULTILINE), name
