"""headwise's own conversion to MLA: rotary energy in few channels, and a latent in the metric of the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from headwise.base.options import STAGES
from headwise.conversion.methods.base import Evidence, LatentMethod
from headwise.conversion.solvers.latent import convert_to_latent, exact_rank, solve_sizes
from headwise.conversion.solvers.layer import Layer, LayerTarget, seen_by_mla, with_norms
from headwise.models.specs import GroupedSpec, LatentSpec, ModelSpec, as_latent, rotary_width


class Headwise(LatentMethod):
    """See `headwise.conversion.solvers.latent`."""

    name = "headwise"
    label = "headwise"
    stages = STAGES
    is_default = True
    shares_channels = True

    def is_exact(self, source: ModelSpec, target: ModelSpec) -> bool:
        """Whether every layer keeps all rotary channels, and its latent is as wide as all the rest."""
        before, after = ((*model.layers, *model.cross_layers) for model in (source, target))
        return all(
            _is_lossless(old, new)
            for old, new in zip(before, after, strict=True)
            if isinstance(old, GroupedSpec) and isinstance(new, LatentSpec)
        )

    def solve_latent(
        self, state: Mapping[str, Tensor], source: GroupedSpec, target: LayerTarget, evidence: Evidence
    ) -> tuple[dict[str, Tensor], list[int]]:
        """See `convert_to_latent`."""
        return convert_to_latent(
            state, source, target, statistics=evidence.statistics, sensitivity=evidence.sensitivity
        )

    def solve_sizes(
        self, source: Layer, sizes: Sequence[tuple[int, int]], target: LayerTarget, evidence: Evidence
    ) -> Iterator[tuple[tuple[int, int], Layer]]:
        """See `headwise.conversion.solvers.latent.solve_sizes`."""
        assert evidence.statistics is not None  # sizes are tried on a text alone
        seen, _ = seen_by_mla(source)
        for size, layer in solve_sizes(seen, sizes, target, evidence.statistics, evidence.sensitivity):
            yield size, with_norms(source, layer, as_latent(source.spec, *size))


def _is_lossless(old: GroupedSpec, new: LatentSpec) -> bool:
    return new.qk_rope_head_dim == rotary_width(old) and new.kv_lora_rank >= exact_rank(old, new)


METHOD = Headwise()
