"""As many key–value heads as before: the layer stays as it is."""

from __future__ import annotations

from headwise.conversion.methods.base import kv_heads
from headwise.conversion.methods.repeat import Repeat
from headwise.specs import ModelSpec


class Copy(Repeat):
    """Heads repeated once."""

    name = "copy"
    label = "copied heads"

    def suits(self, source: ModelSpec, target: ModelSpec) -> bool:
        """The number of key–value heads does not change."""
        return target.mechanism in self.targets and kv_heads(target) == kv_heads(source)


METHOD = Copy()
