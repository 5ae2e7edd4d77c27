"""Whole transformers models on the meta device, and the sizes of their parts as in
`headwise.costs.formulas.model`."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SAME_CLASS = {"kimi_k2": "deepseek_v3"}
"""``model_type`` of published files → the class transformers has for them."""

_OWNERS = {"attention": r"(?<!Delta)Attention$", "mixers": r"Mixer$|MambaLayer$|DeltaNet$|DeltaAttention$|ShortConv$"}
_PARTS = {
    "streams": r"\.(attn_hc|ffn_hc|hc_head)\.",
    "embedding": r"(embed_tokens|wte|word_embeddings|embed_in|model\.embeddings)\.weight$",
    "positions": r"(wpe|embed_positions)\.weight$",
    "head": r"lm_head\.",
    "shared_experts": r"\.(shared_experts?|shared_expert_gate|shared_mlp)\.",
    "experts": r"\.experts\.",
    "router": r"\.(router|(mlp|mixer|feed_forward)\.gate)\.|(e_score_correction|expert)_bias$",
    "feed_forward": r"\.(mlp|feed_forward|fc1|fc2|mixer)\.",
    "norms": r"norm|\.ln_\w+\.|\.ln_f\.",
}


def transformers_config(config: dict[str, Any], **overrides: Any) -> Any:
    """The transformers config of a ``config.json``, its token ids kept within the vocabulary."""
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    fields = {key: value for key, value in {**config, **ids, **overrides}.items() if key != "model_type"}
    return CONFIG_MAPPING[SAME_CLASS.get(config["model_type"], config["model_type"])](**fields)


def meta_model(config: dict[str, Any]) -> Any:
    """The whole model, without memory for it."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(transformers_config(config))


def stored_parts(model: Any) -> Counter[str]:
    """The number of stored values in each part of the model; a tied tensor counts once, where it is first."""
    owners: dict[int, str] = {}
    for module in model.modules():
        for part, rule in _OWNERS.items():
            if re.search(rule, type(module).__name__):
                owners |= {id(parameter): part for parameter in module.parameters()}
    stored = dict(model.named_parameters())
    stored |= {
        name: buffer
        for name, buffer in model.named_buffers()
        if name.endswith(("e_score_correction_bias", "expert_bias"))
    }
    counts: Counter[str] = Counter()
    for name, tensor in stored.items():
        part_name = owners.get(id(tensor)) or next(
            (part for part, rule in _PARTS.items() if re.search(rule, name)), name
        )
        counts[part_name] += tensor.numel()
    if "experts" not in counts and "shared_experts" in counts:  # Granite 4 without experts keeps the name
        counts["feed_forward"] += counts.pop("shared_experts")
    return counts
