"""Writes the tables of the documentation, and of the examples, that are made from code.

    python scripts/generated_tables.py [--check]

A table stands between `<!-- table NAME ... -->` and `<!-- end of table -->`. `--check` writes
nothing and exits 1 if a page is not current.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["PAGES", "with_current_tables"]

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
PAGES = (
    DOCS / "environment.md",
    DOCS / "cli.md",
    DOCS / "mods.md",
    DOCS / "examples.md",
    EXAMPLES / "README.md",
)
TABLE = re.compile(r"(<!-- table (\w+).*?-->\n).*?(<!-- end of table -->)", flags=re.DOTALL)


def environment_variables() -> str:
    from anyflex.registry.environment import markdown_table

    return markdown_table()


def exit_codes() -> str:
    from anyflex.cli.exit_codes import ExitCode

    rows = [f"| {code.value} | {code.meaning} |" for code in ExitCode]
    return "\n".join(["| Status | Meaning |", "|---|---|", *rows]) + "\n"


def spellings() -> str:
    """Spellings that a mod may use on a symbol: operators, functions by namespace, methods,
    facts."""
    import torch

    from anyflex.tracing.conversions import FACTORIES
    from anyflex.tracing.torch_functions import FACTS, OPERATORS, SPELLINGS

    known = {id(function) for function in (*SPELLINGS, *FACTORIES)}
    rows = [f"| operators | {_listed(OPERATORS)} |"]
    for written, namespace in (
        ("torch.", torch),
        ("torch.special.", torch.special),
        ("torch.nn.functional.", torch.nn.functional),
        ("methods: `x.", torch.Tensor),
    ):
        names = [
            name
            for name in dir(namespace)
            if not name.startswith("_") and id(getattr(namespace, name, None)) in known
        ]
        label = written + "name()`" if "`" in written else f"`{written}`"
        rows.append(f"| {label} | {_listed(sorted(names))} |")
    rows.append(f"| facts, known when the mod is traced: `x.` | {_listed(FACTS)} |")
    return "\n".join(["| Written | Known |", "|---|---|", *rows]) + "\n"


def examples() -> str:
    """Subject of each example: the first sentence of its docstring."""
    return _examples("`{name}`")


def linked_examples() -> str:
    """`examples`, with links that lead from that folder to its files."""
    return _examples("[{name}]({name})")


def _examples(written: str) -> str:
    files = {path.name: path for path in sorted(EXAMPLES.glob("*.py"))}
    folders = {f"{path.parent.name}/": path for path in sorted(EXAMPLES.glob("*/__init__.py"))}
    rows = []
    for name, path in (files | folders).items():
        shown = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first = " ".join(shown.partition("\n\n")[0].split()).rstrip(".")
        rows.append(f"| {written.format(name=name)} | {first} |")
    return "\n".join(["| File | Shows |", "|---|---|", *rows]) + "\n"


def _listed(names: Iterable[str]) -> str:
    # A bar would end the table's cell.
    return ", ".join(f"`{name}`" for name in names).replace("|", "\\|")


TABLES: dict[str, Callable[[], str]] = {
    "environment_variables": environment_variables,
    "examples": examples,
    "exit_codes": exit_codes,
    "linked_examples": linked_examples,
    "spellings": spellings,
}


def with_current_tables(text: str) -> str:
    """Return a page's text with its tables made anew.

    Raises:
        KeyError: the page asks for a table that TABLES lacks.
    """
    return TABLE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}", text)


def main(arguments: list[str]) -> int:
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = with_current_tables(old)
        if old != new and arguments == ["--check"]:
            print(f"{page.name} is not current: run {Path(__file__).name}", file=sys.stderr)
            return 1
        if old != new:
            page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
