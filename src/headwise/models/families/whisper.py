"""Whisper's decoder: self-attention, and cross-attention to the encoder's output. The encoder is not converted."""

from headwise.models.families.base import Family, renamed

FAMILY = Family(
    model_type="whisper",
    layer="model.decoder.layers.{layer}",
    attention="model.decoder.layers.{layer}.self_attn",
    cross_attention="model.decoder.layers.{layer}.encoder_attn",
    layout=renamed(o_proj="out_proj"),
    stock_kv_heads=False,
    autos=("AutoModelForSpeechSeq2Seq",),
)
