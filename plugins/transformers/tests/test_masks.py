"""Masks: built once, from documents where they can, and never where one row needs none."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from anyflex_transformers import attention, masks, packed
from anyflex_transformers.carrier import Carrier
from comparison import assert_equal, inputs_of, packed_positions, padding
from families import by_name
from models import pair
from transformers import masking_utils

import anyflex


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every block mask that is built."""
    found: list[Any] = []
    create = anyflex.create_block_mask

    def recorded(*arguments: Any, **options: Any) -> Any:
        found.append(create(*arguments, **options))
        return found[-1]

    masks._kept_causal_blocks.cache_clear()
    monkeypatch.setattr(anyflex, "create_block_mask", recorded)
    return found


@pytest.mark.parametrize(("name", "kinds"), [("Llama", 1), ("Gemma 3", 2)])
def test_a_mask_is_built_once_for_all_layers_of_a_kind(
    name: str, kinds: int, built: list[Any]
) -> None:
    family = by_name(name)
    ours, _ = pair(family)
    ours(**inputs_of(family), attention_mask=padding("left"))
    assert len(built) == kinds


def test_a_compiled_forward_builds_its_mask_once_for_all_layers() -> None:
    family = by_name("Llama")
    ours, _ = pair(family, "compiles")
    called: list[str] = []

    def counting(graph: Any, inputs: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(ours, backend=counting, fullgraph=True)
    compiled(**inputs_of(family), attention_mask=padding("left"))
    torch.compiler.reset()
    layers = ours.config.num_hidden_layers
    assert called.count("anyflex.flex_attention.default") == layers > 1
    assert called.count("anyflex.block_mask.default") == 1


def test_a_training_forward_without_a_mask_compiles_whole() -> None:
    family = by_name("Llama")
    family = dataclasses.replace(family, options={**family.options, "num_hidden_layers": 1})
    ours, eager = pair(family, "compiles")
    tokens = torch.randint(3, 60, (1, 7), generator=torch.Generator().manual_seed(4))
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    for positions in (None, torch.tensor([[0, 1, 2, 0, 1, 2, 3]])):
        given = {"use_cache": False, "position_ids": positions}
        found, wanted = (model(tokens, **given).logits for model in (compiled, eager))
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    torch.compiler.reset()


def test_a_plain_causal_mask_is_built_once_for_all_steps(built: list[Any]) -> None:
    family = by_name("Llama")
    ours, _ = pair(family)
    for _ in range(3):
        ours(**inputs_of(family), attention_mask=torch.ones(2, 21))
    assert len(built) == 1


def test_decoding_builds_no_mask_but_for_the_prompt(built: list[Any]) -> None:
    family = by_name("Mistral")
    ours, _ = pair(family)
    for cache in ("dynamic", "static"):
        options = {"cache_implementation": cache, "pad_token_id": 0, "eos_token_id": None}
        ours.generate(**inputs_of(family), max_new_tokens=12, do_sample=False, **options)
    assert len(built) <= 2


def test_a_mask_made_in_inference_mode_serves_training(built: list[Any]) -> None:
    family = by_name("Llama")
    ours, eager = pair(family)
    with torch.inference_mode():
        ours(**inputs_of(family))
    assert_equal(ours, eager, inputs_of(family), None)
    assert len(built) == 1


def asked(**arguments: Any) -> Any:
    """Ask the registered function, with arguments of the newest version."""
    return masks.mask(**{"batch_size": 1, "device": "cpu", **arguments})


def test_a_row_that_sees_every_key_has_no_mask() -> None:
    assert asked(q_length=1, kv_length=9, q_offset=8) is None
    assert asked(q_length=1, kv_length=9, q_offset=torch.tensor(8)) is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"q_offset": 5},
        {"q_offset": 8, "allow_is_causal_skip": False},
        {"q_offset": 8, "local_size": 4},
        {"q_offset": 8, "attention_mask": torch.tensor([[False] + [True] * 8])},
        {"q_offset": torch.tensor([8]), "attention_mask": torch.ones(1, 6, dtype=torch.bool)},
    ],
    ids=["keys of the future", "static cache", "window", "padding", "a mask that ends before"],
)
def test_other_rows_have_the_dense_row(arguments: Any) -> None:
    function = masking_utils.causal_mask_function
    if "local_size" in arguments:
        function = masking_utils.sliding_window_causal_mask_function(4)
    row = asked(q_length=1, kv_length=9, mask_function=function, **arguments)
    assert row.dtype is torch.bool and row.shape == (1, 1, 1, 9)
    place = torch.arange(9)
    expected = place <= arguments["q_offset"]
    if "local_size" in arguments:
        expected &= place > 4
    if "attention_mask" in arguments:
        padding = arguments["attention_mask"][0]
        expected &= torch.nn.functional.pad(padding, (0, 9 - len(padding)))
    assert (row.view(-1) == expected).all()


def test_a_row_does_not_follow_a_cache_that_counts_on() -> None:
    length = torch.tensor(3)
    row = asked(q_length=1, kv_length=9, q_offset=length, allow_is_causal_skip=False)
    mask = asked(q_length=2, kv_length=9, q_offset=length)
    length += 4
    assert row.own is None and row.seen == 4 and row.shape == (1, 1, 1, 9)
    assert row[:, :, 0:1, :].seen == 4
    assert anyflex.create_mask(mask.own.mask_mod, 1, 1, 2, 9).sum() == 4 + 5


