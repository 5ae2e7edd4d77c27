"""The layer of any mechanism, from its spec."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from headwise.attention.base import AttentionLayer
from headwise.errors import SpecError
from headwise.specs import AttentionSpec, RecurrentSpec, mechanism_module


def build(spec: AttentionSpec, **kwargs: Any) -> AttentionLayer:
    """The layer a spec describes, freshly initialised; keywords go to the mechanism's ``from_spec``."""
    for name in ("output_gate", "shares_kv"):
        if getattr(spec, name, False):
            raise SpecError(name, True, "is not supported by the layers yet")
    if isinstance(spec, RecurrentSpec):
        raise SpecError("attention", spec.label, "has costs and no layer that runs; choose a layer of attention")
    layer = cast(AttentionLayer, mechanism_module("attention", spec.kind).from_spec(spec, **kwargs))
    # A layer is told at each call whether to be causal; its cost is what the model makes of it.
    layer.spec = replace(layer.spec, is_causal=spec.is_causal)
    return layer
