"""Everything that a plugin imports from anyflex: the contract, the mod graph, the hook marker.

A backend is a subclass of `Backend` that stands under a name in the plugin's ``pyproject.toml``::

    [project.entry-points."anyflex.backends.v1"]
    "cuda.mine" = "my_package.backend:MyBackend"

A hook plugin is a module whose functions are marked with `hookimpl`::

    [project.entry-points."anyflex.hooks.v1"]
    my-hooks = "my_package.hooks"
"""

from __future__ import annotations

from anyflex.block_mask.views import MaskViews
from anyflex.contract import CONTRACT, CONTRACT_MIN
from anyflex.contract.artifacts import Artifacts
from anyflex.contract.backend import Backend, Kernel
from anyflex.contract.call import Call, GradInputs, Grads, Outputs, Saved, TensorSpec
from anyflex.contract.capabilities import CONTRACT_1_FIELDS, Capabilities
from anyflex.contract.decision import Accepted, Decision, Rejected
from anyflex.contract.option import Option
from anyflex.contract.spec import Alignment, CapturedFacts, Spec
from anyflex.errors import AnyflexError, ArgumentError, BackendRefused, PluginError
from anyflex.mod_graph.graph import ModGraph, Node, parse_graph
from anyflex.mod_graph.lowering import Lowering
from anyflex.mod_graph.operations import OPERATIONS
from anyflex.registry.hook_specs import hookimpl

__all__ = [
    "CONTRACT",
    "CONTRACT_1_FIELDS",
    "CONTRACT_MIN",
    "OPERATIONS",
    "Accepted",
    "Alignment",
    "AnyflexError",
    "ArgumentError",
    "Artifacts",
    "Backend",
    "BackendRefused",
    "Call",
    "Capabilities",
    "CapturedFacts",
    "Decision",
    "GradInputs",
    "Grads",
    "Kernel",
    "Lowering",
    "MaskViews",
    "ModGraph",
    "Node",
    "Option",
    "Outputs",
    "PluginError",
    "Rejected",
    "Saved",
    "Spec",
    "TensorSpec",
    "hookimpl",
    "parse_graph",
]
