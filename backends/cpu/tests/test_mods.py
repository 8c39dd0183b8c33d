"""How mods run, and what they may read: options, large calls, reads outside of a tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from dense import assert_near, dense_attention
from torch import Tensor

import anyflex
from anyflex_cpu import arguments
from anyflex_cpu.index_ranges import Limits

WAYS = ("jit", "interpreter")


def some(*lengths: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(1, 2, length, 16, generator=generator).to(dtype) for length in lengths
    )


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, dict[str, str]]:
    if request.param == "jit":
        pytest.importorskip("llvmlite")
    return {"cpu": {"mods": request.param}}


def test_the_option_says_how_mods_run(way: dict[str, dict[str, str]]) -> None:
    query, key, value = some(70, 90, 90)
    slopes = torch.tensor([0.5, -0.25])

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(score) * 2 + slopes[h] * (k - q) / 16

    said = anyflex.explain(query, key, value, score_mod, backend="cpu", kernel_options=way).variant
    assert ("mods jit" if way["cpu"]["mods"] == "jit" else "mods interpreted") in said
    out = anyflex.flex_attention(query, key, value, score_mod, backend="cpu", kernel_options=way)
    assert_near(out, dense_attention(query, key, value, score_mod)[0], torch.float32)


def test_a_read_outside_is_an_error_that_names_the_tensor(way: dict[str, dict[str, str]]) -> None:
    query, key, value = some(70, 90, 90)
    table = torch.zeros(80)
    with pytest.raises(
        anyflex.ModIndexError,
        match=r"score_mod reads captured tensor 'table', shape \[80\], outside of it: index 8\d "
        "of dimension 0 at a live pair",
    ):
        anyflex.flex_attention(
            query,
            key,
            value,
            lambda score, b, h, q, k: score + table[k],
            backend="cpu",
            kernel_options=way,
        )


@pytest.mark.parametrize("live", [True, False])
def test_a_mask_may_not_read_outside_where_it_says_true(
    live: bool, way: dict[str, dict[str, str]]
) -> None:
    query, key, value = some(70, 90, 90)
    inside = anyflex.create_block_mask(
        lambda b, h, q, k: q >= k, None, None, 70, 90, BLOCK_SIZE=16
    )
    table = torch.full((80,), 0 if live else 100)
    mask = anyflex.BlockMask.from_runs(
        inside.offsets,
        inside.runs,
        seq_lengths=(70, 90),
        block_size=16,
        mask_mod=lambda b, h, q, k: table[k + 60] <= q,
    )
    if live:
        with pytest.raises(anyflex.ModIndexError, match="mask_mod reads captured tensor 'table'"):
            anyflex.flex_attention(
                query, key, value, None, mask, backend="cpu", kernel_options=way
            )
    else:
        found = anyflex.flex_attention(
            query, key, value, None, mask, backend="cpu", kernel_options=way
        )
        wanted = anyflex.flex_attention(query, key, value, None, mask, backend="reference")
        assert_near(found, wanted.double(), torch.float32)


def test_dead_pairs_may_read_anything(way: dict[str, dict[str, str]]) -> None:
    query, key, value = some(70, 90, 90)
    table = torch.linspace(-1, 1, 50)
    mask = anyflex.create_block_mask(lambda b, h, q, k: k < 50, None, None, 70, 90, BLOCK_SIZE=16)
    out = anyflex.flex_attention(
        query,
        key,
        value,
        lambda score, b, h, q, k: score + table[k],
        mask,
        backend="cpu",
        kernel_options=way,
    )
    wanted = dense_attention(
        query,
        key,
        value,
        lambda score, b, h, q, k: score + table[k.clamp(max=49)],
        lambda b, h, q, k: k < 50,
    )[0]
    assert_near(out, wanted, torch.float32)


def test_a_call_beyond_the_limits_of_32_bits_computes_the_same(
    way: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = some(40, 50, 50)
    table = torch.randn(50, generator=torch.Generator().manual_seed(1))

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + table[(q * 7 + k) % 50]

    def attend() -> Tensor:
        return anyflex.flex_attention(
            query, key, value, score_mod, backend="cpu", kernel_options=way
        )

    wanted = attend()
    for limits in (Limits(1, 1 << 24, 1 << 31), Limits(1 << 16, 45, 1 << 31), Limits(9, 99, 9)):
        monkeypatch.setattr(arguments, "LIMITS", limits)
        assert torch.equal(attend(), wanted)


def test_numbers_that_change_are_read_anew(way: dict[str, dict[str, str]]) -> None:
    query, key, value = some(20, 30, 30)
    for factor in (2.0, 3.5, -1.25, 7):

        def score_mod(
            score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, factor: float = factor
        ) -> Tensor:
            return score * factor + (k > int(factor))

        out = anyflex.flex_attention(
            query, key, value, score_mod, backend="cpu", kernel_options=way
        )
        wanted = dense_attention(query, key, value, score_mod)[0]
        assert_near(out, wanted, torch.float32)


def _resized(size: int) -> Tensor:
    tensor = torch.randn(50)
    tensor.untyped_storage().resize_(size)
    return tensor


@pytest.mark.parametrize(
    "made",
    [lambda: torch._efficientzerotensor((50,)), lambda: _resized(0), lambda: _resized(196)],
    ids=["zero tensor", "freed", "too short"],
)
@pytest.mark.parametrize("reader", ["score_mod", "mask_mod"])
def test_a_captured_tensor_without_memory_is_refused(
    made: Callable[[], Tensor], reader: str, way: dict[str, dict[str, str]]
) -> None:
    (query,) = some(50)
    table, empty = torch.zeros(50), made()
    mask = None
    if reader == "mask_mod":
        mask = anyflex.create_block_mask(lambda b, h, q, k: table[k] <= q, None, None, 50, 50)
        mask.mask_mod = lambda b, h, q, k: empty[k] <= q

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + empty[k]

    chosen = score_mod if reader == "score_mod" else None
    with pytest.raises(
        anyflex.ArgumentError, match=r"captured tensor 'empty' (is a .* without memory|of shape)"
    ):
        anyflex.flex_attention(
            query, query, query, chosen, mask, None, False, False, way, backend="cpu"
        )
