"""Llama, and the many checkpoints that share its architecture (SmolLM2, TinyLlama, Yi, …)."""

from headwise.models.families.base import Family

FAMILY = Family(
    model_type="llama",
    layer="model.layers.{layer}",
    attention="model.layers.{layer}.self_attn",
    deepseek_blocks=True,
    former_rope=True,
    gguf_tensors={
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "blk.{layer}.attn_norm": "model.layers.{layer}.input_layernorm",
        "blk.{layer}.attn_q": "model.layers.{layer}.self_attn.q_proj",
        "blk.{layer}.attn_k": "model.layers.{layer}.self_attn.k_proj",
        "blk.{layer}.attn_v": "model.layers.{layer}.self_attn.v_proj",
        "blk.{layer}.attn_output": "model.layers.{layer}.self_attn.o_proj",
        "blk.{layer}.ffn_norm": "model.layers.{layer}.post_attention_layernorm",
        "blk.{layer}.ffn_gate": "model.layers.{layer}.mlp.gate_proj",
        "blk.{layer}.ffn_up": "model.layers.{layer}.mlp.up_proj",
        "blk.{layer}.ffn_down": "model.layers.{layer}.mlp.down_proj",
    },
    gguf_interleaved=True,
)
