"""Give a loaded model the codes of its cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.errors import CheckpointError
from headwise.hf.attention import HostedLatentAttention
from headwise.hf.coded import SlotRotation
from headwise.quantization import TransformCode


def set_codes(model: Any, codes: Mapping[int, TransformCode]) -> None:
    """Code the values that a model's layers cache.

    For example ``set_codes(model, {})`` changes nothing.

    Args:
        model: a converted model.
        codes: the code of each layer, by the layer's number.

    Raises:
        CheckpointError: a layer has no such values.
    """
    if not codes:
        return
    layers = {m.layer_idx: m for m in model.modules() if isinstance(m, HostedLatentAttention)}
    rotary = next((module for name, module in model.named_modules() if name.endswith("rotary_emb")), None)
    slots = None if rotary is None else SlotRotation(rotary)
    for index, code in codes.items():
        layer = layers.get(index)
        if layer is None or code.width != layer.spec.kv_lora_rank + layer.spec.qk_rope_head_dim:
            raise CheckpointError("kv_cache.safetensors", index, "codes a layer that the model does not have")
        layer.set_code(code, slots)


def has_codes(model: Any) -> bool:
    """Whether values that the model caches are coded; see `set_codes`."""
    return any(isinstance(m, HostedLatentAttention) and m.code is not None for m in model.modules())
