"""Provenance of a run: machine, versions and commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import anyflex

__all__ = [
    "command_of",
    "cpu_name",
    "machine_facts",
    "provenance",
    "source_commit",
    "version_facts",
]


def provenance(device: torch.device) -> dict[str, Any]:
    """Return what a report says of its run: date, commit, machine and versions."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "date": now.replace(microsecond=0).isoformat(),
        "commit": source_commit(),
        "machine": machine_facts(device),
        "versions": version_facts(),
    }


def command_of(program: str, arguments: Sequence[str] | None = None) -> str:
    """Return how a program was called, with its path in the repository: with these arguments, or
    the process's own."""
    return " ".join(["python", program, *(sys.argv[1:] if arguments is None else arguments)])


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Return the processor, the device, and how many threads compute."""
    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "device": str(device),
        "device_name": None,
        "device_count": None,
    }
    if device.type != "cpu":
        module = getattr(torch, device.type, None)
        name = getattr(module, "get_device_name", None)
        facts["device_name"] = str(name(device)) if callable(name) else device.type
        facts["device_count"] = torch.accelerator.device_count()
    return facts


def cpu_name() -> str:
    """Return the processor's name as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        # On other systems than Linux the standard library's name is less detailed.
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def version_facts() -> dict[str, Any]:
    """Return the versions of the packages that compute."""
    facts: dict[str, Any] = {
        "anyflex": anyflex.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": None,
    }
    cudnn: Any = torch.backends.cudnn
    if torch.cuda.is_available() and cudnn.is_available():
        facts["cudnn"] = cudnn.version()
    for package in ("triton", "flash-attn-4"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = None
    return facts


def source_commit() -> str | None:
    """Return the commit of the checkout that anyflex runs from, ``+changes`` behind it where
    files differ from it; None where it isn't a checkout or git isn't there."""
    root = Path(anyflex.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return commit + ("+changes" if changed else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        # Without a commit a report is still useful: the field is null.
        return None
    return done.stdout.strip()
