"""A call of `flex_attention` after all its arguments were checked, once, before any dispatch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyflex.frontend.arguments import (
    check_aux,
    check_built_for_all,
    check_dropout,
    check_flags,
    check_mask_fits,
    check_scale,
    check_tensors,
    refuse_score_mod,
    refuse_tensors,
)
from anyflex.frontend.aux_outputs import AuxRequest
from anyflex.tensors.dynamo_errors import fail
from anyflex.tracing.mod_types import ScoreMod

__all__ = ["CheckedCall", "check"]


class CheckedCall(NamedTuple):
    """`flex_attention`'s arguments in their one form.

    Args:
        query, key, value: after autocast.
        score_mod: callable, or None.
        block_mask: anyflex's, torch's is converted; or None.
        scale: a number; None has become E ** -0.5.
        aux: what is asked for beside out.
        options: ``kernel_options`` as pairs.
        backend: the ``backend=`` argument.
        dropout_p: the probability, 0 for none.
        sinks: [Hq], in lse's dtype, contiguous; or None.
        batch_invariant: of a packed call (`Spec`).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: ScoreMod | None
    block_mask: Any
    scale: float
    aux: AuxRequest
    options: tuple[tuple[str, object], ...]
    backend: str | None
    dropout_p: float
    sinks: Tensor | None = None
    batch_invariant: bool = False


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
    dropout_p: Any = 0.0,
    sinks: Any = None,
) -> CheckedCall:
    """Check `flex_attention`'s arguments, and return them in their one form."""
    # Most calls pass flags that need no function to check them.
    if (
        (enable_gqa is not True and enable_gqa is not False)
        or return_lse is not False
        or backend is not None
    ):
        check_flags(enable_gqa, return_lse, backend)
    aux = _NO_AUX
    if return_aux is not None or return_lse:
        aux = check_aux(return_lse, return_aux)
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        refuse_tensors(query, key, value)
    # A tensor's device type takes 0.4 us longer than this bit of it.
    device_type = "cuda" if query.is_cuda else query.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        query, key, value = _autocast(query, key, value)
    *sizes, head_dim = check_tensors(query, key, value, enable_gqa)
    scale = head_dim**-0.5 if scale is None else check_scale(scale, query.dtype)
    if block_mask is not None:
        # The usual mask, which was checked already, needs no function.
        if (
            torch.compiler.is_dynamo_compiling()  # which would guard on what follows
            or type(block_mask) is not _block_mask_class
            or block_mask.known_views is None
        ):
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
    if type(dropout_p) is not float or dropout_p != 0.0:
        dropout_p = check_dropout(dropout_p)
    if sinks is not None:
        from anyflex.frontend.attention_sinks import checked_sinks

        sinks = checked_sinks(sinks, query, sizes[1])
    return CheckedCall(
        query, key, value, score_mod, block_mask, scale, aux, options, backend, dropout_p, sinks
    )


_NO_AUX = AuxRequest()


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
    from anyflex.mask_structure.run_checks import check_types

    if torch.compiler.is_dynamo_compiling():  # Dynamo follows import statements
        from anyflex.block_mask.block_mask import BlockMask

        if isinstance(block_mask, BlockMask):
            # The op looks at the rest.
            check_types(block_mask.offsets, block_mask.runs, " of block_mask")
            return block_mask
    elif isinstance(block_mask, _block_mask_class or _load_block_mask()):
        if block_mask.known_views is None:
            check_types(block_mask.offsets, block_mask.runs, " of block_mask")
        return block_mask
    if hasattr(block_mask, "kv_num_blocks"):
        from anyflex.frontend.torch_masks import converted

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


_block_mask_class: Any = None
"""`BlockMask`, filled at the first call with a mask: `import anyflex` doesn't pay for its module,
and an import statement would cost every call half a microsecond."""


def _load_block_mask() -> Any:
    global _block_mask_class
    from anyflex.block_mask.block_mask import BlockMask

    _block_mask_class = BlockMask
    return BlockMask
