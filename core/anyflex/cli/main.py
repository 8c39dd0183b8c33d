"""The command ``anyflex`` and its sub-commands.

A sub-command's module adds its parser and has ``run(args)``; heavy modules are imported inside of
``run``, so that ``anyflex --help`` doesn't load them. JSON is printed to ``args.out``.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence

import anyflex
from anyflex.cli import bench, cache, conformance, demo, doctor, explain, new_plugin, warm
from anyflex.cli.exit_codes import ExitCode, code_of, exit_code_table
from anyflex.errors import AnyflexError
from anyflex.registry import environment

__all__ = ["main"]

_COMMANDS = (doctor, explain, demo, cache, warm, conformance, bench, new_plugin)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command.

    Args:
        arguments: without the program's name; None for ``sys.argv``.

    Returns:
        An `ExitCode`. An `AnyflexError` becomes one line on stderr and its code; under
        ANYFLEX_STRICT=1 its traceback comes first. Output that can't be written is wrong usage.
        Any other exception is a bug of anyflex and passes, with its traceback.
    """
    _open_streams()
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        _abandon_streams()
        return ExitCode.INTERRUPTED
    except OSError as error:
        # An OSError of a file names it; one without a name comes from standard output.
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        with contextlib.suppress(OSError):
            print(f"anyflex: standard output can't be written: {error}", file=sys.stderr)
        _abandon_streams()
        return ExitCode.USAGE
    return code


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def _open_streams() -> None:
    """Let every text be printed, and where a stream is closed leave the exit status alone, as if
    it went to the null device."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            # An exception's text may hold characters that no encoding has, such as half of a
            # surrogate pair.
            stream.reconfigure(errors="backslashreplace")


def _abandon_streams() -> None:
    """Replace the streams: Python flushes them once more at exit, and would complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(null, stream.fileno())


def _run(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    try:
        args = parser.parse_args(arguments)
    except SystemExit as exit_:
        # argparse has printed --help, --version or the error already.
        return int(exit_.code or 0)
    if args.version:
        # argparse's own action hides that the output can't be written.
        print(f"anyflex {anyflex.__version__}")
        return ExitCode.OK
    # Reports say how to repeat them.
    args.given = list(sys.argv[1:] if arguments is None else arguments)
    if args.run is None:
        parser.print_help(sys.stderr)
        return ExitCode.USAGE
    args.out = sys.stdout
    # Where JSON is the output, prints of a plugin must not be mixed into it.
    alone = getattr(args, "json", None) in (True, "-")
    try:
        with contextlib.redirect_stdout(sys.stderr) if alone else contextlib.nullcontext():
            return int(args.run(args))
    except AnyflexError as error:
        return _report(error, args.command)
    except KeyboardInterrupt:
        print(f"anyflex {args.command}: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED


def _report(error: AnyflexError, command: str) -> ExitCode:
    try:
        strict = environment.strict()
    except AnyflexError:
        # A wrong ANYFLEX_STRICT: `error` reports it, unless it is about something that came
        # before.
        strict = False
    if strict:
        traceback.print_exception(error)
    print(f"anyflex {command}: {' '.join(str(error).splitlines())}", file=sys.stderr)
    return code_of(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="anyflex",
        description="Attention with your own score and mask functions, on any device.",
        epilog=f"exit status:\n{exit_code_table()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.set_defaults(run=None)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for command in _COMMANDS:
        before = set(subparsers.choices)
        command.add_parser(subparsers)
        for name in set(subparsers.choices) - before:
            subparsers.choices[name].set_defaults(run=command.run)
    return parser
