"""What a folder says of its layers, and which class of vLLM's serves it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2")
"""Families whose MLA folders are served, by the ``model_type`` of their sources."""

CODED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Stock classes whose folders are served with their heads in codes, where they hold some."""

CODE_FILE = "kv_cache.safetensors"
"""The file of a folder whose cache is coded."""

ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE whose frequencies do not depend on the length of the text."""


@dataclass(frozen=True)
class LatentLayer:
    """The sizes of one MLA layer.

    Attributes:
        num_heads: H.
        kv_lora_rank: R, the width of the latent.
        qk_nope_head_dim: N, a head's query–key dims without rotation.
        qk_rope_head_dim: P, the width of the rotary key.
        v_head_dim: V.
        biases: the projections that have one.
        scale: multiplies the scores.
        window: the latest tokens that are attended to; None for all.
        channels: for each rotary pair, the index of the model's frequency.
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    biases: tuple[str, ...]
    scale: float
    window: int | None
    channels: tuple[int, ...]

    @property
    def width(self) -> int:
        """Values that a token caches."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def __getattr__(name: str) -> Any:
    """The config class of a family by its name, such as ``HeadwiseLlamaConfig``.

    vLLM's processes unpickle configs by their class's name, before plugins are called there.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for family in FAMILIES:
        base = CONFIG_MAPPING[family]
        if name == f"Headwise{base.__name__}":
            made = type(name, (base,), {"__module__": __name__, "model_type": f"headwise_{family}"})
            return globals().setdefault(name, made)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register_configs() -> None:
    """Register ``headwise_<family>`` with transformers' AutoConfig, where headwise itself has not done so."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for family in FAMILIES:
        if f"headwise_{family}" not in CONFIG_MAPPING:
            AutoConfig.register(f"headwise_{family}", __getattr__(f"Headwise{CONFIG_MAPPING[family].__name__}"))


OWN = ("HeadwiseLlamaForCausalLM", "HeadwiseMistralForCausalLM", "HeadwiseQwen2ForCausalLM")
"""The classes of MLA folders."""

OWN_CODED = tuple(f"HeadwiseCoded{stock}" for stock in CODED)
"""The classes that take the place of those of `CODED`."""


class Folders:
    """What vLLM asks before it loads a folder of `CODED` or of the plugin's own classes."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Have the plugin's class serve a stock model, where it is a folder that holds codes."""
        config = model_config.hf_config
        if config.architectures[0] in CODED and (Path(model_config.model) / CODE_FILE).is_file():
            config.architectures = [f"HeadwiseCoded{config.architectures[0]}"]

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuse what the plugin does not serve, by its name.

        Raises:
            ValueError: with the field, its value and the rule.
        """
        config, parallel = vllm_config.model_config.hf_config, vllm_config.parallel_config
        if config.architectures[0] not in (*OWN, *OWN_CODED):
            return
        rope = (config.rope_parameters or {}).get("rope_type", "default")
        if rope not in ROPES:
            raise ValueError(f"rope_type = {rope!r}: must be one of {', '.join(ROPES)}")
        kind = vllm_config.cache_config.cache_dtype
        if kind != "auto" and kind != str(vllm_config.model_config.dtype).removeprefix("torch."):
            raise ValueError(f"kv_cache_dtype = {kind!r}: must be auto: the folder says how its cache is stored")
        if (ranks := parallel.decode_context_parallel_size) > 1:
            raise ValueError(f"decode_context_parallel_size = {ranks}: must be 1: caches are not split over ranks")
        if (ranks := parallel.tensor_parallel_size) > 1 and config.architectures[0] in OWN_CODED:
            raise ValueError(f"tensor_parallel_size = {ranks}: must be 1: codes of heads are not split over ranks")


def latent_layers(headwise: dict[str, Any], num_layers: int, frequencies: int) -> list[LatentLayer]:
    """The layers of a model, from the ``headwise`` section of its config.

    Args:
        headwise: the section.
        num_layers: of the model.
        frequencies: rotary frequencies of the model.

    Raises:
        ValueError: a layer is not an MLA layer of the kind that is served here, or the layers are not all told of.
    """
    if headwise.get("format") != 1:
        raise ValueError(f"headwise.format = {headwise.get('format')!r}: must be 1")
    for name in ("kv_cache", "cross_attention"):
        if headwise.get(name):
            raise ValueError(f"headwise.{name}: is not served in vLLM")
    described = {index: entry for entry in headwise["attention"] for index in entry["layers"]}
    listed = headwise.get("rope_channels") or []
    if sorted(described) != list(range(num_layers)) or len(listed) != num_layers:
        raise ValueError(f"headwise.attention, headwise.rope_channels: must tell of {num_layers} layers")
    return [_layer(index, described[index], listed[index], frequencies) for index in range(num_layers)]


def _layer(index: int, entry: dict[str, Any], channels: list[int], frequencies: int) -> LatentLayer:
    where = f"headwise.attention of layer {index}"
    if entry["kind"] != "latent":
        raise ValueError(f"{where}: kind = {entry['kind']!r}: must be latent")
    for name in ("latent_norm", "q_lora_rank", "qk_norm"):
        if entry[name]:
            raise ValueError(f"{where}: {name} = {entry[name]!r}: is not served in vLLM")
    if not entry["is_causal"]:
        raise ValueError(f"{where}: is_causal = {entry['is_causal']!r}: must be true")
    N, P = entry["qk_nope_head_dim"], entry["qk_rope_head_dim"]
    if 2 * len(channels) != P:
        raise ValueError(f"headwise.rope_channels of layer {index}: {len(channels)}: must be {P // 2}")
    if any(type(channel) is not int or not 0 <= channel < frequencies for channel in channels):
        raise ValueError(f"headwise.rope_channels of layer {index}: must be from 0 to {frequencies - 1}")
    scale = entry["softmax_scale"]
    return LatentLayer(
        num_heads=entry["num_heads"],
        kv_lora_rank=entry["kv_lora_rank"],
        qk_nope_head_dim=N,
        qk_rope_head_dim=P,
        v_head_dim=entry["v_head_dim"],
        biases=tuple(entry["bias"]),
        scale=(N + P) ** -0.5 if scale is None else scale,
        window=entry["sliding_window"],
        channels=tuple(channels),
    )
