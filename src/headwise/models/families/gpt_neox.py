"""GPT-NeoX and Pythia: the rows of each head's query, key and value together; part of a head's dims rotate."""

from headwise.models.families.base import Family, fused

FAMILY = Family(
    model_type="gpt_neox",
    layer="gpt_neox.layers.{layer}",
    attention="gpt_neox.layers.{layer}.attention",
    layout=fused("query_key_value", "dense", by_head=True),
    stock_kv_heads=False,
    renamed={"embed_out.": "lm_head."},
    buffers=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
)
