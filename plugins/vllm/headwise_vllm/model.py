"""vLLM's model classes with headwise's attention in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import PPMissingLayer

from headwise_vllm.attention import OP, CodedAttention, LatentAttention, QueryRotation, Rotation
from headwise_vllm.config import CODE_FILE, ROPES, latent_layers

if TYPE_CHECKING:
    from headwise.runtime.quantization import TransformCode


class LatentModel(nn.Module):
    """What the classes of MLA folders share: the family's model, with its attention replaced and loaded."""

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
        install_latents(self.model, vllm_config)

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


class CodedModel(nn.Module):
    """What the classes of stock folders with codes share: the family's model, whose attention reads codes."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        _refuse(vllm_config)
        if (ranks := vllm_config.parallel_config.tensor_parallel_size) > 1:
            raise ValueError(f"tensor_parallel_size = {ranks}: must be 1: codes of heads are not split over ranks")
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        install_heads(self.model, vllm_config)


def _refuse(vllm_config: VllmConfig) -> None:
    """Refuse what is not served here, by its name.

    Raises:
        ValueError: with the field, its value and the rule.
    """
    rope = (vllm_config.model_config.hf_config.rope_parameters or {}).get("rope_type", "default")
    if rope not in ROPES:
        raise ValueError(f"rope_type = {rope!r}: must be one of {', '.join(ROPES)}")
    kind = vllm_config.cache_config.cache_dtype
    if kind != "auto" and kind != str(vllm_config.model_config.dtype).removeprefix("torch."):
        raise ValueError(f"kv_cache_dtype = {kind!r}: must be auto: the folder says how its cache is stored")
    if (ranks := vllm_config.parallel_config.decode_context_parallel_size) > 1:
        raise ValueError(f"decode_context_parallel_size = {ranks}: must be 1: caches are not split over ranks")


def _codes(vllm_config: VllmConfig) -> dict[int, TransformCode]:
    """The code of each layer, from the model's folder; none where its cache is not coded.

    Raises:
        ValueError: headwise is not installed, or a GPU cannot read pages of so many tokens.
    """
    folder, config = Path(vllm_config.model_config.model), vllm_config.model_config.hf_config
    if not (folder / CODE_FILE).is_file():
        return {}
    try:
        from headwise.runtime.kernels.gpu import TILE
        from headwise.runtime.kernels.native.build import built
        from headwise.runtime.quantization.transform_code import read_codes
    except ImportError as error:
        raise ValueError(f"{CODE_FILE}: needs headwise: pip install --no-deps headwise ({error})") from error
    tokens, device = vllm_config.cache_config.block_size, vllm_config.device_config.device
    if torch.device(device).type == "cuda" and tokens % TILE:
        raise ValueError(f"block_size = {tokens}: must be a multiple of {TILE} on a GPU, whose kernels read so many")
    built()  # compiles the kernels, which would else keep the first request waiting
    return {layer: code.to(device) for layer, code in read_codes(folder, config.num_hidden_layers).items()}


def install_latents(model: Any, vllm_config: VllmConfig) -> None:
    """Replace a model's attention by the MLA layers that its config describes.

    Args:
        model: the family's, without its head.
        vllm_config: vLLM's.

    Raises:
        ValueError: the folder cannot be served here; with the field and the reason.
    """
    config, codes = vllm_config.model_config.hf_config, _codes(vllm_config)
    rotary = LlamaRotaryEmbedding(config=config)
    layers = latent_layers(config.headwise, config.num_hidden_layers, len(rotary.inv_freq))
    if codes:
        from headwise_vllm.coded import CodedLatents, key_rotation, slot_tables

        tables = slot_tables(rotary.inv_freq, rotary.attention_scaling, vllm_config.model_config.max_model_len)
    for index, attention in _attentions(model):
        layer, coded = layers[index], None
        if codes:
            keys = key_rotation(tables, layer.channels)
            coded = CodedLatents(codes[index], keys, layer.kv_lora_rank, layer.qk_rope_head_dim)
        frequencies = rotary.inv_freq[list(layer.channels)]
        model.layers[index].self_attn = LatentAttention(
            layer,
            hidden_size=config.hidden_size,
            rotation=Rotation(frequencies, rotary.attention_scaling) if layer.channels else None,
            prefix=attention.attn.layer_name.removesuffix(".attn"),
            coded=coded,
            quant_config=vllm_config.quant_config,
        )
    _run_between_compiled_parts(vllm_config)


def install_heads(model: Any, vllm_config: VllmConfig) -> None:
    """Have a stock model cache its keys and values in codes, before keys are rotated.

    Args:
        model: the family's, without its head.
        vllm_config: vLLM's.

    Raises:
        ValueError: the folder cannot be served here; with the field and the reason.
    """
    from headwise_vllm.coded import CodedHeads, key_rotation, slot_tables

    codes, rotary = _codes(vllm_config), LlamaRotaryEmbedding(config=vllm_config.model_config.hf_config)
    factor, pairs = rotary.attention_scaling, len(rotary.inv_freq)
    tables = slot_tables(rotary.inv_freq, factor, vllm_config.model_config.max_model_len)
    keys = key_rotation(tables, range(pairs))
    for index, attention in _attentions(model):
        if 2 * pairs != attention.head_dim:
            raise ValueError(f"{2 * pairs} rotary channels: must be {attention.head_dim}, all of a head")
        stock, heads = attention.attn, attention.total_num_kv_heads
        coded = CodedHeads(codes[index], keys, heads, attention.head_dim, attention.head_dim)
        attention.rotary_emb = QueryRotation(rotary.inv_freq, factor)
        attention.attn = CodedAttention(stock.layer_name, coded, attention.scaling, stock.sliding_window)
    _run_between_compiled_parts(vllm_config)


def _attentions(model: Any) -> Iterator[tuple[int, Any]]:
    """The attention modules of this process's layers, by the layers' numbers."""
    for index in range(len(model.layers)):
        if not isinstance(model.layers[index], PPMissingLayer):
            yield index, model.layers[index].self_attn


def _run_between_compiled_parts(vllm_config: VllmConfig) -> None:
    """Have what vLLM compiles stop before attention, whose Python is then run, and go on behind it."""
    compilation = vllm_config.compilation_config
    if compilation.splitting_ops is not None and f"vllm::{OP}" not in compilation.splitting_ops:
        compilation.splitting_ops.append(f"vllm::{OP}")


class HeadwiseLlamaForCausalLM(LatentModel, LlamaForCausalLM):
    """Folders of ``headwise_llama``."""


class HeadwiseMistralForCausalLM(LatentModel, MistralForCausalLM):
    """Folders of ``headwise_mistral``."""


class HeadwiseQwen2ForCausalLM(LatentModel, Qwen2ForCausalLM):
    """Folders of ``headwise_qwen2``."""


class HeadwiseCodedLlamaForCausalLM(CodedModel, LlamaForCausalLM):
    """Folders of ``llama`` with codes."""


class HeadwiseCodedMistralForCausalLM(CodedModel, MistralForCausalLM):
    """Folders of ``mistral`` with codes."""


class HeadwiseCodedQwen2ForCausalLM(CodedModel, Qwen2ForCausalLM):
    """Folders of ``qwen2`` with codes."""


class HeadwiseCodedQwen3ForCausalLM(CodedModel, Qwen3ForCausalLM):
    """Folders of ``qwen3`` with codes."""
