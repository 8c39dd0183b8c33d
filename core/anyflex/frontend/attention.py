"""flex_attention: the traced half of a call, and the choice of its way to a kernel."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from anyflex.frontend.arguments import (
    check_aux,
    check_built_for_all,
    check_flags,
    check_mask_fits,
    check_scale,
    check_tensor_types,
    check_tensors,
    refuse_score_mod,
)
from anyflex.frontend.aux_outputs import AuxOutput, AuxRequest
from anyflex.frontend.custom_ops import flex_attention_op, number_tensors
from anyflex.mask_structure.run_checks import check_types
from anyflex.registry.cached_state import posed_as
from anyflex.runtime.op_request import write_request
from anyflex.runtime.saved_for_backward import NOTHING, saved_bytes
from anyflex.tensors.dynamo_errors import fail
from anyflex.tensors.storage_checks import PLAIN
from anyflex.tensors.tensor_facts import fp32_precision
from anyflex.tensors.torch_versions import (
    dispatch_modes,
    dynamo_constant,
    in_dual_level,
    transform_stack,
)
from anyflex.tracing.trace import TracedMod, trace_mod

__all__ = [
    "ScoreMod",
    "check",
    "check_captured_devices",
    "flex_attention",
    "is_plain",
    "op_arguments",
    "refuse_forward_mode",
    "refuse_transforms",
]

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    backend: str | None = None,
) -> Any:
    """Attention with a score function and a mask of your own, forward and backward, on any device.

    ``softmax(score_mod(q k^T * scale), over the keys that block_mask keeps) v``, with scores in
    float32 (float64 for float64 inputs). Signature and meaning are those of
    ``torch.nn.attention.flex_attention.flex_attention``, plus `backend`.

    Args:
        query: [B, Hq, L, E]; float32, bfloat16, float16 or float64; any strides.
        key: [Bkv, Hkv, S, E], Bkv is B or 1.
        value: [Bkv, Hkv, S, Ev].
        score_mod: ``f(score, b, h, q_idx, kv_idx)`` on scalars, returns the new score. It may read
            any tensor and number that it closes over; tensors that require grad get a gradient.
        block_mask: from `anyflex.create_block_mask`, or torch's own BlockMask.
        scale: multiplied into q k^T; None is E ** -0.5.
        enable_gqa: allow Hq to be a multiple of Hkv: query head h reads key head
            ``h // (Hq // Hkv)``.
        return_lse: torch's older spelling of ``return_aux=AuxRequest(lse=True)``; returns
            (out, lse).
        kernel_options: torch's tuning keys, and each backend's own under its name.
        return_aux: which auxiliary outputs to return.
        backend: force a backend by name, for example ``"reference"``. A forced backend never
            falls back: it computes the call, or `BackendRefused` tells why not.

    Returns:
        out, [B, Hq, L, Ev] in query's dtype and dimension order; with `return_aux` (out,
        AuxOutput). A row without a live key has out 0, lse -inf and gradients 0.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is wrong; the message names it.
        BlockMaskError: the block mask doesn't fit the tensors.
        ModTraceError: score_mod can't be traced.
        ModIndexError: score_mod reads outside of a captured tensor (where the backend checks).
        BackendRefused: nobody, or not the forced backend, takes the call; ``.reasons`` has why.
        PluginError: the forced backend is broken.
        AllocationError: there is not enough memory; an accelerator's is torch.OutOfMemoryError.

    Example:
        >>> import torch, anyflex
        >>> q, k, v = torch.randn(3, 1, 4, 128, 32).unbind(0)
        >>> causal = anyflex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128)
        >>> slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
        >>> def alibi(score, b, h, q_idx, kv_idx):
        ...     return score + slopes[h] * (kv_idx - q_idx)
        >>> anyflex.flex_attention(q, k, v, alibi, causal).shape
        torch.Size([1, 4, 128, 32])
    """
    query, key, value, block_mask, scale, aux, options = check(
        query,
        key,
        value,
        score_mod,
        block_mask,
        scale,
        enable_gqa,
        return_lse,
        kernel_options,
        return_aux,
        backend,
    )
    if torch.compiler.is_dynamo_compiling():
        out, lse, max_scores = _through_op(
            query, key, value, score_mod, block_mask, scale, aux, options, backend
        )
    elif is_plain(query, key, value):
        out, lse, max_scores = _late("anyflex.frontend.eager_call").run(
            query, key, value, score_mod, block_mask, scale, aux, options, backend
        )
    else:
        naming = _late("anyflex.frontend.tensor_subclasses").naming_subclasses
        with naming(query=query, key=key, value=value):
            out, lse, max_scores = _through_op(
                query, key, value, score_mod, block_mask, scale, aux, options, backend
            )
    if return_aux is not None:
        return out, AuxOutput(lse, max_scores)
    return (out, lse) if return_lse else out


def check(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Any,
    scale: Any,
    enable_gqa: Any,
    return_lse: Any,
    kernel_options: Any,
    return_aux: Any,
    backend: Any,
) -> tuple[Tensor, Tensor, Tensor, Any, float, AuxRequest, tuple[tuple[str, object], ...]]:
    """Check `flex_attention`'s arguments, and return them in their one form: tensors after
    autocast, a BlockMask of ours, a scale, a request, options as pairs."""
    # Defaults, which most calls leave as they are, need no function to check them.
    if enable_gqa is not False or return_lse is not False or backend is not None:
        check_flags(enable_gqa, return_lse, backend)
    aux = _NO_AUX
    if return_aux is not None or return_lse:
        aux = check_aux(return_lse, return_aux)
    check_tensor_types(query, key, value)
    # A tensor's device type takes 0.4 us longer than this bit of it.
    device_type = "cuda" if query.is_cuda else query.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        query, key, value = _autocast(query, key, value)
    *sizes, head_dim = check_tensors(query, key, value, enable_gqa)
    scale = head_dim**-0.5 if scale is None else check_scale(scale, query.dtype)
    if block_mask is not None:
        block_mask = _own_mask(block_mask)
        if block_mask.needs_mask_mod:
            fail(
                "BlockMaskError",
                "block_mask is a slice whose mask_mod would see shifted indices: assign "
                "block_mask.mask_mod, a function of the slice's own indices, before the call.",
            )
        check_mask_fits(block_mask.offsets.shape, block_mask.seq_lengths, *sizes)
        if block_mask._zero_alone:
            check_built_for_all(block_mask._zero_alone, *sizes[:2])
    if score_mod is not None and not callable(score_mod):
        refuse_score_mod(score_mod)
    options: tuple[tuple[str, object], ...] = ()
    if kernel_options is not None:
        from anyflex.registry.freeze_options import freeze_options

        options = freeze_options(kernel_options)
    return query, key, value, block_mask, scale, aux, options


_NO_AUX = AuxRequest()
_loaded: dict[str, Any] = {}


def _late(module: str) -> Any:
    """Import a module that `import anyflex` doesn't pay for; an import statement here would cost
    every call half a microsecond. Not sys.modules: it holds half-imported modules too."""
    loaded = _loaded.get(module)
    if loaded is None:
        loaded = _loaded[module] = importlib.import_module(module)
    return loaded


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast as autocast casts a matrix product: every floating type but float64."""
    dtype = torch.get_autocast_dtype(query.device.type)
    query, key, value = (
        tensor.to(dtype)
        if tensor.is_floating_point() and tensor.dtype is not torch.float64
        else tensor
        for tensor in (query, key, value)
    )
    return query, key, value


