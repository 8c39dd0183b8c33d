"""Forward and backward: an online softmax over the runs of the block mask.

Shapes of a tile: rows are [b, hkv, g, R, E], keys [b, hkv, 1, C, E], scores [b, hkv, g, R, C].
The online softmax is Milakov and Gimelshein's (2018), the backward from lse FlashAttention's (Dao
et al., 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from anyflex.plugin import Call, GradInputs, Grads, Kernel, Outputs, Saved, Spec, TensorSpec
from anyflex_example.mods import Pairs
from anyflex_example.tiles import Tile, tiles

__all__ = ["ExampleKernel"]


class ExampleKernel(Kernel):
    """Holds everything compiled for a spec and nothing of any call, so threads may share it.

    Args:
        spec: what `ExampleBackend.supports` accepted.
        mods: functions of `anyflex_example.mods.write_source`.
        keys_at_once: keys in one step.
    """

    def __init__(
        self, spec: Spec, mods: dict[str, Callable[[Pairs], Any]], *, keys_at_once: int
    ) -> None:
        self.spec = spec
        self.score_mod = mods.get("score_mod")
        self.mask_mod = mods.get("mask_mod")
        self.score_mod_backward = mods.get("score_mod_backward")
        self.dtype = torch.float64 if spec.dtype is torch.float64 else torch.float32
        self.keys_at_once = keys_at_once

    def describe(self, call: Call) -> str:
        return f"torch operations, {self.keys_at_once} keys at once"

    def saved_outputs(self, call: Call) -> tuple[TensorSpec, ...]:
        """out before it is rounded: backward's delta needs those digits."""
        if self.spec.dtype is self.dtype:
            return ()
        shape = (*call.query.shape[:3], call.value.shape[3])
        return (TensorSpec(shape, self.dtype),)

    def workspace(
        self, call: Call, direction: Literal["forward", "backward"]
    ) -> tuple[TensorSpec, ...]:
        """Return sums over many tiles: of dk and dv, then of each captured tensor that learns."""
        if direction == "forward":
            return ()
        inputs = {"k": call.key, "v": call.value}
        wanted = [
            TensorSpec(tuple(tensor.shape), self.dtype, zeroed=True)
            for name, tensor in inputs.items()
            if name in self.spec.gradients
        ]
        # Thousands of pairs may add to one element. (A device without float64 takes float32.)
        for tensor, facts in zip(call.captured, self.spec.captured, strict=True):
            if facts.needs_grad:
                wanted.append(TensorSpec(tuple(tensor.shape), torch.float64, zeroed=True))
        return tuple(wanted)

    @torch.no_grad()
    def forward(self, call: Call, out: Outputs) -> None:
        kv_heads = call.key.shape[1]
        for tile in tiles(call, self.keys_at_once):
            query = tile.of_rows(call.query, kv_heads).to(self.dtype)
            result = query.new_zeros((*query.shape[:4], call.value.shape[3]))
            maximum = query.new_full((*query.shape[:4], 1), -torch.inf)
            total = torch.zeros_like(maximum)
            for keys, partial in tile.pieces:
                value = self._keys(tile, call.value, keys)
                scores, _, _ = self._scores(call, tile, query, keys, partial, check=True)
                higher = torch.maximum(maximum, scores.amax(-1, keepdim=True))
                shift = _finite_shift(higher)
                weights = torch.exp(scores - shift)
                # Earlier sums were relative to the old maximum.
                factor = torch.exp(maximum - shift)
                total = total * factor + weights.sum(-1, keepdim=True)
                result = result * factor + _product(weights, value, scores != -torch.inf)
                maximum = higher
            result = result / total.masked_fill(total == 0, 1)
            if call.sinks is not None:
                # lse leaves the sink out. In backward core has added it to lse.
                sinks = call.sinks[:, None, None].expand(*call.query.shape[:3], 1)
                weight = torch.exp(tile.of_rows(sinks, kv_heads) - _finite_shift(maximum))
                # A dead row is 0 whatever its sink.
                result = torch.where(total == 0, result, result * (total / (total + weight)))
            tile.of_rows(out.out, kv_heads).copy_(result)
            for unrounded in out.saved:
                tile.of_rows(unrounded, kv_heads).copy_(result)
            if out.lse is not None:
                lse = _finite_shift(maximum) + total.log()
                tile.of_rows(out.lse, kv_heads).copy_(lse.squeeze(-1))
            if out.max_scores is not None:
                tile.of_rows(out.max_scores, kv_heads).copy_(maximum.squeeze(-1))

    @torch.no_grad()
    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        kv_heads = call.key.shape[1]
        sums = iter(grads.workspace)
        dk = None if grads.dk is None else next(sums)
        dv = None if grads.dv is None else next(sums)
        tables = {i: next(sums) for i, to in enumerate(grads.captured) if to is not None}
        out = saved.extras[0] if saved.extras else saved.out
        for tile in tiles(call, self.keys_at_once):
            query = tile.of_rows(call.query, kv_heads).to(self.dtype)
            lse = tile.of_rows(saved.lse, kv_heads).unsqueeze(-1)
            # A row without a live key: gradients that arrive there are dropped, and exp(s - inf)
            # is 0.
            dead = lse == -torch.inf
            lse = lse.masked_fill(dead, torch.inf)
            dout = tile.of_rows(grad.dout, kv_heads).to(self.dtype).masked_fill(dead, 0)
            if grad.delta is None:
                delta = (dout * tile.of_rows(out, kv_heads)).sum(-1, keepdim=True)
            else:
                delta = tile.of_rows(grad.delta, kv_heads).unsqueeze(-1).masked_fill(dead, 0)
            if grad.dlse is not None:
                dlse = tile.of_rows(grad.dlse, kv_heads).unsqueeze(-1)
                delta = delta - dlse.masked_fill(dead, 0)
            dq = torch.zeros_like(query)
            for keys, partial in tile.pieces:
                key = self._keys(tile, call.key, keys)
                value = self._keys(tile, call.value, keys)
                scores, live, pairs = self._scores(call, tile, query, keys, partial, check=False)
                alive = scores != -torch.inf
                weights = torch.exp(scores - lse).masked_fill(~alive, 0)
                dscores = (weights * (dout @ value.mT - delta)).masked_fill(~alive, 0)
                passed = self._through_score_mod(pairs, dscores, live, tables)
                if dv is not None:
                    part = _product(weights.mT, dout, alive.mT)
                    _add_shared(tile.of_keys(dv, keys), part)
                if passed is None:
                    continue
                if dk is not None:
                    part = _product(passed.mT, query, alive.mT) * call.scale
                    _add_shared(tile.of_keys(dk, keys), part)
                if grads.dq is not None:
                    dq += _product(passed, key, alive) * call.scale
            if grads.dq is not None:
                tile.of_rows(grads.dq, kv_heads).copy_(dq)
        for target, total in ((grads.dk, dk), (grads.dv, dv)):
            if target is not None and total is not None:
                target.copy_(total)
        for position, total in tables.items():
            accumulator = grads.captured[position]
            assert accumulator is not None
            accumulator += total

    def _keys(self, tile: Tile, tensor: Tensor, keys: slice) -> Tensor:
        return tile.of_keys(tensor, keys).unsqueeze(2).to(self.dtype)

    def _scores(
        self, call: Call, tile: Tile, query: Tensor, keys: slice, partial: bool, *, check: bool
    ) -> tuple[Tensor, Tensor, Pairs]:
        """Scores after the mods, -inf at dead pairs; which pairs the mask keeps; what mods saw."""
        raw = query @ self._keys(tile, call.key, keys).mT * call.scale
        pairs = Pairs(call, {**tile.indices(call, keys), "score": raw}, check=check)
        live = torch.ones((), dtype=torch.bool, device=raw.device).expand(raw.shape)
        # Structure wins: in a FULL run the mask function isn't even called.
        if partial and self.mask_mod is not None:
            live = self.mask_mod(pairs).expand(raw.shape)
            pairs.raise_for_reads_outside("mask_mod", live)
        scores = raw
        if self.score_mod is not None:
            scores = self.score_mod(pairs).expand(raw.shape)
            pairs.raise_for_reads_outside("score_mod", live)
        return scores.masked_fill(~live, -torch.inf), live, pairs

    def _through_score_mod(
        self, pairs: Pairs, dscores: Tensor, live: Tensor, tables: dict[int, Tensor]
    ) -> Tensor | None:
        """Return the gradient of q k^T * scale, None for 0; feed the captured tensors'."""
        if self.score_mod_backward is None:
            return dscores
        pairs.inputs["grad"] = dscores
        passed, scatters = self.score_mod_backward(pairs)
        for position, indices, gradient in scatters:
            # At a dead pair the mod's slope may be anything: 0 times it may be NaN.
            gradient = gradient.expand(live.shape).masked_fill(~live, 0)
            pairs.scatter(tables[position], indices, gradient)
        return None if passed is None else passed.expand(live.shape).masked_fill(~live, 0)


