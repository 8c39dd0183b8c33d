"""Every check of `flex_attention`'s arguments, made once, before any dispatch.

Part of the traced half: plain Python on shapes and types, inlined by Dynamo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from anyflex.frontend.aux_outputs import AuxRequest
from anyflex.frontend.transforms import refuse_transform
from anyflex.tensors.dynamo_errors import fail
from anyflex.tensors.storage_checks import PLAIN
from anyflex.tensors.symbolic_numbers import SYMBOLIC, fixed
from anyflex.tensors.torch_versions import dispatch_modes, dual_level, transform_stack

__all__ = [
    "check_aux",
    "check_dropout",
    "check_flags",
    "check_mask_fits",
    "check_scale",
    "check_tensors",
    "is_plain",
    "refuse_score_mod",
    "refuse_tensors",
]

STRIDED = torch.strided
_NOTHING, _LSE = AuxRequest(), AuxRequest(lse=True)
DTYPES = {torch.float32: True, torch.float16: True, torch.bfloat16: True, torch.float64: True}
SMALL_FLOATS = {
    getattr(torch, name): True
    for name in "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "float4_e2m1fn_x2".split()
    if hasattr(torch, name)
}


def check_tensors(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[int, int, int, int, int]:
    """Check three tensors: layouts, dtypes, devices and shapes against each other. Returns B, Hq,
    L, S and E: torch takes long to make a tensor's shape."""
    if not (
        query.layout is STRIDED
        and key.layout is STRIDED
        and value.layout is STRIDED
        and query.dim() == 4
        and key.dim() == 4
        and value.dim() == 4
        and not (query.is_nested or key.is_nested or value.is_nested)
    ):
        refuse_tensors(query, key, value)
    dtype = query.dtype
    if key.dtype is not dtype or value.dtype is not dtype or dtype not in DTYPES:
        _refuse_dtypes(query, key, value)
    device = query.device
    if key.device != device or value.device != device:
        fail(
            "ArgumentError",
            f"query, key and value must be on one device, got {query.device}, {key.device} and "
            f"{value.device}.",
        )
    batch, heads, length, head_dim = query.shape
    key_batch, key_heads, key_length, key_dim = key.shape
    value_batch, value_heads, value_length, value_dim = value.shape
    if head_dim != key_dim:
        fail(
            "ArgumentError",
            f"query and key must have one head dim E, got {head_dim} and {key_dim}.",
        )
    if head_dim == 0 or value_dim == 0:
        fail("ArgumentError", f"head dims must be positive, got E = {head_dim}, Ev = {value_dim}.")
    if key_length != value_length:
        _refuse_pair("length S", key_length, value_length)
    if key_heads != value_heads:
        _refuse_pair("number of heads H", key_heads, value_heads)
    if key_batch != value_batch:
        _refuse_pair("batch size", key_batch, value_batch)
    if key_batch != batch and key_batch != 1:
        direction = (
            " Broadcasting goes from key and value to query, not the other way: expand query."
            if batch == 1
            else ""
        )
        fail(
            "ArgumentError",
            f"the batch of key and value must be 1 or B, that of query: got {key_batch} for "
            f"B = {batch}.{direction}",
        )
    if heads != key_heads:
        if not enable_gqa or key_heads == 0 or heads == 0 or heads % key_heads != 0:
            _refuse_heads(heads, key_heads)
    elif heads == 0:
        fail("ArgumentError", "query and key must have at least one head, got H = 0.")
    return batch, heads, length, key_length, head_dim


def _refuse_pair(what: str, of_key: int, of_value: int) -> NoReturn:
    fail("ArgumentError", f"key and value must have one {what}, got {of_key} and {of_value}.")


