"""Plan: from a call's facts to a spec, and from the spec to a compiled kernel, once a spec."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyflex.contract.backend import Kernel
from anyflex.contract.call import Call
from anyflex.contract.packed_rows import PackedRows
from anyflex.contract.spec import STORED, CapturedFacts, Spec
from anyflex.errors import BackendRefused
from anyflex.mod_graph.graph import ModGraph, parse_graph
from anyflex.mod_graph.simplify import simplify
from anyflex.registry.cached_state import STATE
from anyflex.registry.environment import check_indices
from anyflex.registry.forced_backends import FORCED, names_in_force
from anyflex.runtime.compiled_kernel import CompiledKernel
from anyflex.runtime.kernel_cache import kernel_for
from anyflex.runtime.op_request import Request, write_request
from anyflex.runtime.saved_for_backward import NOTHING
from anyflex.runtime.scalar_specialization import Bound, bind_numbers, forget_numbers
from anyflex.tensors.storage_checks import check_readable
from anyflex.tensors.tensor_facts import architecture, determinism, memories, memory, q_class

__all__ = ["Inputs", "Plan", "clear_plans", "plan_for", "refuse_tracing", "spec_for"]

PLANS = 4096
SHAPES, PACKED_SHAPES = 4096, 256
"""Maximum number of call shapes that keep a plan, and of those of a plan's packed calls; then all
are forgotten. Planning again costs less than recording every hit."""


@dataclass(slots=True)
class Inputs:
    """A call after the traced half, whichever way it came.

    Args:
        call: tensors and numbers, as the kernel sees them.
        request: everything else that decides about it.
        read: captured tensors as the mods read them; the call's are copies where torch's negative
            bit is set.
        names: of the captured tensors in the user's score and mask functions, "" where unknown;
            for messages.
    """

    call: Call
    request: Request
    read: tuple[Tensor, ...] = ()
    names: tuple[list[str], list[str]] = ([], [])


class Plan:
    """A compiled spec with the facts that a launch needs, looked up once.

    Attributes:
        compiled: backend, kernel and decision.
        spec: the compiled spec.
        kernel: the kernel.
        own_backward: the kernel's own backward is used, not core's.
        saves, works: the kernel declares saved outputs, or workspace.
        accumulate: dtype of lse.
        device: of the call's tensors.
        accumulators: dtype of each captured tensor's accumulator, None where it needs no gradient.
        casts: some captured tensor is narrower than its accumulator.
        checks_reads: core looks before forward whether captured tensors are read within.
        same_dims: Ev is E.
        max_scores: they are asked for.
        gradients: a flag for query, key, value.
        sinks: () without sinks, else a flag: they need a gradient.
        mark: identifies this kernel's saved outputs, in any process: a positive signed 64-bit
            integer.
        request: of the plan's calls (`anyflex.runtime.op_request`), for a backward that Dynamo
            traces. It promises no saved bytes.
        guard: makes a context manager that selects the device, or None while it is selected; None
            where there is no choice.
    """

    def __init__(
        self,
        compiled: CompiledKernel,
        device: torch.device,
        request: str,
        sinks: tuple[bool, ...] = (),
    ) -> None:
        self.request = request
        self.sinks = sinks
        self.device = device
        self.compiled = compiled
        self.spec = compiled.spec
        self.device_type = device.type
        self.kernel = compiled.kernel
        self._packed: dict[tuple[object, ...], dict[object, Any]] = {}
        kind = type(compiled.kernel)
        self.own_backward = compiled.decision.backward == "own"
        self.saves = kind.saved_outputs is not Kernel.saved_outputs
        self.works = kind.workspace is not Kernel.workspace
        self.accumulate = torch.float64 if self.spec.dtype is torch.float64 else torch.float32
        self.same_dims = self.spec.head_dim == self.spec.value_head_dim
        self.max_scores = "max_scores" in self.spec.aux
        self.gradients = tuple([name in self.spec.gradients for name in "qkv"])
        self.guard = _device_guard(device)
        captured = self.spec.captured
        wide = {torch.float64: torch.float64}
        self.accumulators = tuple(
            [
                wide.get(facts.dtype, self.accumulate) if facts.needs_grad else None
                for facts in captured
            ]
        )
        # On other devices than the CPU a kernel would have to wait for the device to tell.
        self.checks_reads = bool(captured) and self.spec.device_type != "cpu" and check_indices()
        self.casts = any(
            facts.needs_grad and facts.dtype is not dtype
            for facts, dtype in zip(captured, self.accumulators, strict=True)
        )
        text = f"{compiled.backend.name}|{compiled.distribution}|{self.spec.to_text()}"
        digest = hashlib.sha256(text.encode()).digest()
        self.mark = int.from_bytes(digest[:7], "little") + 1

    def kept_by_packed(self, call: Call, packed: PackedRows) -> dict[object, Any]:
        """Return `Call.kept` of a packed call. The shapes of these change with each step, and
        those of a step's layers are the same."""
        query, key, value = call.query, call.key, call.value
        shapes = (
            query.shape,
            query.stride(),
            key.shape,
            key.stride(),
            value.shape,
            value.stride(),
            packed.blocks.shape,
            packed.max_q,
            packed.max_kv,
        )
        found = self._packed.get(shapes)
        if found is None:
            if len(self._packed) >= PACKED_SHAPES:
                self._packed.clear()
            found = self._packed.setdefault(shapes, {})
        return found


