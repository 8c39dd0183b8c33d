"""The sources stay small enough for somebody else to take over."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 68_000
"""Maximum number of lines. What a new backend brings is counted apart, by a line of its own."""
FOLDERS = ("core", "backends/cpu", "backends/cuda", "backends/triton", "backends/xpu", "plugins")
SUFFIXES = {".py", ".c", ".cpp", ".h", ".cu"}
LEFT_OUT = {"tests", "build", "dist", "__pycache__", ".venv"}


def sources() -> list[Path]:
    return [
        file
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*")
        if file.suffix in SUFFIXES and LEFT_OUT.isdisjoint(file.relative_to(ROOT).parts)
    ]


def test_the_sources_of_core_backends_and_plugins_have_at_most_68_000_lines() -> None:
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in sources()}
    assert min(sum(file.is_relative_to(ROOT / folder) for file in lines) for folder in FOLDERS) > 0
    assert sum(lines.values()) <= LIMIT, sorted(lines, key=lambda file: -lines[file])[:10]