def refuse_tensors(query: Any, key: Any, value: Any) -> NoReturn:
    """Refuse the first of query, key and value that is no dense tensor with four dimensions."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if isinstance(tensor, Tensor):
            if tensor.layout is STRIDED and tensor.dim() == 4 and not tensor.is_nested:
                continue
        else:
            cure = ""
            if type(tensor).__module__ == "numpy":
                cure = f" Use torch.from_numpy({name})."
            fail(
                "ArgumentTypeError",
                f"{name} must be a Tensor, got {type(tensor).__name__}.{cure}",
            )
        if tensor.is_nested:
            fail(
                "TensorFormError",
                f"{name} is a nested tensor; pack the documents into one dense tensor and keep "
                "them apart with a block mask over document ids.",
            )
        if tensor.layout is not STRIDED:
            fail(
                "TensorFormError",
                f"{name} must be dense (layout torch.strided), got layout {tensor.layout}. Use "
                f"{name}.to_dense().",
            )
        fail(
            "TensorFormError",
            f"{name} must have four dimensions (B, H, L, E), got shape "
            f"{[fixed(size) for size in tensor.shape]}. "
            "unsqueeze() adds a missing batch or head dimension.",
        )
    raise AssertionError("query, key and value are dense tensors with four dimensions")


def _refuse_heads(heads: int, key_heads: int) -> NoReturn:
    if heads == 0 or key_heads == 0:
        fail(
            "ArgumentError",
            f"query and key must have at least one head, got H = {heads} and {key_heads}.",
        )
    if heads < key_heads:
        fail(
            "ArgumentError",
            f"query has {heads} heads and key {key_heads}: Hq must be a multiple of Hkv. Are "
            "query and key swapped?",
        )
    if heads % key_heads != 0:
        fail(
            "ArgumentError",
            f"Hq must be a multiple of Hkv, got {heads} and {key_heads} (remainder "
            f"{heads % key_heads}).",
        )
    fail(
        "ArgumentError",
        f"query has {heads} heads and key {key_heads}: pass enable_gqa=True for grouped "
        "query attention.",
    )


def _refuse_dtypes(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype in SMALL_FLOATS:
            fail(
                "BackendRefused",
                f"{name} has dtype {tensor.dtype}: no backend of this version takes it. Use "
                "bfloat16 or float16.",
                reasons={"reference": f"dtype {tensor.dtype} is not supported"},
            )
        if tensor.dtype not in DTYPES:
            fail(
                "ArgumentTypeError",
                f"{name} has dtype {tensor.dtype}; it must be one of float32, bfloat16, float16, "
                "float64.",
            )
    fail(
        "TensorFormError",
        f"query, key and value must have one dtype, got {query.dtype}, {key.dtype} and "
        f"{value.dtype}. Convert with .to(query.dtype).",
    )


_LARGEST = torch.finfo(torch.float32).max


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
        refuse_transform()
    return True


def check_scale(scale: Any, dtype: torch.dtype) -> Any:
    """Return the scale as a float or int, symbolic ones as they are.

    Args:
        dtype: of query; but for float64 scores are float32.
    """
    if isinstance(scale, Tensor):
        if scale.requires_grad:
            fail(
                "ArgumentError",
                "scale is a tensor that requires grad, and there is no gradient for scale: "
                "multiply the score by a captured 0-d tensor in score_mod instead.",
            )
        if scale.dim() != 0 and scale.numel() != 1:
            fail(
                "ArgumentTypeError",
                f"scale must be one number, got a tensor of shape {list(scale.shape)}.",
            )
        if scale.device.type == "meta":
            fail("ArgumentError", "scale is on device meta, which holds no numbers.")
        # A compiled call is refused inside of any dual level.
        if not torch.compiler.is_dynamo_compiling() and _has_tangent(scale):
            fail(
                "BackendRefused",
                "scale is a tensor with a forward-mode tangent, and flex_attention has no "
                "forward-mode derivative: use torch.autograd.grad, and multiply the score by a "
                "captured 0-d tensor in score_mod.",
                reasons={"reference": "forward-mode derivatives are not implemented"},
            )
        scale = scale.item()
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        if isinstance(scale, SYMBOLIC):
            return scale  # the op checks it, when it has a value
        fail("ArgumentTypeError", f"scale must be a float, got {type(scale).__name__}.")
    # NaN and inf are the numbers whose difference from themselves isn't 0; Dynamo follows this
    # for a float that changes between calls, and not math.isfinite.
    if scale - scale != 0:
        fail("ArgumentError", f"scale must be finite, got {scale}.")
    if isinstance(scale, int) and (scale >= 2**63 or scale < -(2**63)):
        fail("ArgumentError", "scale is an int of more than 64 bits; pass a float.")
    # A value that may be a symbol to Dynamo would get a guard; the op checks it.
    if (
        dtype is not torch.float64
        and not torch.compiler.is_dynamo_compiling()
        and (scale > _LARGEST or scale < -_LARGEST)
    ):
        fail(
            "ArgumentError",
            f"scale must be finite in float32, the type of scores for {dtype}, got {scale}.",
        )
    return scale


def _has_tangent(tensor: Tensor) -> bool:
    if not dual_level(forward_ad) >= 0:
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def check_dropout(dropout_p: Any) -> Any:
    """Return the probability as a float or int, a symbolic one as it is."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float, *SYMBOLIC)):
        fail(
            "ArgumentTypeError",
            f"dropout_p must be a float, got {type(dropout_p).__name__}. Pass a tensor's number "
            "by .item().",
        )
    if not 0 <= dropout_p < 1:
        fail(
            "ArgumentError",
            "dropout_p is the probability with which weights are dropped: it must be at least 0 "
            f"and below 1, got {dropout_p}.",
        )
    return dropout_p


