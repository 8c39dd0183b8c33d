"""``anyflex demo``: runs the example ``examples/packed_training`` of a checkout."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from anyflex.bench.usage_errors import WrongUsage

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``demo``. All its arguments, ``--help`` too, are the example's own."""
    parser = subparsers.add_parser(
        "demo",
        help="train a small transformer on packed documents, about a minute (in a checkout)",
        add_help=False,
        prefix_chars="\0",  # no argument begins with it: each is passed on as it stands
    )
    parser.add_argument("arguments", nargs="*")


def run(args: argparse.Namespace) -> int:
    """Run the example in this process, with its exit status.

    Raises WrongUsage where the examples are not beside the package, as in an installed wheel.
    """
    examples = _examples()
    if not (examples / "packed_training" / "command.py").is_file():
        raise WrongUsage(
            "the demo is one of the examples, which a checkout of anyflex has and an installed "
            f"package has not ({examples} has no packed_training); clone the repository, and run "
            "`make demo` or `python examples/packed_training` there"
        )
    sys.path.insert(0, str(examples))
    try:
        command = importlib.import_module("packed_training.command")
        return int(command.main(args.arguments, name="anyflex demo"))
    except SystemExit as exit_:
        # argparse has printed what there is to say.
        return int(exit_.code or 0)
    finally:
        sys.path.remove(str(examples))


def _examples() -> Path:
    """The folder of a checkout, seen from ``core/anyflex/cli/demo.py``."""
    return Path(__file__).resolve().parents[3] / "examples"
