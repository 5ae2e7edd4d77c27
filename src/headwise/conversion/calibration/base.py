"""`Calibrator`: gives a conversion evidence of each layer, from a text, from saved statistics, or from weights alone.

All three kinds have one protocol, layer by layer: `evidence` before a layer is solved, `refine` with the solution,
`advance` once the result is on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from headwise.conversion.methods import Evidence
from headwise.conversion.plan import ConversionPlan, Place, read_layer
from headwise.conversion.solvers.layer import Layer


@dataclass(frozen=True)
class Refined:
    """A solved layer after the calibrator's refinement.

    Attributes:
        layer: the refined layer.
        errors: the mean levelled cost (`Cost`) of a token of the held-out windows after each step that was tried:
            ``solved``, ``refine``, ``code``, ``norm``, ``refit``; estimated nats where there are sensitivities.
        chosen: the step whose result is the layer: the one with the least error, or among those with a code or a
            norm; None where nothing was measured.
    """

    layer: Layer
    errors: dict[str, float] = field(default_factory=dict)
    chosen: str | None = None

    def about(self) -> dict[str, Any]:
        """The errors and the chosen step as JSON-able values; empty where nothing was measured."""
        return {"errors": self.errors, "chosen": self.chosen} if self.errors else {}


class Calibrator:
    """Calibration on weights alone. Subclasses have evidence from a text.

    Attributes:
        tokens: the number of calibration tokens, held-out tokens included.
        window: tokens in each window.
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

    def evidence(self, place: Place, source: Layer) -> Evidence:
        """The evidence for one layer.

        Args:
            place: the layer's place in the model.
            source: the source layer with its weights.
        """
        return Evidence()

    def refine(
        self,
        place: Place,
        layer: Layer,
        token_bytes: int | None = None,
        last_step: Callable[[Layer], Layer] | None = None,
    ) -> Refined:
        """Refine a solution on the text, if there is one.

        Args:
            place: the layer's place in the model.
            layer: the solution.
            token_bytes: the bytes of a token's codes, which need a text; None for a cache without codes.
            last_step: what is done with the layer before its refit; None for nothing.
        """
        return Refined(layer if last_step is None else last_step(layer))

    def advance(self, place: Place, refined: Refined) -> None:
        """Go on to the next layer, once the result is on disk: a run killed after this does not solve it again."""

    def losses(self, *layers: Layer) -> list[float] | None:
        """The cost of each solution of the current layer, in nats a token; None without a text to measure on."""
        return None

    def source_evidence(self, plan: ConversionPlan) -> Iterator[tuple[Layer, Evidence]]:
        """Each layer of the source in turn, with its evidence: statistics of the inputs that the source gives it."""
        for place in plan.places:
            source = read_layer(plan.checkpoint, place)
            yield source, self.evidence(place, source)


NOTHING_KNOWN = Calibrator()
"""The calibrator of conversions by weights alone."""
