"""The home page's chart is drawn from the committed results, and from nothing else."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from scripts.speed_chart import CASES, CHART, DIRECTIONS, RESULTS, drawn_chart, speeds

PAGE = RESULTS.read_text(encoding="utf-8")


def test_the_chart_is_current() -> None:
    stored = CHART.read_text(encoding="utf-8")
    assert stored == drawn_chart(PAGE), "run `python scripts/speed_chart.py`"
    assert ElementTree.fromstring(stored).tag.endswith("svg")


def test_speeds_are_the_ratios_of_the_page_s_rows() -> None:
    page = "\n".join(
        [
            "| case | direction | `cuda`, ms | torch.flex | FA4 |",
            *(f"| {case} | {way} | 1.000 | 3.00 | 1.50 |" for case in CASES for way in DIRECTIONS),
            "| another case | forward | 1.000 | 9.00 | 9.00 |",
        ]
    )
    found = speeds(page)
    assert list(found) == [(case, way) for case in CASES for way in DIRECTIONS]
    assert {(each.ours, each.flash) for each in found.values()} == {(3.0, 2.0)}


def test_a_page_without_a_row_or_a_machine_makes_no_chart() -> None:
    case = next(iter(CASES))
    with pytest.raises(KeyError, match=case):
        drawn_chart(PAGE.replace(f"| {case} |", "| renamed |"))
    with pytest.raises(ValueError, match="machine, versions, date and commit"):
        drawn_chart(PAGE.replace("all rows at commit", "at"))


def test_the_home_page_and_the_readme_show_it() -> None:
    name = f"{CHART.parent.name}/{CHART.name}"
    root = RESULTS.parents[2]
    assert f"]({name}" in (root / "docs" / "index.md").read_text(encoding="utf-8")
    assert f"](docs/{name}" in (root / "README.md").read_text(encoding="utf-8")