def _device_guard(device: torch.device) -> Callable[[], Any] | None:
    """As `Plan.guard`: None also where torch can't make one."""
    if device.type == "cpu":
        return None
    module: Any = getattr(torch, device.type, None)
    select = getattr(module, "device", None)
    if callable(select):
        if not callable(getattr(module, "current_device", None)):
            return lambda: select(device)
        index = device.index
        # Asking costs a tenth of selecting the device that is selected already.
        return lambda: None if module.current_device() == index else select(device)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type or device.index is None:
        return None
    if torch.accelerator.device_count() < 2:
        return None
    return lambda: torch.accelerator.device_index(device.index)


_plans: dict[tuple[Any, ...], Plan] = {}
_by_shapes: dict[tuple[Any, ...], tuple[Plan, dict[object, Any]]] = {}
"""Plan and `Call.kept` by facts, shapes, strides and the mask's shape. `_plans` has classes of
shapes instead."""


def plan_for(inputs: Inputs) -> Plan:
    """Return the plan of this call, compiling its spec if it is new, and fill in `Call.kept`.

    Raises:
        ArgumentError: a tensor can't be read (`anyflex.tensors.storage_checks`).
        BackendRefused: inside of torch.jit.trace.
        BackendRefused, PluginError, ArgumentError, GraphCaptureError: see `kernel_for`.
    """
    call = inputs.call
    request = inputs.request
    query, key, value = call.query, call.key, call.value
    bound: Bound = ()
    if call.ints or call.floats:
        bound = bind_numbers(request.score, request.mask, call.ints, call.floats)
    names = None if request.backend is not None else FORCED.get(STATE.environment_names)
    if names is None:
        names = names_in_force(request.backend)
    views = call.mask
    dtype = query.dtype
    layouts = memories(query, key, value, call.captured, inputs.names)
    if call.sinks is not None:
        check_readable("sinks", call.sinks)
    shapes = query.shape, key.shape, value.shape
    facts = (
        request,
        bound,
        None if views is None else views.block_size,
        query.device,
        dtype,
        layouts,
        "off" if not torch.are_deterministic_algorithms_enabled() else determinism(),
        names,
        repr(request.options) if request.options else "",  # 1, 1.0 and True are equal
        # A graph's text determines its captured tensors' number, types and ranks; an untraced mod
        # has no text.
        None
        if call.score_function is None and call.mask_function is None
        else tuple([(t.dtype, t.dim()) for t in call.captured]),
        STATE.generation,
    )
    if call.packed is not None:
        # The number of rows changes with each step.
        page_size = key.shape[2] if request.kv_layout == "paged" else 0
        sizes = query.shape[3], value.shape[3], query.shape[1] // key.shape[1], page_size
        packed_class = (facts, (*sizes, key.dtype, q_class(call.packed.max_q)))
        return _plan_of_class(packed_class, inputs, bound, names)
    exactly = (
        facts,
        shapes,
        # Tensors of the usual case are contiguous, and their strides follow from their shapes,
        # except where a size is 1.
        None if layouts is None else (query.stride(), key.stride(), value.stride()),
        None if views is None else views.shape,
    )
    found = _by_shapes.get(exactly)
    if found is None:
        refuse_tracing()  # no trace's shapes were seen before: each has tensors of its own
        of_class = (facts, _class_of(*shapes))
        plan = _plan_of_class(of_class, inputs, bound, names)
        if len(_by_shapes) >= SHAPES:
            _by_shapes.clear()
        found = _by_shapes.setdefault(exactly, (plan, {}))
    plan, call.kept = found
    return plan


