"""`Calibrator`: what a conversion knows of each layer, from a text, from saved statistics, or from weights alone.

All three answer the same calls, layer by layer: `collect` before a layer is solved, and `advance` with what was
chosen of it, once that is on disk.
"""

from __future__ import annotations

from collections.abc import Iterator

from headwise.conversion.calibration.candidates import Candidate, LayerData
from headwise.conversion.methods import Evidence
from headwise.conversion.plan import ConversionPlan, Place, read_layer
from headwise.conversion.solvers.layer import Layer


class Calibrator:
    """Calibration on weights alone. Subclasses have evidence from a text.

    Attributes:
        tokens: the number of calibration tokens, held-out tokens included.
        window: the number of tokens in each window.
        is_sequential: whether layers must be converted in order, each once, because a text goes through them.
        has_evidence: whether layers are solved from more than their weights.
        read_seconds: seconds spent on reading evidence from disk.
    """

    tokens: int = 0
    window: int = 0
    is_sequential: bool = False
    has_evidence: bool = False
    read_seconds: float = 0.0

    def may_be_saved(self, place: Place) -> bool:
        """Whether an earlier run may have converted and saved a layer already."""
        return True

    def collect(self, place: Place, source: Layer) -> tuple[Evidence, LayerData | None]:
        """Collect what a layer is solved from, and the windows of the text that its solution is measured on.

        Args:
            place: the layer's place in the model.
            source: the source layer with its weights.

        Returns:
            The evidence, and the layer on the windows of a text; None where there is no text.
        """
        return Evidence(), None

    def advance(self, data: LayerData | None, best: Candidate) -> None:
        """Go on to the next layer, once the result is on disk: a run killed after this does not solve it again."""

    def source_evidence(self, plan: ConversionPlan) -> Iterator[tuple[Layer, Evidence]]:
        """Each layer of the source in turn, with its evidence: statistics of the inputs that the source gives it."""
        for place in plan.places:
            source = read_layer(plan.checkpoint, place)
            yield source, self.collect(place, source)[0]


NOTHING_KNOWN = Calibrator()
"""The calibrator of conversions by weights alone."""
