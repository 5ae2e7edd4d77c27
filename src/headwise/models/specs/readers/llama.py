"""Llama and the many families that share its field names, each described by its differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from headwise.errors import SpecError
from headwise.models.specs.base import AttentionSpec, RopeSpec
from headwise.models.specs.grouped import GroupedSpec, grouped_bias
from headwise.models.specs.model import BodySpec
from headwise.models.specs.readers import body, positions
from headwise.models.specs.readers.body import deepseek_experts_rule, dense_rule, experts_rule, read_body
from headwise.models.specs.readers.fields import Config, Reader
from headwise.models.specs.readers.positions import CHUNKED, FULL, SLIDING, Rule, Windows, read_rope

Bias = bool | str | tuple[str, ...]
"""The projections that have a bias, as `grouped_bias` takes them."""
_GATED = dense_rule()


@dataclass(frozen=True, kw_only=True)
class Family:
    """The differences of a family from Llama, whose values are the defaults.

    Sizes and switches are the defaults that the family's transformers class has for fields that a file leaves out.

    Attributes:
        kv_heads: the default of ``num_key_value_heads``; None for as many as query heads.
        head_dim: the default of ``head_dim``; None for E/H.
        bias: the projections that have a bias, or a function that reads them.
        qk_norm: the kind of norm of queries and keys, see `GroupedSpec`.
        qk_norm_switch: the name of the field that turns that norm on; None where there is no such field.
        rope_required: whether the file must describe RoPE, because the class defaults to one model's scaling.
        sinks: whether heads have learned sinks, see `GroupedSpec`.
        refused: the names of switches that make a layer headwise does not support; an error where one is on.
        scale: reads the softmax scale.
        softcap: the default of ``attn_logit_softcapping``; None in a family without a softcap, where the field is not
            read.
        windows: reads the windows of the layers.
        chunked: whether layers with a window attend within chunks, see `AttentionSpec`.
        rope: the keywords that `read_rope` is called with.
        unrotated: reads for each layer whether it has no positions, from the config and the windows.
        feed_forward: reads the networks of the layers.
        around: the keywords that `readers.body.read_body` is called with.
    """

    kv_heads: int | None = None
    head_dim: int | None = None
    bias: Bias | Callable[[Config], Bias] = lambda config: config.flag("attention_bias", False)
    qk_norm: str | None = None
    qk_norm_switch: str | None = None
    rope_required: bool = False
    sinks: bool = False
    refused: tuple[str, ...] = ()
    scale: Callable[[Config], float | None] = lambda config: None
    softcap: float | None = None
    windows: Rule = positions.no_window
    chunked: bool = False
    rope: dict[str, Any] = field(default_factory=dict)
    unrotated: Callable[[Config, Windows], list[bool]] = lambda config, windows: [False] * len(windows)
    feed_forward: body.Rule = _GATED
    around: dict[str, Any] = field(default_factory=dict)


def read_layers(family: Family, config: Config) -> tuple[AttentionSpec, ...]:
    """Read the attention of each layer."""
    for name in family.refused:
        if config.flag(name, False):
            raise SpecError(name, True, f"is not understood in a {config['model_type']} model")
    if family.rope_required and not (config.get("rope_parameters") or config.get("rope_scaling")):
        raise SpecError("rope_parameters", None, f"is required in a {config['model_type']} config.json")
    num_heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
    head_dim = config.head_dim(absent=family.head_dim)
    num_kv_heads = config.optional_integer("num_key_value_heads", absent=family.kv_heads)
    layer_windows = family.windows(config, config.num_layers())
    has_norm = family.qk_norm_switch is None or config.flag(family.qk_norm_switch, False)
    qk_norm = family.qk_norm if has_norm else None
    # The field is read only in families that have a softcap.
    has_cap = family.softcap is not None
    softcap = config.optional_number("attn_logit_softcapping", absent=family.softcap) if has_cap else None

    def layer(window: int | None, unrotated: bool) -> GroupedSpec:
        layer_type = FULL if window is None else SLIDING
        return GroupedSpec(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=head_dim,
            bias=grouped_bias(family.bias(config) if callable(family.bias) else family.bias),
            qk_norm=qk_norm,
            sinks=family.sinks,
            softcap=softcap,
            sliding_window=window,
            chunked=family.chunked and window is not None,
            rope=None if unrotated else read_rope(config, head_dim, layer_type=layer_type, **family.rope),
            softmax_scale=family.scale(config),
        )

    kinds = list(zip(layer_windows, family.unrotated(config, layer_windows), strict=True))
    specs = {kind: layer(*kind) for kind in dict.fromkeys(kinds)}
    return tuple(specs[kind] for kind in kinds)


def attention_layer(
    config: Config,
    rope: RopeSpec | None = None,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    bias: tuple[str, ...] | None = None,
) -> GroupedSpec:
    """Read a layer of softmax attention from Llama's field names, apart from the fields that are given."""
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if num_kv_heads is None:
        num_kv_heads = config.optional_integer("num_key_value_heads") or num_heads
    return GroupedSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.head_dim() if head_dim is None else head_dim,
        bias=grouped_bias(config.flag("attention_bias", False)) if bias is None else bias,
        rope=rope,
    )


