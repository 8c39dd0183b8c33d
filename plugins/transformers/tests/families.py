"""Families of models, and what is compared with eager attention for each.

Data alone, which needs no transformers: the documentation's table is made of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FAMILIES", "Family", "by_name", "some"]

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Larger than the usual 0.02: attention of nearly equal weights hides errors.
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER_DECODER = {
    "vocab_size": 64,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "init_std": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "dropout": 0.0,
}
WINDOWS = ["sliding_attention", "full_attention"]
VISION = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "initializer_range": 0.15,
}


@dataclass(frozen=True)
class Family:
    """One model.

    Attributes:
        name: as users know it.
        model, config: names of transformers' classes.
        options: of the config, over SIZES.
        shows: what is special in its attention, for the documentation.
        kind: what its inputs are: "decoder", "encoder", "encoder-decoder", "vision", "audio",
            "image and text".
        packed: documents in one row, by position_ids.
        dense: takes 4-D masks of the user.
        generate: cache implementations that it has.
        sides: on which side rows may be padded.
        compiles: into one graph.
        sizes: what `options` stand over.
        since: oldest version of transformers that has the model on its attention interface.
        later: the same for one of the things above: "static", "compiles".
    """

    name: str
    model: str
    config: str
    shows: str
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "decoder"
    packed: bool = True
    dense: bool = True
    generate: tuple[str, ...] = ("dynamic", "static")
    sides: tuple[str, ...] = ("left", "right")
    compiles: bool = False
    sizes: Mapping[str, Any] = field(default_factory=lambda: SIZES)
    since: tuple[int, ...] = (4, 57)
    later: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def compared(self) -> dict[str, str]:
        """Return what is compared with eager attention beside outputs and gradients, and from
        which version on, as cells of the documentation's table."""
        decoder = self.kind == "decoder"
        text = self.kind in ("decoder", "encoder", "encoder-decoder")
        return {
            "padded": ", ".join(self.sides) * text,
            "packed": "yes" if decoder and self.packed else "",
            "4-D masks": "yes" if decoder and self.dense else "",
            "trained": "yes" if decoder else "",
            "caches": ", ".join(map(self._since, self.generate)),
            "one graph": self._since("compiles").replace("compiles", "yes") * self.compiles,
        }

    def _since(self, what: str) -> str:
        if what not in self.later:
            return what
        return f"{what} (from {'.'.join(map(str, self.later[what]))})"


