"""``anyflex new-plugin NAME --device TYPE``: a copy of the example backend under another name.

The copy is a whole package: sources, tests, entry point. It computes everything from the start;
its author replaces it piece by piece and keeps the tests passing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from pathlib import Path

from anyflex.bench.usage_errors import NotRun, WrongUsage
from anyflex.cli.exit_codes import ExitCode

__all__ = ["add_parser", "run"]

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_TAKEN = tuple("cpu cuda triton xpu mps example torch-flex flash4 transformers vllm".split())
"""Names of this project's own distributions, without ``anyflex-``."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``new-plugin``."""
    parser = subparsers.add_parser(
        "new-plugin",
        help="begin a backend of your own: a working package to change",
        description=(
            "Write a package anyflex-NAME with a backend that works: forward and backward in "
            "torch operations, its tests, and the entry point. See the guide 'Write a plugin'."
        ),
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        help="of the distribution anyflex-NAME and the package anyflex_NAME: lower case letters, "
        "digits, single dashes",
    )
    parser.add_argument(
        "--device", required=True, metavar="TYPE", help="torch's device type, for example cuda"
    )
    parser.add_argument(
        "--variant",
        metavar="V",
        help="the backend is called TYPE.V; without it TYPE: the default for that device",
    )
    parser.add_argument(
        "--into",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="write the folder anyflex-NAME there (default: the current directory)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the package and print the next commands.

    Raises:
        WrongUsage: a name, a device type or a folder that can't be taken, or can't be written.
        NotRun: this installation lacks the template.
    """
    _check_name(args.name)
    backend = _backend_name(args.device, args.variant)
    folder: Path = args.into / f"anyflex-{args.name}"
    if os.path.lexists(folder):
        raise WrongUsage(
            f"{folder} exists; remove it, or choose another NAME or another folder with --into DIR"
        )
    _write(folder, args.name, backend)
    print(
        f"wrote {folder}, a working backend {backend!r}. Next:\n"
        f"  cd {folder}\n"
        '  pip install -e ".[test]"\n'
        "  anyflex doctor\n"
        "  python -m pytest"
    )
    return ExitCode.OK


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise WrongUsage(
            f"NAME must be lower case letters, digits and single dashes, and begin with a letter; "
            f"got {name!r}"
        )
    if name == "anyflex" or name.startswith("anyflex-"):
        bare = name.removeprefix("anyflex").removeprefix("-") or "mine"
        raise WrongUsage(
            f"NAME {name!r}: the distribution is called anyflex-NAME already; give {bare!r}"
        )
    if name in _TAKEN:
        raise WrongUsage(f"NAME {name!r}: anyflex-{name} is a distribution of anyflex itself")


def _backend_name(device: str, variant: str | None) -> str:
    import torch

    from anyflex.registry.registered_backend import name_problem

    cure = "give a type that torch.device takes, such as cpu, cuda, xpu, mps or privateuseone"
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise WrongUsage(
            f"--device {device}: torch knows no such device type; {cure}. The type of a device "
            "that another package adds is known once that package is installed"
        ) from error
    if parsed.index is not None:
        raise WrongUsage(f"--device {device}: a type has no index; give {parsed.type}")
    if parsed.type == "meta":
        raise WrongUsage(f"--device meta: no backend computes on meta tensors; {cure}")
    backend = parsed.type if variant is None else f"{parsed.type}.{variant}"
    problem = name_problem(backend)
    if problem is not None:
        raise WrongUsage(f"--device {device} --variant {variant}: the backend {problem}")
    return backend


def _write(folder: Path, name: str, backend: str) -> None:
    template = _template()
    try:
        # Ordered so that a text is replaced before a part of it is.
        words = {
            "anyflex-example": f"anyflex-{name}",
            "anyflex_example": f"anyflex_{name.replace('-', '_')}",
            "cpu.example": backend,
            "Example": _class_prefix(name),
        }
        for source in sorted(path for path in template.rglob("*") if _is_part(path, template)):
            target = folder / _replaced(str(source.relative_to(template)), words)
            target.parent.mkdir(parents=True, exist_ok=True)
            text = _replaced(source.read_text(encoding="utf-8"), words)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        # Removes half a package, because the next try would find the folder taken.
        shutil.rmtree(folder, ignore_errors=True)
        raise WrongUsage(f"{folder} can't be written: {error}") from error


def _template() -> Path:
    """The example's folder: in an installed anyflex a part of the package, in a checkout the
    folder itself."""
    import anyflex

    package = Path(anyflex.__file__).resolve().parent
    for folder in (package / "templates" / "plugin", package.parents[1] / "plugins" / "example"):
        if (folder / "pyproject.toml").is_file():
            return folder
    raise NotRun(
        "the template is missing from this installation of anyflex; reinstall it, or run from a "
        "checkout"
    )


def _is_part(path: Path, template: Path) -> bool:
    """Whether a file belongs to the template; tools leave other files there."""
    first, *rest = path.relative_to(template).parts
    if path.suffix not in (".py", ".toml", ".md", ".typed"):
        return False
    if not rest:
        return first in ("pyproject.toml", "README.md")
    return first in ("src", "tests") and "__pycache__" not in rest


def _class_prefix(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("-"))


def _replaced(text: str, words: dict[str, str]) -> str:
    for old, new in words.items():
        text = text.replace(old, new)
    return text
