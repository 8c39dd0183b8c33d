"""Errors of a command line: what was asked for makes no sense, or isn't on this machine."""

from __future__ import annotations

from anyflex.errors import AnyflexError

__all__ = ["NotRun", "WrongUsage"]


class WrongUsage(AnyflexError):
    """A command-line argument that parses and makes no sense, or names a file that can't be
    written. Exit status 2."""


class NotRun(AnyflexError):
    """Something that the command needs is not on this machine. Exit status 3."""
