"""Read a Hugging Face ``config.json`` into a `ModelSpec`, without torch and without running anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from headwise.errors import SpecError
from headwise.specs.base import AttentionSpec, RopeSpec, is_finite, positive, positive_number, spec_from_dict
from headwise.specs.grouped import GroupedSpec, grouped_bias
from headwise.specs.latent import LatentSpec, latent_bias
from headwise.specs.model import ModelSpec

Config = Mapping[str, Any]

HOSTED_PREFIX = "headwise_"
"""A converted model's type is this and its family's: ``headwise_llama``."""

# Llama's field names. The value says which projections carry a bias when the config does not.
_GROUPED: dict[str, bool | str] = {
    "llama": False,
    "mistral": False,
    "mixtral": False,
    "ministral": False,
    "qwen2": "qkv",
    "qwen2_moe": "qkv",
    "qwen3": False,
    "qwen3_moe": False,
    "gemma": False,
    "gemma2": False,
    "gemma3_text": False,
    "phi3": False,
    "gpt_oss": True,
    "olmo": False,
    "olmo2": False,
    "granite": False,
    "smollm3": False,
}
_NO_WINDOW = {"llama", "gemma", "olmo", "olmo2", "granite"}
_QK_NORM = {"qwen3", "qwen3_moe", "gemma3_text"}
_LATENT = {"deepseek_v2", "deepseek_v3", "kimi_k2"}
_MAX_LAYERS = 10_000
_ENCODERS = {"bert", "roberta", "distilbert"}


def read_config(config: Config) -> ModelSpec:
    """What the model described by a ``config.json`` is.

    Args:
        config: the parsed JSON, as it stands in the file: class defaults are never mixed in, so MLA is known
            by its ``kv_lora_rank`` and not by what some class would assume.

    Raises:
        SpecError: a field is missing or impossible, or the architecture is not one headwise understands.
    """
    if not isinstance(config, Mapping):
        raise SpecError("config.json", type(config).__name__, "must hold a JSON object")
    if isinstance(nested := config.get("text_config"), Mapping) and "num_hidden_layers" not in config:
        config = {"torch_dtype": config.get("dtype", config.get("torch_dtype")), **nested}
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise SpecError("model_type", model_type, "must be present: it names the architecture")
    _optional_number(config, "rms_norm_eps")  # no matter of attention's, but NaN here is NaN everywhere
    layers = _reader(model_type, config)(config)
    return ModelSpec(
        model_type=model_type,
        hidden_size=layers[0].hidden_size,
        layers=layers,
        vocab_size=_optional_integer(config, "vocab_size"),
        max_position_embeddings=_optional_integer(config, "max_position_embeddings", "n_positions"),
        dtype=config.get("dtype", config.get("torch_dtype")),
    )


def _reader(model_type: str, config: Config) -> Callable[[Config], tuple[AttentionSpec, ...]]:
    if model_type.startswith(HOSTED_PREFIX):
        return _hosted
    if model_type in _LATENT:
        return _latent
    if "kv_lora_rank" in config:
        raise SpecError("model_type", model_type, "has kv_lora_rank (MLA) but is not an MLA model headwise knows")
    if model_type in _GROUPED:
        return _grouped
    if model_type in ("gpt2", "gpt_bigcode"):
        return _gpt2
    if model_type in ("falcon", "RefinedWeb", "RefinedWebModel"):
        return _falcon
    if model_type in _ENCODERS:
        return _bert
    known = sorted({*_GROUPED, *_LATENT, *_ENCODERS, "gpt2", "gpt_bigcode", "falcon"})
    raise SpecError("model_type", model_type, f"is not understood; known: {', '.join(known)}")


def _grouped(config: Config) -> tuple[AttentionSpec, ...]:
    """Llama and the many models that share its field names."""
    model_type: str = config["model_type"]
    num_heads = _integer(config, "num_attention_heads")
    hidden_size = _integer(config, "hidden_size")
    head_dim = _optional_integer(config, "head_dim")
    if head_dim is None:
        head_dim = _divide(hidden_size, num_heads)
    num_kv_heads = _optional_integer(config, "num_key_value_heads")
    bias = _GROUPED[model_type]
    if bias != "qkv":
        bias = _flag(config, "attention_bias", bool(bias))
    if model_type == "qwen2_moe":
        bias = "qkv" if _flag(config, "qkv_bias", True) else False
    scalar = _optional_number(config, "query_pre_attn_scalar")
    scale = _optional_number(config, "attention_multiplier") if scalar is None else scalar**-0.5
    num_layers = _num_layers(config)
    rotated = _rotated(config, num_layers)
    windows = _windows(config, num_layers)
    return tuple(
        GroupedSpec(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=head_dim,
            bias=grouped_bias(bias),
            qk_norm="full" if model_type == "olmo2" else "head" if model_type in _QK_NORM else None,
            sinks=model_type == "gpt_oss",
            softcap=_optional_number(config, "attn_logit_softcapping"),
            sliding_window=window,
            rope=_rope(config, head_dim, layer_type="full_attention" if window is None else "sliding_attention")
            if has_rope
            else None,
            softmax_scale=scale,
        )
        for window, has_rope in zip(windows, rotated, strict=True)
    )


def _rotated(config: Config, num_layers: int) -> list[bool]:
    """Which layers rotate: SmolLM3 leaves some without positions, and its 0 in ``no_rope_layers`` marks those."""
    if config["model_type"] != "smollm3":
        return [True] * num_layers
    flags = config.get("no_rope_layers")
    if flags is None:
        interval = _optional_integer(config, "no_rope_layer_interval") or 4
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if not isinstance(flags, list) or len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
        raise SpecError("no_rope_layers", flags, f"must list 0 or 1 for each of {num_layers} layers")
    return [bool(flag) for flag in flags]


def _windows(config: Config, num_layers: int) -> list[int | None]:
    """The sliding window of each layer, by each family's own way of writing it."""
    model_type = config["model_type"]
    # Where the switch is off, Qwen's files hold any number here, 0 among them.
    off = model_type.startswith("qwen") and not _flag(config, "use_sliding_window", False)
    window = None if off else _optional_integer(config, "sliding_window")
    if window is not None and model_type in _NO_WINDOW:
        # Its attention would see every token while its cache kept a window: no reading of it is right.
        raise SpecError("sliding_window", window, f"must be null: a {model_type} model has none")
    types = config.get("layer_types")
    if types is None:
        if model_type in ("gemma2", "gpt_oss"):
            types = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(num_layers)]
        elif model_type == "gemma3_text":
            pattern = _optional_integer(config, "sliding_window_pattern", "_sliding_window_pattern") or 6
            types = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(num_layers)]
        elif model_type in ("qwen2", "qwen3") and window is not None:
            first = config.get("max_window_layers")
            if type(first) is not int or first < 0:
                raise SpecError("max_window_layers", first, "must be a whole number of at least 0")
            types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
        elif model_type == "qwen2_moe" and window is not None:
            raise SpecError("layer_types", None, "is required where qwen2_moe has use_sliding_window")
        else:
            return [window] * num_layers
    if not isinstance(types, list) or len(types) != num_layers:
        raise SpecError("layer_types", types, f"must list one type for each of {num_layers} layers")
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise SpecError("layer_types", name, "is not understood; known: full_attention, sliding_attention")
    if "sliding_attention" in types and window is None and not model_type.startswith("qwen"):
        raise SpecError("sliding_window", None, "is required where layer_types has sliding_attention")
    return [window if name == "sliding_attention" else None for name in types]


