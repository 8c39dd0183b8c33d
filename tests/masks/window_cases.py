"""Causal masks and windows."""

from __future__ import annotations

import random

import torch

from anyflex import masks
from tests.masks.case import Made, case, tensor

__all__: list[str] = []


@case
def causal(n: int) -> Made:
    return Made(masks.causal(), lambda b, h, q, k: k in range(q + 1), n, n + 9)


@case
def causal_after_a_cache(n: int) -> Made:
    return Made(masks.causal(7), lambda b, h, q, k: k in range(q + 8), n - 7, n)


@case
def causal_with_an_offset_a_batch_entry(n: int) -> Made:
    seen = [0, 5, n - 3]
    mask_mod = masks.causal(tensor(seen))
    return Made(mask_mod, lambda b, h, q, k: k < seen[b] + q + 1, 3, n, batch=3)


@case
def causal_with_a_changing_offset(n: int) -> Made:
    mask_mod = masks.causal(torch.tensor(4))
    return Made(mask_mod, lambda b, h, q, k: k < q + 5, n - 4, n)


@case
def causal_bottom_right(n: int) -> Made:
    mask_mod = masks.causal_bottom_right(n // 2, n)
    return Made(mask_mod, lambda b, h, q, k: n - k >= n // 2 - q, n // 2, n)


@case
def causal_bottom_right_with_dead_rows(n: int) -> Made:
    mask_mod = masks.causal_bottom_right(n, n // 2)
    return Made(mask_mod, lambda b, h, q, k: n // 2 - k >= n - q, n, n // 2)


@case
def sliding_window(n: int) -> Made:
    mask_mod = masks.sliding_window(6, 3)
    return Made(mask_mod, lambda b, h, q, k: k in range(q - 6, q + 4), n, n)


@case
def sliding_window_open_to_the_left(n: int) -> Made:
    mask_mod = masks.sliding_window(None, 2)
    return Made(mask_mod, lambda b, h, q, k: k in range(q + 3), n, n)


@case
def sliding_window_open_to_the_right(n: int) -> Made:
    mask_mod = masks.sliding_window(2, None, offset=5)
    return Made(mask_mod, lambda b, h, q, k: k in range(q + 3, n), n - 5, n)


@case
def sliding_window_a_head(n: int) -> Made:
    left, right = [0, 3, n], [1, 0, 8]
    mask_mod = masks.sliding_window(tensor(left), tensor(right, torch.int64))
    return Made(
        mask_mod, lambda b, h, q, k: k in range(q - left[h], q + right[h] + 1), n, n, heads=3
    )


@case
def causal_window(n: int) -> Made:
    return Made(masks.causal_window(9), lambda b, h, q, k: k in range(q + 1)[-9:], n, n)


@case
def causal_window_of_a_changing_size(n: int) -> Made:
    mask_mod = masks.causal_window(torch.tensor(9), offset=3)
    return Made(mask_mod, lambda b, h, q, k: k in range(q + 4)[-9:], n - 3, n)


@case
def causal_window_a_head(n: int) -> Made:
    sizes = [1, 17]
    mask_mod = masks.causal_window(tensor(sizes))
    return Made(mask_mod, lambda b, h, q, k: k in range(q + 1)[-sizes[h] :], n, n, heads=2)


@case
def dilated(n: int) -> Made:
    return Made(masks.dilated(3), lambda b, h, q, k: k in range(q, -1, -3), n, n)


@case
def dilated_window(n: int) -> Made:
    mask_mod = masks.dilated(4, window=3, offset=2)
    return Made(mask_mod, lambda b, h, q, k: k in range(q + 2, -1, -4)[:3], n, n + 2)


@case
def dilated_on_both_sides(n: int) -> Made:
    mask_mod = masks.dilated(4, window=3, causal=False)

    def live(b: int, h: int, q: int, k: int) -> bool:
        return k in range(q, -1, -4)[:3] or k in range(q, n, 4)[:3]

    return Made(mask_mod, live, n, n)


@case
def dilated_a_head(n: int) -> Made:
    steps = [1, 2, 5]
    mask_mod = masks.dilated(tensor(steps), window=4)
    return Made(mask_mod, lambda b, h, q, k: k in range(q, -1, -steps[h])[:4], n, n, heads=3)


@case
def global_and_window(n: int) -> Made:
    mask_mod = masks.global_and_window(5, 4, 2)

    def live(b: int, h: int, q: int, k: int) -> bool:
        return min(q, k) in range(5) or k in range(q - 4, q + 3)

    return Made(mask_mod, live, n, n)


@case
def global_and_window_by_a_table(n: int) -> Made:
    draw = random.Random(3)
    chosen = [set(draw.sample(range(n), 3)) for _ in range(2)]
    table = tensor([[i in row for i in range(n)] for row in chosen], torch.bool)
    mask_mod = masks.global_and_window(table, 3)

    def live(b: int, h: int, q: int, k: int) -> bool:
        return bool({q, k} & chosen[b]) or k in range(q - 3, q + 4)

    return Made(mask_mod, live, n, n, batch=2)


@case
def sinks_and_window(n: int) -> Made:
    mask_mod = masks.sinks_and_window(4, 9, offset=6)

    def live(b: int, h: int, q: int, k: int) -> bool:
        seen = range(q + 7)
        return k in seen[:4] or k in seen[-9:]

    return Made(mask_mod, live, n - 6, n)
