"""Everything that a plugin imports from anyflex: the contract, the mod graph, the hook marker.

A backend is a subclass of `Backend` with a name in the plugin's ``pyproject.toml``::

    [project.entry-points."anyflex.backends.v1"]
    "cuda.mine" = "my_package.backend:MyBackend"

A hook plugin is a module whose functions are marked with `hookimpl`::

    [project.entry-points."anyflex.hooks.v1"]
    my-hooks = "my_package.hooks"
"""

from __future__ import annotations

from anyflex.contract import CONTRACT, CONTRACT_MIN
from anyflex.contract.artifacts import Artifacts
from anyflex.contract.backend import Backend, Kernel
from anyflex.contract.call import Call, GradInputs, Grads, Outputs, Saved, TensorSpec
from anyflex.contract.capabilities import CONTRACT_1_FIELDS, Capabilities
from anyflex.contract.decision import Accepted, Decision, Rejected
from anyflex.contract.option import Option
from anyflex.contract.spec import CapturedFacts, Spec
from anyflex.errors import (
    AllocationError,
    AnyflexError,
    ArgumentError,
    BackendRefused,
    ModIndexError,
    PerformanceWarning,
    PluginError,
)
from anyflex.mask_structure.device_views import FULL, PARTIAL, MaskViews
from anyflex.mask_structure.to_index_lists import IndexLists
from anyflex.mod_graph.differentiate import Derivative, Scatter, differentiate
from anyflex.mod_graph.dtypes import DTYPES, type_class
from anyflex.mod_graph.evaluate import evaluate
from anyflex.mod_graph.graph import ModGraph, parse_graph
from anyflex.mod_graph.integer_ranges import IntegerRange, integer_ranges
from anyflex.mod_graph.lowering import Lowering, operand_classes
from anyflex.mod_graph.mkl_warmup import make_first_calls
from anyflex.mod_graph.node import Node
from anyflex.mod_graph.operations import OPERATIONS
from anyflex.mod_graph.simplify import simplify, simplify_nodes
from anyflex.process.fork_safe_locks import free_in_child
from anyflex.process.progress_line import ProgressLine
from anyflex.registry.backend_table import isolated, register, register_hooks
from anyflex.registry.hook_specs import hookimpl
from anyflex.tensors.tensor_facts import Alignment

__all__ = [
    "CONTRACT",
    "CONTRACT_1_FIELDS",
    "CONTRACT_MIN",
    "DTYPES",
    "FULL",
    "OPERATIONS",
    "PARTIAL",
    "Accepted",
    "Alignment",
    "AllocationError",
    "AnyflexError",
    "ArgumentError",
    "Artifacts",
    "Backend",
    "BackendRefused",
    "Call",
    "Capabilities",
    "CapturedFacts",
    "Decision",
    "Derivative",
    "GradInputs",
    "Grads",
    "IndexLists",
    "IntegerRange",
    "Kernel",
    "Lowering",
    "MaskViews",
    "ModGraph",
    "ModIndexError",
    "Node",
    "Option",
    "Outputs",
    "PerformanceWarning",
    "PluginError",
    "ProgressLine",
    "Rejected",
    "Saved",
    "Scatter",
    "Spec",
    "TensorSpec",
    "differentiate",
    "evaluate",
    "free_in_child",
    "hookimpl",
    "integer_ranges",
    "isolated",
    "make_first_calls",
    "operand_classes",
    "parse_graph",
    "register",
    "register_hooks",
    "simplify",
    "simplify_nodes",
    "type_class",
]
