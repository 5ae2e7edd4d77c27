"""Which programs serve what an option makes; `headwise engines FOLDER` says it of a finished folder, condition by
condition, and docs/engines.md of every output that was run."""

from __future__ import annotations

import re

PLUGIN_FAMILIES = ("llama", "mistral", "qwen2")
"""Families whose folders of headwise's own MLA are served by headwise's plugin in vLLM."""

WITHOUT_KV_HEADS = ("bert", "gpt2", "gpt_neox", "opt", "whisper")
"""Families whose own classes have as many key–value heads as query heads, so that GQA needs headwise's layers."""

OWN = "headwise, transformers"
"""What loads a folder with headwise's layers; transformers after ``import headwise.hf``."""

UNCHANGED = "whatever serves the original"


def served_by(target: str, model_type: str) -> str:
    """The programs that serve an option, in words.

    For example ``served_by("mla:0.5", "llama")`` is ``"headwise, transformers, vLLM with headwise's plugin"``.

    Args:
        target: as `headwise.advice.Option.target` has it.
        model_type: of the source.
    """
    if target == "as it is":
        return UNCHANGED
    if re.fullmatch(r"mha|mqa|gqa:\d+", target):
        return OWN if model_type in WITHOUT_KV_HEADS else UNCHANGED
    if target.startswith("mla:") and "@" not in target:
        return f"{OWN}, vLLM with headwise's plugin" if model_type in PLUGIN_FAMILIES else OWN
    return "headwise"
