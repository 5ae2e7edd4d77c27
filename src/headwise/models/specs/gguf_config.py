"""Conversion between GGUF's metadata and the ``config.json`` of the same model, in both directions.

GGUF keeps what llama.cpp needs. What llama.cpp's code takes for granted about an architecture is added here.

Sources: the GGUF specification (ggml), the converters of llama.cpp (conversion/), and what its loaders read
(src/models/llama.cpp, qwen2.cpp, qwen3.cpp, deepseek2.cpp).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from headwise.errors import SpecError
from headwise.models.specs.base import AttentionSpec, RopeSpec
from headwise.models.specs.gguf_header import FACTORS, GgufHeader, gguf_weights, read_gguf_header
from headwise.models.specs.grouped import GroupedSpec
from headwise.models.specs.huggingface import read_config
from headwise.models.specs.latent import LatentSpec
from headwise.models.specs.model import ModelSpec

_SMALLEST, _LARGEST = 1.1754944e-38, 3.4028234e38
"""The normal numbers of float32."""
_LIKE_LLAMA = ("llama", "qwen2", "qwen3")
"""The architectures whose metadata are Llama's."""

_FREQS, _LONG, _SHORT = FACTORS
_FACTORS = {"phi3": {_LONG, _SHORT}, **{name: {_FREQS} for name in _LIKE_LLAMA}}
"""The tensors of frequency factors that each architecture may have."""

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The RoPE parameters that all of Llama 3.1 to 3.3 share; their files hold the frequencies' factors alone."""

_GEMMA3_27B = 62
"""The number of layers of the one Gemma 3 whose softmax scale does not follow from the head dim."""

_SOFTMAX, _SIGMOID = 1, 2
"""GGUF's numbers of the functions that score experts; the second distinguishes DeepSeek-V3 from V2."""


