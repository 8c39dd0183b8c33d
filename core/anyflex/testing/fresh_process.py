"""Tasks of a fresh process: to probe a backend, or to compute with it."""

from __future__ import annotations

import base64
import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from anyflex.testing.answering import Task

__all__ = ["TASKS", "posed", "registered"]


def _probe(task: dict[str, Any]) -> dict[str, Any]:
    """Load and probe: return the modules that were loaded, the programs that were started, and the
    device that runs."""
    import torch

    from anyflex.registry import backend_table

    programs: list[str] = []

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
            programs.append(str(arguments[0]))

    importlib.import_module("anyflex.plugin")
    before = set(sys.modules)
    sys.addaudithook(audit)
    with registered(task):
        entry = backend_table.current().get(task["name"])
        state = "missing" if entry is None else entry.state().kind
    return {
        "modules": sorted(set(sys.modules) - before),
        "programs": programs,
        "state": state,
        "started": [
            kind
            for kind in ("cuda", "xpu")
            if getattr(getattr(torch, kind, None), "is_initialized", bool)()
        ],
    }


def _compute(task: dict[str, Any]) -> dict[str, Any]:
    """Run a case twice: with artifacts that another process has kept, and without any."""
    import torch

    from anyflex.testing.cases import every_case
    from anyflex.testing.inspector import KeptArtifacts
    from anyflex.testing.runner import run_case
    from anyflex.testing.session import open_session

    torch.set_num_threads(task["threads"])
    case = every_case()[task["case"]]
    outcomes = []
    with posed(task):
        kept = {name: base64.b64decode(text) for name, text in task["artifacts"].items()}
        fingerprint = ""
        for stored in (kept, {}):
            with registered(task), open_session(task["name"], task["device"]) as session:
                session.journal.artifacts = KeptArtifacts(stored)
                outcome = run_case(session, case)
                fingerprint = session.backend.fingerprint()
            outcomes.append({"status": outcome.status, "detail": outcome.detail})
    return {"outcomes": outcomes, "fingerprint": fingerprint}


@contextmanager
def registered(task: dict[str, Any]) -> Iterator[None]:
    """Put the parent's backend into an empty registry, unless it is installed.

    Raises:
        ImportError: the module of the parent's backend can't be imported.
        AttributeError: it isn't in that module.
    """
    from anyflex.registry import backend_table

    if task["name"] == backend_table.REFERENCE:
        with backend_table.isolated(reference=task["target"]):
            yield
    elif task["installed"]:
        with backend_table.isolated(scan=True):
            yield
    else:
        module, _, name = task["target"].partition(":")
        backend_class: Any = importlib.import_module(module)
        for part in name.split("."):
            backend_class = getattr(backend_class, part)
        with backend_table.isolated():
            backend_table.register(task["name"], backend_class)
            yield


@contextmanager
def posed(task: dict[str, Any]) -> Iterator[None]:
    """Let CPU tensors pose in the body as they do in the parent."""
    from anyflex.testing import posing

    with ExitStack() as stack:
        if task["posed"]:
            kind, arch = task["posed"]
            stack.enter_context(posing(kind, arch=arch))
        yield


TASKS: dict[str, Task] = {"probe": _probe, "compute": _compute}
