"""Private names of torch: all in one module, and none that import or an eager call needs."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from anyflex.tensors import torch_versions
from anyflex.tensors.torch_versions import (
    DYNAMO_NAMES,
    PRIVATE_NAMES,
    TESTED,
    dynamo_name,
    is_tested,
    release,
)

ROOT = Path(__file__).resolve().parents[2]

# One child process a name, forked of one that has imported torch. The module's lookups find a
# `getattr` of their own, to which torch lacks the name: that reaches C's attributes too.
PROGRAM = """
import importlib, importlib.util, json, math, os, sys, warnings
import torch

def without(path):
    owner, _, last = ("torch." + path).rpartition(".")
    names = owner.split(".")[1:]
    missing_from = torch
    for name in names:
        if not hasattr(missing_from, name):
            importlib.import_module(f"{missing_from.__name__}.{name}")
        missing_from = getattr(missing_from, name)

    def lookup(found, name, *default):
        if found is missing_from and name == last:
            if default:
                return default[0]
            raise AttributeError(f"{found} has no attribute {name!r}")
        return getattr(found, name, *default)

    spec = importlib.util.spec_from_file_location("anyflex.tensors.torch_versions", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    module.getattr = lookup
    sys.modules["anyflex.tensors.torch_versions"] = module
    spec.loader.exec_module(module)
    return module

def check(path):
    module = without(path)
    import anyflex
    missing = [name.path for name in module.missing_names()]
    assert path in missing and all(each.startswith(path) for each in missing), missing
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 40, 8, requires_grad=True) for _ in range(3))
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    mask = anyflex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 40, 40)
    out, aux = anyflex.flex_attention(
        q, k, v, lambda s, b, h, i, j: s + slopes[h] * (j - i), mask,
        return_aux=anyflex.AuxRequest(lse=True), backend="reference",
    )
    (out.sum() + aux.lse.sum()).backward()
    found = [out, aux.lse, q.grad, k.grad, v.grad, slopes.grad]
    dense = [t.detach().double().requires_grad_() for t in (q, k, v, slopes)]
    i, j = torch.arange(40)[:, None], torch.arange(40)[None]
    scores = dense[0] @ dense[1].mT / math.sqrt(8) + dense[3][:, None, None] * (j - i)
    scores = scores.masked_fill(i < j, -math.inf)
    lse = scores.logsumexp(-1)
    wanted = [(scores - lse[..., None]).exp() @ dense[2], lse]
    (wanted[0].sum() + lse.sum()).backward()
    wanted += [t.grad for t in dense]
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-4)

for path in json.loads(sys.argv[2]):
    child = os.fork()
    if child == 0:
        try:
            check(path)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(path, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def without_each() -> dict[str, int]:
    """Exit status of a child for each name that it lacked, and the output of all."""
    paths = [name.path for name in PRIVATE_NAMES]
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM, torch_versions.__file__, json.dumps(paths)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    sys.stderr.write(printed.stderr)
    rows = (line.split(" ") for line in printed.stdout.splitlines())
    return {path: int(status) for path, status in rows}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
@pytest.mark.parametrize("path", [name.path for name in PRIVATE_NAMES])
def test_import_and_an_eager_call_survive_without(path: str, without_each: dict[str, int]) -> None:
    assert without_each[path] == 0


def test_every_name_says_where_it_was_seen_and_what_happens_without_it() -> None:
    rows = [(name.path, name.seen, name.without) for name in PRIVATE_NAMES]
    rows += [(path, *row) for path, row in DYNAMO_NAMES.items()]
    assert len({path for path, _, _ in rows}) == len(rows)
    for path, seen, without in rows:
        assert seen.startswith("2.") and len(without) > 20, path


def test_this_torch_has_the_names_that_it_was_seen_with() -> None:
    for name in PRIVATE_NAMES:
        assert name.found == _covers(name.seen), name.path


@pytest.mark.parametrize("path", DYNAMO_NAMES)
def test_this_torch_has_the_names_of_its_compiler_that_it_was_seen_with(path: str) -> None:
    seen, without = DYNAMO_NAMES[path]
    if _covers(seen):
        assert dynamo_name(path) is not None
    else:
        with pytest.raises(ImportError, match=without):
            dynamo_name(path)


def _covers(seen: str) -> bool:
    oldest, _, newest = seen.partition(" to ")
    return release(oldest) <= release(torch.__version__) <= release(newest or oldest)


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
_OF_TENSORS = {"_base", "_dynamo_marked_constant", "_is_view", "_schema"} | {
    last for last in (name.path.rpartition(".")[2] for name in PRIVATE_NAMES) if last[0] == "_"
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