class _Metadata:
    """The values of a file's architecture, by their keys without its name.

    Args:
        header: the header of the file.
    """

    def __init__(self, header: GgufHeader) -> None:
        self.header = header

    def get(self, key: str, default: Any = None) -> Any:
        """A value as it is, or the default where the key is missing."""
        return self.header.metadata.get(f"{self.header.architecture}.{key}", default)

    def error(self, key: str, value: object, rule: str) -> SpecError:
        """An error that names a key."""
        return SpecError(f"{self.header.architecture}.{key}", value, rule)

    def refuse(self, *keys: str) -> None:
        """Raise a `SpecError` where one of these keys, which the architecture is not known to have, has a value."""
        for key in keys:
            if self.get(key) not in (None, 0, "none"):
                raise self.error(key, self.get(key), "is not understood in GGUF")

    def number(self, key: str, default: float | None = None, *, whole: bool = False) -> Any:
        """A finite number above 0, or the default where the key is missing; else raise a `SpecError`."""
        value = self.get(key, default)
        is_number = isinstance(value, int) if whole else isinstance(value, int | float)
        if value is not None and not (is_number and type(value) is not bool and 0 < value < math.inf):
            raise self.error(key, value, f"must be a {'whole number' if whole else 'number'} above 0")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number above 0; raise a `SpecError` where it is none, or missing."""
        if (value := self.number(key, default, whole=True)) is None:
            raise self.error(key, None, "is required")
        return int(value)

    @property
    def rope_theta(self) -> float:
        """The base of the rotary frequencies."""
        return float(self.get("rope.freq_base", 10000.0))


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """The fields of the ``config.json`` that a GGUF header is equivalent to.

    For example ``gguf_config(read_gguf_header(Path("model.gguf")))["hidden_size"]``.

    Raises:
        SpecError: the architecture's metadata are not understood, or a needed number is missing.
    """
    metadata, architecture = header.metadata, header.architecture
    if architecture not in ARCHITECTURES:
        names = ", ".join(sorted(ARCHITECTURES))
        raise SpecError("general.architecture", architecture, f"is not understood in GGUF; known: {names}")

    file = _Metadata(header)
    get = file.get
    for key in ("rope.freq_base", "attention.layer_norm_rms_epsilon"):
        if not isinstance(get(key, 1.0), int | float):
            raise file.error(key, get(key), "must be a number")
    for name in header.factors.keys() - _FACTORS.get(architecture, frozenset()):
        raise SpecError(name, "present", f"is not understood in {architecture}; use the safetensors")
    embedding = header.tensors.get("token_embd.weight")
    config = {
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "vocab_size": embedding.shape[0] if embedding and embedding.shape else get("vocab_size"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": "float32",
        **ARCHITECTURES[architecture](file),
    }
    if config["rms_norm_eps"] is not None:
        # The file holds a float32; the shortest decimal that rounds to it is the number its author wrote.
        config["rms_norm_eps"] = _shortest_float32(config["rms_norm_eps"])
    # A text ends with its own token, and in a conversation with that of a turn or of a message.
    for name, *keys in (("bos_token_id", "bos"), ("eos_token_id", "eos", "eot", "eom"), ("pad_token_id", "padding")):
        tokens = {metadata.get(f"tokenizer.ggml.{key}_token_id"): None for key in keys}  # in order, each once
        known = [token for token in tokens if token is not None and not _is_beyond(token, config["vocab_size"])]
        if known:
            config[name] = known[0] if len(known) == 1 else known
    return config


def _is_beyond(token: object, count: object) -> bool:
    """Whether a token id is beyond a vocabulary, such as -1 as an unsigned number, and so means no token."""
    return isinstance(count, int) and isinstance(token, int) and token >= count


def read_gguf_spec(path: Path) -> ModelSpec:
    """Read the spec of the model in a GGUF file."""
    header = read_gguf_header(path)
    model = read_config(gguf_config(header))
    return replace(model, stored=gguf_weights(header, model.num_layers))


def _heads(file: _Metadata, *, partial: bool = False) -> dict[str, Any]:
    """Key–value heads and the width of heads, of which RoPE rotates the whole unless ``partial``."""
    hidden_size, num_heads = file.get("embedding_length"), file.get("attention.head_count")
    head_dim = file.get("attention.key_length")
    if head_dim is None and isinstance(hidden_size, int) and isinstance(num_heads, int) and num_heads > 0:
        head_dim = None if hidden_size % num_heads else hidden_size // num_heads
    for key in ("attention.value_length", *(() if partial else ("rope.dimension_count",))):
        if head_dim is not None and file.get(key, head_dim) != head_dim:
            raise file.error(key, file.get(key), f"must equal the head dim, {head_dim}")
    return {"num_key_value_heads": file.get("attention.head_count_kv", num_heads), "head_dim": head_dim}


def _llama(model_type: str, file: _Metadata) -> dict[str, Any]:
    """Llama, Mistral, which GGUF calls Llama too, and Qwen."""
    file.refuse("expert_count")
    heads = _heads(file)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": file.rope_theta}
    if file.get("rope.scaling.type") == "linear":
        rope |= {"rope_type": "linear", "factor": file.number("rope.scaling.factor", 1.0)}
    else:
        file.refuse("rope.scaling.type")
    if _FREQS in file.header.factors:
        rope = _llama3_rope(file.header.factors[_FREQS], file.rope_theta, heads["head_dim"])
    config = {"model_type": model_type, **heads, "rope_parameters": rope}
    if "blk.0.attn_q.bias" in file.header.tensors and model_type == "llama":  # Qwen2's need no word in the config
        config["attention_bias"] = True
    return config


def _llama3_rope(factors: tuple[float, ...], theta: float, head_dim: Any) -> dict[str, Any]:
    """The scaled RoPE of Llama 3.1 and later, from the factors that its frequencies are divided by.

    Raises:
        SpecError: they are other factors.
    """
    factor = max(factors, default=0.0)
    fits = type(head_dim) is int and head_dim == 2 * len(factors) and 0 < theta < math.inf and 0 < factor < math.inf
    is_llama3 = fits and all(
        math.isclose(own, other, rel_tol=1e-4)
        for own, other in zip(factors, llama3_factors(theta, head_dim, factor, *_LLAMA3.values()), strict=True)
    )
    if not is_llama3:
        raise SpecError(_FREQS, f"{len(factors)} factors", "are not those of Llama 3's RoPE; use the safetensors")
    return {"rope_type": "llama3", "rope_theta": theta, "factor": _shortest_float32(factor), **_LLAMA3}


def llama3_factors(
    theta: float, head_dim: int, factor: float, low: float, high: float, original: float
) -> tuple[float, ...]:
    """What the scaling of Llama 3.1 and later divides the frequency of each rotary pair by.

    For example ``llama3_factors(500_000.0, 128, 8.0, 1.0, 4.0, 8192)[0]`` is 1.0.

    Args:
        theta: the base of the frequencies.
        head_dim: D, of which all dims are rotated.
        factor: what slow frequencies are divided by.
        low: the number of turns in ``original`` tokens below which a frequency is slow, and divided by the whole
            factor.
        high: the number of turns in ``original`` tokens above which a frequency stays as it is.
        original: the length, in tokens, that the model was first trained on.

    Source: transformers' ``modeling_rope_utils``, and what llama.cpp's converter writes.
    """
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        part = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)  # 0 where all is scaled
        factors.append(1 / ((1 - part) / factor + part))
    return tuple(factors)


def _phi3(file: _Metadata) -> dict[str, Any]:
    """Phi-3 and Phi-4: heads of which RoPE may rotate a part, with factors for short and for long texts."""
    file.refuse("rope.scaling.type", "expert_count")
    heads = _heads(file, partial=True)
    rotated, head_dim = file.get("rope.dimension_count"), heads["head_dim"]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": file.rope_theta}
    original = file.number("rope.scaling.original_context_length", whole=True)
    if _LONG in file.header.factors or _SHORT in file.header.factors:
        long, short = (file.header.factors.get(name) for name in (_LONG, _SHORT))
        if long is None or short is None:
            raise SpecError("rope_factors", "one of two", "must be given for short and for long texts")
        rope = {"rope_type": "longrope", "rope_theta": file.rope_theta}
        rope |= {"long_factor": list(long), "short_factor": list(short)}
        attention = file.number("rope.scaling.attn_factor")
        for factors in (long, short):
            if 2 * len(factors) != (rotated or head_dim) or not all(0 < own < math.inf for own in factors):
                rule = f"must be a factor above 0 for each pair of {rotated or head_dim} rotated dims"
                raise SpecError("rope_factors", f"{len(factors)} factors", rule)
        if attention is not None and not _is_default_factor(attention, original, file.get("context_length")):
            rope["attention_factor"] = attention
        if original is not None:
            rope["original_max_position_embeddings"] = original
    if rotated is not None and rotated != head_dim:
        if not isinstance(rotated, int) or not isinstance(head_dim, int) or not 0 < rotated < head_dim:
            rule = f"must be a whole number of at most the head dim, {head_dim}"
            raise file.error("rope.dimension_count", rotated, rule)
        rope["partial_rotary_factor"] = rotated / head_dim
    config = {"model_type": "phi3", **heads, "rope_parameters": rope, "pad_token_id": None}
    config["sliding_window"] = file.get("attention.sliding_window") or None
    if original is not None:
        config["original_max_position_embeddings"] = original
    return config


def _is_default_factor(attention_factor: Any, original: Any, longest: Any) -> bool:
    """Whether a factor of cos and sin is the one that follows from the lengths, and a config leaves it out."""
    if not all(isinstance(number, int | float) and number > 1 for number in (original, longest)):
        return False
    scale = longest / original
    usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    return isinstance(attention_factor, int | float) and math.isclose(attention_factor, usual, rel_tol=1e-5)


def _gemma3(file: _Metadata) -> dict[str, Any]:
    """Gemma 3: five layers with a window and a RoPE of their own to one that sees all."""
    file.refuse("expert_count", "attn_logit_softcapping", "attention.scale")
    if file.get("attention.sliding_window_pattern", 6) != 6:
        pattern = file.get("attention.sliding_window_pattern")
        raise file.error("attention.sliding_window_pattern", pattern, "must be 6")
    heads, layers = _heads(file), file.get("block_count")
    if file.get("rope.scaling.type") not in (None, "none", "linear"):
        raise file.error("rope.scaling.type", file.get("rope.scaling.type"), "must be linear")
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": float(file.get("rope.freq_base", 1e6))}
    if file.get("rope.scaling.type") == "linear":
        full |= {"rope_type": "linear", "factor": file.number("rope.scaling.factor", 1.0)}
    local = {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", 1e4)}
    config: dict[str, Any] = {
        "model_type": "gemma3_text",
        **heads,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "query_pre_attn_scalar": heads["head_dim"],
        "sliding_window": file.integer("attention.sliding_window"),
        "final_logit_softcapping": file.get("final_logit_softcapping") or None,  # 0 is none
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    if isinstance(layers, int):
        kinds = ["sliding_attention" if (index + 1) % 6 else "full_attention" for index in range(layers)]
        config["layer_types"] = kinds
    if layers == _GEMMA3_27B:
        config["query_pre_attn_scalar"] = file.integer("embedding_length") // file.integer("attention.head_count")
    return config


def _deepseek2(file: _Metadata) -> dict[str, Any]:
    """DeepSeek-V2 and V3, which score experts by a softmax and by a sigmoid."""
    file.refuse("attention.temperature_scale", "attention.temperature_length")
    rank, rotary = file.get("attention.kv_lora_rank"), file.get("rope.dimension_count")
    gating = file.get("expert_gating_func", _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise file.error("expert_gating_func", gating, f"must be {_SOFTMAX} or {_SIGMOID}")
    # Files without the lengths of MLA are older, and those of attention are of its heads.
    key = file.get("attention.key_length_mla", file.get("attention.key_length"))
    groups = file.integer("expert_group_count", 1)
    layers, dense = file.get("block_count"), file.get("leading_dense_block_count", 0)
    # A model of dense layers alone has no experts, but its config names the numbers of one.
    has_experts = not (isinstance(layers, int) and isinstance(dense, int) and dense >= layers)
    one = None if has_experts else 1
    experts = file.integer("expert_count", one)
    is_v3 = gating == _SIGMOID
    if experts % groups:
        raise file.error("expert_group_count", groups, f"must divide expert_count = {experts}")
    if not is_v3:
        file.refuse("expert_weights_norm")
    config = {
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "num_key_value_heads": file.get("attention.head_count"),
        "q_lora_rank": file.get("attention.q_lora_rank") or None,  # 0 is none
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary if isinstance(key, int) and isinstance(rotary, int) else None,
        "v_head_dim": file.get("attention.value_length_mla", file.get("attention.value_length")),
        "rope_parameters": _deepseek_rope(file),
        "n_routed_experts": experts,
        "n_shared_experts": file.get("expert_shared_count") or one,
        "num_experts_per_tok": file.integer("expert_used_count", one),
        "moe_intermediate_size": file.integer("expert_feed_forward_length"),
        "first_k_dense_replace": dense,
        "n_group": groups,
        "topk_group": file.integer("expert_group_used_count", 1),
        "norm_topk_prob": bool(file.get("expert_weights_norm", False)),
        "routed_scaling_factor": file.get("expert_weights_scale") or 1.0,  # 0 is no scaling
    }
    if not is_v3:
        config["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    return config


def _deepseek_rope(file: _Metadata) -> dict[str, Any]:
    if file.get("rope.scaling.type") in (None, "none"):
        return {"rope_type": "default", "rope_theta": file.rope_theta}
    if file.get("rope.scaling.type") != "yarn":
        raise file.error("rope.scaling.type", file.get("rope.scaling.type"), "must be yarn")
    rope = {"rope_type": "yarn", "rope_theta": file.rope_theta, "factor": file.number("rope.scaling.factor")}
    rope["original_max_position_embeddings"] = file.integer("rope.scaling.original_context_length")
    if (multiplier := file.number("rope.scaling.yarn_log_multiplier")) is not None:
        # The two are equal in every published model, and only one of them is in the file, times 0.1.
        rope["mscale"] = rope["mscale_all_dim"] = round(10 * multiplier, 6)
    for name in ("beta_fast", "beta_slow"):
        if (value := file.number(f"rope.scaling.yarn_{name}")) is not None:
            rope[name] = value
    return rope


ARCHITECTURES: dict[str, Callable[[_Metadata], dict[str, Any]]] = {
    **{name: partial(_llama, name) for name in _LIKE_LLAMA},
    "phi3": _phi3,
    "gemma3": _gemma3,
    "deepseek2": _deepseek2,
}
"""The config fields that each ``general.architecture`` has beside those of all, for those that are understood."""


def _shortest_float32(value: float) -> float:
    """The shortest decimal that rounds to a float32."""
    if abs(value) > _LARGEST:
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value


GGUF_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "deepseek_v3": "deepseek2",
}
"""What llama.cpp calls each model type that headwise writes for it."""


@dataclass(frozen=True)
class GgufModel:
    """What a GGUF file says of a model beside its weights and its tokenizer.

    Attributes:
        architecture: llama.cpp's name of the architecture.
        metadata: GGUF's values by their keys, the architecture's name included.
        rope_factors: the numbers that the frequencies of rotary pairs are divided by; none where empty.
    """

    architecture: str
    metadata: Mapping[str, Any]
    rope_factors: tuple[float, ...] = ()


def gguf_model(config: Mapping[str, Any]) -> GgufModel:
    """The metadata that a ``config.json`` is equivalent to.

    For example ``gguf_model(json.loads(Path("model/config.json").read_text())).architecture``.

    Args:
        config: the content of the file, with every field that its class has a default for.

    Raises:
        SpecError: llama.cpp has no such architecture, or not all that the config asks for.
    """
    model_type = config.get("model_type")
    if model_type not in GGUF_ARCHITECTURES:
        rule = f"is not written as GGUF; can: {', '.join(GGUF_ARCHITECTURES)}"
        raise SpecError("model_type", model_type, rule)
    spec = read_config(dict(config))
    first, *_ = spec.layers
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise SpecError("hidden_act", activation, "must be silu, which llama.cpp's model always computes")
    if config.get("mlp_bias"):
        raise SpecError("mlp_bias", True, "has no place in llama.cpp's model")
    if model_type == "qwen3" and config.get("attention_bias"):
        raise SpecError("attention_bias", True, "has no place in llama.cpp's qwen3")
    for layer in spec.layers:
        if layer.sliding_window is not None:
            rule = f"has no place in llama.cpp's {spec.model_type}; it attends to all tokens"
            raise SpecError("sliding_window", layer.sliding_window, rule)
    architecture = GGUF_ARCHITECTURES[str(model_type)]
    rope, factors = _rope_metadata(first.rope)
    own = {
        "block_count": len(spec.layers),
        "context_length": config["max_position_embeddings"],
        "embedding_length": spec.hidden_size,
        "feed_forward_length": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        **rope,
        **(_latent_metadata(config, first) if isinstance(first, LatentSpec) else _grouped_metadata(first)),
    }
    for key, value in own.items():
        is_normal = not isinstance(value, float) or value == 0 or _SMALLEST <= abs(value) <= _LARGEST
        if not is_normal or (isinstance(value, int) and not 0 <= value < 2**32):
            raise SpecError(key, value, "must fit in the 32 bits that GGUF has for it")
    return GgufModel(architecture, {f"{architecture}.{key}": value for key, value in own.items()}, factors)


def _grouped_metadata(layer: AttentionSpec) -> dict[str, Any]:
    assert isinstance(layer, GroupedSpec)
    if layer.rope is not None and layer.rope.dim != layer.head_dim:
        raise SpecError("rope dim", layer.rope.dim, f"must be the head dim, {layer.head_dim}, in llama.cpp's model")
    return {
        "attention.head_count_kv": layer.num_kv_heads,
        "attention.key_length": layer.head_dim,
        "attention.value_length": layer.head_dim,
        "rope.dimension_count": layer.head_dim,
    }


def _latent_metadata(config: Mapping[str, Any], layer: LatentSpec) -> dict[str, Any]:
    """MLA: to llama.cpp one key head of R + P dims, whose first R are the values.

    Raises:
        SpecError: a layer has biases, or a norm that llama.cpp does not compute.
    """
    if layer.bias:
        rule = "have no place in llama.cpp's deepseek2; convert with --bias-free"
        raise SpecError("biases", ", ".join(layer.bias), rule)
    if not config.get("rope_interleave", True):
        rule = "must be true for llama.cpp's deepseek2, which rotates neighbouring pairs"
        raise SpecError("rope_interleave", False, rule)
    if layer.qk_nope_head_dim < 1:
        raise SpecError("qk_nope_head_dim", layer.qk_nope_head_dim, "must be at least 1 in llama.cpp's deepseek2")
    if config["first_k_dense_replace"] < config["num_hidden_layers"]:
        raise SpecError("first_k_dense_replace", config["first_k_dense_replace"], "experts are not written as GGUF")
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": layer.kv_lora_rank + layer.qk_rope_head_dim,
        "attention.value_length": layer.kv_lora_rank,
        "attention.key_length_mla": layer.qk_nope_head_dim + layer.qk_rope_head_dim,
        "attention.value_length_mla": layer.v_head_dim,
        "attention.kv_lora_rank": layer.kv_lora_rank,
        "attention.q_lora_rank": layer.q_lora_rank or 0,
        "rope.dimension_count": layer.qk_rope_head_dim,
        "leading_dense_block_count": config["num_hidden_layers"],
        # There are no experts, but the loader asks for these.
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_shared_count": 0,
        "expert_gating_func": _SIGMOID,
    }


def _rope_metadata(rope: RopeSpec | None) -> tuple[dict[str, Any], tuple[float, ...]]:
    """The metadata of RoPE, and the factors of its frequencies.

    Raises:
        SpecError: llama.cpp's model cannot compute it.
    """
    if rope is None:
        raise SpecError("rope", None, "must be there: llama.cpp's model always rotates")
    base = {"rope.freq_base": float(rope.theta)}
    given = dict(rope.parameters)
    if rope.rope_type == "default":
        return base, ()
    if rope.rope_type == "linear":
        return base | {"rope.scaling.type": "linear", "rope.scaling.factor": float(given["factor"])}, ()
    if rope.rope_type == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if given["high_freq_factor"] <= given["low_freq_factor"]:
            rule = f"must be above low_freq_factor, {given['low_freq_factor']}"
            raise SpecError("high_freq_factor", given["high_freq_factor"], rule)
        return base, llama3_factors(rope.theta, rope.dim, *(given[name] for name in names))
    raise SpecError("rope_type", rope.rope_type, "is not written as GGUF; can: default, linear, llama3")
