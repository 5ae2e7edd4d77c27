"""Functions that the readers of mixed stacks and of MLA share."""

from __future__ import annotations

from headwise.models.specs.base import AttentionSpec, RopeSpec
from headwise.models.specs.grouped import GroupedSpec, grouped_bias
from headwise.models.specs.model import BodySpec
from headwise.models.specs.readers import body
from headwise.models.specs.readers.fields import Config, read_flag, read_head_dim, read_integer, read_optional_integer
from headwise.models.specs.readers.positions import FULL

RECURRENT = "linear_attention"
TYPES = {FULL: FULL, "attention": FULL, RECURRENT: RECURRENT, "mamba": RECURRENT}
"""Names in ``layer_types`` of current and of older files."""


def attention_layer(
    config: Config,
    rope: RopeSpec | None = None,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    bias: tuple[str, ...] | None = None,
) -> GroupedSpec:
    """Read a layer of softmax attention from Llama's field names, apart from the fields that are given."""
    hidden_size, num_heads = read_integer(config, "hidden_size"), read_integer(config, "num_attention_heads")
    if num_kv_heads is None:
        num_kv_heads = read_optional_integer(config, "num_key_value_heads") or num_heads
    return GroupedSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=read_head_dim(config) if head_dim is None else head_dim,
        bias=grouped_bias(read_flag(config, "attention_bias", False)) if bias is None else bias,
        rope=rope,
    )


def layers_by_type(types: list[str], attention: AttentionSpec, recurrent: AttentionSpec) -> tuple[AttentionSpec, ...]:
    """A stack with ``attention`` in the layers of full attention, and ``recurrent`` in all others."""
    return tuple(attention if name == FULL else recurrent for name in types)


def read_body(feed_forward: body.Rule, config: Config, layers: int, *, tied: bool = False) -> BodySpec:
    """Read the body of a family whose networks follow a rule."""
    return body.read_body(config, feed_forward(config, layers), tied=tied)
