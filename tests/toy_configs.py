"""A toy ``config.json`` of every family transformers can build, with only the fields that a reader needs."""

from __future__ import annotations

from typing import Any

_SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "intermediate_size": 96,
    "vocab_size": 100,
    "num_hidden_layers": 6,
    "max_position_embeddings": 256,
}
_GPT2 = {"n_embd": 64, "n_head": 8, "n_layer": 3, "n_positions": 50, "vocab_size": 100}
_MOE = {"moe_intermediate_size": 40, "num_experts_per_tok": 2}
_ROUTED = {**_MOE, "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1}
_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
_MLA = {
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
_INDEXED = {"index_topk": 512, "index_n_heads": 3, "index_head_dim": 8}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 12, "mamba_d_conv": 4, "mamba_n_groups": 2}
_DELTA = {
    "num_key_value_heads": 2,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 5,
    "linear_conv_kernel_dim": 4,
}
_QWEN_MOE = {**_MOE, "num_experts": 6, "shared_expert_intermediate_size": 56}
_WINDOW = {"sliding_window": 8}

_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"max_position_embeddings": 8192},
    "ministral": {"head_dim": 8, "max_position_embeddings": 8192},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "mixtral": _LOCAL,
    "llama4_text": {
        **_LOCAL,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size_mlp": 112,
        "attention_chunk_size": 8,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 3,
    },
    "qwen2": {"num_key_value_heads": 8},
    "qwen2_moe": {**_QWEN_MOE, "num_key_value_heads": 8, "mlp_only_layers": [1]},
    "qwen3": {"num_key_value_heads": 8},
    "qwen3_moe": {**_MOE, "num_experts": 6, "decoder_sparse_step": 2},
    "gemma": {"num_key_value_heads": 1},
    "gemma2": _WINDOW,
    "gemma3_text": _WINDOW,
    "phi3": {},
    "gpt_oss": {**_LOCAL, **_WINDOW, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOW,
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "granite": {},
    "granitemoe": _LOCAL,
    "smollm3": {},
    "starcoder2": {},
    "stablelm": {"num_key_value_heads": 8},
    "cohere": {},
    "cohere2": _WINDOW,
    "glm": {},
    "glm4": {},
    "glm4_moe": {**_ROUTED, "num_key_value_heads": 2},
    "exaone4": {**_WINDOW, "num_key_value_heads": 8},
    "seed_oss": {},
    "dots1": {**_ROUTED, "num_key_value_heads": 8, "sliding_window": None},
    "minimax_m2": {**_LOCAL, "rotary_dim": 64},
    "nemotron": {"num_key_value_heads": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "ernie4_5": {},
    "arcee": {},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "falcon": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_neox": {},
    "phi": {},
    "deepseek_v2": {**_ROUTED, **_MLA},
    "deepseek_v3": {**_ROUTED, **_MLA, "n_group": 2, "topk_group": 1},
    "kimi_k2": {**_ROUTED, **_MLA, "n_group": 1, "topk_group": 1},
    "glm4_moe_lite": {**_ROUTED, **_MLA},
    "deepseek_v32": {**_ROUTED, **_MLA, **_INDEXED, "n_group": 2, "topk_group": 1},
    "deepseek_v4": {
        "moe_intermediate_size": 96,
        "num_experts_per_tok": 2,
        "n_routed_experts": 6,
        "head_dim": 24,
        "q_lora_rank": 20,
        "sliding_window": 16,
        "o_groups": 2,
        "o_lora_rank": 12,
        "index_topk": 2,
        "index_n_heads": 3,
        "index_head_dim": 8,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "qk_rope_head_dim": 8,
    },
    "glm_moe_dsa": {**_ROUTED, **_MLA, **_INDEXED, "indexer_types": ["full", "shared"] * 3},
    "minicpm3": _MLA,
    "qwen3_next": {**_QWEN_MOE, **_DELTA},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_QWEN_MOE, **_DELTA},
    "lfm2": {"num_key_value_heads": 2, "full_attn_idxs": [1, 4], "conv_L_cache": 3},
    "lfm2_moe": {
        **_MOE,
        "num_key_value_heads": 2,
        "num_experts": 6,
        "layer_types": ["conv", "full_attention"] * 3,
        "conv_L_cache": 3,
    },
    "kimi_linear": {
        "moe_intermediate_size": 40,
        "num_experts_per_token": 2,
        "num_experts": 6,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
        **_MLA,
        "q_lora_rank": None,
        "linear_attn_config": {
            "full_attn_layers": [3, 6],
            "kda_layers": [1, 2, 4, 5],
            "head_dim": 8,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    },
    "jamba": {
        "num_key_value_heads": 2,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "mamba_d_state": 5,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "bamba": {**_MAMBA2, "num_key_value_heads": 2, "attn_layer_indices": [2]},
    "granitemoehybrid": {
        **_MAMBA2,
        **_LOCAL,
        "layer_types": ["mamba", "attention"] * 3,
        "shared_intermediate_size": 56,
        "position_embedding_type": "nope",
    },
    "nemotron_h": {
        **_MOE,
        "num_key_value_heads": 2,
        "hybrid_override_pattern": "M*-EM-",
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 4,
        "ssm_state_size": 6,
        "n_groups": 2,
        "conv_kernel": 4,
        "n_routed_experts": 6,
        "moe_shared_expert_intermediate_size": 56,
    },
    "gemma3n_text": {
        **_WINDOW,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "vocab_size_per_layer_input": 100,
    },
}
TOYS: dict[str, dict[str, Any]] = {
    name: {**({} if own is _GPT2 else _SIZES), **own, "model_type": name} for name, own in _OWN.items()
}
UNBUILT = {
    "bert",
    "roberta",
    "distilbert",
    "RefinedWeb",
    "RefinedWebModel",
    "nemotron-nas",
    "openelm",
    "step3_text",
    "whisper",
}
"""Model types that have a reader, but no class, or no decoder, in transformers."""
