"""Origin of a spec's artifacts: one more artifact beside them, which core writes.

Their key is a hash, which can't be read back. The origin says what they were made from, so that
`anyflex cache specs` can list them, and loading an archive can say why some can't be used here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from anyflex.contract.spec import Spec
from anyflex.errors import PluginError
from anyflex.mod_graph.torch_derivatives import IN_FORCE
from anyflex.process.version import VERSION
from anyflex.registry import backend_table, plugin_errors
from anyflex.runtime.disk_cache import ORIGIN, Store, unseal
from anyflex.tensors.tensor_facts import architecture

if TYPE_CHECKING:
    from anyflex.registry.registered_backend import Entry

__all__ = ["mismatch", "read_origin", "spec_lines", "write_origin"]


def write_origin(plugin: str, package: str, version: str, fingerprint: str, spec: Spec) -> bytes:
    """Return the content of the artifact `ORIGIN`. Arguments as of `disk_cache.artifacts_for`."""

    origin = {
        "anyflex": VERSION,
        "torch": torch.__version__,
        "derivatives": IN_FORCE,
        "plugin": plugin,
        "distribution": f"{package} {version}",
        "fingerprint": fingerprint,
        "spec": spec.to_text(),
    }
    return json.dumps(origin, indent=1).encode()


def read_origin(content: bytes) -> dict[str, Any] | None:
    """Return the facts, or None where it isn't an origin of this version."""
    try:
        facts = json.loads(content)
    except ValueError:
        return None
    expected = "anyflex torch derivatives plugin distribution fingerprint spec".split()
    if isinstance(facts, dict) and all(isinstance(facts.get(name), str) for name in expected):
        return facts
    return None


def mismatch(content: bytes) -> str | None:
    """Return why no call in this environment finds the artifacts of an origin, or None where one
    may. Imports the plugin that made them.

    A device that isn't initialised isn't asked for its architecture: images are built without one.
    """

    origin = read_origin(content)
    if origin is None:
        return "they say nothing of their origin that this anyflex reads"
    if origin["anyflex"] != VERSION:
        return f"made for anyflex {origin['anyflex']}, here is {VERSION}"
    if origin["derivatives"] != IN_FORCE:
        return (
            f"made for torch {origin['torch']}, which differentiates otherwise at bounds than "
            f"torch {torch.__version__} here"
        )
    entry = backend_table.current().get(origin["plugin"])
    if entry is None or entry.distribution != origin["distribution"]:
        found = "which isn't installed" if entry is None else f"here is {entry.distribution}"
        return f"made by backend {origin['plugin']!r} of {origin['distribution']}, {found}"
    fingerprint = _fingerprint(entry)
    if fingerprint not in (None, origin["fingerprint"]):
        return f"made for {origin['fingerprint']}, here is {fingerprint}"
    return _other_device(origin["spec"])


def _fingerprint(entry: Entry) -> str | None:
    backend = entry.state().backend
    if backend is None:
        return None
    try:
        with plugin_errors.plugin_code(entry.name, entry.distribution, "fingerprint()"):
            return backend.fingerprint()
    except PluginError:
        return None  # reported when the backend is asked for a kernel


def _other_device(text: str) -> str | None:
    try:
        spec = Spec.from_text(text)
    except ValueError:
        return "made for a spec of another contract"
    module = getattr(torch, spec.device_type, None)
    initialized = getattr(module, "is_initialized", None)
    if not spec.arch or initialized is None or not initialized():
        return None
    here = {
        architecture(torch.device(spec.device_type, index))
        for index in range(torch.accelerator.device_count())
    }
    if spec.arch in here:
        return None
    return f"made for {spec.device_type} {spec.arch}, here is {', '.join(sorted(here)) or 'none'}"


def spec_lines(store: Store) -> Iterator[str]:
    """Yield a line of JSON, with ``backend`` and ``spec``, for each spec with artifacts in the
    cache."""
    for item in store.items():
        if item.name == ORIGIN:
            with contextlib.suppress(FileNotFoundError):  # Cleared meanwhile.
                content = unseal(ORIGIN, item.path.read_bytes())
                origin = None if content is None else read_origin(content)
                if origin is not None:
                    yield json.dumps({"backend": origin["plugin"], "spec": origin["spec"]})