def refuse_tracing() -> None:
    """Raise BackendRefused inside of torch.jit.trace, where sizes are tensors."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise BackendRefused(
            "flex_attention inside of torch.jit.trace is not supported: use torch.export or "
            "torch.compile",
            {"reference": "torch.jit.trace"},
        )


def _class_of(query: torch.Size, key: torch.Size, value: torch.Size) -> tuple[object, ...]:
    """Key of the shapes that a spec distinguishes."""
    batch, heads, length, head_dim = query
    return head_dim, value[3], heads // key[1], key[0] != batch, q_class(length)


def _plan_of_class(
    of_class: tuple[Any, ...],
    inputs: Inputs,
    bound: Bound,
    names: tuple[str, ...],
) -> Plan:
    """The plan of the class of calls that this one belongs to.

    Args:
        of_class: the key of the class.
        bound, names: of `bind_numbers` and `names_in_force`.
    """
    plan = _plans.get(of_class)
    if plan is None:
        spec = _spec(inputs, bound)
        request = inputs.request
        compiled = kernel_for(spec, names, request.backend, request.options)
        text = write_request(request._replace(saved_bytes=NOTHING))
        plan = Plan(compiled, inputs.call.query.device, text, request.sinks)
        if len(_plans) >= PLANS:
            _plans.clear()
        _plans[of_class] = plan
    return plan


def spec_for(inputs: Inputs) -> Spec:
    """Return the spec of this call, without asking any backend."""
    call = inputs.call
    request = inputs.request
    bound = bind_numbers(request.score, request.mask, call.ints, call.floats)
    return _spec(inputs, bound)


def _spec(inputs: Inputs, bound: Bound) -> Spec:
    call, request = inputs.call, inputs.request
    query, key, value, views = call.query, call.key, call.value, call.mask
    packed = call.packed
    score_graph, mask_graph = _graphs(inputs, bound)
    captured = tuple(
        CapturedFacts(tensor.dtype, tensor.dim(), needed)
        for tensor, needed in zip(call.captured, request.gradients[3:], strict=True)
    )
    posed = request.posed or (query.device.type, architecture(query.device))
    classes = [memory(tensor) for tensor in (query, key, value)]
    aux = (("lse", request.lse), ("max_scores", request.max_scores))
    return Spec(
        device_type=posed[0],
        arch=posed[1],
        dtype=query.dtype,
        head_dim=query.shape[3],
        value_head_dim=value.shape[3],
        gqa_ratio=query.shape[1] // key.shape[1],
        kv_broadcast=packed is None and key.shape[0] != query.shape[0],
        score_graph=score_graph,
        mask_graph=mask_graph,
        mask_kind="none" if views is None else "runs",
        block_size=(0, 0) if views is None else views.block_size,
        captured=captured,
        aux=tuple(name for name, wanted in aux if wanted),
        needs_lse=request.needs_lse,
        gradients=tuple(
            name for name, needed in zip("qkv", request.gradients, strict=False) if needed
        ),
        dlse=request.lse and any(request.gradients),
        determinism=determinism(),  # type: ignore[arg-type]
        fp32_precision=request.fp32_precision,
        q_class=q_class(  # type: ignore[arg-type]
            query.shape[2] if packed is None else packed.max_q
        ),
        alignment=(classes[0][0], classes[1][0], classes[2][0]),
        index_width=32 if all(narrow for _, narrow in classes) else 64,
        opaque=call.score_function is not None or call.mask_function is not None,
        batch_invariant=request.batch_invariant,
        dropout=request.dropout,
        q_layout="dense" if packed is None else "packed",
        kv_layout=request.kv_layout,  # type: ignore[arg-type]
        page_size=key.shape[2] if request.kv_layout == "paged" else 0,
        kv_storage=STORED.get(key.dtype, "plain"),  # type: ignore[arg-type]
        sinks=call.sinks is not None,
    )


def _graphs(inputs: Inputs, bound: Bound) -> tuple[ModGraph | None, ModGraph | None]:
    """The two graphs with this call's constants in place, slots counted over the whole call."""
    captured, ints, floats = inputs.request.score_slots
    constants = {}
    all_ints = len(inputs.call.ints)
    for i, value in enumerate(bound):
        if value is not None:
            constants[f"i{i}" if i < all_ints else f"f{i - all_ints}"] = value
    score = mask = None
    if inputs.request.score:
        score = simplify(parse_graph(inputs.request.score).bind(constants=constants))
    if inputs.request.mask:
        moved = parse_graph(inputs.request.mask).bind(
            shift_captured=captured, shift_ints=ints, shift_floats=floats
        )
        mask = simplify(moved.bind(constants=constants))
    return score, mask


def clear_plans() -> None:
    """Forget every plan and every seen number. Kernels stay in their own cache."""
    _plans.clear()
    _by_shapes.clear()
    forget_numbers()
