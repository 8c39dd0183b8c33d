"""The pictures of masks are current, and every ready-made mask and mod is documented."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from anyflex import masks, mods
from scripts.mask_pictures import DEAD, FULL, LIVE, PAGE, PICTURES, drawn_pictures, spans


def test_the_pictures_are_current() -> None:
    stored = {path.stem: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")}
    assert stored == drawn_pictures(), "run `python scripts/mask_pictures.py`"
    for text in stored.values():
        assert ElementTree.fromstring(text).tag.endswith("svg")


@pytest.mark.parametrize("name", masks.__all__)
def test_a_mask_has_its_code_and_picture(name: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f"masks.{name}(" in text
    assert f"](pictures/{name}.svg " in text


@pytest.mark.parametrize("name", [*mods.__all__, "with_sinks"])
def test_a_mod_is_documented(name: str) -> None:
    text = (PAGE.parent / "mods.md").read_text(encoding="utf-8")
    assert re.search(rf"`[^`\n]*\b{name}\b", text)


def test_a_picture_shows_full_blocks_in_a_colour_of_their_own() -> None:
    live = [[True] * 4 + [q == 0, False] for q in range(4)]
    assert list(spans(live)) == [
        (0, 0, 4, FULL),
        (0, 4, 1, LIVE),
        (1, 0, 4, FULL),
        (2, 0, 4, FULL),
        (3, 0, 4, FULL),
    ]
    assert len({DEAD, LIVE, FULL}) == 3
