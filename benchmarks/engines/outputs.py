"""The models that engines are given: SmolLM2 and small random models of other families, converted in every way."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import headwise
from benchmarks import data

SMOLLM2 = "smollm2-135m"
TOKENS = 4096
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
TOYS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "llama-3": ("llama", {"rope_parameters": _LLAMA3}),
    "mistral": ("mistral", {"sliding_window": None}),
    "32 heads": (
        "llama",
        {"hidden_size": 512, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 64},
    ),
}
"""Random models by name: the family and what differs from the others."""


@dataclass(frozen=True)
class Output:
    """One model that engines are given.

    Attributes:
        source: ``smollm2-135m`` or a name in `TOYS`.
        options: of `headwise.convert`, beside the source, the text and the folder.
        calibrated: whether the conversion needs a text.
        engines: that it is given to; all when None.
    """

    source: str
    options: dict[str, Any] = field(default_factory=dict)
    calibrated: bool = False
    engines: tuple[str, ...] | None = None


# The descent is left out: what is measured here is whether two programs compute the same, not how good it is.
_MLA = {"to": "mla", "without": ["refine", "sequence", "sensitivity", "spread"]}
_HALF = {**_MLA, "kv_budget": 0.5}
OUTPUTS: dict[str, Output] = {
    "original": Output(SMOLLM2, {"to": "gqa:3"}),
    "MQA": Output(SMOLLM2, {"to": "mqa"}, calibrated=True),
    "MHA": Output(SMOLLM2, {"to": "mha"}),
    "MLA, deepseek --bias-free": Output(SMOLLM2, {**_HALF, "format": "deepseek", "bias_free": True}, True),
    "MLA, deepseek --bias-free --pad-to 512+64": Output(
        SMOLLM2, {**_HALF, "format": "deepseek", "bias_free": True, "pad_to": "512+64"}, True
    ),
    "MLA, deepseek": Output(SMOLLM2, {**_HALF, "format": "deepseek"}, True),
    "MLA, deepseek-longrope": Output(SMOLLM2, {**_HALF, "format": "deepseek-longrope"}, True),
    "MLA, headwise": Output(SMOLLM2, _HALF, True),
    "MLA, headwise, sizes by layer": Output(
        SMOLLM2, {"to": "mla", "kv_budget": 0.5, "spread": True, "without": ["refine", "sequence"]}, True
    ),
    **{f"{name}, MQA": Output(name, {"to": "mqa"}) for name in ("qwen2", "llama-3", "mistral")},
    **{f"{name}, GQA": Output(name, {"to": "gqa:2"}) for name in ("qwen2", "llama-3", "mistral")},
    **{
        f"{name}, MLA": Output(name, {**_HALF, "format": "deepseek", "bias_free": True}, True)
        for name in ("qwen2", "mistral")
    },
    "qwen2, MLA, headwise": Output("qwen2", _HALF, True),
    **{
        name: Output(SMOLLM2, {**options, "without": ["refine", "sequence"]}, True, ("transformers", "vllm"))
        for name, options in {
            "MLA in codes": {"to": "mla", "kv_bytes": 0.19},
            "grouped in codes": {"to": "same", "kv_bytes": 0.28},
        }.items()
    },
    # The sizes that vLLM's kernel on a CPU has.
    "32 heads, MLA 512 + 64": Output(
        "32 heads",
        {**_MLA, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "format": "deepseek", "bias_free": True},
        True,
    ),
}


def make(name: str, work: Path, cache: Path, progress: Callable[..., None] = print) -> Path:
    """The folder of an output, made once."""
    output, folder = OUTPUTS[name], work / re.sub(r"\W+", "-", name)
    if (folder / "config.json").exists():
        return folder
    progress("making", name)
    source: str | Path = output.source
    if output.source in TOYS:
        source = toy(output.source, work / f"source-{output.source}")
    text: dict[str, Any] = {}
    if output.calibrated:
        text = {"calibrate": data.wikitext("train", cache), "calibration_tokens": TOKENS}
    headwise.convert(source, folder, evaluate=False, **output.options, **text)
    return folder


def toy(name: str, folder: Path) -> Path:
    """A small random model with SmolLM2's tokenizer, as a folder in float32."""
    if (folder / "config.json").exists():
        return folder
    model_type, overrides = TOYS[name]
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 49_152,
        "max_position_embeddings": 16_384,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**sizes, **overrides}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0, 0.1) if parameter.dim() == 1 else parameter.mul_(2.0)
        # Trained models have large components that all tokens share, and a constant is made of those.
        model.model.embed_tokens.weight += 0.1 * torch.randn(model.config.hidden_size)
    model.save_pretrained(folder)
    headwise.models.checkpoints.load_tokenizer(headwise.models.checkpoints.model_path(SMOLLM2)).save_pretrained(
        folder
    )
    return folder
