"""AnyflexBackend: what it refuses by name, and when vLLM gets it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM isn't installed; it needs a torch of its own")

import anyflex_vllm
from anyflex_vllm.attention import AnyflexImpl
from anyflex_vllm.backend import AnyflexBackend
from anyflex_vllm.metadata import AnyflexMetadataBuilder
from vllm.config import AttentionConfig, VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

import anyflex

SIZES = (4, 32, 0.5, 2)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("kv_cache_dtype", "fp8_e5m2"),
        ("kv_cache_dtype", "int8_per_token_head"),
        ("attn_type", AttentionType.ENCODER_DECODER),
        ("attn_type", AttentionType.ENCODER),
        ("chunk_lookback", 1),
    ],
)
def test_layers(name: str, given: Any) -> None:
    arguments: dict[str, Any] = {name: given}
    with pytest.raises(anyflex.ArgumentError, match=f"has {name} = .*, and ANYFLEX requires"):
        AnyflexImpl(*SIZES, **arguments)


@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_quantised_outputs(name: str) -> None:
    scale: dict[str, Any] = {name: torch.ones(())}
    rows = torch.randn(3, 4, 32)
    with pytest.raises(anyflex.ArgumentError, match=f"has {name} = 'a tensor'"):
        AnyflexImpl(*SIZES).forward(None, rows, rows, rows, rows, None, rows, **scale)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("causal", torch.tensor([True, False])),
        ("mm_req_doc_ranges", {0: [(0, 1)]}),
        ("rswa_prefix_lens", torch.tensor([1, 1])),
    ],
)
def test_batches(name: str, given: Any) -> None:
    batch = SimpleNamespace(causal=True, mm_req_doc_ranges=None, rswa_prefix_lens=None)
    setattr(batch, name, given)
    builder = AnyflexMetadataBuilder(None, [], None, torch.device("cpu"))
    with pytest.raises(anyflex.ArgumentError, match=f"the batch has {name}.*ANYFLEX requires"):
        builder.build(0, batch)


def test_no_number_of_a_batch_is_read_on_the_host() -> None:
    def on_meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    batch = SimpleNamespace(
        query_start_loc=on_meta(3),
        seq_lens=on_meta(2),
        block_table_tensor=on_meta(2, 8),
        max_query_len=5,
        max_seq_len=70,
        num_actual_tokens=6,
        causal=True,
        mm_req_doc_ranges=None,
        rswa_prefix_lens=None,
    )
    builder = AnyflexMetadataBuilder(None, [], None, torch.device("meta"))
    step, tokens, causal = builder.build(0, batch)
    assert (step.packed.page_table is batch.block_table_tensor, tokens, causal) == (True, 6, True)


def test_zeros_are_written_while_vllm_measures_memory() -> None:
    rows, out = torch.randn(3, 4, 32), torch.full((3, 4, 32), torch.nan)
    assert (AnyflexImpl(*SIZES).forward(None, rows, rows, rows, rows, None, out) == 0).all()


@pytest.mark.parametrize(
    ("chosen", "found"),
    [("ANYFLEX", AnyflexBackend), ("CPU_ATTN", CPUAttentionBackend), (None, CPUAttentionBackend)],
)
def test_a_cpu_has_the_backend_that_was_chosen(chosen: str | None, found: type) -> None:
    anyflex_vllm.register()
    with set_current_vllm_config(VllmConfig(attention_config=AttentionConfig(backend=chosen))):
        assert AttentionBackendEnum.CPU_ATTN.get_class() is found


def test_a_choice_for_one_kind_of_layers_on_a_cpu() -> None:
    anyflex_vllm.register()
    choice = AttentionConfig(backend_per_kind={"sliding_window": "ANYFLEX"})
    with (
        set_current_vllm_config(VllmConfig(attention_config=choice)),
        pytest.raises(anyflex.ArgumentError, match="backend_per_kind must not name ANYFLEX on"),
    ):
        AttentionBackendEnum.CPU_ATTN.get_class()


def test_a_process_that_has_loaded_no_plugin_is_told_of_the_choice() -> None:
    anyflex_vllm.register()
    choice = pickle.dumps(AttentionConfig(backend="ANYFLEX"))
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer).backend.name)"
    done = subprocess.run([sys.executable, "-c", program], input=choice, capture_output=True)
    assert done.stdout.split()[-1:] == [b"ANYFLEX"], done.stderr.decode()


def test_another_plugin_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyflex_vllm.registration.NAME", "ANYFLEX_OF_A_TEST")
    taken = AttentionBackendEnum.CPU_ATTN
    before = taken.get_path()
    register_backend(taken, "another_plugin")
    try:
        with pytest.raises(anyflex.ArgumentError, match="is another_plugin of another"):
            anyflex_vllm.register()
    finally:
        register_backend(taken, before)
