"""``anyflex cache info|clear|save FILE|load FILE|specs``: the disk cache of compiled kernels.

Exit codes: 0 done; 1 the cache or the archive can't be used, 2 the archive can't be written, with
the reason on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from typing import TYPE_CHECKING

from anyflex.bench.usage_errors import WrongUsage
from anyflex.cli.exit_codes import ExitCode
from anyflex.cli.file_argument import file_argument
from anyflex.errors import AnyflexError, ArgumentError
from anyflex.runtime import cache_archive, disk_cache
from anyflex.runtime.artifact_origin import spec_lines

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``cache``."""
    parser = subparsers.add_parser(
        "cache",
        help="show, clear, save, load or list the cache of compiled kernels",
        description="The disk cache of compiled kernels.",
    )
    parser.set_defaults(run=run)
    actions = parser.add_subparsers(dest="cache_action", required=True, metavar="ACTION")
    for name, text in (
        ("info", "print folder, size, and what each plugin keeps"),
        ("clear", "delete every artifact"),
        ("save", "write every artifact to one file"),
        (
            "load",
            "put the artifacts of a file into the cache; they are executed later, so load "
            "only what comes from people you trust",
        ),
        ("specs", "print each kernel's backend and spec, a line each, as `anyflex warm` reads it"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        if name in ("save", "load"):
            action.add_argument("file", metavar="FILE", type=file_argument)
        action.add_argument("--json", action="store_true", help="print facts as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Carry the command out; return the exit code."""
    actions = {"info": _info, "clear": _clear, "save": _save, "load": _load, "specs": _specs}
    try:
        facts, text = actions[arguments.cache_action](arguments)
    except AnyflexError as error:
        if arguments.json:
            print(json.dumps({"error": str(error)}), file=arguments.out)
        print(f"anyflex cache: {error}", file=sys.stderr)
        wrong = isinstance(error, WrongUsage)
        return ExitCode.USAGE if wrong else ExitCode.CHECK_FAILED
    print(json.dumps(facts, indent=2) if arguments.json else text, file=arguments.out)
    return ExitCode.CHECK_FAILED if facts.get("problem") else ExitCode.OK


Report = tuple["Mapping[str, object]", str]


def _store() -> disk_cache.Store:
    """Return the store, its folder made and tried."""
    store = disk_cache.store()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each action reports it itself
        store.usable(create=True)
    return store


def _info(arguments: argparse.Namespace) -> Report:
    store = _store()
    items = store.items()
    builds: dict[str, dict[str, int]] = {}
    specs: dict[str, set[str]] = {}
    for item in items:
        build = builds.setdefault(item.build, {"artifacts": 0, "bytes": 0, "kernels": 0})
        build["artifacts"] += 1
        build["bytes"] += item.size
        specs.setdefault(item.build, set()).add(item.key)
        build["kernels"] = len(specs[item.build])
    size = sum(item.size for item in items)
    lines = [f"folder: {store.folder}"]
    if store.problem is not None:
        lines.append(f"not usable: {store.problem}; kernels are kept in memory only")
    lines.append(f"artifacts: {len(items)}, {_size(size)}")
    lines += [
        f"  {name}: {build['kernels']} kernels, {build['artifacts']} artifacts, "
        f"{_size(build['bytes'])}"
        for name, build in builds.items()
    ]
    facts = {
        "folder": str(store.folder),
        "problem": store.problem,
        "artifacts": len(items),
        "bytes": size,
        "builds": builds,
    }
    return facts, "\n".join(lines)


def _clear(arguments: argparse.Namespace) -> Report:
    store = disk_cache.store()
    count = store.clear()
    facts = {"folder": str(store.folder), "deleted": count}
    return facts, f"deleted {count} artifacts of {store.folder}"


def _save(arguments: argparse.Namespace) -> Report:
    store = _store()
    if store.problem is not None:
        raise ArgumentError(
            f"the cache {store.folder} can't be used ({store.problem}); set ANYFLEX_CACHE_DIR to "
            "a writable folder of your own"
        )
    try:
        count = cache_archive.save(store, arguments.file)
    except ArgumentError as error:
        raise WrongUsage(str(error)) from error
    facts = {"file": str(arguments.file), "saved": count}
    return facts, f"saved {count} artifacts to {arguments.file}"


def _load(arguments: argparse.Namespace) -> Report:
    store = disk_cache.store()
    loaded = cache_archive.load_artifacts(arguments.file)
    if loaded.skipped and not loaded.artifacts:
        raise ArgumentError(
            f"{arguments.file} has nothing for this environment: {'; '.join(loaded.reasons)}"
        )
    facts = {
        "file": str(arguments.file),
        "folder": str(store.folder),
        "loaded": loaded.artifacts,
        "skipped": loaded.skipped,
        "reasons": loaded.reasons,
    }
    lines = [f"loaded {loaded.artifacts} artifacts into {store.folder}"]
    lines += [f"skipped {reason}" for reason in loaded.reasons]
    return facts, "\n".join(lines)


def _specs(arguments: argparse.Namespace) -> Report:
    lines = sorted(set(spec_lines(_store())))
    return {"specs": [json.loads(line) for line in lines]}, "\n".join(lines)


def _size(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
