"""``anyflex doctor``: what this machine offers, what is wrong, and the cure."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from anyflex.cli.exit_codes import ExitCode

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``doctor``."""
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine offers, what is wrong, and the cure",
        description=(
            "Prints versions, devices, every installed backend with self-tests on its device (a "
            "tiny forward and backward, and one row of decoding with GQA and a scale, against a "
            "dense float64 formula), plugins that can't be used and why, the environment "
            "variables in force, whether torch's flex_attention goes to anyflex, and the cache "
            "folder. Fails (1) if a self-test fails, a plugin is broken or written for another "
            "contract, a variable has a value that isn't allowed, ANYFLEX_TORCH has no effect, or "
            "the cache folder that ANYFLEX_CACHE_DIR names can't be used."
        ),
    )
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the facts."""
    from anyflex.cli.doctor_facts import collect

    facts = collect()
    text = json.dumps(facts, indent=2) if args.json else "\n".join(_text(facts))
    print(text, file=args.out)
    return ExitCode.CHECK_FAILED if facts["failures"] else ExitCode.OK


def _text(facts: dict[str, Any]) -> list[str]:
    lines = _versions(facts["versions"])
    lines += ["", "Devices", *_indented(_devices(facts["devices"]))]
    lines += ["", "Backends"]
    for backend in facts["backends"]:
        lines += _indented(_backend(backend))
    for title, rows in (
        ("Hooks", [line for hook in facts["hooks"] for line in _hook(hook)]),
        ("Stale copies", _stale_copies(facts["stale_copies"])),
        ("Variables", _variables(facts)),
        ("torch's flex_attention", _torch_routing(facts["torch_routing"])),
        ("Cache", _cache(facts["cache"])),
    ):
        if rows:
            lines += ["", title, *_indented(rows)]
    lines += [""]
    lines += [f"FAIL: {failure}" for failure in facts["failures"]] or [_passed(facts)]
    return lines


def _passed(facts: dict[str, Any]) -> str:
    """Return the line for a run without failures, with the devices that the reference serves
    although a backend for them is installed: an environment variable may be the cause."""
    served = []
    for device in facts["devices"]:
        names = [
            backend["name"]
            for backend in facts["backends"]
            if backend["state"] == "rejected" and backend["device_type"] == device["type"]
        ]
        if names and not device["backends"]:
            served.append(f"on {device['type']} the reference computes, see {', '.join(names)}")
    return "; ".join(["All checks passed", *served]) + "."


def _indented(lines: list[str]) -> list[str]:
    return ["  " + line for line in lines]


def _versions(versions: dict[str, Any]) -> list[str]:
    oldest, newest = versions["torch_tested"]
    note = "" if versions["torch_in_tested_range"] else "not tested; "
    return [
        f"anyflex {versions['anyflex']} (plugin contract {versions['contracts'][-1]})",
        f"torch {versions['torch']} ({note}tested: {oldest} to {newest})",
        f"Python {versions['python']} on {versions['platform']}",
    ]


def _devices(devices: list[dict[str, Any]]) -> list[str]:
    lines = []
    for device in devices:
        names = ", ".join(device["backends"])
        what = f"backends: {names}" if names else "no usable backend, the reference computes"
        count = f"{device['count']} x " if device["count"] > 1 else ""
        lines.append(f"{device['type']}  {count}{device['name']}; {what}")
        if device["hint"] is not None:
            lines.append(f"  {device['hint']}")
    return lines


def _backend(backend: dict[str, Any]) -> list[str]:
    requires = f", requires {', '.join(backend['requires'])}" if backend["requires"] else ""
    lines = [
        f"{backend['name']}  {backend['state']}  ({backend['distribution']} "
        f"{backend['version']}, contract {backend['contract']}{requires})"
    ]
    lines += _why(backend)
    if backend["fingerprint"]:
        lines.append(f"  kernels of: {backend['fingerprint']}")
    if backend["layouts"]:
        lines.append(f"  takes as they are, without core: {', '.join(backend['layouts'])}")
    lines += ["  note: " + note for note in backend["notes"]]
    for test in backend["self_tests"]:
        lines.append("  " + test["text"])
        lines += ["    " + line for line in _abridged(test["traceback"])]
    for option in backend["options"]:
        choices = f", one of {', '.join(map(str, option['choices']))}" if option["choices"] else ""
        lines.append(
            f"  option {option['name']}: {option['type']} = {option['default']}{choices}. "
            f"{option['doc']}"
        )
    return lines


def _hook(hook: dict[str, Any]) -> list[str]:
    return [f"{hook['name']}  {hook['state']}  ({hook['distribution']})", *_why(hook)]


def _why(plugin: dict[str, Any]) -> list[str]:
    lines = [plugin["reason"]] if plugin["reason"] else []
    # The reason quotes the error already.
    raised = [line for line in _abridged(plugin["traceback"]) if line not in plugin["reason"]]
    return ["  " + line for line in (*lines, *raised)]


def _abridged(traceback: Sequence[str]) -> Sequence[str]:
    """Return the last frame and the error: ``--json`` has all of it."""
    frames = [index for index, line in enumerate(traceback) if line.startswith("  File ")]
    return traceback[frames[-1] :] if frames else traceback


def _stale_copies(groups: list[list[dict[str, Any]]]) -> list[str]:
    lines = []
    for copies in groups:
        lines.append(
            f"{copies[0]['distribution']} is installed {len(copies)} times; remove the copies "
            "that are not used:"
        )
        for copy in copies:
            use = "used" if copy["used"] else "not used"
            points = ", ".join(copy["entry_points"]) or "no anyflex entry points"
            lines.append(f"  {use}: {copy['path']} ({points})")
    return lines


def _variables(facts: dict[str, Any]) -> list[str]:
    lines = []
    for variable in facts["variables"]:
        if variable["value"] is not None:
            lines.append(f"{variable['name']}={variable['value']}")
        if variable["problem"] is not None:
            lines.append(f"  {variable['problem']}")
        if variable["read"] and variable["now"] != variable["value"]:
            lines.append(f"  changed to {variable['now']} after it was read, which has no effect")
    lines += [f"{other['name']}={other['value']}" for other in facts["variables_of_others"]]
    for variable in facts["unknown_variables"]:
        near = f"; did you mean {variable['nearest']}?" if variable["nearest"] else ""
        lines.append(f"{variable['name']} is set, and nobody reads it{near}")
    return lines or ["none is set"]


def _torch_routing(routing: dict[str, Any]) -> list[str]:
    devices = ", ".join(routing["devices"])
    return [f"goes to anyflex on: {devices}" if devices else "is torch's own"]


def _cache(cache: dict[str, Any]) -> list[str]:
    lines = [f"{cache['folder']}: {cache['artifacts']} artifacts, {cache['bytes']:,} bytes"]
    if cache["problem"] is not None:
        lines.append(f"can't be used: {cache['problem']}; kernels are kept in memory only")
    return lines
