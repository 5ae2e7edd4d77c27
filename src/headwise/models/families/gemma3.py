"""Gemma 3 with images: its text model is converted; its vision tower and the projector are carried over."""

from dataclasses import replace

from headwise.models.families import gemma3_text

_LAYER = "model.language_model.layers.{layer}"
FAMILY = replace(
    gemma3_text.FAMILY,
    model_type="gemma3",
    layer=_LAYER,
    attention=f"{_LAYER}.self_attn",
    autos=("AutoModelForImageTextToText", "AutoModelForCausalLM"),
    renamed={
        "model.language_model.model.": "model.language_model.",
        "model.language_model.lm_head.": "lm_head.",
        "model.lm_head.": "lm_head.",
        "model.vision_tower.vision_model.": "model.vision_tower.",
    },
    gguf_tensors={},
)