def _own_mask(block_mask: Any) -> Any:
    """Return the mask as anyflex's, converting torch's."""
    if torch.compiler.is_dynamo_compiling():  # Dynamo follows import statements
        from anyflex.block_mask.block_mask import BlockMask

        if isinstance(block_mask, BlockMask):
            # The op looks at the rest.
            check_types(block_mask.offsets, block_mask.runs, " of block_mask")
            return block_mask
    elif isinstance(block_mask, _late("anyflex.block_mask.block_mask").BlockMask):
        if block_mask._views is None:
            check_types(block_mask.offsets, block_mask.runs, " of block_mask")
        return block_mask
    if hasattr(block_mask, "kv_num_blocks"):
        from anyflex.block_mask.torch_format import converted

        return converted(block_mask)
    got = (
        f"a tensor of shape {list(block_mask.shape)}"
        if isinstance(block_mask, Tensor)
        else ("a function" if callable(block_mask) else type(block_mask).__name__)
    )
    fail(
        "ArgumentTypeError",
        f"block_mask must be a BlockMask, got {got}. Make one with "
        "create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN), where mask_mod takes 4 arguments "
        "(b, h, q_idx, kv_idx) and may read a dense bool tensor; a score mod takes 5 and is "
        "passed as score_mod.",
    )


