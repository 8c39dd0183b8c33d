"""User functions, ``FILE.py::function``, and the call that one returns."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import anyflex
from anyflex.bench.usage_errors import WrongUsage
from anyflex.cli.exit_codes import UserFileFailed

__all__ = ["call_function", "checked_arguments", "failed"]


def call_function(target: str) -> Any:
    """Import FILE, call ``function()`` and return what it returns.

    As for a script, the file's own folder stands first on ``sys.path`` while it runs.

    Raises:
        WrongUsage: no such file or function.
        UserFileFailed: it raised; the part of the traceback that is in the user's code is on
            stderr.
    """
    file_name, separator, function_name = target.partition("::")
    path = Path(file_name)
    if not separator or not function_name:
        raise WrongUsage(f"{target}: expected FILE.py::function")
    if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
        raise WrongUsage(f"{target}: there is no file {file_name}")
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        module = _run_file(path, target)
        function = getattr(module, function_name, None)
        if not callable(function):
            functions = sorted(
                name
                for name, value in vars(module).items()
                if isinstance(value, FunctionType) and value.__module__ == module.__name__
            )
            raise WrongUsage(
                f"{target}: {file_name} has no function {function_name!r}; it has: "
                f"{', '.join(functions) or 'none'}"
            )
        try:
            return function()
        # User code, like a plugin's, may raise anything, and a script calls exit().
        except (Exception, SystemExit) as error:
            raise failed(target, error) from error
    finally:
        sys.path.remove(folder)


def checked_arguments(target: str, arguments: object) -> dict[str, Any]:
    """Return what a function returned, if it is arguments of `anyflex.flex_attention` by name.

    Raises:
        WrongUsage: it is something else.
    """
    if not isinstance(arguments, dict) or not {"query", "key", "value"} <= arguments.keys():
        raise WrongUsage(
            f"{target}: the function must return a dict of anyflex.flex_attention's arguments by "
            f"name, with query, key and value at least; it returned {_described(arguments)}"
        )
    try:
        inspect.signature(anyflex.explain).bind(**arguments)
    except TypeError as error:
        raise WrongUsage(
            f"{target}: the function must return a dict of anyflex.flex_attention's arguments by "
            f"name: {error}"
        ) from error
    return arguments


def _run_file(path: Path, target: str) -> ModuleType:
    import importlib.util

    # A unique module name: the file may have the name of a module that is in use.
    name = f"anyflex_explained_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WrongUsage(f"{target}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise failed(target, error) from error
    return module


def failed(target: str, error: BaseException) -> UserFileFailed:
    own = str(Path(__file__))
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [
        frame
        for frame in frames
        if frame.filename != own and not frame.filename.startswith("<frozen ")
    ]
    print("Traceback (most recent call last):", file=sys.stderr)
    for line in traceback.format_list(theirs):
        print(line, end="", file=sys.stderr)
    for line in traceback.format_exception_only(error):
        print(line, end="", file=sys.stderr)
    return UserFileFailed(f"{target} raised {type(error).__name__}")


def _described(value: object) -> str:
    if isinstance(value, dict):
        return f"a dict with the keys {', '.join(map(repr, value)) or 'none'}"
    return f"an object of type {type(value).__name__}"