def _finite_shift(maximum: Tensor) -> Tensor:
    """Number subtracted from scores: 0 for a row without a live key, because -inf - -inf is
    NaN."""
    return maximum.masked_fill(maximum == -torch.inf, 0)


def _add_shared(total: Tensor, part: Tensor) -> None:
    """Add [b, hkv, g, C, E] to [b or 1, hkv, C, E], summed over all that share a key."""
    total += part.sum(2).sum_to_size(total.shape)


def _product(weights: Tensor, operand: Tensor, live: Tensor) -> Tensor:
    """``weights @ operand`` over live pairs: at the others weights are 0, and 0 * NaN is NaN.

    A kernel for a device selects in its inner loop. Here the operand's NaN and infinities are
    taken out of the product, and counted at live pairs by two more: a sum that has any of them is
    infinite if all of its non-finite terms are infinities of one sign, else NaN.

    Args:
        weights, live: [..., R, C].
        operand: [..., C, E].
    """
    strange = ~operand.isfinite()
    # On a device the host would wait for it to know whether any value is non-finite.
    if operand.device.type == "cpu" and not bool(strange.any()):
        return weights @ operand
    result = weights @ operand.masked_fill(strange, 0)
    # A weight of 0 times an infinity is NaN: such a pair counts, and its sign is 0.
    met = live.to(weights.dtype) @ strange.to(weights.dtype)
    signs = weights.sign() @ (operand.sign() * operand.isinf())
    infinite = (signs * torch.inf).masked_fill(met != signs.abs(), torch.nan)
    return result + infinite.masked_fill(met == 0, 0)
