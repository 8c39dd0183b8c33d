"""Errors of a command line: a request that makes no sense, or that this machine can't serve."""

from __future__ import annotations

from anyflex.errors import AnyflexError

__all__ = ["NotRun", "WrongUsage"]


class WrongUsage(AnyflexError):
    """A command-line argument that parses and makes no sense, or names a file that can't be
    written. Exit status 2."""


class NotRun(AnyflexError):
    """Something that the command needs is not on this machine. Exit status 3."""
