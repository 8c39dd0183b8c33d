"""Ready-made masks agree with their plain definitions, in blocks of every size."""

from __future__ import annotations

import pytest
import torch

import anyflex
from anyflex.testing.oracle import dense_attention
from anyflex.testing.results import Forward, Results
from anyflex.tracing.trace_cache import traced
from tests.masks import CASES
from tests.oracles.differences import differences
from tests.oracles.runs import dense_to_runs
from tests.soak import SOAK

__all__: list[str] = []

TOKENS = 53
BLOCK_SIZES = ((16, 16), (128, 128), (32, 16), (7, 5))


@pytest.mark.parametrize("name", CASES)
def test_a_mask_is_what_its_definition_says(name: str) -> None:
    made = CASES[name].make(TOKENS)
    sizes = (made.batch, made.heads, made.q_length, made.kv_length)
    live = made.dense()
    assert live.any() and not live.all()
    assert torch.equal(anyflex.create_mask(made.mask_mod, *sizes), live)
    for block_size in BLOCK_SIZES:
        built = anyflex.create_block_mask(made.mask_mod, *sizes, BLOCK_SIZE=block_size)
        offsets, runs = dense_to_runs(live, block_size)
        assert built.offsets.shape[:2] == sizes[:2], "the mask reads b, h, and no other"
        assert torch.equal(built.offsets, offsets)
        assert torch.equal(built.runs[: len(runs)], runs)


@pytest.mark.parametrize("name", list(CASES)[:: 1 if SOAK else 3])
@pytest.mark.usefixtures("float64_numbers")
def test_a_call_with_a_mask_gives_what_the_definition_gives(name: str) -> None:
    made = CASES[name].make(TOKENS)
    generator = torch.Generator().manual_seed(1)
    batch, heads = made.batch, made.heads
    query = torch.randn((batch, heads, made.q_length, 4), generator=generator)
    key, value = (
        torch.randn((batch, heads, made.kv_length, 4), generator=generator) for _ in "kv"
    )
    mask = anyflex.create_block_mask(
        made.mask_mod, batch, heads, made.q_length, made.kv_length, BLOCK_SIZE=16
    )
    wanted = Results(Forward(dense_attention(query, key, value, None, made.dense()).out))
    out = anyflex.flex_attention(query, key, value, block_mask=mask)
    assert differences(Results(Forward(out)), wanted, tolerance=1e-12) == []

    torch._dynamo.reset()
    attend = torch.compile(anyflex.flex_attention, backend="eager", fullgraph=True)
    assert torch.equal(attend(query, key, value, block_mask=mask), out)


@pytest.mark.parametrize("name", CASES)
def test_a_mask_is_traced_once(name: str) -> None:
    mask_mod = CASES[name].make(TOKENS).mask_mod
    first, second = (
        traced(mask_mod, "mask", torch.float32, torch.device("cpu")) for _ in range(2)
    )
    assert not first.depends_on_facts
    assert first.text is second.text


SAME_STRUCTURE = {
    "causal_after_a_cache": [anyflex.masks.causal(3), anyflex.masks.causal(70)],
    "causal_window": [anyflex.masks.causal_window(5), anyflex.masks.causal_window(1024)],
    "sliding_window": [anyflex.masks.sliding_window(1, 2), anyflex.masks.sliding_window(8, 0)],
    "prefix_lm": [anyflex.masks.prefix_lm(0), anyflex.masks.prefix_lm(99)],
    "chunked": [anyflex.masks.chunked(1), anyflex.masks.chunked(4096)],
    "block_diffusion": [
        anyflex.masks.block_diffusion(64, 4),
        anyflex.masks.block_diffusion(999, 32),
    ],
    "neighbourhood_2d": [
        anyflex.masks.neighbourhood((8, 9), 3),
        anyflex.masks.neighbourhood((32, 64), (7, 13)),
    ],
    "document": [
        anyflex.masks.document(torch.zeros(4, dtype=torch.int32)),
        anyflex.masks.document(torch.arange(9, dtype=torch.int32)),
    ],
}


@pytest.mark.parametrize("name", SAME_STRUCTURE)
def test_masks_that_differ_in_numbers_alone_share_one_structure(name: str) -> None:
    texts = {
        traced(mask_mod, "mask", torch.float32, torch.device("cpu")).text
        for mask_mod in SAME_STRUCTURE[name]
    }
    assert len(texts) == 1


def test_a_changing_offset_is_read_at_each_call() -> None:
    offset = torch.tensor(0)
    mask_mod = anyflex.masks.causal(offset)
    assert anyflex.create_mask(mask_mod, 1, 1, 1, 5).sum() == 1
    offset += 3
    assert anyflex.create_mask(mask_mod, 1, 1, 1, 5).sum() == 4


def test_a_block_mask_of_an_offset_that_has_changed_is_built_anew() -> None:
    offset = torch.tensor(0)
    mask_mod = anyflex.masks.causal(offset)
    query, key = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 5, 4)
    value = torch.arange(5.0).view(1, 1, 5, 1)
    old = anyflex.create_block_mask(mask_mod, None, None, 1, 5)
    offset += 3
    # The old mask's structure stays that of offset 0: one row whose only key is the first.
    out = anyflex.flex_attention(query, key, value, block_mask=old)
    assert out.shape == (1, 1, 1, 1)
    new = anyflex.create_block_mask(mask_mod, None, None, 1, 5)
    out = anyflex.flex_attention(query, key, value, block_mask=new)
    assert out.item() == pytest.approx(1.5)  # the mean of 0 to 3


def test_offsets_of_no_documents_make_the_row_one_document() -> None:
    mask_mod = anyflex.masks.document_offsets(torch.tensor([0]), 4)
    assert anyflex.create_mask(mask_mod, 1, 1, 4, 4).all()


def test_a_tree_that_is_one_long_chain_needs_no_recursion() -> None:
    count = 100_000
    mask_mod = anyflex.masks.tree(torch.arange(-1, count - 1))
    index = torch.tensor(count - 1)
    assert mask_mod(index * 0, index * 0, index, index * 0)
    assert not mask_mod(index * 0, index * 0, index * 0, index)
