"""headwise's own merging of key–value heads: those that come to share one are aligned with each other first."""

from __future__ import annotations

from headwise.conversion.methods.base import Evidence, LayerTarget, MergingMethod
from headwise.conversion.solvers.aligned import align, refuse_unaligned
from headwise.conversion.solvers.layer import Layer
from headwise.specs import GroupedSpec, ModelSpec


class Aligned(MergingMethod):
    """See `headwise.conversion.solvers.aligned`."""

    name = "aligned"
    label = "aligned"
    stages = ("sensitivity", "sequence", "refine", "refit")
    is_default = True

    def check(self, source: ModelSpec) -> None:
        """Refuse layers with no place to undo a mixture of heads in.

        Raises:
            SpecError: a layer is one.
        """
        for layer in (*source.layers, *source.cross_layers):
            assert isinstance(layer, GroupedSpec)
            refuse_unaligned(layer)

    def solve(self, source: Layer, target: LayerTarget, evidence: Evidence) -> Layer:
        """See `align`."""
        assert isinstance(source.spec, GroupedSpec)
        assert isinstance(target.spec, GroupedSpec)
        state = align(
            source.state,
            source.spec,
            target.spec,
            statistics=evidence.statistics,
            sensitivity=evidence.sensitivity,
        )
        return Layer(target.spec, state, norm_eps=source.norm_eps)


METHOD = Aligned()
