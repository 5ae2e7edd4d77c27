"""A calibrator gives a conversion what is known of each layer: from a text, from saved statistics, or nothing.

The three kinds are asked in the same way, layer by layer: `evidence` before a layer is solved, `refine` with the
solution, `advance` once the result is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headwise.conversion.methods import Evidence
from headwise.conversion.planning.plan import ConversionPlan, Place
from headwise.conversion.solvers.layer import Layer


@dataclass(frozen=True)
class Refined:
    """A solved layer after the calibrator's own improvements.

    Attributes:
        layer: what it became.
        errors: the cost of a token of the held-out windows, levelled (`Cost`), after each step that was tried:
            ``solved``, ``refine``, ``refit``. In nats, by estimate, where there are sensitivities.
        chosen: the step whose result was kept.
    """

    layer: Layer
    errors: dict[str, float] = field(default_factory=dict)
    chosen: str | None = None

    def about(self) -> dict[str, Any]:
        """What is noted of the layer, as JSON-able values; nothing where nothing was measured."""
        return {"errors": self.errors, "chosen": self.chosen} if self.errors else {}


class Calibrator:
    """Nothing is known beside the weights. Subclasses know more.

    Attributes:
        tokens: that were looked at, those held out among them.
        window: tokens in each window of them.
        is_sequential: whether layers have to be converted in order, each once, for the text that goes through them.
        read_seconds: spent on reading what is known from disk.
    """

    tokens: int = 0
    window: int = 0
    is_sequential: bool = False
    read_seconds: float = 0.0

    def is_past(self, place: Place) -> bool:
        """Whether an earlier run may have converted a layer already."""
        return True

    def evidence(self, place: Place, source: Layer) -> Evidence:
        """What is known of one layer.

        Args:
            place: which.
            source: the layer as it is.
        """
        return Evidence()

    def refine(self, place: Place, layer: Layer) -> Refined:
        """A solution, improved on the text where there is one."""
        return Refined(layer)

    def advance(self, place: Place, refined: Refined) -> None:
        """Go on to the next layer; the result is kept, so that a run killed after this need not solve it again."""

    def losses(self, *layers: Layer) -> list[float] | None:
        """The cost of each solution of the layer at hand, in nats a token; None where none is measured."""
        return None

    def source_evidence(self, plan: ConversionPlan) -> Iterator[tuple[Layer, Evidence]]:
        """Each layer of the source in turn, and what the source's own layers hand on to it, as far as it is known."""
        for place in plan.places:
            source = plan.source_layer(place)
            yield source, self.evidence(place, source)


NOTHING_KNOWN = Calibrator()
"""For conversions by weights alone."""