def _latent(config: Config) -> tuple[AttentionSpec, ...]:
    """DeepSeek-V2, V3 and Kimi-K2. ``num_key_value_heads`` and ``head_dim`` there mean nothing for the cache."""
    rope_dim = _integer(config, "qk_rope_head_dim")
    nope_dim = _integer(config, "qk_nope_head_dim")
    q_lora_rank = _optional_integer(config, "q_lora_rank")
    # DeepSeek-V2's own code always pairs neighbours; V3 says so in `rope_interleave`.
    rope = _rope(config, rope_dim, interleaved=_flag(config, "rope_interleave", True), partial=False)
    spec = LatentSpec(
        hidden_size=_integer(config, "hidden_size"),
        num_heads=_integer(config, "num_attention_heads"),
        kv_lora_rank=_integer(config, "kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=_integer(config, "v_head_dim"),
        q_lora_rank=q_lora_rank,
        bias=latent_bias("hf" if _flag(config, "attention_bias", False) else False, q_lora_rank),
        rope=rope,
        softmax_scale=_yarn_softmax_scale(rope, nope_dim + rope_dim),
    )
    return (spec,) * _num_layers(config)


def _yarn_softmax_scale(rope: RopeSpec | None, qk_head_dim: int) -> float | None:
    """YaRN's temperature, which DeepSeek applies to the scores rather than to cos and sin."""
    if rope is None or rope.rope_type == "default":
        return None
    parameters = dict(rope.parameters)
    if not parameters.get("mscale_all_dim"):
        return None
    all_dim = _number("mscale_all_dim", parameters["mscale_all_dim"])
    if (factor := _number("rope factor", parameters.get("factor"))) <= 1:
        return None
    mscale = 0.1 * all_dim * math.log(factor) + 1.0
    return float(qk_head_dim**-0.5 * mscale * mscale)


def _gpt2(config: Config) -> tuple[AttentionSpec, ...]:
    """GPT-2, and GPT-BigCode with its ``multi_query``."""
    hidden_size = _integer(config, "n_embd", "hidden_size")
    num_heads = _integer(config, "n_head", "num_attention_heads")
    multi_query = config["model_type"] == "gpt_bigcode" and _flag(config, "multi_query", True)
    spec = GroupedSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=1 if multi_query else num_heads,
        head_dim=_divide(hidden_size, num_heads),
        bias=grouped_bias(True),
    )
    return (spec,) * _num_layers(config, "n_layer", "num_hidden_layers")