@pytest.mark.parametrize("device", ["cpu", "another"])
def test_a_row_sees_the_keys_that_a_cache_has_filled(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The number of keys is read on the host only where nothing has to be waited for.
    monkeypatch.setattr(attention, "is_compiling", lambda: device == "another")
    query = torch.randn(2, 4, 1, 16)
    key, value = (torch.full((2, 2, 9, 16), torch.nan) for _ in range(2))
    if device == "another":
        key, value = key.zero_(), value.zero_()
    key[:, :, :5], value[:, :, :5] = torch.randn(2, 2, 2, 5, 16)
    row = asked(q_length=1, kv_length=9, q_offset=torch.tensor([4]), allow_is_causal_skip=False)
    found, _ = attention.attention(torch.nn.Module(), query, key, value, row)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key[:, :, :5].double(), value[:, :, :5].double(), enable_gqa=True
    )
    torch.testing.assert_close(found.double(), expected.transpose(1, 2), atol=1e-6, rtol=1e-5)


def every_key(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= 0


@pytest.mark.parametrize(
    ("function", "rows"), [(every_key, 4), (masking_utils.causal_mask_function, 9)]
)
def test_keys_that_a_mask_of_tokens_lacks_are_dead(function: Any, rows: int) -> None:
    # An encoder with a static cache, or a mask that is shorter than the rows.
    mask = asked(
        q_length=rows,
        kv_length=9,
        mask_function=function,
        attention_mask=torch.ones(1, 6, dtype=torch.bool),
        allow_is_bidirectional_skip=True,
    )
    live = anyflex.create_mask(mask.own.mask_mod, 1, 1, rows, 9)
    assert (live.any(2).view(-1) == (torch.arange(9) < 6)).all()


remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
REMAPS = pytest.mark.skipif(remap is None, reason="this transformers compares tokens itself")


@REMAPS
@pytest.mark.parametrize(
    "pattern",
    [
        masking_utils.causal_mask_function,
        masking_utils.sliding_window_causal_mask_function(5),
    ],
    ids=["causal", "window"],
)
def test_packed_documents_are_built_from_their_ids(pattern: Any) -> None:
    positions = packed_positions(9, 1, 11)
    ids = masking_utils.find_packed_sequence_indices(positions)
    same = masking_utils.packed_sequence_mask_function(ids)
    function = masking_utils.and_masks(remap(pattern, positions), same)  # type: ignore[misc]
    simple = packed.without_positions(function)
    assert simple is not function
    dense = (anyflex.create_mask(each, 1, 1, 21, 21) for each in (function, simple))
    assert torch.equal(*dense)


@REMAPS
def test_patterns_that_see_more_than_distances_keep_their_positions() -> None:
    positions = packed_positions(9, 12)
    ids = masking_utils.find_packed_sequence_indices(positions)
    same = masking_utils.packed_sequence_mask_function(ids)
    chunks = masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    for pattern in (chunks, every_key, lambda b, h, q, k: q > k):
        function = masking_utils.and_masks(remap(pattern, positions), same)  # type: ignore[misc]
        assert packed.without_positions(function) is function
    assert packed.without_positions(chunks) is chunks


def test_packed_documents_are_as_if_alone() -> None:
    family = by_name("Llama")
    ours, _ = pair(family)
    tokens = inputs_of(family, rows=1)["input_ids"]
    lengths = (9, 1, 11)
    with torch.no_grad():
        whole = ours(tokens, position_ids=packed_positions(*lengths), use_cache=False).logits
        alone = [ours(part).logits for part in tokens.split(lengths, 1)]
    torch.testing.assert_close(whole, torch.cat(alone, 1), atol=2e-5, rtol=2e-5)


IMAGE = torch.tensor([[0] * 5 + [1] * 6 + [0] * 10])


def of_one_image(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (IMAGE[0, q] == 1) & (IMAGE[0, k] == 1)


def by_a_row(b: Any, h: Any, q: Any, k: Any) -> Any:
    # Reads a whole row, which no mod graph can.
    return (IMAGE[0].sum() > q) & (k > q)


@pytest.mark.parametrize(
    ("function", "warns"), [(of_one_image, False), (by_a_row, True)], ids=["index", "row"]
)
def test_mask_functions_of_the_user(function: Any, warns: bool, recwarn: Any) -> None:
    arguments = {"batch_size": 1, "q_length": 21, "kv_length": 21}
    either = masking_utils.or_masks(masking_utils.causal_mask_function, function)
    mask = asked(**arguments, mask_function=either, use_vmap=True)
    assert isinstance(mask, Carrier) and mask.own.opaque is None
    q, k = torch.arange(21)[:, None], torch.arange(21)[None]
    expected = (k <= q) | function(0, 0, q, k)
    assert (anyflex.create_mask(mask.own.mask_mod, 1, 1, 21, 21)[0, 0] == expected).all()
    slow = [each for each in recwarn if each.category is anyflex.PerformanceWarning]
    assert bool(slow) is warns
    assert not warns or "mask function can't be traced" in str(slow[0].message)
