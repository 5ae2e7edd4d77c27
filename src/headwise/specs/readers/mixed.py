"""Functions that the readers of mixed stacks and of MLA share."""

from __future__ import annotations

from typing import Any

from headwise.specs.base import AttentionSpec, RopeSpec
from headwise.specs.grouped import GroupedSpec, grouped_bias
from headwise.specs.model import BodySpec
from headwise.specs.readers import body
from headwise.specs.readers.fields import Config, flag, head_dim_of, integer, optional_integer
from headwise.specs.readers.windows import FULL

RECURRENT = "linear_attention"
TYPES = {FULL: FULL, "attention": FULL, RECURRENT: RECURRENT, "mamba": RECURRENT}
"""Names in ``layer_types`` of current and of older files."""


def attention_layer(config: Config, rope: RopeSpec | None = None, **rest: Any) -> GroupedSpec:
    """Read a layer of softmax attention from Llama's field names; ``rest`` overrides them."""
    hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    sizes = {
        "num_kv_heads": optional_integer(config, "num_key_value_heads") or num_heads,
        "head_dim": head_dim_of(config),
        "bias": grouped_bias(flag(config, "attention_bias", False)),
    }
    return GroupedSpec(hidden_size=hidden_size, num_heads=num_heads, rope=rope, **{**sizes, **rest})


def stack(types: list[str], attention: AttentionSpec, recurrent: AttentionSpec) -> tuple[AttentionSpec, ...]:
    """A stack with ``attention`` in the layers of full attention, and ``recurrent`` in all others."""
    return tuple(attention if name == FULL else recurrent for name in types)


def read_body(feed_forward: body.Rule, config: Config, layers: int, **rest: Any) -> BodySpec:
    """Read the body of a family whose networks follow a rule."""
    return body.read_body(config, feed_forward(config, layers), **rest)
