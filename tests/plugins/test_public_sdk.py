"""Contract 1 is frozen: the names that a plugin may use stay, and new fields have defaults.

A test here that fails says that plugins in the world would break. Names and fields may be added at
the end of these lists; nothing may be taken out, renamed or moved while CONTRACT is 1.
"""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest
import torch

import anyflex
from anyflex import plugin

NAMES = """
    CONTRACT CONTRACT_1_FIELDS CONTRACT_MIN DTYPES FULL OPERATIONS PARTIAL Accepted Alignment
    AnyflexError ArgumentError Artifacts Backend BackendRefused Call Capabilities CapturedFacts
    Decision Derivative Dropout GradInputs Grads IndexLists IntegerRange Kernel Lowering MaskViews
    ModGraph ModIndexError Node Option Outputs PerformanceWarning PluginError ProgressLine Rejected
    Saved Scatter Spec TensorSpec differentiate evaluate free_in_child hookimpl integer_ranges
    isolated make_first_calls operand_classes parse_graph register register_hooks simplify
    simplify_nodes type_class
""".split()

ELSEWHERE = {
    *"AllocationError AnyflexError ArgumentError BackendRefused IndexLists ModIndexError".split(),
    *"PerformanceWarning PluginError simplify_nodes".split(),
}
"""Names that plugins may go on importing here and that ``__all__`` leaves out."""

FIELDS = {
    "Accepted": "backward",
    "CapturedFacts": "dtype rank needs_grad",
    "Derivative": "nodes score scatters",
    "Node": "operation dtype arguments attribute",
    "Option": "type default doc choices torch_key",
    "Rejected": "reason",
    "Scatter": "captured indices value",
    "TensorSpec": "shape dtype zeroed",
    "Capabilities": (
        "dtypes head_dim_min head_dim_max head_dim_multiple different_value_head_dim gqa "
        "kv_broadcast scattered aux gradients core_backward captured_dtypes decode deterministic "
        "operations known_fields node_dtypes"
    ),
    "Spec": (
        "device_type arch dtype head_dim value_head_dim gqa_ratio kv_broadcast score_graph "
        "mask_graph mask_kind block_size captured aux needs_lse gradients dlse determinism "
        "fp32_precision q_class alignment index_width options opaque q_layout kv_layout page_size "
        "index_map kv_storage dropout sinks batch_invariant"
    ),
}
WITHOUT_DEFAULT = {
    "Accepted": 0,
    "CapturedFacts": 3,
    "Derivative": 3,
    "Node": 2,
    "Option": 3,
    "Rejected": 1,
    "Scatter": 3,
    "TensorSpec": 2,
    "Capabilities": 1,
    "Spec": 5,
}
ARGUMENTS = {
    "Call": "query key value mask captured ints floats scale score_function mask_function",
    "Outputs": "out lse max_scores saved workspace",
    "Saved": "out lse extras",
    "GradInputs": "dout dlse delta",
    "Grads": "dq dk dv captured workspace",
}
METHODS = {
    "Kernel.describe": "self call",
    "Kernel.workspace": "self call direction",
    "Kernel.saved_outputs": "self call",
    "Kernel.forward": "self call out",
    "Kernel.backward": "self call saved grad grads",
    "Backend.__init__": "self name device_type",
    "Backend.probe": "self",
    "Backend.fingerprint": "self",
    "Backend.supports": "self spec",
    "Backend.saved_bytes": "self dtype",
    "Backend.compile": "self spec artifacts",
    "Artifacts.get": "self name",
    "Artifacts.put": "self name data",
    "Lowering.__init__": "self target rules emit types",
    "Lowering.missing": "self",
    "Lowering.operations": "self",
    "Lowering.lower": "self nodes context wanted",
    "MaskViews.on": "self device",
    "MaskViews.transposed": "self",
    "MaskViews.index_lists": "self",
    "MaskViews.dense": "self",
    "ProgressLine.__init__": "self stream seconds",
    "ProgressLine.show": "self text",
    "ProgressLine.clear": "self",
    "Spec.unsupported_by": "self capabilities",
}


def test_every_name_is_there() -> None:
    assert set(NAMES) <= {*plugin.__all__, *ELSEWHERE}
    for name in (*plugin.__all__, *ELSEWHERE):
        assert hasattr(plugin, name)
    for name in ELSEWHERE & set(anyflex.__all__):
        assert getattr(plugin, name) is getattr(anyflex, name)


def test_the_module_s_docstring_lists_every_name_by_its_subject() -> None:
    listed = re.findall(r"\w+", str(plugin.__doc__))
    assert set(plugin.__all__) <= set(listed)


@pytest.mark.parametrize("name", FIELDS)
def test_fields_keep_their_order_and_new_ones_have_defaults(name: str) -> None:
    fields = dataclasses.fields(getattr(plugin, name))
    frozen = FIELDS[name].split()
    assert [field.name for field in fields][: len(frozen)] == frozen
    needed = [field for field in fields if field.default is dataclasses.MISSING]
    assert len(needed) == WITHOUT_DEFAULT[name]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_a_kernel_is_given_keeps_its_fields(name: str) -> None:
    parameters = list(inspect.signature(getattr(plugin, name)).parameters)
    frozen = ARGUMENTS[name].split()
    assert parameters[: len(frozen)] == frozen
    assert set(getattr(plugin, name).__annotations__) >= set(frozen)


@pytest.mark.parametrize("name", METHODS)
def test_methods_keep_their_arguments(name: str) -> None:
    owner, _, method = name.partition(".")
    parameters = inspect.signature(getattr(getattr(plugin, owner), method)).parameters
    frozen = METHODS[name].split()
    assert list(parameters)[: len(frozen)] == frozen
    for added in list(parameters.values())[len(frozen) :]:
        assert added.default is not inspect.Parameter.empty


def test_reserved_fields_of_a_call_have_what_contract_1_gives_them() -> None:
    tensor = torch.zeros(1, 1, 1, 1)
    call = plugin.Call(tensor, tensor, tensor, None, (), (), (), 1.0)
    assert call.index_offsets == (0, 0, 0, 0)
    for name in (
        "packed",
        "k_scale",
        "v_scale",
        "dropout",
        "sinks",
    ):
        assert getattr(call, name) is None


def test_the_contract_is_one() -> None:
    assert (plugin.CONTRACT, plugin.CONTRACT_MIN) == (1, 1)


def test_a_backward_whose_table_lacks_an_operation_of_the_derivative_refuses() -> None:
    # The slope of abs is sign.
    graph = plugin.parse_graph("input f32 - score;abs f32 0 -;=1")
    capabilities = plugin.Capabilities(
        dtypes=frozenset({torch.float32}),
        gradients=frozenset({"q"}),
        operations=frozenset(plugin.OPERATIONS) - {"sign"},
    )
    spec = plugin.Spec("cpu", "", torch.float32, 16, 16, score_graph=graph)
    assert spec.unsupported_by(capabilities) is None
    spec = dataclasses.replace(spec, gradients=("q",))
    reason = "operation sign in the derivative of a mod is not supported"
    assert spec.unsupported_by(capabilities) == reason
    with_core = dataclasses.replace(capabilities, core_backward=True)
    assert spec.unsupported_by(with_core) is None
    assert with_core.gradient_refusal(spec) == reason
