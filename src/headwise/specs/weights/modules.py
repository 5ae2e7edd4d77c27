"""The names that transformers and published files give the matrices of a layer, by which quantisers skip some.

A matrix has several names: files of a mixture of experts were published before transformers joined its experts, and
the text part of a multimodal model lies under another name than a model of text alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

_LAYERS = (
    "model.layers",
    "model.language_model.layers",
    "language_model.model.layers",
    "transformer.h",
    "gpt_neox.layers",
    "model.decoder.layers",
    "backbone.layers",
)
_ATTENTION = ("self_attn", "attn", "attention", "self_attention", "mixer")
_MIXERS = ("linear_attn", "mamba", "mixer", "conv", "self_attn")
_NETWORKS = ("mlp", "feed_forward", "block_sparse_moe", "mixer")
_MATRICES = {
    "gate_proj": ("gate_proj", "w1"),
    "up_proj": ("up_proj", "w3", "fc1", "c_fc", "dense_h_to_4h"),
    "down_proj": ("down_proj", "w2", "fc2", "c_proj", "dense_4h_to_h"),
}
_QUERIES_KEYS_VALUES = ("query_key_value", "c_attn")

_OWN = {
    "q_proj": ("q_proj", *_QUERIES_KEYS_VALUES),
    "k_proj": ("k_proj", *_QUERIES_KEYS_VALUES),
    "v_proj": ("v_proj", *_QUERIES_KEYS_VALUES),
    "o_proj": ("o_proj", "out_proj", "dense", "c_proj"),
    "q_a_proj": ("q_a_proj",),
    "q_b_proj": ("q_b_proj",),
    "kv_a_proj_with_mqa": ("kv_a_proj_with_mqa",),
    "kv_b_proj": ("kv_b_proj",),
    "index wq_b": ("indexer.wq_b",),
    "index wk": ("indexer.wk",),
    "index weights_proj": ("indexer.weights_proj", "compressor.indexer.scorer.weights_proj"),
    "kv_proj": ("kv_proj",),
    "o_a_proj": ("o_a_proj",),
    "o_b_proj": ("o_b_proj",),
    "entry kv_proj": ("compressor.kv_proj",),
    "entry gate_proj": ("compressor.gate_proj",),
    "index entry kv_proj": ("compressor.indexer.kv_proj",),
    "index entry gate_proj": ("compressor.indexer.gate_proj",),
    "index q_b_proj": ("compressor.indexer.q_b_proj",),
}
_RECURRENT = {
    "in_proj": ("in_proj", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"),
    "out_proj": ("out_proj", "o_proj"),
    "x_proj": ("x_proj",),
    "dt_proj": ("dt_proj",),
    "f_b_proj": ("f_b_proj", "forget_gate.f_b_proj"),
    "g_b_proj": ("g_b_proj",),
}
_FUSED = {
    **{name: ("self_attn.qkv_proj",) for name in ("q_proj", "k_proj", "v_proj")},
    **{f"feed_forward {name}": ("mlp.gate_up_proj",) for name in ("gate_proj", "up_proj")},
}
"""Names where one matrix holds several."""
_FUSED_IN = {
    "phi3": tuple(_FUSED),
    "glm": ("feed_forward gate_proj", "feed_forward up_proj"),
    "glm4": ("feed_forward gate_proj", "feed_forward up_proj"),
}

HEAD = ("lm_head", "language_model.lm_head", "model.lm_head", "embed_out", "output")
"""Names of the head."""
ROUTER, SHARED_GATE = "router router", "shared_experts shared gate"


@dataclass(frozen=True)
class Module:
    """A matrix: the name of its stage, and its names in files and classes. ``layer`` is None for the head."""

    stage: str
    names: tuple[str, ...]
    layer: int | None = None

    @property
    def is_expert(self) -> bool:
        """Whether it is one of a mixture's experts."""
        return self.stage.startswith("experts ")


def modules(model_type: str, num_layers: int) -> Iterator[Module]:
    """Every matrix that a model of a type may have: the head, then those of each layer.

    For example ``next(modules("llama", 1)).stage`` is ``"head"``.
    """
    yield Module("head", HEAD)
    for layer in range(num_layers):
        for stage, names in _within_a_layer(model_type):
            yield Module(stage, tuple(f"{place}.{layer}.{name}" for place in _LAYERS for name in names), layer)


@cache
def _within_a_layer(model_type: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    def under(places: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{place}.{name}" for place in places for name in names)

    found = {stage: under(_ATTENTION, names) for stage, names in _OWN.items()}
    found |= {stage: under(_MIXERS, names) for stage, names in _RECURRENT.items()}
    for stage, names in _MATRICES.items():
        plain = tuple(name for name in names if name.startswith("fc"))  # OPT's stand in the layer itself
        found[f"feed_forward {stage}"] = (*under(_NETWORKS, names), *plain)
        experts = tuple(f"experts.0.{name}" for name in names)
        found[f"experts {stage}"] = under(_NETWORKS, (*experts, "experts"))
        shared = tuple(f"{place}.{name}" for place in ("shared_experts", "shared_expert") for name in names)
        found[f"shared_experts {stage}"] = (*under(_NETWORKS, shared), *under(("shared_mlp",), names))
    found[ROUTER] = under(_NETWORKS, ("gate", "router"))
    found[SHARED_GATE] = under(_NETWORKS, ("shared_expert_gate",))
    found |= {stage: _FUSED[stage] for stage in _FUSED_IN.get(model_type, ())}
    return tuple(found.items())
