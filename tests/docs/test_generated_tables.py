"""The tables of the documentation that are made from code are current."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.generated_tables import PAGES, TABLE, with_current_tables


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_of_a_page_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert TABLE.search(text), "the page has lost the marks around its table"
    assert text == with_current_tables(text), "run `python scripts/generated_tables.py`"
