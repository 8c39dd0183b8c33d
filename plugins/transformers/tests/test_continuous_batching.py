"""Continuous batching: requests that join and leave, each as alone."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import anyflex_transformers
import pytest
import torch
import transformers
from anyflex_transformers import sequences
from anyflex_transformers.continuous_batching import BATCHED, attention_of_requests
from families import by_name, some
from models import pair
from torch import Tensor

import anyflex

SERVES = pytest.mark.skipif(
    not hasattr(transformers, "ContinuousBatchingConfig"),
    reason="this transformers configures continuous batching otherwise",
)
NAMES = ["Llama", "Mistral", "Gemma 2", "Gemma 3", "gpt-oss"]


def small(**options: Any) -> Any:
    """Return a config of a cache of 512 tokens in pages of 8, and 16 tokens a step."""
    config = transformers.ContinuousBatchingConfig
    page = "page_size" if "page_size" in inspect.signature(config).parameters else "block_size"
    given = {page: 8, "num_blocks": 64, "max_batch_tokens": 16, **options}
    return config(**given)


def settings(new_tokens: int, **options: Any) -> Any:
    return transformers.GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=-1, **options
    )


def alone(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(torch.tensor([prompt]), eos_token_id=None, **options)
    return tokens[0, len(prompt) :].tolist()


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 64, (n,), generator=generator).tolist() for n in lengths]


@SERVES
@pytest.mark.parametrize("name", some(NAMES, 2))
def test_requests_join_and_leave_and_get_the_tokens_that_they_get_alone(name: str) -> None:
    ours, eager = pair(by_name(name))
    # The third is longer than a step takes, and they end after different numbers of tokens.
    asked = list(zip(prompts_of(5, 12, 37, 3), (3, 14, 9, 6), strict=True))
    found: dict[str, list[int]] = {}
    with (
        anyflex_transformers.continuous_batching(ours),
        ours.continuous_batching_context_manager(
            generation_config=settings(9), continuous_batching_config=small(), warmup=False
        ) as manager,
    ):
        for number, (prompt, new_tokens) in enumerate(asked):
            if number == 2:
                found |= results_of(manager, 1)
            manager.add_request(prompt, request_id=f"{number}", max_new_tokens=new_tokens)
        found |= results_of(manager, 3)
    assert ours.config._attn_implementation == "anyflex"
    expected = {
        f"{number}": alone(eager, prompt, new_tokens)
        for number, (prompt, new_tokens) in enumerate(asked)
    }
    assert found == expected


def results_of(manager: Any, count: int) -> dict[str, list[int]]:
    found = {}
    for _ in range(count):
        result = manager.get_result(timeout=60)
        assert result is not None and result.error is None, result
        found[result.request_id] = result.generated_tokens
    return found


@SERVES
def test_generate_batch_takes_requests_that_the_cache_has_no_room_for_at_once() -> None:
    ours, eager = pair(by_name("Llama"))
    prompts = prompts_of(20, 9, 31, 14, 25)
    with anyflex_transformers.continuous_batching(ours):
        results = ours.generate_batch(
            prompts,
            generation_config=settings(7),
            continuous_batching_config=small(num_blocks=7),
            progress_bar=False,
        )
    found = [result.generated_tokens for result in results.values()]
    assert found == [alone(eager, prompt, 7) for prompt in prompts]


@SERVES
def test_layers_share_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    packed = sequences._packed

    def counted(offsets: Any) -> Any:
        made.append(offsets)
        return packed(offsets)

    monkeypatch.setattr(sequences, "_packed", counted)
    ours, _ = pair(by_name("Llama"))
    assert ours.config.num_hidden_layers == 2
    with anyflex_transformers.continuous_batching(ours):
        ours.generate_batch(
            prompts_of(5),
            generation_config=settings(4),
            continuous_batching_config=small(),
            progress_bar=False,
        )
    # A forward for the prompt, and three for tokens.
    assert len(made) == 4


@SERVES
def test_implementations_are_as_before_when_it_ends() -> None:
    ours, eager = pair(by_name("Llama"))
    for model, name in ((ours, "anyflex"), (eager, "eager")):
        with pytest.raises(ZeroDivisionError), anyflex_transformers.continuous_batching(model):
            assert model.config._attn_implementation == BATCHED
            raise ZeroDivisionError
        assert model.config._attn_implementation == name


@SERVES
def test_only_text_of_a_model_of_images_is_batched() -> None:
    ours, _ = pair(by_name("Gemma 3, images and text"))
    with anyflex_transformers.continuous_batching(ours):
        assert ours.config.text_config._attn_implementation == BATCHED
        assert ours.config.vision_config._attn_implementation == "anyflex"
    assert ours.config.text_config._attn_implementation == "anyflex"


@SERVES
def test_other_forwards_are_refused_while_it_is_entered() -> None:
    ours, _ = pair(by_name("Llama"))
    with (
        anyflex_transformers.continuous_batching(ours),
        pytest.raises(anyflex.ArgumentError, match="computes batched requests alone"),
    ):
        ours(torch.tensor([[3, 4, 5]]))


def test_it_takes_a_model() -> None:
    with (
        pytest.raises(anyflex.ArgumentTypeError, match="model must be a PreTrainedModel"),
        anyflex_transformers.continuous_batching("llama"),  # type: ignore[arg-type]
    ):
        pass


def test_versions_without_it_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair(by_name("Llama"))
    # The package has a function of the module's name.
    module = sys.modules["anyflex_transformers.continuous_batching"]
    monkeypatch.setattr(module, "PREFIXED", False)
    monkeypatch.setattr(module, "_takes_flash_names", lambda: False)
    with (
        pytest.raises(anyflex.ArgumentError, match=r"needs transformers 5\.0 or newer, got"),
        anyflex_transformers.continuous_batching(ours),
    ):
        pass


# Rows and keys of three sequences; the last row and the last key belong to nobody.
Q_OFFSETS, KV_OFFSETS = [0, 1, 4, 9], [0, 6, 9, 20]


def packed_call(**options: Any) -> tuple[list[Tensor], Tensor]:
    """Return (query, key, value, sinks) of random numbers, and what attention gave."""
    generator = torch.Generator().manual_seed(3)
    shapes = (1, 4, 10, 16), (1, 2, 21, 16), (1, 2, 21, 8)
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    sinks = torch.randn(4, generator=generator)
    out, _ = attention_of_requests(
        torch.nn.Module(),
        query,
        key,
        value,
        None,
        cu_seq_lens_q=torch.tensor(Q_OFFSETS, dtype=torch.int32),
        cu_seq_lens_k=torch.tensor(KV_OFFSETS, dtype=torch.int32),
        max_length_q=5,
        max_length_k=11,
        **{"is_causal": True, **options},
    )
    return [query, key, value, sinks], out


def dense(
    tensors: list[Tensor], causal: bool, window: int | None, softcap: float | None
) -> Tensor:
    """Return attention of each sequence by the formula, in float64: [T, Hq, Ev]."""
    query, key, value, _ = (each.double() for each in tensors)
    out = torch.zeros(10, 4, 8, dtype=torch.float64)
    for begin, end, first, last in zip(
        Q_OFFSETS, Q_OFFSETS[1:], KV_OFFSETS, KV_OFFSETS[1:], strict=False
    ):
        for head in range(4):
            scores = query[0, head, begin:end] @ key[0, head // 2, first:last].T / 4
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            rows = torch.arange(end - begin)[:, None] + (last - first) - (end - begin)
            keys = torch.arange(last - first)
            if causal:
                scores = scores.masked_fill(keys > rows, -torch.inf)
            if window is not None:
                scores = scores.masked_fill(keys <= rows - window, -torch.inf)
                scores = scores.masked_fill(keys >= rows + window, -torch.inf)
            out[begin:end, head] = scores.softmax(-1) @ value[0, head // 2, first:last]
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_packed_sequences_are_those_of_the_formula(
    causal: bool, window: int | None, softcap: float | None
) -> None:
    tensors, out = packed_call(is_causal=causal, sliding_window=window, softcap=softcap)
    expected = dense(tensors, causal, window, softcap)
    torch.testing.assert_close(out[0].double(), expected, atol=1e-6, rtol=1e-5)
    assert not out[0, 9].any()


def test_offsets_that_are_written_in_place_begin_another_step() -> None:
    layer = torch.nn.Linear(1, 1)
    offsets = sequences.Offsets(torch.tensor([0, 2, 5], dtype=torch.int32), None, 5, 5)
    first = sequences._step(layer, offsets)
    assert sequences._step(torch.nn.Linear(1, 1), offsets) is first
    offsets.q[1] = 4
    second = sequences._step(torch.nn.Linear(1, 1), offsets)
    assert second is not first
    # A layer that comes again is in another forward.
    assert sequences._step(layer, offsets) is second
    assert sequences._step(layer, offsets) is not second


@pytest.mark.parametrize(
    ("name", "given"), [("dropout", 0.1), ("position_bias", torch.zeros(1, 4, 10, 21))]
)
def test_what_packed_sequences_lack_is_refused(name: str, given: Any) -> None:
    with pytest.raises(anyflex.ArgumentError, match=f"{name}=, which packed sequences don't have"):
        packed_call(**{name: given})


@pytest.mark.parametrize("name", ["block_table", "k_cache"])
def test_tables_of_pages_are_refused(name: str) -> None:
    with pytest.raises(anyflex.ArgumentError, match=f"calls attention with {name}="):
        packed_call(**{name: torch.zeros(1, 2, dtype=torch.int32)})


def test_offsets_are_of_one_packed_row() -> None:
    rows = [torch.randn(2, 2, 5, 8) for _ in range(3)]
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    with pytest.raises(anyflex.ArgumentError, match="query must have batch size 1, got 2"):
        attention_of_requests(torch.nn.Module(), *rows, None, cu_seq_lens_q=offsets)
