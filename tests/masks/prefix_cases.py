"""Prefixes, padding and packed documents."""

from __future__ import annotations

import random

import torch

import anyflex
from anyflex import masks
from tests.masks.case import Made, case, lengths_of, spread, tensor

__all__: list[str] = []


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