def _bias(name: str, default: bool, covers: bool | str = True) -> Callable[[Config], bool | str]:
    """A reader of a switch that gives ``covers`` a bias."""
    return lambda config: covers if config.flag(name, default) else False


def _seed_bias(config: Config) -> tuple[str, ...]:
    qkv = ("q_proj", "k_proj", "v_proj") if config.flag("attention_bias", True) else ()
    return (*qkv, "o_proj") if config.flag("attention_out_bias", False) else qkv


def _scalar(config: Config) -> float | None:
    scalar = config.optional_number("query_pre_attn_scalar", absent=256.0)
    return None if scalar is None else float(scalar**-0.5)


def _multiplier(config: Config) -> float | None:
    return config.optional_number("attention_multiplier", absent=1.0)


def _unrotated_layers(config: Config, windows: Windows) -> list[bool]:
    """SmolLM3, Llama 4: a 0 in ``no_rope_layers`` marks a layer without positions."""
    flags, layers = config.get("no_rope_layers"), len(windows)
    if flags is None or (flags == [] and config["model_type"] == "llama4_text"):
        interval = config.optional_integer("no_rope_layer_interval") or 4
        return [(i + 1) % interval == 0 for i in range(layers)]
    if not isinstance(flags, list) or len(flags) != layers or any(flag not in (0, 1) for flag in flags):
        raise SpecError("no_rope_layers", flags, f"must list 0 or 1 for each of {layers} layers")
    return [not flag for flag in flags]


def _llama4_types(config: Config, layers: int) -> list[str]:
    """Llama 4: layers with positions attend within chunks."""
    return [FULL if unrotated else CHUNKED for unrotated in _unrotated_layers(config, [None] * layers)]


def _full_unrotated(config: Config, windows: Windows) -> list[bool]:
    return [window is None for window in windows]


def _full_unrotated_among_sliding(config: Config, windows: Windows) -> list[bool]:
    """EXAONE 4: full layers have no positions, unless the model has no windows."""
    return [window is None and config.get("sliding_window") is not None for window in windows]


def _smollm3_types(config: Config, layers: int) -> list[str]:
    return [SLIDING if unrotated else FULL for unrotated in _unrotated_layers(config, [None] * layers)]


_QWEN_WINDOWS = positions.windows_with_switch(partial(positions.upper_layers, absent=28), absent=4096)
_GEMMA: dict[str, Any] = {"head_dim": 256, "refused": ("use_bidirectional_attention",)}
_FOUR_NORMS = {"norms": 4, "tied": True}
_PHI3_KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
_PHI3_ROPE = {"fraction": 1.0, "kinds": _PHI3_KINDS}
_GLM: dict[str, Any] = {"kv_heads": 2, "head_dim": 128, "bias": _bias("attention_bias", True, "qkv")}
_GLM |= {"rope": {"fraction": 0.5, "interleaved": True}}

