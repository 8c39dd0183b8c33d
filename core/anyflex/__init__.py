"""anyflex: portable flex attention.

Write score and mask functions in plain Python, import one library, and run attention with them on
any device, forward and backward. Backends are separate packages, found through entry points and
loaded at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anyflex.errors import (
    AllocationError,
    AnyflexError,
    ArgumentError,
    ArgumentTypeError,
    BackendConflict,
    BackendRefused,
    BlockMaskError,
    GraphCaptureError,
    ModIndexError,
    ModTraceError,
    PerformanceWarning,
    PluginError,
    TensorFormError,
)
from anyflex.frontend.attention import flex_attention
from anyflex.frontend.aux_outputs import AuxOutput, AuxRequest
from anyflex.process.version import VERSION

# Imported for its registration: torch loses a cache bundle that holds an unknown type.
from anyflex.runtime import torch_bundle as _torch_bundle  # noqa: F401

# Imported for its registration: a saved program calls operations that nobody may have used yet.
from anyflex.tensors import static_ops as _static_ops  # noqa: F401

if TYPE_CHECKING:
    from anyflex import masks, mods
    from anyflex.block_mask.block_mask import BlockMask
    from anyflex.block_mask.combine import and_masks, noop_mask, or_masks
    from anyflex.block_mask.create import create_block_mask, create_mask
    from anyflex.frontend.attention_sinks import with_sinks
    from anyflex.frontend.explain import explain
    from anyflex.frontend.gradients import flex_attention_backward
    from anyflex.packed.attention import flex_attention_packed
    from anyflex.packed.merge import merge_attention
    from anyflex.packed.packed import Packed, Step
    from anyflex.paging.cache import PagedKVCache
    from anyflex.registry.forced_backends import use_backend
    from anyflex.runtime.cache_archive import load_artifacts, save_artifacts
    from anyflex.torch_routing.rerouting import reroute_torch, restore_torch

__version__ = VERSION

__all__ = [
    "AllocationError",
    "AnyflexError",
    "ArgumentError",
    "ArgumentTypeError",
    "AuxOutput",
    "AuxRequest",
    "BackendConflict",
    "BackendRefused",
    "BlockMask",
    "BlockMaskError",
    "GraphCaptureError",
    "ModIndexError",
    "ModTraceError",
    "Packed",
    "PagedKVCache",
    "PerformanceWarning",
    "PluginError",
    "Step",
    "TensorFormError",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "explain",
    "flex_attention",
    "flex_attention_backward",
    "flex_attention_packed",
    "load_artifacts",
    "masks",
    "merge_attention",
    "mods",
    "noop_mask",
    "or_masks",
    "reroute_torch",
    "restore_torch",
    "save_artifacts",
    "use_backend",
    "with_sinks",
]

_LATER = {
    "BlockMask": "anyflex.block_mask.block_mask",
    "Packed": "anyflex.packed.packed",
    "PagedKVCache": "anyflex.paging.cache",
    "Step": "anyflex.packed.packed",
    "and_masks": "anyflex.block_mask.combine",
    "create_block_mask": "anyflex.block_mask.create",
    "create_mask": "anyflex.block_mask.create",
    "explain": "anyflex.frontend.explain",
    "flex_attention_backward": "anyflex.frontend.gradients",
    "flex_attention_packed": "anyflex.packed.attention",
    "load_artifacts": "anyflex.runtime.cache_archive",
    "merge_attention": "anyflex.packed.merge",
    "noop_mask": "anyflex.block_mask.combine",
    "or_masks": "anyflex.block_mask.combine",
    "reroute_torch": "anyflex.torch_routing.rerouting",
    "restore_torch": "anyflex.torch_routing.rerouting",
    "save_artifacts": "anyflex.runtime.cache_archive",
    "use_backend": "anyflex.registry.forced_backends",
    "with_sinks": "anyflex.frontend.attention_sinks",
}
"""Public names whose modules are imported at first use: they cost `import anyflex` nothing."""

_MODULES_LATER = ("masks", "mods")
"""Public modules that are imported at first use."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        import importlib

        value = getattr(importlib.import_module(_LATER[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES_LATER:
        import importlib

        return importlib.import_module(f"anyflex.{name}")
    raise AttributeError(f"module 'anyflex' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