def is_plain(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a call may go to its kernel directly: plain tensors that hold numbers, and nobody
    who watches the dispatcher."""
    if type(query) not in PLAIN or type(key) not in PLAIN or type(value) not in PLAIN:
        return False
    if dispatch_modes() != 0:
        return False
    if query.is_meta:
        fail(
            "BackendRefused",
            "query is on device meta, which holds no numbers: trace with torch.export, "
            "torch.compile or FakeTensorMode instead.",
            reasons={"reference": "device meta holds no numbers"},
        )
    if transform_stack() is not None:
        _refuse_transform(_transform())
    return True


def _transform() -> str:
    """The innermost functorch transform, or ""."""
    innermost = transform_stack()
    return "" if innermost is None else str(innermost.key()).rpartition(".")[2]


def _refuse_transform(transform: str) -> NoReturn:
    fail(
        "BackendRefused",
        f"flex_attention inside of the functorch transform {transform.lower()} is not "
        "supported: use torch.autograd.grad for gradients, and the batch dimension for vmap.",
        reasons={"reference": f"functorch transform {transform}"},
    )


def refuse_transforms() -> None:
    """Raise BackendRefused where the static op might lose a tangent without a word, or be refused
    by torch in words of its own."""
    found = _unfit_transform(torch.compiler.is_dynamo_compiling())
    if found == "dual level":
        refuse_forward_mode()
    if found:
        _refuse_transform(found)


@dynamo_constant
def _unfit_transform(compiling: bool) -> str:
    """The transform, or "dual level", that the static op can't be in, or "". Dynamo runs this, as
    it traces inside of the transforms."""
    transform = _transform()
    if transform == "Jvp" or (compiling and transform in ("Grad", "Vmap")):
        return transform
    return "dual level" if in_dual_level() else ""


def refuse_forward_mode() -> NoReturn:
    """Raise BackendRefused: a kernel would compute the value and lose the tangent."""
    fail(
        "BackendRefused",
        "flex_attention has no forward-mode derivative: use torch.autograd.grad",
        reasons={"reference": "forward-mode derivatives are not implemented"},
    )


def _through_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None,
    block_mask: Any,
    scale: float,
    aux: AuxRequest,
    options: tuple[tuple[str, object], ...],
    backend: str | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Call the static op: torch.compile and export see one node."""
    refuse_transforms()
    arguments, _, _ = op_arguments(
        query, key, value, score_mod, block_mask, scale, aux, options, backend
    )
    out, lse, max_scores, *_ = flex_attention_op(query, key, value, *arguments)
    return out, lse if aux.lse else None, max_scores if aux.max_scores else None


def op_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None,
    block_mask: Any,
    scale: float,
    aux: AuxRequest,
    options: tuple[tuple[str, object], ...],
    backend: str | None,
    every_gradient: bool = False,
) -> tuple[tuple[list[Tensor], list[int], str], list[Tensor], list[bool]]:
    """Return what the static ops take after query, key and value (tensors, ints, request), the
    captured tensors among them, and whether a gradient is wanted of query, key, value and each
    captured tensor. `every_gradient`: query, key and value need not require it."""
    score = TracedMod("", [], [], [], [])
    if score_mod is not None:
        wide = query.dtype is torch.float64
        score = trace_mod(
            score_mod, "score", torch.float64 if wide else torch.float32, query.device
        )
    mask = TracedMod("", [], [], [], [])
    structure: list[Tensor] = []
    block_size: tuple[int, ...] = ()
    if block_mask is not None:
        structure = [block_mask.offsets, block_mask.runs]
        if block_mask.offsets.is_meta and not query.is_meta:
            fail(
                "BlockMaskError",
                "this block mask is on meta, where it has no values, and can't move to "
                f"{query.device}",
            )
        block_size = block_mask.BLOCK_SIZE
        if block_mask.traced is not None:
            mask = block_mask.traced
        elif block_mask.opaque is not None:
            fail(
                "ModTraceError",
                "block_mask's mask_mod could not be traced, and runs through vmap in eager calls "
                "only",
                operation="mask_mod",
                hint="Write it with the operations of the table in the documentation.",
            )
    captured = [*score.captured, *mask.captured]
    check_captured_devices(query.device, captured, [*score.names, *mask.names])
    grad_mode = torch.is_grad_enabled()
    gradients = [
        every_gradient or (grad_mode and tensor.requires_grad) for tensor in (query, key, value)
    ]
    gradients += [grad_mode and tensor.requires_grad for tensor in score.captured]
    gradients += [False for _ in mask.captured]
    needs_backward = any(gradients)
    posed = posed_as(query.device)
    saved = NOTHING
    if needs_backward and not every_gradient:  # else no forward of this call runs
        saved = saved_bytes(query.device, query.dtype, backend, posed)
    request = write_request(
        score.text,
        mask.text,
        (len(score.captured), len(score.ints), len(score.floats)),
        aux.lse,
        aux.max_scores,
        aux.lse or needs_backward,
        gradients,
        backend,
        options,
        posed,
        saved,
        fp32_precision(query.dtype, query.device.type if posed is None else posed[0]),
    )
    numbers = number_tensors([scale, *score.floats, *mask.floats])
    ints = [len(structure), len(captured), *score.ints, *mask.ints, *block_size]
    return ([*structure, *captured, *numbers], ints, request), captured, gradients


def check_captured_devices(device: torch.device, captured: list[Tensor], names: list[str]) -> None:
    """Check that captured tensors are where query is."""
    for tensor, name in zip(captured, names, strict=True):
        if tensor.device != device:
            which = name or f"of shape {list(tensor.shape)}"
            fail(
                "ArgumentError",
                f"captured tensor {which} is on {tensor.device}, query on {device}: move it with "
                f".to({str(device)!r}).",
            )
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_complex():
            which = name or f"of shape {list(tensor.shape)}"
            kind = "nested" if tensor.is_nested else "complex" if tensor.is_complex() else "sparse"
            fail(
                "ArgumentTypeError",
                f"captured tensor {which} is {kind}; mods read dense, real tensors.",
            )
