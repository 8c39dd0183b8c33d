"""Values by pairs that are read by steps of keys, or by tiles of rows, and those that are not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import anyflex
from anyflex.plugin import CapturedFacts, Spec, parse_graph
from anyflex.tracing.trace import trace_mod
from anyflex_triton.pair_reads import pair_kinds, pair_reads_source

TABLE = torch.zeros(8, 512)
BUCKETS = torch.zeros(300, dtype=torch.int32)
IMAGES = torch.zeros(2, 8, 64, 64, dtype=torch.bfloat16)
NUMBERS = torch.zeros(64, 64, dtype=torch.int32)


def source_of(mod: Callable[..., Any]) -> str:
    """Return the text for a mod, whose numbers are constants."""
    traced = trace_mod(mod, "score")
    slots: dict[str, int | float] = {f"i{i}": value for i, value in enumerate(traced.ints)}
    slots |= {f"f{i}": value for i, value in enumerate(traced.floats)}
    graph = parse_graph(traced.text).bind(constants=slots)
    captured = tuple(CapturedFacts(t.dtype, t.ndim, t.requires_grad) for t in traced.captured)
    spec = Spec(
        "cuda", "sm_90", torch.bfloat16, 64, 64, score_graph=graph, captured=captured
    )  # fmt: skip
    text = pair_reads_source(spec)
    assert pair_kinds(spec) == re.findall(r"def read_(distances|chunks|periods|dense)_", text)
    return text


DISTANCES: dict[str, Callable[..., Any]] = {
    "offset": lambda s, b, h, q, k: s + TABLE[h, q - k + 256],
    "clamped": lambda s, b, h, q, k: s + TABLE[h, BUCKETS[(k - q).clamp(-128, 128) + 128]],
    "moved both": lambda s, b, h, q, k: s + TABLE[h, (k + 3) - (q + h)],
    "of a table": lambda s, b, h, q, k: s * (TABLE[h, q - k].exp() + 1),
}
BY_ROW: dict[str, tuple[Callable[..., Any], str]] = {
    "chunks": (lambda s, b, h, q, k: s + TABLE[q, k // 64], "chunks"),
    "chunks of chunks": (lambda s, b, h, q, k: s + TABLE[q, k // 64 + q % 3], "chunks"),
    "periods": (lambda s, b, h, q, k: s + TABLE[q, k % 32], "periods"),
}
DENSE: dict[str, tuple[Callable[..., Any], list[int]]] = {
    "by pair": (lambda s, b, h, q, k: s + TABLE[q, k], [0]),
    "of a head": (lambda s, b, h, q, k: s * TABLE[h, 0] + IMAGES[b % 2, h, q, k], [1]),
    "of chosen rows": (lambda s, b, h, q, k: s + TABLE[BUCKETS[q], k], [0]),
    "twice": (
        lambda s, b, h, q, k: s * IMAGES[0, h, q, k] + IMAGES[b, h, q // 2, k].exp(),
        [0, 0],
    ),
}
NEITHER: dict[str, Callable[..., Any]] = {
    # Reading a slope by step takes more than multiplying it by a distance.
    "slopes": anyflex.mods.alibi(torch.ones(8)),
    "slopes of ints": lambda s, b, h, q, k: s + TABLE[h, 0] * (k - q),
    "slopes by row": lambda s, b, h, q, k: s + TABLE[h, q] * (k - q).abs(),
    "documents": lambda s, b, h, q, k: torch.where(BUCKETS[q] == BUCKETS[k], s, s - 1.0),
    "by key first": lambda s, b, h, q, k: s + TABLE[k, q],
    "moved by a key": lambda s, b, h, q, k: s + TABLE[q, k + 1],
    "of ints": lambda s, b, h, q, k: s + NUMBERS[q, k],
    "rows by key": lambda s, b, h, q, k: s + TABLE[k - q * 2, k],
    "two rows a key": lambda s, b, h, q, k: s + TABLE[h, 2 * q - k],
    "sum": lambda s, b, h, q, k: s + TABLE[h, q + k],
    "distance of chunks": lambda s, b, h, q, k: s + TABLE[h, q // 2 - k // 2],
    "moved before": lambda s, b, h, q, k: s + TABLE[q, (k + 1) // 64],
    "small chunks": lambda s, b, h, q, k: s + TABLE[q, k // 8],
    "a period of no steps": lambda s, b, h, q, k: s + TABLE[q, k % 48],
    "long": lambda s, b, h, q, k: s + TABLE[q, k % 128],
    "both in one": lambda s, b, h, q, k: s + TABLE[q + k // 64, k % 64],
    "of scores": lambda s, b, h, q, k: s + TABLE[h, (s + k - q).to(torch.int32)],
}


@pytest.mark.parametrize("name", DISTANCES)
def test_what_distance_alone_decides_is_read_by_distance(name: str) -> None:
    text = source_of(DISTANCES[name])
    assert "def read_distances_" in text and "if STEADY" not in text
    _, _, score_mod = text.partition("def score_mod_of_pairs")
    assert "along_distances" in score_mod and "load" not in score_mod


@pytest.mark.parametrize("name", BY_ROW)
def test_what_a_part_of_the_key_decides_is_read_by_row(name: str) -> None:
    mod, kind = BY_ROW[name]
    text = source_of(mod)
    assert f"def read_{kind}_" in text and f"ops.along_{kind}(" in text and "if STEADY" in text


@pytest.mark.parametrize("name", DENSE)
def test_what_each_pair_has_of_its_own_is_read_in_words(name: str) -> None:
    mod, tables = DENSE[name]
    text = source_of(mod)
    assert re.findall(r"ops\.load_dense\(", text) == ["ops.load_dense("] * len(tables)
    with_words, _, others = text.partition("def score_mod_of_pairs")[2].partition("else:")
    assert "if DENSE:" in with_words and "load" not in with_words and "ops.load_once(" in others
    assert "def read_rows" not in text


@pytest.mark.parametrize("name", NEITHER)
def test_other_reads_are_left(name: str) -> None:
    assert source_of(NEITHER[name]) == ""


def test_gradients_are_added_in_words_to_tensors_alone_whose_rows_are_known_to_be_whole() -> None:
    biases = torch.zeros(512, 511, requires_grad=True)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + TABLE[q, k] + biases[q, k]

    assert "ops.add_dense(" not in source_of(mod)
    # Where it is the only one, calls are asked for its rows.
    assert "ops.add_dense(" in source_of(lambda s, b, h, q, k: s + biases[q, k])