FAMILIES = (
    Family("Llama", "LlamaForCausalLM", "LlamaConfig", "grouped queries", compiles=True),
    Family(
        "Mistral",
        "MistralForCausalLM",
        "MistralConfig",
        "window in all layers",
        {"sliding_window": 8},
        compiles=True,
    ),
    Family("Gemma", "GemmaForCausalLM", "GemmaConfig", "head dim 32", {"head_dim": 32}),
    Family(
        "Gemma 2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        "soft cap, window in every other layer",
        {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 2.0},
        compiles=True,
    ),
    Family(
        "Gemma 3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        "windows and full layers",
        {"head_dim": 16, "sliding_window": 8, "layer_types": WINDOWS},
        compiles=True,
    ),
    Family(
        "Gemma 4",
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        "layers that share keys and slice the mask",
        {
            "head_dim": 16,
            "global_head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "layer_types": WINDOWS * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 64,
        },
        since=(5, 5),
    ),
    Family(
        "Qwen2",
        "Qwen2ForCausalLM",
        "Qwen2Config",
        "windows in some layers, biases",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": WINDOWS},
    ),
    Family("Qwen3", "Qwen3ForCausalLM", "Qwen3Config", "normalized q and k", {"head_dim": 16}),
    Family(
        "Qwen3-MoE",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        "experts",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    Family(
        "Qwen3-Next",
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        "attention beside linear layers",
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        packed=False,
        dense=False,
        generate=("dynamic",),
    ),
    Family("Phi-3", "Phi3ForCausalLM", "Phi3Config", "one projection of q, k and v"),
    Family(
        "PhiMoE",
        "PhimoeForCausalLM",
        "PhimoeConfig",
        "experts",
        # Without noise in training.
        {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.0},
        since=(5, 0),
    ),
    Family(
        "gpt-oss",
        "GptOssForCausalLM",
        "GptOssConfig",
        "sinks, window in every other layer",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": WINDOWS,
        },
        # Its mask is made without position_ids: packed documents see each other, in eager too.
        packed=False,
        compiles=True,
        # Its experts break the graph before.
        later={"compiles": (5, 0)},
    ),
    Family("OLMo 2", "Olmo2ForCausalLM", "Olmo2Config", "norms after attention"),
    Family(
        "OLMo 3",
        "Olmo3ForCausalLM",
        "Olmo3Config",
        "windows and full layers",
        {"sliding_window": 8, "layer_types": WINDOWS},
    ),
    Family(
        "Cohere 2",
        "Cohere2ForCausalLM",
        "Cohere2Config",
        "windows, layers without positions",
        {"sliding_window": 8, "layer_types": WINDOWS},
    ),
    Family("Granite", "GraniteForCausalLM", "GraniteConfig", "a scale of its own"),
    Family("SmolLM3", "SmolLM3ForCausalLM", "SmolLM3Config", "layers without positions"),
    Family(
        "Llama 4",
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        "chunks",
        {
            "head_dim": 16,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": 8,
            "num_local_experts": 2,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
        },
    ),
    Family(
        "GLM-4", "Glm4ForCausalLM", "Glm4Config", "half of each head rotated", {"head_dim": 16}
    ),
    Family(
        "DeepSeek-V3",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        "values of another head dim",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
        # Its static cache takes values of the keys' head dim before.
        later={"static": (5, 0)},
    ),
    Family(
        "Mixtral",
        "MixtralForCausalLM",
        "MixtralConfig",
        "experts",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    Family(
        "StarCoder2",
        "Starcoder2ForCausalLM",
        "Starcoder2Config",
        "window in all layers",
        {"sliding_window": 8, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
    Family(
        "EXAONE 4",
        "Exaone4ForCausalLM",
        "Exaone4Config",
        "windows and full layers",
        {"sliding_window": 8, "sliding_window_pattern": 2, "layer_types": WINDOWS},
    ),
    Family(
        "VaultGemma",
        "VaultGemmaForCausalLM",
        "VaultGemmaConfig",
        "soft cap",
        {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 2.0},
    ),
    Family(
        "GPT-2",
        "GPT2LMHeadModel",
        "GPT2Config",
        "learned positions",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
        | {"embd_pdrop": 0.0},
        generate=("dynamic", "static"),
    ),
    Family("GPT-NeoX", "GPTNeoXForCausalLM", "GPTNeoXConfig", "a quarter of each head rotated"),
    Family(
        "OPT",
        "OPTForCausalLM",
        "OPTConfig",
        "positions from the mask",
        {"ffn_dim": 64, "word_embed_proj_dim": 64, "init_std": 0.15, "dropout": 0.0},
        packed=False,
        dense=False,
    ),
    Family(
        "BioGPT",
        "BioGptForCausalLM",
        "BioGptConfig",
        "learned positions",
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        packed=False,
        dense=False,
    ),
    Family(
        "BERT",
        "BertForMaskedLM",
        "BertConfig",
        "encoder",
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        kind="encoder",
        generate=(),
        since=(5, 0),
    ),
    Family(
        "RoBERTa",
        "RobertaForMaskedLM",
        "RobertaConfig",
        "encoder",
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        kind="encoder",
        generate=(),
        since=(5, 0),
    ),
    Family(
        "ModernBERT",
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        "encoder with windows to both sides",
        {"local_attention": 16, "global_attn_every_n_layers": 2},
        kind="encoder",
        generate=(),
        since=(5, 0),
    ),
    Family(
        "T5",
        "T5ForConditionalGeneration",
        "T5Config",
        "learned relative bias",
        {
            "vocab_size": 64,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "initializer_factor": 1.0,
            "pad_token_id": 0,
            "decoder_start_token_id": 0,
            "eos_token_id": 2,
        },
        kind="encoder-decoder",
        sizes={},
        since=(5, 18),
    ),
    Family(
        "BART",
        "BartForConditionalGeneration",
        "BartConfig",
        "cross attention",
        kind="encoder-decoder",
        sizes=ENCODER_DECODER,
    ),
    Family(
        "Whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        "audio encoder, cross attention",
        {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64},
        kind="audio",
        generate=(),
        sizes=ENCODER_DECODER,
    ),
    Family(
        "Gemma 3, images and text",
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        "an image's tokens see each other",
        {
            "text_config": {
                **SIZES,
                "head_dim": 16,
                "sliding_window": 8,
                "layer_types": WINDOWS,
            },
            "vision_config": {**VISION, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
            "image_token_index": 63,
            "image_token_id": 63,
            "boi_token_index": 61,
            "eoi_token_index": 62,
        },
        kind="images and text",
        generate=(),
        sizes={},
        since=(5, 0),
    ),
    Family(
        "Qwen2-VL",
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        "positions of three dimensions",
        {
            "text_config": {
                **SIZES,
                "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            },
            "vision_config": {
                "depth": 2,
                "embed_dim": 64,
                "hidden_size": 64,
                "num_heads": 4,
                "mlp_ratio": 2,
            },
        },
        packed=False,
        dense=False,
        generate=("dynamic",),
        sizes={},
        since=(5, 0),
    ),
    Family(
        "ViT", "ViTModel", "ViTConfig", "image encoder", kind="vision", generate=(), sizes=VISION
    ),
    Family(
        "SigLIP",
        "SiglipVisionModel",
        "SiglipVisionConfig",
        "image encoder, attention pool",
        kind="vision",
        generate=(),
        sizes=VISION,
    ),
    Family(
        "CLIP",
        "CLIPVisionModel",
        "CLIPVisionConfig",
        "image encoder",
        kind="vision",
        generate=(),
        sizes=VISION,
    ),
)


def by_name(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def some(families: Sequence[Any], step: int = 5) -> Sequence[Any]:
    """Return every fifth family, or of another step; in `make soak` all of them."""
    return families if os.environ.get("ANYFLEX_SOAK") == "1" else families[::step]
