"""Mixtral: Mistral's attention beside experts, which are not converted."""

from dataclasses import replace

from headwise.models.families import mistral

_EXPERTS = "model.layers.{layer}.mlp.experts"
_EXPERT = f"{_EXPERTS}.{{expert}}"
FAMILY = replace(
    mistral.FAMILY,
    model_type="mixtral",
    deepseek_blocks=False,
    renamed={".block_sparse_moe.": ".mlp."},
    written={".mlp.": ".block_sparse_moe."},
    joined={
        f"{_EXPERTS}.gate_up_proj": (f"{_EXPERT}.w1.weight", f"{_EXPERT}.w3.weight"),
        f"{_EXPERTS}.down_proj": (f"{_EXPERT}.w2.weight",),
    },
    gguf_tensors={},
)
