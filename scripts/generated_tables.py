"""Writes the tables of the documentation, and of the examples, that are made from code.

    python scripts/generated_tables.py [--check]

A table stands between `<!-- table NAME ... -->` and `<!-- end of table -->`. `--check` writes
nothing and exits 1 if a page is not current.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from anyflex.mod_graph.operations.record import Operation

__all__ = ["PAGES", "with_current_tables"]

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
TRANSFORMERS = ROOT / "plugins" / "transformers"
PAGES = (
    DOCS / "environment.md",
    DOCS / "cli.md",
    DOCS / "mods.md",
    DOCS / "examples.md",
    DOCS / "operations.md",
    DOCS / "transformers.md",
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
    from anyflex.tracing.torch_functions import FACTS, OPERATORS, ROW_FUNCTIONS, SPELLINGS

    reads = (torch.select, torch.Tensor.select)
    known = {id(function) for function in (*SPELLINGS, *FACTORIES, *reads)}
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
    of_rows = sorted(name for name in ROW_FUNCTIONS if not name.startswith("_"))
    rows.append(
        f"| of [rows](#rows-of-captured-tensors): functions and methods | {_listed(of_rows)} |"
    )
    rows.append(f"| facts, known when the mod is traced: `x.` | {_listed(FACTS)} |")
    return "\n".join(["| Written | Known |", "|---|---|", *rows]) + "\n"


def operations() -> str:
    """Operations of mod graphs: operands, result, and values at edges, computed by `evaluate`."""
    from anyflex.mod_graph.operations import RECORDS

    leaves = {"input", "const", "number", "load", "cast", "where", "detach"}
    rows = [_operation(record) for name, record in RECORDS.items() if name not in leaves]
    head = "| Operation | Operands | Result | of -7, 2 | of -7.0, 2.0 | of NaN, 2.0 | Any result |"
    return "\n".join([head, "|---" * 7 + "|", *rows]) + "\n"


def _operation(record: Operation) -> str:
    import torch

    compares = record.reading == "comparison"
    count = record.operands or 0
    cells = [
        f"`{record.name}`",
        f"{count} of " + ", ".join(record.types),
        "bool" if compares else "the operands' type",
    ]
    for kind, operands in (
        (torch.int64, (-7, 2)),
        (torch.float64, (-7.0, 2.0)),
        (torch.float64, (math.nan, 2.0)),
    ):
        name = "float" if kind.is_floating_point else "int"
        value = _value(record.name, kind, operands[:count], compares)
        cells.append(f"{value:.6g}" if name in record.types else "")
    anything = [
        f"{first}, {second}"
        for first, second in ((-7, 0), (0, -1), (-(2**63), -1))
        if "int" in record.types and count == 2 and not _is_defined(record.name, first, second)
    ]
    cells.append("; ".join(anything).replace(str(-(2**63)), "least"))
    return f"| {' | '.join(cells)} |"


def _value(name: str, dtype: torch.dtype, operands: Sequence[float], compares: bool) -> float:
    import torch

    from anyflex.plugin import Node, evaluate, operand_classes, type_class

    if type_class(dtype) not in operand_classes(name):
        return 0
    nodes = [Node("input", dtype, (), str(place)) for place in range(len(operands))]
    places = tuple(range(len(nodes)))
    nodes.append(Node(name, torch.bool if compares else dtype, places))
    inputs = {str(place): torch.tensor(value, dtype=dtype) for place, value in enumerate(operands)}
    (found,) = evaluate(nodes, [len(places)], inputs=inputs, captured=(), ints=(), floats=())
    value: float = found.item()
    return value


def _is_defined(name: str, first: int, second: int) -> bool:
    import torch

    from anyflex.testing.lowering_check import defined_results

    where = defined_results(name, torch.tensor(first), torch.tensor(second))
    return where is None or bool(where)


def transformers_families() -> str:
    """Families of models that the tests compare with eager attention, and in what."""
    families = _module_of(TRANSFORMERS / "tests" / "families.py").FAMILIES
    columns = ["family", "class", "in its attention", "since", *families[0].compared()]
    rows = [[column[0].upper() + column[1:] for column in columns], ["---"] * len(columns)]
    for family in families:
        since = ".".join(map(str, family.since))
        facts = [family.name, f"`{family.model}`", family.shows, since]
        rows.append([*facts, *family.compared().values()])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def transformers_versions() -> str:
    """Differences between the versions of transformers."""
    versions = _module_of(TRANSFORMERS / "src" / "anyflex_transformers" / "versions.py")
    rows = [f"| {each.since} | {each.changed} | {each.handled} |" for each in versions.CHANGES]
    head = f"| Since | In transformers | Here (run with {' and '.join(versions.TESTED)}) |"
    return "\n".join([head, "|---" * 3 + "|", *rows]) + "\n"


def _module_of(path: Path) -> ModuleType:
    """Return the module of a file whose package need not be importable."""
    spec = importlib.util.spec_from_file_location(f"tables_of_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look for the types that annotations name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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
    "operations": operations,
    "spellings": spellings,
    "transformers_families": transformers_families,
    "transformers_versions": transformers_versions,
}


def with_current_tables(text: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """Return a page's text with its tables made anew.

    Args:
        tables: what makes the table of each name.

    Raises:
        KeyError: the page asks for a table that `tables` lacks.
    """
    return TABLE.sub(lambda found: f"{found[1]}\n{tables[found[2]]()}\n{found[3]}", text)


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
