"""headwise's folders in vLLM: MLA with a rank and rotary channels for each layer, and caches in codes."""

from __future__ import annotations

import warnings

RUN_WITH = "0.32"
"""The version of vLLM that this is run with; it uses parts of vLLM that change without notice."""


def register() -> None:
    """Tell vLLM and transformers of headwise's folders; vLLM calls it in each of its processes."""
    import vllm
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from headwise_vllm.config import CODED, OWN, OWN_CODED, Folders, register_configs

    if not vllm.__version__.startswith(f"{RUN_WITH}."):
        warnings.warn(f"headwise-vllm is run with vLLM {RUN_WITH}; this is {vllm.__version__}", stacklevel=2)
    register_configs()
    for name in (*OWN, *OWN_CODED):
        if name not in vllm.ModelRegistry.get_supported_archs():
            vllm.ModelRegistry.register_model(name, f"headwise_vllm.model:{name}")
    for name in (*CODED, *OWN, *OWN_CODED):
        MODELS_CONFIG_MAP.setdefault(name, Folders)
