"""File arguments of the command line: which names are allowed, and one error for failed writes."""

from __future__ import annotations

import argparse
from pathlib import Path

from anyflex.bench.usage_errors import WrongUsage

__all__ = ["check_different", "file_argument", "write_text"]


def file_argument(text: str) -> Path:
    """Return the path that an argument names, for argparse's ``type``.

    Raises:
        argparse.ArgumentTypeError: it is empty, or ``-``, which is standard output where a command
            says so and no file's name anywhere.
    """
    if text in ("", "-"):
        raise argparse.ArgumentTypeError(
            f"must be a file's name, got {text!r}; a file that is called so is ./-"
            if text
            else "must be a file's name, got ''"
        )
    return Path(text)


def check_different(**files: str | Path | None) -> None:
    """Raise `WrongUsage` if two options name one file: the second would overwrite the first."""
    seen: dict[Path, str] = {}
    for option, file in files.items():
        if file is not None and str(file) != "-":
            path = Path(file).resolve()
            if path in seen:
                raise WrongUsage(
                    f"--{seen[path]} and --{option} name one file, {file}: give each its own"
                )
            seen[path] = option


def write_text(path: Path, text: str) -> None:
    """Write a file, or raise `WrongUsage`. Characters that UTF-8 can't encode, such as half of a
    surrogate pair in a plugin's message, are written as escapes."""
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise WrongUsage(f"{path} can't be written: {error}") from error
