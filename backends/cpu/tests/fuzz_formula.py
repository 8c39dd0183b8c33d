"""The dense formula's results for a call that the fuzzer has drawn, and the elements that they are
compared on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from dense import dense_attention
from fuzz_drawing import Call, arriving
from fuzz_mods import Noting
from torch import Tensor

__all__ = ["Expected", "expected_of"]


@dataclass
class Expected:
    """Results of the formula.

    Args:
        results: out, lse and max_scores, in float64.
        gradients: of the leaves, in float64.
        parts: returns what gradient number n would be if no two parts of dS cancelled.
        largest_score: the largest of the scores that carry weight.
        judged: for each result and gradient the elements that NaN and infinity in the inputs
            don't reach; broadcastable.
        must_fail: a live pair reads outside.
        may_fail: something else reads outside.
    """

    results: list[Tensor]
    gradients: list[Tensor]
    parts: Callable[[int], Tensor]
    largest_score: float
    judged: list[Tensor]
    must_fail: bool
    may_fail: bool


def expected_of(call: Call, seed: int) -> Expected:
    """Evaluate the dense formula, with finite inputs."""
    clean = {
        name: tensor.detach().double().nan_to_num(0, 0, 0).requires_grad_(name in call.learned)
        for name, tensor in call.inputs.items()
    }
    leaves = [tensor for name, tensor in clean.items() if name in call.learned]
    query, key, value = clean.values()
    batch, heads, length, dim = query.shape
    keys = key.shape[2]
    score_mod = mask_mod = None
    by_score, by_mask = Noting(), Noting()
    empty = False
    if call.score is not None:
        tensors = list(call.score.tensors)
        empty = any(tensor.numel() == 0 for tensor in tensors)
        for position in call.score.learned:
            if str(position) in call.learned:
                # The function sees the table in the table's own type, as in anyflex.
                leaf = tensors[position].detach().double().requires_grad_()
                leaves.append(leaf)
                tensors[position] = leaf
        score_mod = call.score.function(by_score, tensors)
    if call.mask is not None:
        mask_mod = call.mask.function(by_mask)
    scale = dim**-0.5 if call.scale is None else call.scale
    scaled = query * (scale * dim**0.5)
    scores = Tensor()

    def keep_scores(score: Tensor, *at: Tensor) -> Tensor:
        nonlocal scores
        scores = score if score_mod is None else score_mod(score, *at)
        return scores

    out, lse = dense_attention(scaled, key, value, keep_scores, mask_mod)
    live = torch.ones(batch, heads, length, keys, dtype=torch.bool)
    if mask_mod is not None:
        places = torch.meshgrid(
            *(torch.arange(size) for size in (batch, heads, length, keys)), indexing="ij"
        )
        live = mask_mod(*places).expand(live.shape)
    dout, dlse = arriving(call, out, lse, seed)
    # Rows without a live key have a constant lse of -inf.
    finite_lse = lse.masked_fill(lse == -torch.inf, 0)
    loss = (out * dout).sum() + (finite_lse * dlse).sum()
    gradients = gradients_of(loss, leaves)

    def parts(place: int) -> Tensor:
        """P * (|dP| + |delta|), for dS = P * (dP - delta)."""
        values = value.expand(batch, -1, -1, -1).repeat_interleave(heads // key.shape[1], 1)
        delta = (out * dout).sum(-1, keepdim=True) - dlse[..., None]
        sizes = (dout.double() @ values.mT).abs() + delta.abs()
        # In the formula a row without a live key has an out of NaN.
        weights = (torch.exp(scores - finite_lse[..., None]) * sizes).masked_fill(~live, 0)
        return gradients_of(scores, leaves, weights.detach())[place]

    top = torch.full(live.shape[:3], -torch.inf, dtype=torch.float64)
    if keys:
        top = scores.detach().expand(live.shape).masked_fill(~live, -torch.inf).amax(-1)
    return Expected(
        [out.detach(), lse.detach(), top],
        gradients,
        parts,
        float(finite_lse.detach().abs().max()) if lse.numel() else 0.0,
        judged_of(call, live, len(leaves)),
        bool((by_score.outside & live).any() or (by_mask.outside & live).any()),
        bool(by_mask.outside.any()) or empty,
    )


def gradients_of(
    result: Tensor, leaves: list[Tensor], arriving: Tensor | None = None
) -> list[Tensor]:
    """The gradients of leaves, zeros where the result doesn't depend on them."""
    if not leaves or not result.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(result, leaves, arriving, retain_graph=True, allow_unused=True)
    return [
        torch.zeros_like(leaf) if each is None else each
        for leaf, each in zip(leaves, found, strict=True)
    ]


def judged_of(call: Call, live: Tensor, leaves: int) -> list[Tensor]:
    """Elements of out, lse, max_scores and the leaves' gradients that no non-finite input
    reaches."""
    rows = live.any(-1) | True
    everything = torch.ones((), dtype=torch.bool)
    if not call.nonfinite:
        return [everything] * (3 + leaves)
    ratio = live.shape[1] // call.inputs["key"].shape[1]

    def bad(name: str) -> Tensor:
        found = ~call.inputs[name].isfinite().all(-1)
        found = found.expand(live.shape[0], -1, -1)
        return found if name == "query" else found.repeat_interleave(ratio, 1)

    bad_keys = (bad("key") | bad("value"))[:, :, None, :]
    rows = ~((bad_keys | bad("query")[..., None]) & live).any(-1)
    # Gradients of keys sum over rows, and those of a table over everything.
    keys = ~((~rows)[..., None] & live).any(-2)
    kv_batch, kv_heads = call.inputs["key"].shape[:2]
    keys = keys.unflatten(1, (kv_heads, ratio)).all(2)
    if kv_batch != keys.shape[0]:
        keys = keys.all(0, keepdim=True)
    of_inputs = {"query": rows[..., None], "key": keys[..., None], "value": keys[..., None]}
    judged = [rows[..., None], rows, rows]
    judged += [of_inputs[name] for name in call.inputs if name in call.learned]
    return judged + [torch.zeros((), dtype=torch.bool)] * (3 + leaves - len(judged))
