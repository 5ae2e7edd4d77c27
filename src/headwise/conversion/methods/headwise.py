"""headwise's own conversion to MLA: rotation concentrated in few channels, one latent in the metric of the loss."""

from __future__ import annotations

from headwise.conversion.methods.base import Evidence, LayerTarget, Method
from headwise.conversion.solvers.latent import LatentOptions, convert_to_latent
from headwise.conversion.solvers.layer import Layer
from headwise.options import STAGES
from headwise.specs import GroupedSpec, LatentSpec, ModelSpec, rotary_width


class Headwise(Method):
    """See `headwise.conversion.solvers.latent`."""

    name = "headwise"
    label = "headwise"
    targets = frozenset({"mla"})
    stages = STAGES
    is_default = True
    shares_channels = True

    def is_exact(self, source: ModelSpec, target: ModelSpec) -> bool:
        """Every rotary channel is kept, and the latent is as wide as all the rest."""
        before, after = ((*model.layers, *model.cross_layers) for model in (source, target))
        return all(
            _is_whole(old, new)
            for old, new in zip(before, after, strict=True)
            if isinstance(old, GroupedSpec) and isinstance(new, LatentSpec)
        )

    def solve(self, source: Layer, target: LayerTarget, evidence: Evidence) -> Layer:
        """See `convert_to_latent`."""
        assert isinstance(source.spec, GroupedSpec)
        assert isinstance(target.spec, LatentSpec)
        state, channels = convert_to_latent(
            source.state,
            source.spec,
            target.spec,
            statistics=evidence.statistics,
            sensitivity=evidence.sensitivity,
            options=LatentOptions(
                longest=target.longest,
                key_weight=target.key_weight,
                kept=target.rotary_channels,
                mix=target.mixes_heads,
            ),
        )
        return Layer(target.spec, state, channels)


def _is_whole(old: GroupedSpec, new: LatentSpec) -> bool:
    content = old.num_kv_heads * (old.head_dim + old.value_dim) - rotary_width(old)
    # The content is a linear map of E inputs and a constant, however many numbers it has.
    inputs = old.hidden_size + ("kv_a_proj_with_mqa" in new.bias)
    return new.qk_rope_head_dim == rotary_width(old) and new.kv_lora_rank >= min(content, inputs)


METHOD = Headwise()
