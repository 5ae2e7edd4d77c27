"""A tiny random model of every family that can be converted, in float64, and its outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headwise.models.checkpoints import family_names, family_of
from tests.real_models import save_character_tokenizer

_COMMON = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": 7},
    "qwen3": {"head_dim": 14},
    "gemma3_text": {
        "head_dim": 14,
        "num_hidden_layers": 3,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 20,
    },
    "gemma3": {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 2,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": 4,
        "image_token_index": 96,
        "boi_token_index": 95,
        "eoi_token_index": 94,
    },
    "olmo2": {},
    "granite": {
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.4,
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.5,
    },
    "smollm3": {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    "qwen3_moe": {**_EXPERTS, "head_dim": 14, "norm_topk_prob": True},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "gpt2": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 48},
    "bert": {},
    "whisper": {
        "d_model": 48,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 6,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_source_positions": 10,
        "max_target_positions": 64,
        "num_mel_bins": 8,
        "vocab_size": 97,
        "decoder_start_token_id": 1,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        "begin_suppress_tokens": None,
        "suppress_tokens": None,
    },
}


def tiny_family(name: str, *, num_key_value_heads: int = 3, **overrides: Any) -> Any:
    """A random model of the family, 48 wide with 6 heads; ``num_key_value_heads`` where the family has such a field.

    Everything learned is random, biases and norms too.
    """
    text = "gemma3_text" if name == "gemma3" else name
    sizes = _OWN[name] if name == "whisper" else {**_COMMON, **_OWN[text]}
    if family_of(name).stock_kv_heads:
        sizes = {**sizes, "num_key_value_heads": num_key_value_heads}
    sizes |= overrides
    config = CONFIG_MAPPING[name](**(sizes if text == name else {**_OWN[name], "text_config": sizes}))
    torch.manual_seed(0)
    auto = getattr(transformers, family_of(name).autos[0])
    model = auto.from_config(config, dtype=torch.float64, experts_implementation="eager").eval()
    with torch.no_grad():
        for own, parameter in model.named_parameters():
            if parameter.dim() == 1:
                is_scale = own.endswith("weight") and text != "gemma3_text"  # Gemma's are offsets from 1
                parameter.normal_(1.0 if is_scale else 0.0, 0.3)
            else:
                parameter.normal_(0.0, 1.5 / parameter[0].numel() ** 0.5)
    return model


def save_family(folder: Path, name: str, **overrides: Any) -> Path:
    """Such a model as a folder, with a tokenizer of single characters."""
    tiny_family(name, **overrides).save_pretrained(folder)
    save_character_tokenizer(folder, 97)
    return folder


@torch.inference_mode()
def answer(model: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Logits (or an encoder's last states) for token ids; a speech model always gets the same noise."""
    if model.config.is_encoder_decoder:
        kwargs = {"input_features": noise(len(ids)).to(model.dtype), "decoder_input_ids": ids, **kwargs}
        return model(**kwargs).logits
    return model(ids, **kwargs)[0]


def noise(batch: int) -> torch.Tensor:
    """Random features for a tiny speech model, ``[batch, 8, 20]``."""
    return torch.randn(batch, 8, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


FAMILIES = family_names()
STOCK = [name for name in FAMILIES if family_of(name).stock_kv_heads]
NORMED = ["gemma3", "gemma3_text", "olmo2", "qwen3", "qwen3_moe"]
"""Families with norms on queries and keys, which transformers computes in float32 whatever the model's dtype."""
MERGES = {"olmo2": "mean"}
"""The methods that merge the heads of families whose heads are not aligned."""
