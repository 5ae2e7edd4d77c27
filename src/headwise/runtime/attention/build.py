"""Build the layer that a spec describes, whatever its mechanism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from headwise.errors import SpecError
from headwise.models.specs import AttentionSpec, CompressedSpec, GroupedSpec, RecurrentSpec, mechanism_module
from headwise.runtime.attention.base import AttentionLayer


def build(spec: AttentionSpec, **kwargs: Any) -> AttentionLayer:
    """Build the layer that a spec describes, freshly initialised.

    Args:
        spec: the layer.
        kwargs: passed to the ``from_spec`` of the mechanism's module, such as ``dropout`` or ``backend``.

    Raises:
        SpecError: there is no such layer here: it shares keys and values, gates its output, attends within chunks or
            to entries, has a query latent, or is recurrent.

    >>> build(headwise.GroupedSpec(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16), dropout=0.1)
    """
    for name in ("output_gate", "shares_kv", "chunked"):
        if getattr(spec, name, False):
            raise SpecError(name, True, "is not supported by the layers yet")
    if isinstance(spec, GroupedSpec) and spec.q_lora_rank is not None:
        raise SpecError("q_lora_rank", spec.q_lora_rank, "is not supported by these layers yet")
    if isinstance(spec, RecurrentSpec | CompressedSpec):
        raise SpecError("attention", spec.label, "has costs, but no layer that runs; choose a layer of attention")
    layer = cast(AttentionLayer, mechanism_module("runtime.attention", spec.kind).from_spec(spec, **kwargs))
    # A layer is told at each call whether to be causal; its spec, which costs are computed from, says what the model
    # does.
    layer.spec = replace(layer.spec, is_causal=spec.is_causal)
    return layer