FAMILIES = {
    "llama": Family(feed_forward=dense_rule(bias="mlp_bias")),
    "llama4_text": Family(
        kv_heads=8,
        head_dim=128,
        windows=positions.windows_of_chunks(_llama4_types, absent=8192),
        chunked=True,
        rope={"theta": 5e5, "interleaved": True},
        unrotated=_unrotated_layers,
        feed_forward=body.llama4_experts,
    ),
    "mistral": Family(kv_heads=8, bias=False, windows=positions.window_in_every_layer(absent=4096)),
    "ministral": Family(kv_heads=8, bias=False, windows=positions.window_in_every_layer(absent=4096)),
    "ministral3": Family(
        kv_heads=8, head_dim=128, bias=False, rope_required=True, windows=positions.window_in_every_layer()
    ),
    "mixtral": Family(
        kv_heads=8,
        windows=positions.window_in_every_layer(),
        rope={"theta": 1e6},
        feed_forward=experts_rule(),
        bias=False,
    ),
    "qwen2": Family(bias="qkv", windows=_QWEN_WINDOWS),
    "qwen2_moe": Family(
        bias=_bias("qkv_bias", True, "qkv"),
        windows=positions.windows_with_switch(positions.must_be_listed, absent=4096),
        feed_forward=body.qwen_experts_rule(shared=True),
    ),
    "qwen3": Family(head_dim=128, qk_norm="head", windows=_QWEN_WINDOWS),
    "qwen3_moe": Family(
        kv_heads=4,
        qk_norm="head",
        windows=positions.windows_with_switch(positions.all_layers, absent=4096),
        feed_forward=body.qwen_experts_rule(shared=False),
    ),
    "gemma": Family(**_GEMMA, around={"tied": True}),
    "gemma2": Family(
        **_GEMMA,
        kv_heads=4,
        scale=_scalar,
        softcap=50.0,
        windows=positions.window_but_every_nth(2),
        around=_FOUR_NORMS,
    ),
    "gemma3_text": Family(
        **_GEMMA,
        kv_heads=4,
        qk_norm="head",
        scale=_scalar,
        windows=positions.window_but_every_nth(6, field="sliding_window_pattern"),
        rope={"theta": 1e6, "local": ("rope_local_base_freq", 1e4)},
        around=_FOUR_NORMS,
    ),
    "phi3": Family(
        bias=False, windows=positions.window_in_every_layer(), rope={"fraction": 1.0, "kinds": _PHI3_KINDS}
    ),
    "gpt_oss": Family(
        kv_heads=8,
        head_dim=64,
        bias=_bias("attention_bias", True),
        sinks=True,
        windows=positions.window_but_every_nth(2),
        rope={"theta": 150000.0},
        rope_required=True,
        feed_forward=experts_rule(bias=True),
    ),
    "olmo": Family(around={"norm_vectors": 0}),
    "olmo2": Family(qk_norm="full"),
    "olmo3": Family(
        qk_norm="full", windows=positions.window_but_every_nth(4), rope={"theta": 5e5, "local": ("", 5e5)}
    ),
    "olmoe": Family(qk_norm="full", feed_forward=experts_rule("num_experts")),
    "granite": Family(scale=_multiplier, feed_forward=dense_rule(bias="mlp_bias")),
    "granitemoe": Family(scale=_multiplier, feed_forward=experts_rule()),
    "smollm3": Family(
        kv_heads=4,
        windows=positions.windows_with_switch(_smollm3_types),
        rope={"theta": 2e6},
        unrotated=_unrotated_layers,
        feed_forward=dense_rule(bias="mlp_bias"),
        around={"tied": True},
    ),
    "starcoder2": Family(
        kv_heads=2,
        bias=_bias("use_bias", True),
        windows=positions.window_in_every_layer(),
        feed_forward=dense_rule(gated=False, bias="use_bias", bias_absent=True),
        around={"norm_vectors": 2, "tied": True},
    ),
    "stablelm": Family(bias=_bias("use_qkv_bias", False, "qkv"), refused=("qk_layernorm",), rope={"fraction": 0.25}),
    "cohere": Family(
        refused=("use_qk_norm",), rope={"theta": 5e5, "interleaved": True}, around={"norms": 1, "tied": True}
    ),
    "cohere2": Family(
        windows=positions.window_but_every_nth(4, field="sliding_window_pattern"),
        rope={"interleaved": True},
        unrotated=_full_unrotated,
        around={"norms": 1, "tied": True},
    ),
    "glm": Family(**_GLM),
    "glm4": Family(**_GLM, around={"norms": 4}),
    "glm4_moe": Family(
        bias=_bias("attention_bias", False, "qkv"),
        qk_norm="head",
        qk_norm_switch="use_qk_norm",
        rope={"fraction": 0.5},
        feed_forward=deepseek_experts_rule(first_dense=1),
    ),
    "exaone4": Family(
        bias=False,
        qk_norm="head",
        windows=positions.window_but_every_nth(4, field="sliding_window_pattern", may_be_null=True),
        unrotated=_full_unrotated_among_sliding,
    ),
    "seed_oss": Family(kv_heads=8, head_dim=128, bias=_seed_bias, feed_forward=dense_rule(bias="mlp_bias")),
    "dots1": Family(
        qk_norm="head", windows=positions.above_max_window_layers, feed_forward=deepseek_experts_rule(first_dense=0)
    ),
    "minimax_m2": Family(
        kv_heads=8,
        head_dim=128,
        bias=False,
        qk_norm="full",
        rope={"theta": 5e6, "fraction": 1.0},
        feed_forward=experts_rule(score_correction=True),
    ),
    "nemotron": Family(
        rope={"fraction": 0.5}, feed_forward=dense_rule(gated=False, bias="mlp_bias"), around={"norm_vectors": 2}
    ),
    "hunyuan_v1_dense": Family(qk_norm="head"),
    "ernie4_5": Family(
        kv_heads=2,
        head_dim=128,
        bias=_bias("use_bias", False),
        rope={"theta": 5e5, "interleaved": True},
        feed_forward=dense_rule(bias="use_bias"),
        around={"tied": True},
    ),
    "arcee": Family(feed_forward=dense_rule(gated=False, bias="mlp_bias")),
}
READERS = {
    name: Reader(partial(read_layers, family), partial(read_body, family.feed_forward, **family.around))
    for name, family in FAMILIES.items()
}


