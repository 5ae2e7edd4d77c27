"""GPT-2: no RoPE; query, key and value columns in one transposed projection."""

from headwise.models.families.base import Family, fused

FAMILY = Family(
    model_type="gpt2",
    layer="transformer.h.{layer}",
    attention="transformer.h.{layer}.attn",
    layout=fused("c_attn", "c_proj", transposed=True),
    stock_kv_heads=False,
    dropout="attn_pdrop",
    output_dropout="resid_pdrop",
    buffers=(".attn.bias", ".attn.masked_bias"),
)
