"""Kernel of torch's flex attention, compiled by torch at the first call."""

from __future__ import annotations

import itertools
import math
import threading
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from anyflex import BackendRefused
from anyflex.plugin import (
    Call,
    GradInputs,
    Grads,
    Kernel,
    Outputs,
    Saved,
    Spec,
    TensorSpec,
    unrouted_flex_attention,
)
from anyflex_torch_flex.block_masks import one_block, torch_block_mask
from anyflex_torch_flex.mods import MakeMods

__all__ = ["TorchFlexKernel", "autograd_records", "in_another_thread"]

# torch's own: after reroute_torch the public function would call this kernel again.
flex_attention = unrouted_flex_attention()

_WIDE = 128
"""Head dim above which float32 needs smaller tiles."""
_GRID = 65535
"""Maximum size of the second and third dimensions of a CUDA grid."""
_GRAPH = "anyflex_torch_flex_graph"
_NUMBERS = itertools.count()
# torch compiles under a lock of its own and runs autograd on the device's one thread meanwhile. A
# backward that waits for that lock there, to be compiled at its first run, would wait for ever.
# Guards aren't read under torch's lock either.
_LOCK = threading.Lock()


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
        # fullgraph: at torch's recompile limit raise an error instead of taking a path that is 10x
        # slower.
        self._attend = torch.compile(_own_code(_attend), fullgraph=True)

    def describe(self, call: Call) -> str:
        return " ".join(["torch flex_attention", *self.kernel_options.values()])

    def saved_outputs(self, call: Call) -> tuple[TensorSpec, ...]:
        """An empty tensor that carries torch's autograd graph from forward to backward."""
        return (TensorSpec((0,), torch.float32),) if self.spec.needs_backward else ()

    def forward(self, call: Call, out: Outputs) -> None:
        # torch has no kernel for empty tensors.
        if call.query.numel() == 0 or call.key.shape[2] == 0 or call.value.numel() == 0:
            out.out.zero_()
            for tensor in (out.lse, out.max_scores):
                if tensor is not None:
                    tensor.fill_(-torch.inf)
            return
        if any(call.index_offsets):
            raise BackendRefused("torch's flex attention takes no index offsets")
        self._refuse_large(call)
        # Inside of one of torch's operators autograd's records aren't kept.
        learns = self.spec.needs_backward and autograd_records()
        leaves, result, lse, max_scores = self._results(call, learns=learns)
        pairs = ((out.out, result), (out.lse, lse), (out.max_scores, max_scores))
        for output, found in pairs:
            if output is not None and found is not None:
                output.copy_(found.detach())
        for carrier in out.saved if learns else ():
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
        if autograd_records():
            self._differentiate(call, saved, grad, targets)
        else:
            in_another_thread(
                call.query.device, lambda: self._differentiate(call, saved, grad, targets)
            )

    def _differentiate(
        self, call: Call, saved: Saved, grad: GradInputs, targets: tuple[Tensor | None, ...]
    ) -> None:
        kept = getattr(saved.extras[0], _GRAPH, None)
        if kept is None:
            # Core has passed it through one of torch's operators, which returns another object.
            leaves, result, lse, _ = self._results(call, learns=True)
        else:
            leaves, result, lse = kept
            # A graph serves once: compiled code may overwrite tensors that forward has saved.
            delattr(saved.extras[0], _GRAPH)
        roots, arriving = [result], [grad.dout]
        if grad.dlse is not None:
            assert lse is not None
            roots.append(lse)
            arriving.append(grad.dlse.masked_fill(saved.lse == -torch.inf, 0))
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        with _LOCK:
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
        ints = _numbers(call.ints, torch.int64, device)
        # Some devices have no float64.
        floats = _numbers(call.floats, torch.float32, device)
        captured = tuple(_readable(tensor) for tensor in call.captured)
        score_mod, mask_mod = self._make_mods(captured, ints, floats)
        if call.mask is None:
            mask = one_block(device)
        else:
            mask = torch_block_mask(call.mask, mask_mod, self._block_multiple)
        needs_lse = self.spec.needs_lse
        needs_maximum = "max_scores" in self.spec.aux
        asked: dict[str, Any] = {}
        if needs_lse or needs_maximum:
            asked["return_aux"] = AuxRequest(lse=needs_lse, max_scores=needs_maximum)
        with torch.set_grad_enabled(learns), _LOCK:
            found = self._attend(
                *leaves,
                score_mod,
                mask,
                scale=call.scale,
                enable_gqa=self.spec.gqa_ratio != 1,
                kernel_options=self._options_for(call) or None,
                **asked,
            )
        if not asked:
            return leaves, found, None, None
        result, aux = found
        return leaves, result, aux.lse, aux.max_scores

    def _options_for(self, call: Call) -> dict[str, Any]:
        """torch's own kernel options, with corrections of those that it should have chosen by
        itself."""
        options: dict[str, Any] = dict(self.kernel_options)
        if call.query.device.type != "cuda":
            return options
        # The kernels for decoding stack the heads of a group, in tiles that must divide the mask's
        # blocks; where no tile does, no configuration is left to compile.
        no_tile = False
        if call.mask is not None:
            rows = max(16, call.query.shape[2] * self.spec.gqa_ratio)
            q_block = math.lcm(call.mask.block_size[0], self._block_multiple)
            no_tile = q_block % (1 << (rows - 1).bit_length()) != 0
        wide = self.spec.dtype is torch.float32 and (
            max(self.spec.head_dim, self.spec.value_head_dim) > _WIDE
        )
        if (no_tile or wide) and options.get("BACKEND", "AUTO") == "AUTO":
            options["BACKEND"] = "TRITON"
        if wide and options.get("BACKEND") == "TRITON":
            # Its usual tiles are larger than the shared memory.
            options |= dict.fromkeys(("BLOCK_M", "BLOCK_N"), 32)
            options |= dict.fromkeys(("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), 32)
            options["num_stages"] = 1
        return options

    def _refuse_large(self, call: Call) -> None:
        if call.query.device.type == "cuda" and max(call.query.shape[:2]) > _GRID:
            raise BackendRefused(
                f"torch's kernels take at most {_GRID} batches and heads; split the call"
            )


def autograd_records() -> bool:
    """Whether autograd records: False inside of one of torch's operators, which torch runs below
    autograd."""
    with torch.enable_grad():
        return (torch.ones((), requires_grad=True, device="cpu") * 1).requires_grad


def in_another_thread(device: torch.device, work: Callable[[], None]) -> None:
    """Work where autograd records, on this thread's stream; raises what `work` raises.

    torch turns autograd off for the current thread only.
    """
    # A stream selects its device too.
    stream = nullcontext() if device.type == "cpu" else torch.accelerator.current_stream(device)

    def run() -> None:
        with stream:
            work()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()


def _numbers(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """1-d and never empty. Filled on the device: a copy from the host would wait for its queue."""
    return torch.stack([torch.full((), v, dtype=dtype, device=device) for v in values or (0,)])


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: BlockMask,
    **settings: Any,
) -> Any:
    return flex_attention(query, key, value, score_mod, block_mask, **settings)


def _own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the same code under a name of its own.

    torch counts recompilations by code object, for functions with a source file, and gives up at a
    limit. By file, line and name it remembers which sizes have changed, and compiles for any size
    from then on, for every kernel alike.
    """
    assert isinstance(function, types.FunctionType)
    name = f"{function.__name__}_{next(_NUMBERS)}"
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name)


def _readable(table: Tensor) -> Tensor:
    """A captured tensor in a form that can be indexed: rank 0 becomes [1], and no dimension is 0.

    torch's CPU template takes no views with gaps.
    """
    table = table.detach()
    if table.device.type == "cpu":
        table = table.contiguous()
    if table.numel() == 0:
        return table.new_zeros([max(1, size) for size in table.shape])
    return table.reshape(1) if table.dim() == 0 else table