def check_flags(enable_gqa: Any, return_lse: Any, backend: Any) -> None:
    if not isinstance(enable_gqa, bool):
        fail("ArgumentTypeError", f"enable_gqa must be a bool, got {type(enable_gqa).__name__}.")
    if not isinstance(return_lse, bool):
        fail("ArgumentTypeError", f"return_lse must be a bool, got {type(return_lse).__name__}.")
    if backend is not None and not isinstance(backend, str):
        fail(
            "ArgumentTypeError",
            f"backend must be a backend's name, for example 'reference', got "
            f"{type(backend).__name__}.",
        )


def check_aux(return_lse: bool, return_aux: Any) -> AuxRequest:
    if return_aux is None:
        return _LSE if return_lse else _NOTHING
    if return_lse:
        fail("ArgumentError", "return_lse and return_aux are both given; keep return_aux.")
    if isinstance(return_aux, AuxRequest):
        for name, value in zip(AuxRequest._fields, return_aux, strict=True):
            if not isinstance(value, bool):
                fail(
                    "ArgumentTypeError",
                    f"return_aux: {name} of AuxRequest must be a bool, got "
                    f"{type(value).__name__}; for example AuxRequest(lse=True).",
                )
        return return_aux
    # torch's own AuxRequest has the same two fields.
    if type(return_aux).__name__ == "AuxRequest":
        return AuxRequest(lse=bool(return_aux.lse), max_scores=bool(return_aux.max_scores))
    fail(
        "ArgumentTypeError",
        f"return_aux must be an AuxRequest, for example AuxRequest(lse=True), got "
        f"{type(return_aux).__name__}.",
    )


def refuse_score_mod(score_mod: Any) -> NoReturn:
    """Refuse a score mod that can't be called."""
    fail(
        "ArgumentTypeError",
        "score_mod must be a function f(score, b, h, q_idx, kv_idx), got "
        f"{type(score_mod).__name__}.",
    )


def check_mask_fits(
    mask_shape: Sequence[int],
    lengths: tuple[int, int],
    batch: int,
    heads: int,
    q_length: int,
    kv_length: int,
) -> None:
    """Check a block mask's batch and heads (`mask_shape`) and its (q, kv) lengths against those of
    the tensors."""
    if lengths[0] != q_length or lengths[1] != kv_length:
        # Under torch.compile these may be symbols, which Dynamo can't put into a text.
        built = f"({fixed(lengths[0])}, {fixed(lengths[1])})"
        fail(
            "BlockMaskError",
            f"block_mask was built for (Q_LEN, KV_LEN) = {built}, the call has "
            f"({fixed(q_length)}, {fixed(kv_length)}). Rebuild it with create_block_mask for "
            "these lengths, or slice its rows.",
        )
    if mask_shape[0] != 1 and mask_shape[0] != batch:
        fail(
            "BlockMaskError",
            f"block_mask has batch B' = {mask_shape[0]}, the call has B = {batch}: B' must be 1 "
            "or B.",
        )
    if mask_shape[1] != 1 and mask_shape[1] != heads:
        fail(
            "BlockMaskError",
            f"block_mask has H' = {mask_shape[1]} heads, query has Hq = {heads}: H' must be 1 or "
            "Hq (query heads, under grouped query attention too).",
        )


def check_built_for_all(zero_alone: Sequence[str], batch: int, heads: int) -> None:
    """Check that a block mask built for one b or h alone (`zero_alone` has the index), from a mask
    mod that reads it, serves no other batch entries or heads."""
    for index, argument, size in (("b", "B", batch), ("h", "H", heads)):
        if index in zero_alone and size > 1:
            fail(
                "BlockMaskError",
                f"block_mask was built for one {index} alone ({argument} = None or 1, or a slice "
                f"of one), and its mask mod reads {index}; the call has {argument} = "
                f"{fixed(size)}. Build it with create_block_mask(..., {argument}={fixed(size)}).",
            )


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
