"""Whisper's decoder: attention to its own past, and to what the encoder heard. The encoder stays as it is."""

from headwise.checkpoints.family import Family
from headwise.checkpoints.layout import renamed

FAMILY = Family(
    model_type="whisper",
    layer="model.decoder.layers.{layer}",
    attention="model.decoder.layers.{layer}.self_attn",
    cross_attention="model.decoder.layers.{layer}.encoder_attn",
    layout=renamed(o_proj="out_proj"),
    stock_kv_heads=False,
    autos=("AutoModelForSpeechSeq2Seq",),
)
