"""headwise's MLA folders in vLLM: each layer has a rank and rotary channels of its own, and may have biases."""

from __future__ import annotations

import warnings

RUN_WITH = "0.32"
"""The version of vLLM that this is run with; it uses parts of vLLM that change without notice."""


def register() -> None:
    """Tell vLLM and transformers of headwise's folders; vLLM calls it in each of its processes."""
    import vllm

    from headwise_vllm.config import register_configs

    if not vllm.__version__.startswith(f"{RUN_WITH}."):
        warnings.warn(f"headwise-vllm is run with vLLM {RUN_WITH}; this is {vllm.__version__}", stacklevel=2)
    register_configs()
    for name in ("HeadwiseLlamaForCausalLM", "HeadwiseMistralForCausalLM", "HeadwiseQwen2ForCausalLM"):
        if name not in vllm.ModelRegistry.get_supported_archs():
            vllm.ModelRegistry.register_model(name, f"headwise_vllm.model:{name}")