def _falcon(config: Config) -> tuple[AttentionSpec, ...]:
    """Falcon. Before the "new decoder architecture" ``multi_query`` forces one key–value head."""
    hidden_size = _integer(config, "hidden_size", "n_embed")
    num_heads = _integer(config, "num_attention_heads", "n_head")
    # The first 40B file predates that flag and is told by its model type alone.
    if _flag(config, "new_decoder_architecture", config["model_type"] == "RefinedWeb"):
        num_kv_heads = _optional_integer(config, "num_kv_heads", "n_head_kv") or num_heads
    else:
        num_kv_heads = 1 if _flag(config, "multi_query", True) else num_heads
    head_dim = _divide(hidden_size, num_heads)
    spec = GroupedSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        bias=grouped_bias(_flag(config, "bias", False)),
        rope=None if _flag(config, "alibi", False) else _rope(config, head_dim),
    )
    return (spec,) * _num_layers(config)


def _bert(config: Config) -> tuple[AttentionSpec, ...]:
    """Bidirectional encoders: every token sees every other, so nothing is cached."""
    if _flag(config, "is_decoder", False):
        raise SpecError("is_decoder", True, f"{config['model_type']} as a decoder is not understood")
    hidden_size = _integer(config, "hidden_size", "dim")
    num_heads = _integer(config, "num_attention_heads", "n_heads")
    spec = GroupedSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=_divide(hidden_size, num_heads),
        bias=grouped_bias(True),
        is_causal=False,
    )
    return (spec,) * _num_layers(config)


