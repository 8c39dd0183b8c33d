"""Everything that a plugin imports from anyflex: the contract, the mod graph, the hook marker.

A backend is a subclass of `Backend` with a name in the plugin's ``pyproject.toml``::

    [project.entry-points."anyflex.backends.v1"]
    "cuda.mine" = "my_package.backend:MyBackend"

A hook plugin is a module whose functions are marked with `hookimpl`::

    [project.entry-points."anyflex.hooks.v1"]
    my-hooks = "my_package.hooks"

Names by subject, in the order in which a new backend meets them:

    what a backend is        Backend, Kernel, Capabilities, Option, Accepted, Rejected, Decision
    what is compiled         Spec, CapturedFacts, Artifacts, ProgressLine, CONTRACT_1_FIELDS
    what a kernel is given   Call, PackedRows, Dropout, Outputs, Saved, GradInputs, Grads,
                             TensorSpec
    block masks              MaskViews, FULL, PARTIAL
    mods                     ModGraph, Node, DTYPES, OPERATIONS, Lowering, simplify, differentiate,
                             Derivative, Scatter, evaluate, parse_graph
    registration, hooks      register, register_hooks, hookimpl, CONTRACT, CONTRACT_MIN
    advanced                 integer_ranges, IntegerRange, operand_classes, type_class, Alignment,
                             free_in_child, make_first_calls, isolated,
                             unrouted_flex_attention

Errors are in `anyflex`: a kernel raises `anyflex.BackendRefused` and the others from there.
"""

from __future__ import annotations

from anyflex.contract import CONTRACT, CONTRACT_MIN
from anyflex.contract.artifacts import Artifacts
from anyflex.contract.backend import Backend, Kernel
from anyflex.contract.call import Call, GradInputs, Grads, Outputs, Saved, TensorSpec
from anyflex.contract.capabilities import CONTRACT_1_FIELDS, Capabilities
from anyflex.contract.decision import Accepted, Decision, Rejected
from anyflex.contract.dropout import Dropout
from anyflex.contract.option import Option
from anyflex.contract.packed_rows import PackedRows
from anyflex.contract.spec import CapturedFacts, Spec

# Contract 1 has these names here too, so plugins that import them keep working. `__all__` leaves
# them out: errors have one home, `anyflex`, and the last two are what other members return and do.
from anyflex.errors import AllocationError as AllocationError
from anyflex.errors import AnyflexError as AnyflexError
from anyflex.errors import ArgumentError as ArgumentError
from anyflex.errors import BackendRefused as BackendRefused
from anyflex.errors import ModIndexError as ModIndexError
from anyflex.errors import PerformanceWarning as PerformanceWarning
from anyflex.errors import PluginError as PluginError
from anyflex.mask_structure.device_views import FULL, PARTIAL, MaskViews
from anyflex.mask_structure.to_index_lists import IndexLists as IndexLists
from anyflex.mod_graph.differentiate import Derivative, Scatter, differentiate
from anyflex.mod_graph.dtypes import DTYPES, type_class
from anyflex.mod_graph.evaluate import evaluate
from anyflex.mod_graph.graph import ModGraph, parse_graph
from anyflex.mod_graph.integer_ranges import IntegerRange, integer_ranges
from anyflex.mod_graph.lowering import Lowering, operand_classes
from anyflex.mod_graph.mkl_warmup import make_first_calls
from anyflex.mod_graph.node import Node
from anyflex.mod_graph.operations import OPERATIONS
from anyflex.mod_graph.simplify import simplify
from anyflex.mod_graph.simplify import simplify_nodes as simplify_nodes
from anyflex.process.fork_safe_locks import free_in_child
from anyflex.process.progress_line import ProgressLine
from anyflex.registry.backend_table import isolated, register, register_hooks
from anyflex.registry.hook_specs import hookimpl
from anyflex.tensors.tensor_facts import Alignment
from anyflex.torch_routing.rerouting import unrouted_flex_attention

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
    "Artifacts",
    "Backend",
    "Call",
    "Capabilities",
    "CapturedFacts",
    "Decision",
    "Derivative",
    "Dropout",
    "GradInputs",
    "Grads",
    "IntegerRange",
    "Kernel",
    "Lowering",
    "MaskViews",
    "ModGraph",
    "Node",
    "Option",
    "Outputs",
    "PackedRows",
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
    "type_class",
    "unrouted_flex_attention",
]
