"""Backward problems with gradients by the dense formula, for kernels that `gluon_in_python`
runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from gluon_in_python import Pointer, runs_of

__all__ = ["SHIFTS", "Problem"]

Mod = Callable[..., Any]
SHIFTS = (3, 5, 7, 11)
"""Index offsets (b, h, q, kv) of the call."""


def softcap(score: Any, b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    return 3.0 * np.tanh(score / 3.0) + 0.01 * (k - q) * (h + 1)


def softcap_backward(grad: Any, score: Any, b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    return grad * (1.0 - np.tanh(score / 3.0) ** 2)


class Problem:
    """A call's tensors, mask and mods, and its gradients in `wanted`.

    Args:
        seed, pick: seed and generator of what is drawn.
        dims: head dims of query and value.
        kv_shared: whether all batch entries have the same keys.
        blocks: block size of the mask, query rows and keys.
        odd_key: key at which the score mod's derivative is NaN, or None.
        low: whether all scores are far below 0.
    """

    scale = 0.2

    def __init__(
        self,
        seed: int,
        pick: random.Random,
        dims: tuple[int, int],
        batch: int,
        kv_heads: int,
        group: int,
        kv_shared: bool,
        rows: int,
        keys: int,
        blocks: tuple[int, int],
        has_mask: bool,
        has_mask_mod: bool,
        has_score_mod: bool,
        odd_key: int | None = None,
        low: bool = False,
    ) -> None:
        numbers = np.random.default_rng(seed)
        heads = kv_heads * group
        kv_batch = 1 if kv_shared else batch
        self.batch, self.heads, self.kv_heads, self.kv_batch = batch, heads, kv_heads, kv_batch
        self.group, self.kv_shared, self.rows, self.keys = group, kv_shared, rows, keys
        self.q, self.do = (numbers.standard_normal((batch, heads, rows, d)) for d in dims)
        self.k, self.v = (numbers.standard_normal((kv_batch, kv_heads, keys, d)) for d in dims)
        if low:
            self.q, self.k = self.q + 30.0, self.k - 30.0
        at = (
            np.arange(batch).reshape(-1, 1, 1, 1), np.arange(heads).reshape(1, -1, 1, 1),
            np.arange(rows).reshape(-1, 1), np.arange(keys),
        )  # fmt: skip
        seen = tuple(x + shift for x, shift in zip(at, SHIFTS, strict=True))
        modulus = pick.choice((2, 3, 97))
        slopes = np.zeros(keys)
        if odd_key is not None:
            slopes[odd_key] = np.nan
        # The mod gives NaN for rows past the end.
        row_slopes = np.where(np.arange(rows + 256) < rows, 0.0, np.nan)

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, *_: Any) -> Any:
            return (q_idx * 3 + kv_idx * 5 + h) % modulus != 0

        def slope_mod(grad: Any, score: Any, b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
            slope = softcap_backward(grad, score, b, h, q, k) + row_slopes[q - SHIFTS[2]]
            return slope if odd_key is None else slope + slopes[k - SHIFTS[3]]

        # Kinds of blocks: unlisted, FULL, PARTIAL.
        self.has_mask = has_mask
        self.mods = {
            "SCORE_MOD": softcap if has_score_mod else None,
            "SCORE_MOD_BACKWARD": slope_mod if has_score_mod else None,
            "MASK_MOD": mask_mod if has_mask_mod else None,
        }
        q_blocks, kv_blocks = (-(-n // size) for n, size in zip((rows, keys), blocks, strict=True))
        kinds = numbers.integers(0, 3, (1, pick.choice((1, heads)), kv_blocks, q_blocks))
        if not has_mask_mod:
            kinds = np.minimum(kinds, 1)
        self._pick, self._kinds = pick, kinds
        live = np.ones((batch, heads, rows, keys), bool)
        if has_mask:
            of_pair = kinds[:, :, at[3] // blocks[1]][..., (at[2] // blocks[0]).ravel()]
            of_pair = np.swapaxes(of_pair, -1, -2)
            live = np.broadcast_to(of_pair != 0, live.shape).copy()
            if has_mask_mod:
                live &= (of_pair == 1) | mask_mod(*seen)

        ke, ve = (
            np.repeat(np.broadcast_to(x, (batch, *x.shape[1:])), group, 1)
            for x in (self.k, self.v)
        )
        raw = self.q @ np.swapaxes(ke, -1, -2) * self.scale
        score, slope = raw, np.ones_like(raw)
        if has_score_mod:
            score, slope = softcap(raw, *seen), slope_mod(1.0, raw, *seen)
        highest = np.where(live, score, -np.inf).max(-1, keepdims=True)
        dead = highest == -np.inf
        highest = np.where(dead, 0.0, highest)
        exponentials = np.where(live, np.exp(np.where(live, score - highest, 0.0)), 0.0)
        sums = exponentials.sum(-1, keepdims=True)
        weights = exponentials / np.where(dead, 1.0, sums)
        delta = ((weights @ ve) * self.do).sum(-1)
        grad = weights * (self.do @ np.swapaxes(ve, -1, -2) - delta[..., None]) * self.scale
        grad = np.where(live, grad * slope, 0.0)
        lse2 = highest * np.log2(np.e) + np.log2(np.where(dead, 1.0, sums))
        self._lse2 = np.where(dead, np.inf, lse2)[..., 0]
        self._delta = np.where(dead[..., 0], 0.0, delta)
        self.wanted = {
            "dq": grad @ ke,
            "dk": self._of_keys(np.swapaxes(grad, -1, -2) @ self.q),
            "dv": self._of_keys(np.swapaxes(weights, -1, -2) @ self.do),
        }

    def _of_keys(self, x: np.ndarray) -> np.ndarray:
        found = x.reshape(self.batch, self.kv_heads, self.group, *x.shape[2:]).sum(2)
        return found.sum(0, keepdims=True) if self.kv_shared else found

    def row_values(self) -> np.ndarray:
        """Return [4, B * Hq, rows padded to 128] as `backward_rows.prepare_kernel` writes them;
        unread values are NaN."""
        padded = -(-self.rows // 128) * 128
        values = np.full((4, self.batch * self.heads, padded), np.nan)
        values[3] = 0
        values[0] = np.inf
        values[0, :, : self.rows] = self._lse2.reshape(-1, self.rows)
        values[3, :, : self.rows] = self._delta.reshape(-1, self.rows)
        return values

    def arguments(self, transposed: bool) -> dict[str, Any]:
        """Return the arguments that all kernels share: the mask, by rows or, `transposed`, by
        keys; mods; sizes."""
        kinds = self._kinds if transposed else np.swapaxes(self._kinds, -1, -2)
        offsets, runs = runs_of(kinds, self._pick)
        return {
            "offsets": Pointer(offsets), "ends": Pointer(offsets, 1), "runs": Pointer(runs),
            "mask_strides": (0, offsets.shape[2] if offsets.shape[1] > 1 else 0),
            "tables": (), "ints": (), "floats": (), "shifts": SHIFTS, "scale": self.scale,
            "batch": self.batch, "heads": self.heads, "kv_heads": self.kv_heads,
            "q_length": self.rows, "kv_length": self.keys, **self.mods, "HAS_MASK": self.has_mask,
            "GROUP": self.group, "KV_SHARED": self.kv_shared,
        }  # fmt: skip

    def odd(self, name: str, size: int) -> np.ndarray:
        """Return [number of all heads, tiles]: whether some element of `wanted[name]` is NaN in a
        tile of `size` rows."""
        found = np.isnan(self.wanted[name]).any(-1)
        found = found.reshape(-1, found.shape[-1])
        tiles = -(-found.shape[1] // size)
        padded = np.zeros((len(found), tiles * size), bool)
        padded[:, : found.shape[1]] = found
        return padded.reshape(len(found), tiles, size).any(-1)
