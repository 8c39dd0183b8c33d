"""``anyflex cache info|clear|save FILE|load FILE``: the disk cache of compiled kernels.

Exit codes: 0 done; 1 the cache or the archive can't be used, with the reason on stderr.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import TYPE_CHECKING

from anyflex.errors import AnyflexError
from anyflex.runtime import cache_archive, disk_cache

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``cache`` to the command line."""
    parser = subparsers.add_parser(
        "cache",
        help="show, clear, save or load the cache of compiled kernels",
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
    ):
        action = actions.add_parser(name, help=text, description=text)
        if name in ("save", "load"):
            action.add_argument("file", metavar="FILE", type=pathlib.Path)
        action.add_argument("--json", action="store_true", help="print facts as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Carry the command out; return the exit code."""
    actions = {"info": _info, "clear": _clear, "save": _save, "load": _load}
    try:
        facts, text = actions[arguments.cache_action](arguments)
    except AnyflexError as error:
        if arguments.json:
            print(json.dumps({"error": str(error)}))
        print(f"anyflex cache: {error}", file=sys.stderr)
        return 1
    print(json.dumps(facts, indent=2) if arguments.json else text)
    return 0


Report = tuple["Mapping[str, object]", str]


def _info(arguments: argparse.Namespace) -> Report:
    store = disk_cache.store()
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
    count = cache_archive.save(disk_cache.store(), arguments.file)
    facts = {"file": str(arguments.file), "saved": count}
    return facts, f"saved {count} artifacts to {arguments.file}"


def _load(arguments: argparse.Namespace) -> Report:
    store = disk_cache.store()
    count = cache_archive.load(store, arguments.file)
    facts = {"file": str(arguments.file), "folder": str(store.folder), "loaded": count}
    return facts, f"loaded {count} artifacts into {store.folder}"


def _size(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
