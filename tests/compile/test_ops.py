"""The two operations: torch's own checks of them, and agreement with eager calls."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import anyflex
from anyflex.runtime.op_request import Request, write_request
from anyflex.runtime.saved_for_backward import NOTHING
from anyflex.testing.mods import MASK_MODS, SCORE_MODS, Sizes

__all__: list[str] = []

SIZES = Sizes(2, 4, 2, 21, 37)
CASES = {
    "plain": ("identity", None),
    "learned": ("alibi_learned", "causal"),
    "numbers": ("temperature", "window_both"),
    "tables": ("bias_alias", "doc_sorted"),
    "scalar": ("scalar_learned", "batch_head_mix"),
    "without score": ("ignores_score", "random_spans"),
}


class Recording(TorchDispatchMode):
    """Records calls: an active dispatch mode sends them through the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[Any, Any]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function.namespace == "anyflex":
            self.calls[function] = (arguments, options or {})
        return function(*arguments, **(options or {}))


def call(name: str, mode: Any) -> list[Tensor]:
    """Outputs and gradients of one case under `mode`."""
    score_name, mask_name = CASES[name]
    generator = torch.Generator().manual_seed(4)
    score = SCORE_MODS[score_name].make(SIZES, generator)
    mask = None
    if mask_name is not None:
        mask_mod = MASK_MODS[mask_name].make(SIZES, generator).function()
        mask = anyflex.create_block_mask(mask_mod, 2, 4, 21, 37, BLOCK_SIZE=16)
    shapes = [(2, 4, 21, 8), (2, 2, 37, 8), (2, 2, 37, 6)]
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    tensors += score.learned.values()
    request = anyflex.AuxRequest(lse=True, max_scores=True)
    with mode:
        out, aux = anyflex.flex_attention(
            *tensors[:3], score.function(), mask, enable_gqa=True, return_aux=request
        )
        loss = (out * 1.5).sum() + torch.where(aux.lse.isfinite(), aux.lse, 0.0).square().sum()
        grads = torch.autograd.grad(loss, tensors)
    return [out.detach(), aux.lse.detach(), aux.max_scores, *grads]


class Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *details: object) -> None:
        return None


@pytest.mark.parametrize("name", CASES)
def test_eager_and_operation_give_equal_results(name: str) -> None:
    recording = Recording()
    through_operations = call(name, recording)
    assert {function._opname for function in recording.calls} == {
        "flex_attention",
        "flex_attention_backward",
    }
    for a, b in zip(through_operations, call(name, Nothing()), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["plain", "learned", "numbers"])
def test_the_operations_pass_torchs_checks(name: str) -> None:
    recording = Recording()
    call(name, recording)
    for function, (arguments, options) in recording.calls.items():
        # Nothing is differentiable twice: the backward operation gets no leaf that requires a
        # gradient.
        learns = function._opname == "flex_attention"
        leaf = functools.partial(_leaf, learns=learns)
        torch.library.opcheck(function, *torch.utils._pytree.tree_map(leaf, (arguments, options)))


def _leaf(value: Any, *, learns: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad and learns)


def test_a_mask_made_under_inference_mode_goes_through_the_operation() -> None:
    query = torch.randn(1, 2, 16, 4)
    with torch.inference_mode():
        mask = anyflex.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 16, 16, BLOCK_SIZE=16)
    eager = anyflex.flex_attention(query, query, query, block_mask=mask)
    with Recording():
        recorded = anyflex.flex_attention(query, query, query, block_mask=mask)
    torch.testing.assert_close(recorded, eager)


def test_a_mask_whose_memory_is_written_again_is_another_mask() -> None:
    masks = [
        anyflex.create_block_mask(mod, None, None, 32, 32, BLOCK_SIZE=16)
        for mod in (lambda b, h, q, k: k < 16, lambda b, h, q, k: k >= 16)
    ]
    query = torch.randn(1, 1, 32, 8)
    wanted = [anyflex.flex_attention(query, query, query, block_mask=mask) for mask in masks]
    offsets, runs = masks[0].offsets.clone(), masks[0].runs.clone()
    flags = (False,) * 3
    request = write_request(
        Request("", "", (0, 0, 0), *flags, flags, None, (), None, NOTHING, "highest")
    )
    scale = torch.tensor(8**-0.5, dtype=torch.float64)
    for mask, out in zip([*masks, *masks], [*wanted, *wanted], strict=True):
        # Runs it as Inductor does: without a new object, and uncounted.
        offsets.numpy()[...] = mask.offsets.numpy()
        runs.numpy()[...] = mask.runs.numpy()
        found, *_ = torch.ops.anyflex.flex_attention(
            query, query, query, [offsets, runs, scale], [2, 0, 16, 16], request
        )
        assert torch.equal(found, out)
