"""The entry point that vLLM looks for leads to `register`."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import anyflex_vllm

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def test_the_entry_point_is_register() -> None:
    text = PROJECT.read_text(encoding="utf-8")
    table = text.partition('[project.entry-points."vllm.general_plugins"]\n')[2]
    found = re.match(r'"(.*)" = "(.*)"', table)
    assert found is not None and found[1] == "anyflex"
    assert EntryPoint(found[1], found[2], "vllm.general_plugins").load() is anyflex_vllm.register
