"""OPT: no RoPE, learned positions."""

from headwise.models.families.base import Family, renamed

FAMILY = Family(
    model_type="opt",
    layer="model.decoder.layers.{layer}",
    attention="model.decoder.layers.{layer}.self_attn",
    layout=renamed(o_proj="out_proj"),
    stock_kv_heads=False,
)
