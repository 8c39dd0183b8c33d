"""Every line of the misuse list gives its error, or succeeds if the list calls it legal."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import anyflex
from anyflex.errors import AnyflexError, ModTraceError, PerformanceWarning
from tests.misuse import (
    block_mask_rows,
    environment_rows,
    mod_rows,
    option_rows,
    tensor_rows,
)
from tests.misuse.elsewhere import ELSEWHERE, LATER
from tests.misuse.row import Attend, Row
from tests.soak import SOAK

__all__: list[str] = []

ROWS: list[Row] = [
    row
    for module in (tensor_rows, option_rows, block_mask_rows, mod_rows, environment_rows)
    for row in module.TABLE.rows
]
TESTS = Path(__file__).parents[1]
HASHED = "dict_indexed_by_a_symbol"  # Dynamo tells the line of the call for what hashing raises
REFUSED_BY_DYNAMO = {101, 103, 104, 105, 107, 108}
"""Rows of which Dynamo refuses some before it asks a symbol, in its own words."""
OLDER_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_misuse(row: Row) -> None:
    check(row, anyflex.flex_attention)


@pytest.mark.parametrize("row", [row for row in ROWS if row.attends], ids=str)
def test_misuse_with_a_forced_backend(row: Row) -> None:
    check(row, functools.partial(anyflex.flex_attention, backend="reference"))


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.compiled][:: 1 if SOAK else 6], ids=str
)
def test_misuse_compiled(row: Row) -> None:
    torch._dynamo.reset()

    @torch.compile(backend="eager", fullgraph=True)
    def attend(*arguments: Any, **options: Any) -> Any:
        return anyflex.flex_attention(*arguments, **options)

    if OLDER_TORCH and row.call.__name__ == "random_number":
        pytest.skip("torch before 2.13 compiles torch.rand past the tracer: one number a call")
    try:
        check(row, attend, eager=False)
    except torch._dynamo.exc.TorchDynamoException:
        assert row.error is not None and (OLDER_TORCH or row.number in REFUSED_BY_DYNAMO)


def check(row: Row, attend: Attend, *, eager: bool = True) -> None:
    """Make the call, and compare its outcome with the row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        if row.error is None:
            row.call(attend)
            return
        with pytest.raises(row.error) as caught:
            row.call(attend)
    error = caught.value
    text = str(error)
    names = (*row.names, *row.eager) if eager else row.names
    missing = [name for name in names if not re.search(name, text)]
    assert not missing, f"{missing} not in {type(error).__name__}: {text}"
    if isinstance(row.error, type) and issubclass(row.error, AnyflexError):
        assert caught.typename == row.error.__name__, f"raised {caught.typename}"
    if row.line and (eager or row.call.__name__ != HASHED):
        assert isinstance(error, ModTraceError)
        source, first = inspect.getsourcelines(row.call)
        file = inspect.getsourcefile(row.call)
        if eager:
            assert error.file == file
            assert f":{error.line}" in text
            lines = [error.line]
        else:  # the compiler tells the way down to the mod's line
            told = re.findall(rf'{re.escape(str(file))}(?:", line |:)(\d+)', text)
            lines = [int(line) for line in told]
        assert any(line is not None and first <= line < first + len(source) for line in lines)


def test_every_line_of_the_list_is_covered_somewhere() -> None:
    covered = {row.number for row in ROWS} | ELSEWHERE.keys() | LATER.keys()
    assert covered == set(range(1, 159))
    assert not (ELSEWHERE.keys() & LATER.keys())


@pytest.mark.parametrize("number", ELSEWHERE)
def test_a_line_that_is_covered_elsewhere(number: int) -> None:
    file, _, test = ELSEWHERE[number].partition("::")
    path = TESTS / file
    assert path.is_file(), f"row {number}: no file {file!r}"
    assert re.search(rf"def {test}\b", path.read_text(encoding="utf-8")), f"no test {test}"
