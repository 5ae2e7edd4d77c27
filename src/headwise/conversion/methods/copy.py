"""Copy a layer whose number of key–value heads does not change."""

from __future__ import annotations

from headwise.conversion.methods.base import kv_heads
from headwise.conversion.methods.repeat import Repeat
from headwise.models.specs import ModelSpec


class Copy(Repeat):
    """`Repeat`, once for each head."""

    name = "copy"
    label = "copied heads"

    def suits(self, source: ModelSpec, target: ModelSpec) -> bool:
        """Whether the target has as many key–value heads as the source."""
        return target.mechanism in self.targets and kv_heads(target) == kv_heads(source)


METHOD = Copy()
