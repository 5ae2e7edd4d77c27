"""What an engine's own small cache is: its bytes, the models that it suits, and the devices that run it."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.costs.prediction.hardware import Device
from headwise.models.specs import AttentionSpec, GroupedSpec, LatentSpec, ModelSpec, RecurrentSpec

SAFE_LOSS = 0.02
"""The largest rise of perplexity that eight bits cost a model that was measured (docs/prepare.md), rounded up."""


@dataclass(frozen=True, kw_only=True)
class EngineCache:
    """One way in which an engine stores keys and values.

    Attributes:
        name: what a target has behind the engine's name, such as ``q8_0`` of ``llama.cpp:q8_0``.
        options: what is added to the engine's command line.
        words: the options in a table.
        key_bits: the bits of a key's channel, with the scale of its block.
        value_bits: the bits of a value's channel, with the scale of its block.
        key_scale: bits that a key of all channels takes besides.
        value_scale: bits that a value of all channels takes besides.
        block: the channels that share a scale; they must divide a head.
        rotates: whether it rotates a whole head first, whose channels must then be a power of two, and at least 8.
        unquantised_ends: layers at each end of a model that the engine leaves as they are.
        is_safe: whether models that were measured lost at most `SAFE_LOSS` in it.
        overflows: whether keys beyond 448 cannot be stored, which some Qwen2 models have.
        stores_latents: whether it also stores the latents of MLA.
        stores_windows: whether it also stores layers whose window slides.
        is_simulated: whether headwise stores keys and values in the same way, so that the loss can be measured and
            `headwise prepare` can fit a model to it.
        needs_gpu: whether a processor computes something else with it.
        needs_peak: the dtype of products that a device must have a peak of; empty where none is asked for.
        limit: what is known to go wrong, in words; empty where nothing is.
    """

    name: str
    options: str
    words: str
    key_bits: float
    value_bits: float
    key_scale: int = 0
    value_scale: int = 0
    block: int = 1
    rotates: bool = False
    unquantised_ends: int = 0
    is_safe: bool = False
    overflows: bool = False
    stores_latents: bool = False
    stores_windows: bool = True
    is_simulated: bool = False
    needs_gpu: bool = False
    needs_peak: str = ""
    limit: str = ""

    def suits(self, model: ModelSpec) -> bool:
        """Whether a model's keys and values can be stored in it.

        For example ``cache_of("llama.cpp", "q8_0").suits(read_spec("phi-2"))`` is False: blocks of 32 do not divide
        its heads of 80 channels.

        Args:
            model: the model.
        """
        layers = [layer for layer in model.layers if not isinstance(layer, RecurrentSpec)]
        if not self.stores_windows and any(layer.sliding_window is not None for layer in layers):
            return False
        widths: list[int] = []
        for layer in layers:
            if isinstance(layer, GroupedSpec):
                widths += [layer.head_dim, layer.value_dim]
            elif isinstance(layer, LatentSpec) and self.stores_latents:
                widths += [layer.kv_lora_rank, layer.kv_lora_rank + layer.qk_rope_head_dim]
            else:
                return False
        return bool(widths) and all(self.takes(width) for width in widths)

    def runs_on(self, device: Device) -> bool:
        """Whether a device is known to run it.

        For example ``cache_of("vllm", "nvfp4").runs_on(device("rtx-4090"))`` is False.

        Args:
            device: the device.
        """
        has_products = not self.needs_peak or self.needs_peak in device.peaks
        return has_products and not (self.needs_gpu and device.kind == "cpu")

    def takes(self, width: int) -> bool:
        """Whether heads of ``width`` channels can be stored."""
        return width % self.block == 0 and not (self.rotates and (width < 8 or width & (width - 1)))

    def bits(self, model: ModelSpec) -> float:
        """The mean bits of a cached value, scales included, of a model that it `suits`.

        For example ``cache_of("vllm", "int4_per_token_head").bits(read_spec("llama-3-8b"))`` is 4.25.

        Args:
            model: the model.
        """
        taken = values = 0.0
        ends = min(self.unquantised_ends, model.num_layers // 2)
        for index, layer in enumerate(model.layers):
            heads, key, value = cached_heads(layer)
            count = heads * (key + value)
            values += count
            if not ends <= index < model.num_layers - ends:
                taken += 16 * count
                continue
            taken += heads * (key * self.key_bits + bool(key) * self.key_scale)
            taken += heads * (value * self.value_bits + bool(value) * self.value_scale)
        return taken / values

    def is_safe_for(self, model: ModelSpec) -> bool:
        """Whether the cache is known to be safe for models of this kind.

        For example ``cache_of("vllm", "fp8").is_safe_for(read_spec("llama-3-8b"))`` is True.

        Args:
            model: the model.
        """
        return self.is_safe and not (self.overflows and model.model_type.startswith("qwen2"))


def cached_heads(layer: AttentionSpec) -> tuple[int, int, int]:
    """What a layer caches for a token: so many heads, of each a key and a value of so many channels.

    For example ``cached_heads(read_spec("llama-3-8b").layers[0])`` is ``(8, 128, 128)``; no heads where it caches
    something else.

    Args:
        layer: the layer.
    """
    if isinstance(layer, GroupedSpec) and not layer.shares_kv:
        return layer.num_kv_heads, layer.head_dim, layer.value_dim
    if isinstance(layer, LatentSpec):
        return 1, layer.kv_lora_rank + layer.qk_rope_head_dim, 0
    return 0, 0, 0