def _hosted(config: Config) -> tuple[AttentionSpec, ...]:
    """What headwise itself wrote: the specs are in the file."""
    block = config.get("headwise")
    if not isinstance(block, Mapping) or not isinstance(block.get("attention"), list):
        raise SpecError("headwise", block, "must hold the attention specs headwise wrote")
    layers: list[tuple[int, AttentionSpec]] = []
    for entry in block["attention"]:
        if not isinstance(entry, Mapping):
            raise SpecError("headwise.attention", entry, "must be a JSON object with the spec of some layers")
        indices = entry.get("layers")
        if not isinstance(indices, list) or any(type(index) is not int for index in indices):
            raise SpecError("headwise.attention.layers", indices, "must be a list of layer numbers")
        spec = spec_from_dict({key: value for key, value in entry.items() if key != "layers"})
        layers += [(index, spec) for index in indices]
    layers.sort(key=lambda layer: layer[0])
    covered = [index for index, _ in layers]
    if covered != list(range(_num_layers(config))):
        raise SpecError("headwise.attention", covered, "must cover every layer once")
    return tuple(spec for _, spec in layers)


def _rope(
    config: Config,
    head_dim: int,
    *,
    interleaved: bool = False,
    partial: bool = True,
    layer_type: str = "full_attention",
) -> RopeSpec:
    """The rotary embedding, from ``rope_parameters`` (transformers 5) or ``rope_theta`` + ``rope_scaling``."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise SpecError("rope_parameters", parameters, "must be a JSON object")
    theta = config.get("rope_theta", 10000.0)
    if isinstance(parameters.get(layer_type), Mapping):
        parameters = parameters[layer_type]
    elif layer_type == "sliding_attention" and config.get("rope_local_base_freq") is not None:
        parameters, theta = {}, config["rope_local_base_freq"]
    kept = {key: value for key, value in parameters.items() if value is not None}
    rope_type = kept.pop("rope_type", kept.pop("type", "default"))
    theta = kept.pop("rope_theta", theta)
    fraction = _number(
        "partial_rotary_factor", kept.pop("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    )
    if not 0 < fraction <= 1:
        raise SpecError("partial_rotary_factor", fraction, "must be above 0 and at most 1")
    if rope_type == "proportional":
        # It keeps the head's whole width and stops the frequencies beyond the fraction instead.
        kept["partial_rotary_factor"], fraction = fraction, 1.0
    if rope_type in ("llama3", "yarn", "longrope") and "original_max_position_embeddings" not in kept:
        kept["original_max_position_embeddings"] = _integer(
            config, "original_max_position_embeddings", "max_position_embeddings"
        )
    return RopeSpec(
        dim=int(head_dim * fraction) if partial else head_dim,
        theta=_number("rope_theta", theta),
        rope_type=str(rope_type),
        parameters=tuple(
            (key, tuple(value) if isinstance(value, list) else value) for key, value in sorted(kept.items())
        ),
        interleaved=interleaved,
        max_position_embeddings=_optional_integer(config, "max_position_embeddings"),
    )


def _optional_number(config: Config, name: str) -> float | None:
    value = config.get(name)
    if value is not None:
        positive_number(name, value)
    return None if value is None else float(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not is_finite(value):
        raise SpecError(name, value, "must be a number")
    return float(value)


def _flag(config: Config, name: str, default: bool) -> bool:
    """A switch; absent and null are the default, and only true and false are others."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise SpecError(name, value, "must be true or false")
    return value


def _optional_integer(config: Config, *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        positive(name, value)
        return int(value)
    return None


def _integer(config: Config, *names: str) -> int:
    """The first of several spellings that is present, as a positive whole number."""
    value = _optional_integer(config, *names)
    if value is None:
        raise SpecError(names[0], None, "is required in config.json")
    return value


def _num_layers(config: Config, *names: str) -> int:
    value = _integer(config, *(names or ("num_hidden_layers", "n_layer", "n_layers")))
    # A spec is made for each: a number without sense must not take the machine with it.
    positive("num_hidden_layers", value, most=_MAX_LAYERS)
    return value


def _divide(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise SpecError("num_attention_heads", num_heads, f"must divide hidden_size = {hidden_size}")
    return hidden_size // num_heads
