"""Functions take few enough parameters to be read: related ones travel as a record."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("core/anyflex", "backends/*/src", "plugins", "bench", "scripts", "examples")
"""Folders with sources; tests have none."""
MOST_PARAMETERS = 20


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for found in sorted(ROOT.glob(folder)):
            yield from sorted(found.rglob("*.py"))


def parameter_count(arguments: ast.arguments) -> int:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len(named) + sum(each is not None for each in (arguments.vararg, arguments.kwarg))


def is_entry_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is launched: such a function takes pointers, numbers and constants alone."""
    decorators = (ast.unparse(each) for each in function.decorator_list)
    return function.name.endswith("_kernel") and any(
        each in ("triton.jit", "gluon.jit") for each in decorators
    )


def crowded(text: str) -> list[tuple[str, int]]:
    """(name, count) of functions with more parameters than allowed, entry kernels apart."""
    return [
        (node.name, count)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (count := parameter_count(node.args)) > MOST_PARAMETERS
        and not is_entry_kernel(node)
    ]


def test_no_function_takes_more_than_twenty_parameters() -> None:
    files = list(sources())
    assert len(files) > 200
    found = {
        f"{file.relative_to(ROOT)}:{name}": count
        for file in files
        for name, count in crowded(file.read_text(encoding="utf-8"))
    }
    assert found == {}


def test_a_crowded_function_is_found_and_an_entry_kernel_is_not() -> None:
    names = ", ".join(f"a{i}" for i in range(MOST_PARAMETERS))
    assert crowded(f"def step({names}): pass") == []
    assert crowded(f"def step({names}, *, b=1): pass") == [("step", MOST_PARAMETERS + 1)]
    assert crowded(f"@triton.jit\ndef step({names}, *rest): pass") == [
        ("step", MOST_PARAMETERS + 1)
    ]
    assert crowded(f"@triton.jit\ndef step_kernel({names}, b): pass") == []
    assert crowded(f"def step_kernel({names}, b): pass") == [("step_kernel", MOST_PARAMETERS + 1)]
