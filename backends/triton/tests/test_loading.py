"""Functions of modules of kernels, cut where indentation ends: as Python cuts them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import threading
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType

import pytest
import torch

import anyflex
from anyflex.plugin import isolated, register
from anyflex.testing import posing
from anyflex_triton import generated_modules, loading
from anyflex_triton.backend import TritonBackend
from anyflex_triton.loading import loading_kernels

ODD = '''\
@first(
    1,
)
@second
def with_decorators(
    a,
    b,
):
    """Of two lines,

    and more."""

    # A comment.
    return a + b
    # Another one, which ends it.


# Of the next one.
def one_line(a): return a
def follows(a):
    if a:
        return 1

    return 2
CONSTANT = 1
class Kept:
    def method(self):
        return 1
'''


def modules_of(package: str) -> Iterator[ModuleType]:
    """All of them."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations is not None
    for module in pkgutil.iter_modules(found.submodule_search_locations):
        yield importlib.import_module(f"{package}.{module.name}")


def functions_in(modules: Iterable[object]) -> Iterator[FunctionType]:
    """What a decorator of Triton's was put on, the interpreter's too."""
    for module in modules:
        for each in vars(module).values():
            if isinstance(own := getattr(each, "fn", None), FunctionType):
                yield own


def sources_are_pythons(functions: list[FunctionType]) -> None:
    """Compare."""
    wanted = [inspect.getsourcelines(each) for each in functions]
    with loading_kernels():
        found = [inspect.getsourcelines(each) for each in functions]
    assert found == wanted


@pytest.mark.parametrize("package", ["anyflex_triton", "anyflex_cuda"])
def test_sources_of_kernels(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} isn't installed")
    functions = list(functions_in(modules_of(package)))
    assert len(functions) > 50
    sources_are_pythons(functions)


def test_sources_of_mods(monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, object] = {}
    monkeypatch.setattr(generated_modules, "_loaded", written)
    q, k, v = torch.randn(3, 1, 2, 16, 16).unbind()
    with isolated(), posing("cuda"):
        register("cuda.mine", TritonBackend)
        anyflex.flex_attention(
            q, k, v, lambda score, b, h, i, j: score * 0.3125 + i - j, backend="cuda.mine"
        )
    functions = list(functions_in(written.values()))
    assert functions
    sources_are_pythons(functions)


def test_functions_are_cut_as_python_cuts_them() -> None:
    lines = ODD.splitlines(keepends=True)
    starts = [0] + [
        index for index, line in enumerate(lines) if line.startswith("def ") and index > 3
    ]
    assert len(starts) == 4
    for start in starts:
        assert loading._end(lines[start:]) == len(inspect.getblock(lines[start:]))
    # Not one of them: Python finds its end.
    for start in (lines.index("class Kept:\n"), lines.index("    def method(self):\n")):
        assert loading._end(lines[start:]) is None


def test_other_threads_and_later_calls_have_pythons() -> None:
    own = inspect.getblock
    lines = ["def f():\n", '    """A string\n', 'at the margin."""\n', "    return 1\n"]
    elsewhere: list[int] = []
    with loading_kernels():
        with loading_kernels():
            assert len(inspect.getblock(lines)) == 2
        assert len(inspect.getblock(lines)) == 2
        thread = threading.Thread(target=lambda: elsewhere.append(len(inspect.getblock(lines))))
        thread.start()
        thread.join()
    assert elsewhere == [4]
    assert inspect.getblock is own
    assert len(inspect.getblock(lines)) == 4


def test_who_replaces_it_meanwhile_stays() -> None:
    own = inspect.getblock
    try:
        with loading_kernels():
            ours = inspect.getblock
            inspect.getblock = theirs = lambda lines: ours(lines)
        assert inspect.getblock is theirs
        assert len(inspect.getblock(["def f():\n", "    return 1\n", "x = 1\n"])) == 2
        with loading_kernels():
            assert len(inspect.getblock(["def f():\n", "    return 1\n", "x = 1\n"])) == 2
        assert inspect.getblock is theirs
    finally:
        inspect.getblock = own
