"""Writes the charts and the tables, or says which of them are not current."""

from __future__ import annotations

import sys

from scripts.generated_tables import with_current_tables
from scripts.speed_pages.charts import CHARTS, FOLDER
from scripts.speed_pages.tables import PAGES, TABLES

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    current = {FOLDER / name: draw() for name, draw in CHARTS.items()}
    for page in PAGES:
        current[page] = with_current_tables(page.read_text(encoding="utf-8"), TABLES)
    stale = [
        file
        for file, text in current.items()
        if not file.exists() or file.read_text(encoding="utf-8") != text
    ]
    if arguments == ["--check"]:
        for file in stale:
            print(f"{file.name} is not current: run `python -m scripts.speed_pages`")
        return int(bool(stale))
    for file in stale:
        file.write_text(current[file], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
