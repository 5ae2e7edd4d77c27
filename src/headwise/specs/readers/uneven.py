"""Stacks whose layers are not all their own: Gemma 3n shares keys and values, Nemotron-NAS skips attention."""

from __future__ import annotations

from collections.abc import Mapping

from headwise.errors import SpecError
from headwise.specs.base import AttentionSpec
from headwise.specs.grouped import GroupedSpec
from headwise.specs.readers.fields import Config, Reader, count, divide, flag, integer, num_layers, optional_integer
from headwise.specs.readers.mixed import attention_layer
from headwise.specs.readers.rope import read_rope
from headwise.specs.readers.windows import FULL, SLIDING, every_nth_full
from headwise.specs.recurrent import RecurrentSpec


def _gemma3n_layers(config: Config) -> tuple[AttentionSpec, ...]:
    windows = every_nth_full(5)(config, num_layers(config))
    shared = count(config, "num_kv_shared_layers", 15)
    first = len(windows) - shared
    if shared and not set(windows[first:]) <= set(windows[: max(first, 0)]):
        rule = f"must leave a layer of each type below, of {len(windows)}"
        raise SpecError("num_kv_shared_layers", shared, rule)
    head_dim = optional_integer(config, "head_dim", absent=256) or divide(
        integer(config, "hidden_size"), integer(config, "num_attention_heads")
    )

    def layer(window: int | None, shares: bool) -> GroupedSpec:
        kind = FULL if window is None else SLIDING
        rope = read_rope(config, head_dim, theta=1e6, local_theta=1e4, layer_type=kind)
        kv_heads = integer(config, "num_key_value_heads")
        return attention_layer(
            config,
            rope,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            qk_norm="head",
            softmax_scale=1.0,
            sliding_window=window,
            shares_kv=shares,
        )

    return tuple(layer(window, i >= first) for i, window in enumerate(windows))


def _nemotron_nas_layers(config: Config) -> tuple[AttentionSpec, ...]:
    layers, blocks = num_layers(config), config.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != layers:
        raise SpecError("block_configs", blocks, f"must list one for each of {layers} layers")
    num_heads = integer(config, "num_attention_heads")
    head_dim = optional_integer(config, "head_dim") or divide(integer(config, "hidden_size"), num_heads)
    rope = read_rope(config, head_dim)

    def layer(block: object) -> AttentionSpec:
        own = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(own, Mapping):
            raise SpecError("block_configs", block, "must say each layer's attention")
        if flag(own, "replace_with_linear", False):
            raise SpecError("replace_with_linear", True, "is not understood")
        if flag(own, "no_op", False):
            return RecurrentSpec(form="none", hidden_size=integer(config, "hidden_size"))
        return attention_layer(config, rope, num_kv_heads=divide(num_heads, integer(own, "n_heads_in_group")))

    return tuple(map(layer, blocks))


READERS = {"gemma3n_text": Reader(_gemma3n_layers), "nemotron-nas": Reader(_nemotron_nas_layers)}
