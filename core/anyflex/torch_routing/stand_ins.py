"""Functions whose code torch's functions run while they are re-routed.

Names in that code are looked up among the globals of torch's module, so each body imports what it
calls. Parameters are those of torch 2.11 to 2.15; `stand_in` compares them.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch

from anyflex.errors import BackendRefused

__all__ = ["stand_in"]


def _attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Any = None,
    enable_gqa: Any = False,
    return_lse: Any = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    from anyflex.torch_routing.routed_calls import attend

    return attend(
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
    )


def _block_mask_2_11(
    mask_mod: Any,
    B: Any,
    H: Any,
    Q_LEN: Any,
    KV_LEN: Any,
    device: Any = None,
    BLOCK_SIZE: Any = 128,
    _compile: Any = False,
) -> Any:
    from anyflex.torch_routing.routed_calls import make_block_mask

    options = {"BLOCK_SIZE": BLOCK_SIZE, "_compile": _compile}
    return make_block_mask(mask_mod, (B, H, Q_LEN, KV_LEN), device, options)


def _block_mask_2_13(
    mask_mod: Any,
    B: Any,
    H: Any,
    Q_LEN: Any,
    KV_LEN: Any,
    device: Any = None,
    BLOCK_SIZE: Any = 128,
    _compile: Any = False,
    separate_full_blocks: Any = True,
    compute_dq_write_order: Any = False,
    dq_kv_order: Any = True,
) -> Any:
    from anyflex.torch_routing.routed_calls import make_block_mask

    options = {
        "BLOCK_SIZE": BLOCK_SIZE,
        "_compile": _compile,
        "separate_full_blocks": separate_full_blocks,
        "compute_dq_write_order": compute_dq_write_order,
        "dq_kv_order": dq_kv_order,
    }
    return make_block_mask(mask_mod, (B, H, Q_LEN, KV_LEN), device, options)


_STAND_INS = {
    "flex_attention": (_attention,),
    "create_block_mask": (_block_mask_2_11, _block_mask_2_13),
}


def stand_in(name: str, function: Any) -> types.CodeType:
    """Return the code that torch's `function` called `name` runs while it is re-routed.

    Raises:
        BackendRefused: it isn't the plain function of these parameters that torch 2.11 to 2.15
            have: another torch, or somebody has replaced it.
    """
    found = "not a plain function"
    if isinstance(function, types.FunctionType) and function.__closure__ is None:
        for candidate in _STAND_INS[name]:
            if _parameters(candidate) == _parameters(function):
                return candidate.__code__
        found = f"{name}{inspect.signature(function, follow_wrapped=False)}"
    raise BackendRefused(
        f"torch's {name} can't be re-routed: it is {found} in torch {torch.__version__}, which "
        "torch 2.11 to 2.15 don't have. If something has replaced it, re-route first; else "
        f"upgrade anyflex, or import anyflex.{name} instead.",
        {"torch": found},
    )


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    signature = inspect.signature(function, follow_wrapped=False)
    return [(each.name, each.kind, each.default) for each in signature.parameters.values()]
