"""A kernel: torch's flex attention, compiled by torch at the first call."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from anyflex.plugin import (
    BackendRefused,
    Call,
    GradInputs,
    Grads,
    Kernel,
    Outputs,
    Saved,
    Spec,
    TensorSpec,
)
from anyflex_torch_flex.block_masks import torch_block_mask
from anyflex_torch_flex.mods import MakeMods

__all__ = ["TorchFlexKernel"]

_GRAPH = "anyflex_torch_flex_graph"


class TorchFlexKernel(Kernel):
    """Calls torch's flex attention with the spec's mods.

    Args:
        spec: what the backend accepted.
        make_mods: of `anyflex_torch_flex.mods.write_source`.
        block_multiple: torch's kernels want the mask's blocks to be multiples of this.
        kernel_options: torch's own, handed on.
    """

    def __init__(
        self,
        spec: Spec,
        make_mods: MakeMods,
        kernel_options: dict[str, str],
        block_multiple: int = 1,
    ) -> None:
        self.spec = spec
        self.kernel_options = kernel_options
        self._make_mods = make_mods
        self._block_multiple = block_multiple
        # fullgraph: at torch's recompile limit there is an error, not a path that is 10x slower.
        self._attend = torch.compile(_own_code(_attend), fullgraph=True)
        # Dynamo compiles for one thread at a time, and its guards aren't read under its lock.
        self._lock = threading.Lock()

    def describe(self, call: Call) -> str:
        return " ".join(["torch flex_attention", *self.kernel_options.values()])

    def saved_outputs(self, call: Call) -> tuple[TensorSpec, ...]:
        """An empty tensor that carries torch's autograd graph from forward to backward."""
        return (TensorSpec((0,), torch.float32),) if self.spec.needs_backward else ()

    def forward(self, call: Call, out: Outputs) -> None:
        # torch has no kernel for nothing.
        if call.query.numel() == 0 or call.key.shape[2] == 0 or call.value.numel() == 0:
            out.out.zero_()
            for tensor in (out.lse, out.max_scores):
                if tensor is not None:
                    tensor.fill_(-torch.inf)
            return
        leaves, result, lse, max_scores = self._results(call, learns=self.spec.needs_backward)
        out.out.copy_(result.detach())
        if out.lse is not None:
            assert lse is not None
            out.lse.copy_(lse.detach())
        if out.max_scores is not None:
            assert max_scores is not None
            out.max_scores.copy_(max_scores.detach())
        for carrier in out.saved:
            setattr(carrier, _GRAPH, (leaves, result, lse))

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        targets = (grads.dq, grads.dk, grads.dv)
        if call.query.numel() == 0 or call.key.shape[2] == 0 or call.value.numel() == 0:
            for target in targets:
                if target is not None:
                    target.zero_()
            return
        if grad.delta is not None:
            raise BackendRefused("torch's flex attention can't take lse and delta from outside")
        kept = getattr(saved.extras[0], _GRAPH, None)
        if kept is None:
            # What core has passed through one of torch's operators is another object.
            leaves, result, lse, _ = self._results(call, learns=True)
        else:
            leaves, result, lse = kept
            # A graph serves once: what torch compiles may overwrite what forward has kept.
            delattr(saved.extras[0], _GRAPH)
        roots, arriving = [result], [grad.dout]
        if grad.dlse is not None:
            assert lse is not None
            roots.append(lse)
            arriving.append(grad.dlse.masked_fill(saved.lse == -torch.inf, 0))
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(roots, wanted, arriving))
        for leaf, target in zip(leaves, targets, strict=True):
            if leaf.requires_grad:
                gradient = next(found)
                if target is not None:
                    target.copy_(gradient)

    def _results(
        self, call: Call, *, learns: bool
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor | None, Tensor | None]:
        """Return detached (query, key, value), out, lse and max_scores, the last two where the
        spec asks for them."""
        device = call.query.device
        leaves = (call.query.detach(), call.key.detach(), call.value.detach())
        for name, leaf in zip("qkv", leaves, strict=True):
            leaf.requires_grad_(learns and name in self.spec.gradients)
        ints = torch.tensor(call.ints or (0,), dtype=torch.int64).to(device)
        # Some devices have no float64.
        floats = torch.tensor(call.floats or (0.0,), dtype=torch.float32).to(device)
        captured = tuple(_readable(tensor) for tensor in call.captured)
        score_mod, mask_mod = self._make_mods(captured, ints, floats)
        mask = None
        if call.mask is not None:
            mask = torch_block_mask(call.mask, mask_mod, self._block_multiple)
        needs_lse = self.spec.needs_lse
        needs_maximum = "max_scores" in self.spec.aux
        asked: dict[str, Any] = {}
        if needs_lse or needs_maximum:
            asked["return_aux"] = AuxRequest(lse=needs_lse, max_scores=needs_maximum)
        with torch.set_grad_enabled(learns), self._lock:
            found = self._attend(
                *leaves,
                score_mod,
                mask,
                scale=call.scale,
                enable_gqa=self.spec.gqa_ratio != 1,
                kernel_options=self.kernel_options or None,
                **asked,
            )
        if not asked:
            return leaves, found, None, None
        result, aux = found
        return leaves, result, aux.lse, aux.max_scores


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: BlockMask | None,
    **settings: Any,
) -> Any:
    return flex_attention(query, key, value, score_mod, block_mask, **settings)


def _own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the same code in another object: torch counts recompilations by code
    object, of a function that has a source file, and at a limit gives up."""
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=function.__code__.co_name)
    return types.FunctionType(code, function.__globals__, function.__name__)


def _readable(table: Tensor) -> Tensor:
    """A captured tensor that can be indexed: rank 0 becomes [1], and nothing is empty."""
    table = table.detach()
    if table.numel() == 0:
        return table.new_zeros([max(1, size) for size in table.shape])
    return table.reshape(1) if table.dim() == 0 else table
