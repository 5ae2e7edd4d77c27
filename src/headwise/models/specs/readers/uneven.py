"""Stacks whose layers differ: OpenELM's grow, Gemma 3n's share keys and values, Nemotron-NAS's may lack attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headwise.errors import SpecError
from headwise.models.specs.base import AttentionSpec, RopeSpec
from headwise.models.specs.grouped import GroupedSpec
from headwise.models.specs.model import BodySpec, FeedForwardSpec
from headwise.models.specs.readers.body import FeedForward, read_body
from headwise.models.specs.readers.fields import Config, MissingFieldError, Reader, check_number, divided_head_dim
from headwise.models.specs.readers.llama import attention_layer
from headwise.models.specs.readers.positions import FULL, SLIDING, read_rope, window_but_every_nth
from headwise.models.specs.recurrent import RecurrentSpec


def _gemma3n_layers(config: Config) -> tuple[AttentionSpec, ...]:
    windows = window_but_every_nth(5)(config, config.num_layers())
    shared = config.count("num_kv_shared_layers", 15)
    first = len(windows) - shared
    if shared and not set(windows[first:]) <= set(windows[: max(first, 0)]):
        rule = f"must leave a layer of each type below, of {len(windows)}"
        raise SpecError("num_kv_shared_layers", shared, rule)
    head_dim = config.head_dim(absent=256)

    def layer(window: int | None, shares: bool) -> GroupedSpec:
        kind = FULL if window is None else SLIDING
        rope = read_rope(config, head_dim, theta=1e6, local=("rope_local_base_freq", 1e4), layer_type=kind)
        kv_heads = config.integer("num_key_value_heads")
        plain = attention_layer(config, rope, num_kv_heads=kv_heads, head_dim=head_dim)
        return replace(plain, qk_norm="head", softmax_scale=1.0, sliding_window=window, shares_kv=shares)

    return tuple(layer(window, i >= first) for i, window in enumerate(windows))


def _nemotron_nas_layers(config: Config) -> tuple[AttentionSpec, ...]:
    layers, blocks = config.num_layers(), config.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != layers:
        raise SpecError("block_configs", blocks, f"must list one for each of {layers} layers")
    num_heads, rope = config.integer("num_attention_heads"), read_rope(config, config.head_dim())

    def layer(block: object) -> AttentionSpec:
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            raise SpecError("block_configs", block, "must have each layer's attention")
        own = Config(attention)
        if own.flag("replace_with_linear", False):
            raise SpecError("replace_with_linear", True, "is not understood")
        if own.flag("no_op", False):
            return RecurrentSpec(form="none", hidden_size=config.integer("hidden_size"))
        groups = divided_head_dim(num_heads, own.integer("n_heads_in_group"))
        return attention_layer(config, rope, num_kv_heads=groups)

    return tuple(map(layer, blocks))


def _openelm_layers(config: Config) -> tuple[AttentionSpec, ...]:
    """OpenELM lists query and key–value heads layer by layer."""
    layers = config.num_layers("num_transformer_layers")
    head_dim = config.integer("head_dim")
    theta = check_number("rope_freq_constant", config.get("rope_freq_constant", 10000))
    longest = config.optional_integer("max_context_length")
    rope = RopeSpec(dim=head_dim, theta=theta, max_position_embeddings=longest)

    def heads(name: str) -> list[int]:
        counts = config.get(name)
        if not isinstance(counts, list) or len(counts) != layers:
            raise SpecError(name, counts, f"must list one number for each of {layers} layers")
        return counts

    return tuple(
        GroupedSpec(
            hidden_size=config.integer("model_dim"),
            num_heads=queries,
            num_kv_heads=keys,
            head_dim=head_dim,
            qk_norm="head" if config.flag("normalize_qk_projections", True) else None,
            rope=rope,
        )
        for queries, keys in zip(heads("num_query_heads"), heads("num_kv_heads"), strict=True)
    )


def _openelm_networks(config: Config, layers: int) -> FeedForward:
    """OpenELM's widths are multiples of E, rounded to ``ffn_dim_divisor`` and never down by more than a tenth."""
    E, divisor = config.integer("model_dim"), config.integer("ffn_dim_divisor")
    multipliers = config.get("ffn_multipliers")
    if not isinstance(multipliers, list) or len(multipliers) != layers:
        raise MissingFieldError("ffn_multipliers", multipliers, f"must list one number for each of {layers} layers")
    widths = []
    for multiplier in multipliers:
        exact = check_number("ffn_multipliers", multiplier) * E
        width = max(divisor, int(exact + divisor / 2) // divisor * divisor)
        widths.append(width + divisor if width < 0.9 * exact else width)
    gated = config.flag("ffn_with_glu", True)
    return tuple(FeedForwardSpec(hidden_size=E, intermediate_size=width, gated=gated) for width in widths)


def _openelm_body(config: Config, layers: int) -> BodySpec:
    tied = config.flag("share_input_output_layers", True)
    return read_body(_openelm_networks, Config(config, tie_word_embeddings=tied), layers)


READERS = {
    "gemma3n_text": Reader(_gemma3n_layers),
    "nemotron-nas": Reader(_nemotron_nas_layers),
    "openelm": Reader(_openelm_layers, _openelm_body),
}
