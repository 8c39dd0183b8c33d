"""One case for each ready-made mask and each kind of its arguments, at any length.

`live` says for one element whether it is live: with lists, loops and Python numbers, and never
with the mask's own expression. `make(n)` gives rows of about n tokens, so that the same list can
be built at sizes that nobody could check element by element.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import anyflex
from anyflex import masks
from anyflex.block_mask.mask_function import MaskMod

__all__ = ["CASES", "Case", "Made"]

Live = Callable[[int, int, int, int], bool]
"""``live(b, h, q, k)``."""


@dataclass(frozen=True)
class Made:
    """A mask at one size: what the project makes, and what it must mean."""

    mask_mod: MaskMod
    live: Live
    q_length: int
    kv_length: int
    batch: int = 1
    heads: int = 1

    def dense(self) -> torch.Tensor:
        """bool [batch, heads, q_length, kv_length], element by element."""
        return torch.tensor(
            [
                [
                    [
                        [bool(self.live(b, h, q, k)) for k in range(self.kv_length)]
                        for q in range(self.q_length)
                    ]
                    for h in range(self.heads)
                ]
                for b in range(self.batch)
            ],
            dtype=torch.bool,
        ).reshape(self.batch, self.heads, self.q_length, self.kv_length)


@dataclass(frozen=True)
class Case:
    """A name, and a function from the number of tokens to the mask."""

    name: str
    make: Callable[[int], Made]


CASES: dict[str, Case] = {}


def case(make: Callable[[int], Made]) -> Callable[[int], Made]:
    CASES[make.__name__] = Case(make.__name__, make)
    return make


def lengths_of(n: int, seed: int) -> list[int]:
    """Lengths of documents that add up to n: some are empty, most are short."""
    draw = random.Random(seed)
    lengths: list[int] = []
    while sum(lengths) < n:
        lengths.append(min(draw.choice((0, 1, 2, 5, 9, 14)), n - sum(lengths)))
    return lengths


def spread(values: Sequence[Any], lengths: Sequence[int]) -> list[Any]:
    """Each value as often as its length says."""
    return [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]


def tensor(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


# Causal


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


# Windows


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


# Prefixes


@case
def prefix_lm(n: int) -> Made:
    mask_mod = masks.prefix_lm(n // 3)
    return Made(mask_mod, lambda b, h, q, k: k in range(max(q + 1, n // 3)), n, n)


@case
def prefix_lm_a_batch_entry(n: int) -> Made:
    prefixes = [0, n // 2, n]
    mask_mod = masks.prefix_lm(tensor(prefixes), offset=4)
    return Made(
        mask_mod, lambda b, h, q, k: k in range(max(q + 5, prefixes[b])), n - 4, n, batch=3
    )


def answers_of(n: int) -> tuple[list[int], list[int], list[list[int]]]:
    """Answer and group of each token, and the tokens that each one sees."""
    lengths = lengths_of(n, 4)
    answers: list[int] = []
    groups: list[int] = []
    seen: list[list[int]] = []
    prompt: list[int] = []
    for number, length in enumerate(lengths):
        if number % 4 == 0:
            prompt = []
        own: list[int] = []
        for _ in range(length):
            own.append(len(seen))
            seen.append([*own] if number % 4 == 0 else [*prompt, *own])
            answers.append(-1 if number % 4 == 0 else number)
            groups.append(number // 4)
        if number % 4 == 0:
            prompt = own
    return answers, groups, seen


@case
def shared_prefix(n: int) -> Made:
    lengths = [n // 3, *lengths_of(n - n // 3, 2)]
    answers = spread(range(-1, len(lengths) - 1), lengths)
    starts = spread([sum(lengths[:i]) for i in range(len(lengths))], lengths)
    mask_mod = masks.shared_prefix(tensor(answers))

    def live(b: int, h: int, q: int, k: int) -> bool:
        return k in range(q + 1)[: n // 3] or k in range(starts[q], q + 1)

    return Made(mask_mod, live, n, n)


@case
def shared_prefixes_of_groups(n: int) -> Made:
    answers, groups, seen = answers_of(n)
    mask_mod = masks.shared_prefix(tensor([answers, answers]), tensor(groups, torch.int64))
    return Made(mask_mod, lambda b, h, q, k: k in seen[q], n, n, batch=2)


@case
def padding(n: int) -> Made:
    keys = [0, n // 2, n]
    mask_mod = masks.padding(tensor(keys))
    return Made(mask_mod, lambda b, h, q, k: k in range(keys[b]), 11, n, batch=3)


@case
def padding_of_queries_too(n: int) -> Made:
    queries, keys = [3, n], [n, n // 2]
    mask_mod = masks.padding(tensor(keys), tensor(queries))
    return Made(
        mask_mod, lambda b, h, q, k: q in range(queries[b]) and k in range(keys[b]), n, n, batch=2
    )


# Documents


@case
def document(n: int) -> Made:
    lengths = lengths_of(n, 5)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    own = spread([range(*pair) for pair in zip(starts, [*starts[1:], n], strict=True)], lengths)
    ids = tensor(spread(range(len(lengths)), lengths))
    return Made(masks.document(ids), lambda b, h, q, k: k in own[q], n, n)


@case
def document_and_causal(n: int) -> Made:
    lengths = lengths_of(n, 5)
    starts = spread([sum(lengths[:i]) for i in range(len(lengths))], lengths)
    ids = tensor(spread(range(len(lengths)), lengths))
    mask_mod = anyflex.and_masks(masks.causal(), masks.document(ids))
    return Made(mask_mod, lambda b, h, q, k: k in range(starts[q], q + 1), n, n)


@case
def documents_in_any_order(n: int) -> Made:
    draw = random.Random(6)
    rows = []
    for seed in (7, 8):
        lengths = lengths_of(n, seed)
        names = draw.sample(range(1000 + 10 * len(lengths)), len(lengths))
        rows.append(spread(names, lengths))
    mask_mod = masks.document(tensor(rows, torch.int64))
    return Made(mask_mod, lambda b, h, q, k: {rows[b][q]} == {rows[b][k]}, n, n, batch=2)


@case
def document_of_other_keys(n: int) -> Made:
    query_ids, key_ids = [i // 3 for i in range(n // 2)], [i // 7 for i in range(n)]
    # Short rows have ids of another dtype than the queries.
    mask_mod = masks.document(
        tensor(query_ids), tensor(key_ids, [torch.int64, torch.int16][n < 1000])
    )
    return Made(mask_mod, lambda b, h, q, k: k in range(7 * (q // 3), 7 * (q // 3 + 1)), n // 2, n)


@case
def document_offsets(n: int) -> Made:
    lengths = lengths_of(n, 9)
    edges = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    spans = spread(range(len(lengths)), lengths)
    mask_mod = masks.document_offsets(tensor(edges))
    return Made(
        mask_mod,
        lambda b, h, q, k: edges[spans[q]] <= k < edges[spans[q] + 1],
        n,
        n,
    )


@case
def document_offsets_with_an_inner_mask(n: int) -> Made:
    lengths = lengths_of(n - 6, 9)
    edges = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    spans = [*spread(range(len(lengths)), lengths), *[len(lengths)] * 6]
    mask_mod = masks.document_offsets(tensor(edges), n, inner=masks.prefix_lm(3))
    edges = [*edges, n]

    def live(b: int, h: int, q: int, k: int) -> bool:
        own = range(edges[spans[q]], edges[spans[q] + 1])
        return k in own[:3] or k in own[: q - own[0] + 1]

    return Made(mask_mod, live, n, n)


# Blocks


@case
def chunked(n: int) -> Made:
    chunks = [set(range(i, i + 12)) for i in range(0, n, 12)]
    mask_mod = masks.chunked(12, offset=5)
    return Made(
        mask_mod,
        lambda b, h, q, k: any(k in chunk and q + 5 in chunk for chunk in chunks),
        n - 5,
        n,
    )


@case
def chunked_and_causal(n: int) -> Made:
    mask_mod = anyflex.and_masks(masks.causal(), masks.chunked(12))
    return Made(mask_mod, lambda b, h, q, k: k in range(q - q % 12, q + 1), n, n)


@case
def block_causal(n: int) -> Made:
    ends = [min(i + 10, n) for i in range(0, n, 10) for _ in range(10)]
    return Made(masks.block_causal(10), lambda b, h, q, k: k < ends[q], n, n)


def diffusion_sets(length: int, size: int) -> list[set[int]]:
    """The keys that each of the 2 * length tokens sees."""
    blocks = [range(i, min(i + size, length)) for i in range(0, length, size)]
    noisy: list[set[int]] = []
    clean: list[set[int]] = []
    before: set[int] = set()
    for block in blocks:
        noisy += [before | set(block) for _ in block]
        before = before | {length + i for i in block}
        clean += [before for _ in block]
    return noisy + clean


@case
def block_diffusion(n: int) -> Made:
    half = n // 2 // 8 * 8
    seen = diffusion_sets(half, 8) if n < 1000 else []
    return Made(
        masks.block_diffusion(half, 8), lambda b, h, q, k: k in seen[q], 2 * half, 2 * half
    )


@case
def block_diffusion_with_a_short_block(n: int) -> Made:
    half = n // 2 // 6 * 6 + 1
    seen = diffusion_sets(half, 6) if n < 1000 else []
    return Made(
        masks.block_diffusion(half, 6), lambda b, h, q, k: k in seen[q], 2 * half, 2 * half
    )


# Neighbourhoods


def windows_of(size: int, window: int, dilation: int, causal: bool) -> list[set[int]]:
    """The coordinates that each coordinate sees along one dimension, by walking its own grid."""
    seen: list[set[int]] = [set() for _ in range(size)]
    for remainder in range(dilation):
        line = list(range(remainder, size, dilation))
        for place, point in enumerate(line):
            if causal:
                seen[point] = set(line[: place + 1][-window:])
                continue
            first = place - window // 2
            while first < 0:
                first += 1
            while first + window > len(line):
                first -= 1
            seen[point] = set(line[first : first + window])
    return seen


def coordinates(grid: Sequence[int]) -> list[tuple[int, ...]]:
    points: list[tuple[int, ...]] = [()]
    for size in grid:
        points = [(*point, i) for point in points for i in range(size)]
    return points


def neighbourhood_case(
    grid: Sequence[int],
    window: Sequence[int],
    dilation: Sequence[int],
    causal: Sequence[bool],
    mask_mod: MaskMod,
) -> Made:
    axes = [windows_of(*axis) for axis in zip(grid, window, dilation, causal, strict=True)]
    points = coordinates(grid)

    def live(b: int, h: int, q: int, k: int) -> bool:
        return all(
            key in axis[query] for axis, query, key in zip(axes, points[q], points[k], strict=True)
        )

    return Made(mask_mod, live, len(points), len(points))


@case
def neighbourhood_1d(n: int) -> Made:
    return neighbourhood_case([n], [7], [1], [False], masks.neighbourhood(n, 7))


@case
def neighbourhood_1d_even_window(n: int) -> Made:
    return neighbourhood_case([n], [6], [1], [False], masks.neighbourhood((n,), 6))


@case
def neighbourhood_1d_dilated(n: int) -> Made:
    return neighbourhood_case([n], [5], [3], [False], masks.neighbourhood(n, 5, 3))


@case
def neighbourhood_1d_causal(n: int) -> Made:
    return neighbourhood_case([n], [5], [2], [True], masks.neighbourhood(n, 5, 2, causal=True))


@case
def neighbourhood_2d(n: int) -> Made:
    grid = (max(n // 9, 5), 9)
    return neighbourhood_case(
        grid, (3, 5), (1, 1), (False,) * 2, masks.neighbourhood(grid, (3, 5))
    )


@case
def neighbourhood_2d_dilated(n: int) -> Made:
    grid = (max(n // 8, 7), 8)
    mask_mod = masks.neighbourhood(grid, 3, (2, 1), (False, True))
    return neighbourhood_case(grid, (3, 3), (2, 1), (False, True), mask_mod)


@case
def neighbourhood_3d(n: int) -> Made:
    grid = (max(n // 20, 3), 5, 4)
    mask_mod = masks.neighbourhood(grid, (2, 3, 3), causal=(True, False, False))
    return neighbourhood_case(grid, (2, 3, 3), (1, 1, 1), (True, False, False), mask_mod)


# Trees


def parents_of(n: int, seed: int, shuffled: bool = False) -> list[int]:
    draw = random.Random(seed)
    parents = [-1 if i % 23 == 0 else draw.randrange(max(0, i - 6), i) for i in range(n)]
    if not shuffled:
        return parents
    place = draw.sample(range(n), n)
    moved = [0] * n
    for i, parent in enumerate(parents):
        moved[place[i]] = -1 if parent < 0 else place[parent]
    return moved


def is_ancestor(parents: Sequence[int], token: int, other: int) -> bool:
    while token >= 0 and token != other:
        token = parents[token]
    return token == other


@case
def tree(n: int) -> Made:
    parents = parents_of(n, 10)
    mask_mod = masks.tree(tensor(parents))
    return Made(mask_mod, lambda b, h, q, k: is_ancestor(parents, q, k), n, n)


@case
def tree_after_a_prefix(n: int) -> Made:
    parents = [parents_of(20, 11), parents_of(20, 12, shuffled=True)]
    before = [n - 20, n - 31]
    mask_mod = masks.tree(tensor(parents, torch.int64), tensor(before))

    def live(b: int, h: int, q: int, k: int) -> bool:
        draft = k - before[b]
        return draft < 0 or (draft < 20 and is_ancestor(parents[b], q, draft))

    # The second entry's last keys belong to nobody: its row is shorter.
    shortest = anyflex.and_masks(mask_mod, masks.padding(tensor([n, n - 11])))
    return Made(shortest, live, 20, n, batch=2)


# Combinations


@case
def documents_or_sinks(n: int) -> Made:
    lengths = lengths_of(n, 13)
    starts = spread([sum(lengths[:i]) for i in range(len(lengths))], lengths)
    ids = tensor(spread(range(len(lengths)), lengths))
    first = anyflex.or_masks(masks.document(ids), masks.padding(4))
    mask_mod = anyflex.and_masks(masks.causal(), first)

    def live(b: int, h: int, q: int, k: int) -> bool:
        seen = range(q + 1)
        return k in seen[:4] or k in seen[starts[q] :]

    return Made(mask_mod, live, n, n)
