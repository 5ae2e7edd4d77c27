"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention beside experts, which are not converted."""

from dataclasses import replace

from headwise.models.families import qwen2

_EXPERTS = "model.layers.{layer}.mlp.experts"
_EXPERT = f"{_EXPERTS}.{{expert}}"
FAMILY = replace(
    qwen2.FAMILY,
    model_type="qwen2_moe",
    deepseek_blocks=False,
    joined={
        f"{_EXPERTS}.gate_up_proj": (f"{_EXPERT}.gate_proj.weight", f"{_EXPERT}.up_proj.weight"),
        f"{_EXPERTS}.down_proj": (f"{_EXPERT}.down_proj.weight",),
    },
    gguf_tensors={},
)