def _stablelm_body(config: Config, layers: int) -> BodySpec:
    """StableLM: attention and network side by side share one norm."""
    norms = 1 if config.flag("use_parallel_residual", False) else 2
    return read_body(_GATED, config, layers, norms=norms, norm_vectors=2)


READERS["stablelm"] = READERS["stablelm"]._replace(body=_stablelm_body)
# The file of Gemma 3 4B has only those fields of its text part that differ from the class's defaults.
_GEMMA3_4B = {"num_attention_heads": 8, "vocab_size": 262208, "max_position_embeddings": 131072}
READERS["gemma3_text"] = READERS["gemma3_text"]._replace(absent=_GEMMA3_4B)
# The class has a length of its own, which takes precedence over that of rope_scaling.
READERS["phi3"] = READERS["phi3"]._replace(absent={"original_max_position_embeddings": 4096})


def _minimax_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """MiniMax-M2: ``rotary_dim`` says how many dims of a head are rotated, where nothing else does."""
    family = FAMILIES["minimax_m2"]
    if (rotated := config.optional_integer("rotary_dim")) is not None:
        head_dim = config.optional_integer("head_dim", absent=family.head_dim)
        config = Config({"partial_rotary_factor": rotated / (head_dim or rotated), **config})
    return read_layers(family, config)


READERS["minimax_m2"] = READERS["minimax_m2"]._replace(layers=_minimax_layers)
