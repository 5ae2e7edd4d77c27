"""vLLM's model classes with headwise's attention in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.utils import PPMissingLayer

from headwise_vllm.attention import OP, LatentAttention
from headwise_vllm.config import ROPES, latent_layers


class LatentModel(nn.Module):
    """What the model classes below share: the family's model, with its attention replaced and loaded."""

    # The attention's projections are not packed, so adapters of qkv_proj have nothing to attach to.
    packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}  # noqa: RUF012 # as vLLM declares it

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        _refuse(vllm_config)
        # The family's attention is made first. What it asks of key–value heads and of windows does not hold for MLA.
        config = vllm_config.model_config.hf_config
        config.num_key_value_heads = config.num_attention_heads
        if hasattr(config, "layer_types"):
            config.layer_types = ["full_attention"] * config.num_hidden_layers
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        install(self.model, vllm_config)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """See vLLM's classes; they know no names of this attention."""
        own: set[str] = set()

        def others() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if ".self_attn." not in name:
                    yield name, tensor
                elif name in parameters:
                    parameter = parameters[name]
                    getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
                    own.add(name)
                elif any(name.startswith(f"{layer}.") for layer in here):
                    raise ValueError(f"{name}: has no place in the layer that config.json describes")

        parameters = dict(self.named_parameters())
        here = [name for name, module in self.named_modules() if isinstance(module, LatentAttention)]
        return super().load_weights(others()) | own


def _refuse(vllm_config: VllmConfig) -> None:
    """Refuse what is not served here, by its name.

    Raises:
        ValueError: with the field, its value and the rule.
    """
    config, folder = vllm_config.model_config.hf_config, Path(vllm_config.model_config.model)
    if (folder / "kv_cache.safetensors").exists():
        raise ValueError(f"{folder}: kv_cache.safetensors: a cache in codes is not served in vLLM")
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in ROPES:
        raise ValueError(f"rope_type = {rope!r}: must be one of {', '.join(ROPES)}")
    kind = vllm_config.cache_config.cache_dtype
    if kind != "auto" and kind != str(vllm_config.model_config.dtype).removeprefix("torch."):
        raise ValueError(f"kv_cache_dtype = {kind!r}: must be auto: latents are cached in the model's dtype")
    if (ranks := vllm_config.parallel_config.decode_context_parallel_size) > 1:
        raise ValueError(f"decode_context_parallel_size = {ranks}: must be 1: latents are not split over ranks")


def install(model: Any, vllm_config: VllmConfig) -> None:
    """Replace a model's attention by the layers that its config describes.

    Args:
        model: the family's, without its head.
        vllm_config: vLLM's.

    Raises:
        ValueError: the folder cannot be served here; with the field and the reason.
    """
    config = vllm_config.model_config.hf_config
    rotary = LlamaRotaryEmbedding(config=config)
    layers = latent_layers(config.headwise, config.num_hidden_layers, len(rotary.inv_freq))
    compilation = vllm_config.compilation_config
    for index in range(len(model.layers)):
        if isinstance(model.layers[index], PPMissingLayer):
            continue
        stock = model.layers[index].self_attn
        del compilation.static_forward_context[stock.attn.layer_name]
        model.layers[index].self_attn = LatentAttention(
            layers[index],
            hidden_size=config.hidden_size,
            inv_freq=rotary.inv_freq,
            rope_factor=rotary.attention_scaling,
            prefix=stock.attn.layer_name.removesuffix(".attn"),
            quant_config=vllm_config.quant_config,
        )
    if compilation.splitting_ops is not None and f"vllm::{OP}" not in compilation.splitting_ops:
        compilation.splitting_ops.append(f"vllm::{OP}")  # its Python is run between the compiled parts


class HeadwiseLlamaForCausalLM(LatentModel, LlamaForCausalLM):
    """Folders of ``headwise_llama``."""


class HeadwiseMistralForCausalLM(LatentModel, MistralForCausalLM):
    """Folders of ``headwise_mistral``."""


class HeadwiseQwen2ForCausalLM(LatentModel, Qwen2ForCausalLM):
    """Folders of ``headwise_qwen2``."""
