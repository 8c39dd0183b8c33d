"""Command line: ``anyflex-mps dump-shaders DIR``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="anyflex-mps", description="Tools of anyflex's backend for Apple GPUs."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    dump = commands.add_parser(
        "dump-shaders",
        help="write the kernels' Metal source to a folder",
        description=(
            "Writes the Metal source of kernels for every dtype, usual head dims, masks and "
            "operations of mods, one file each, and prints how Apple's compiler checks them. "
            "Needs no Apple GPU."
        ),
    )
    dump.add_argument("folder", metavar="DIR", type=Path, help="a new or empty folder")
    given = parser.parse_args(arguments)
    return _dump(given.folder)


def _dump(folder: Path) -> int:
    # On demand: `--help` needs no torch.
    from anyflex_mps.dump import COMMANDS, METAL_4, dump_shaders

    try:
        count = dump_shaders(folder)
    except OSError as error:
        sys.stderr.write(f"anyflex-mps dump-shaders: {error}\n")
        return 2
    sys.stdout.write(
        f"{count} kernels written to {folder}. With Xcode's command line tools this checks them, "
        "and fails where Apple's compiler refuses one; warnings of unused variables don't count. "
        f"Those in {METAL_4} need Xcode 26.2:\n"
    )
    for part, command in COMMANDS.items():
        where = shlex.quote(str(folder / part))
        sys.stdout.write(
            f"  find {where} -maxdepth 1 -name '*.metal' -print0 | xargs -0 -n 1 {command}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
