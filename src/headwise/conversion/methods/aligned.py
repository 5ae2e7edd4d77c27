"""headwise's own merging of key–value heads: the heads of a group are aligned with each other first."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from headwise.base.options import GROUPED_STAGES
from headwise.conversion.methods.base import Evidence, MergingMethod
from headwise.conversion.solvers.aligned import align, refuse_unaligned
from headwise.conversion.solvers.layer import grouped_layers
from headwise.models.specs import GroupedSpec, ModelSpec


class Aligned(MergingMethod):
    """See `headwise.conversion.solvers.aligned`."""

    name = "aligned"
    label = "aligned"
    stages = GROUPED_STAGES
    is_default = True

    def check(self, source: ModelSpec) -> None:
        """Refuse layers with no place to undo a mixture of heads in.

        Raises:
            SpecError: see `refuse_unaligned`.
        """
        for layer in grouped_layers(source):
            refuse_unaligned(layer)

    def solve_heads(
        self, state: Mapping[str, Tensor], source: GroupedSpec, target: GroupedSpec, evidence: Evidence
    ) -> dict[str, Tensor]:
        """See `align`."""
        return align(state, source, target, statistics=evidence.statistics, sensitivity=evidence.sensitivity)


METHOD = Aligned()
