"""Peers that torch itself has: scaled dot product attention, and its own flex attention.

They are called as a user of torch calls them, with nothing of anyflex between: also where
ANYFLEX_TORCH re-routes torch's flex attention.
"""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from anyflex.bench.case import BenchCase, Inputs
from anyflex.torch_routing.rerouting import unrouted_flex_attention

__all__ = ["Attend", "Contender", "peers"]


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query, key, value) -> out, with everything else bound."""


@dataclass(frozen=True)
class Contender:
    """An implementation of attention that is measured.

    Args:
        name: of the backend, or the peer's.
        kind: peers aren't anyflex's own; others are compared with them.
        distribution: ``"name version"`` of what carries it.
        refusal: returns why a case is out of reach, or None; a reason that shows at the first
            call only is reported then.
        prepare: binds a case's functions; costly work may wait for the first call.
    """

    name: str
    kind: Literal["backend", "peer"]
    distribution: str
    refusal: Callable[[BenchCase], str | None]
    prepare: Callable[[Inputs], Attend]


def peers(device: torch.device) -> list[Contender]:
    """Return the peers of a device."""
    kernels = {"cpu": ("FLASH",), "cuda": ("CUDNN", "FLASH", "EFFICIENT")}.get(device.type, ())
    found = [_sdpa(kernel) for kernel in kernels] or [_sdpa(None)]
    found.append(_flex("torch.flex", device, {}))
    if device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None:
        found.append(_flex("torch.flex.flash", device, {"BACKEND": "FLASH"}))
    return found


def _peer(
    name: str,
    refusal: Callable[[BenchCase], str | None],
    prepare: Callable[[Inputs], Attend],
) -> Contender:
    return Contender(name, "peer", f"torch {torch.__version__}", refusal, prepare)


def _sdpa(kernel: str | None) -> Contender:
    """scaled_dot_product_attention by one of its kernels, None for torch's choice."""

    def refusal(case: BenchCase) -> str | None:
        if case.mods:
            return "scaled_dot_product_attention has no score mods"
        if case.masks not in ((), ("causal",)):
            return "scaled_dot_product_attention has no mask functions but causal"
        if case.masks and case.q_shape[2] != case.kv_shape[2]:
            return "causal of other lengths means different things to different kernels"
        return None

    def prepare(inputs: Inputs) -> Attend:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        settings: dict[str, Any] = {"is_causal": bool(inputs.case.masks)}
        if inputs.case.gqa:
            settings["enable_gqa"] = True

        def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, **settings)

        if kernel is None:
            return plain
        only = getattr(SDPBackend, f"{kernel}_ATTENTION")

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel(only):
                return plain(query, key, value)

        return attend

    return _peer("torch.sdpa" + (f".{kernel.lower()}" if kernel else ""), refusal, prepare)


def _flex(name: str, device: torch.device, options: dict[str, str]) -> Contender:
    """torch's flex_attention, compiled for the case's lengths."""

    def refusal(case: BenchCase) -> str | None:
        if device.type == "cpu" and case.learns:
            return "torch's flex attention has no backward on the CPU"
        return None

    def prepare(inputs: Inputs) -> Attend:
        flex_attention = unrouted_flex_attention()
        mask = None
        if inputs.block_mask is not None:
            mask = inputs.block_mask.to_torch()
            # The mod is passed as written: torch traces it itself.
            mask.mask_mod = inputs.mask_mod
        settings: dict[str, Any] = {
            "score_mod": inputs.score_mod,
            "block_mask": mask,
            "enable_gqa": inputs.case.gqa,
            "kernel_options": options or None,
        }

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out: Tensor = flex_attention(query, key, value, **settings)
            return out

        compiled: Attend = torch.compile(_own_code(attend), dynamic=False, fullgraph=True)
        return compiled

    return _peer(name, refusal, prepare)


def _own_code(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of the same code in another object: torch counts recompilations by code
    object, and at a limit gives up."""
    assert isinstance(function, types.FunctionType)
    return types.FunctionType(
        function.__code__.replace(co_name=function.__code__.co_name),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
