"""The report of a healing, which `heal` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwise.base.documents import as_document
from headwise.measure.evaluation import Evaluation


@dataclass(frozen=True, kw_only=True)
class Healing:
    """The report of a healing.

    Attributes:
        model: the given model, as the user named it.
        output: the folder or file of the result.
        teacher: the model it learnt from, as the user named it.
        objective: ``distill`` or ``cross-entropy``.
        objective_settings: ``temperature``, ``hidden`` and ``text_weight``, as far as they are not the defaults.
        texts: that it was trained on.
        trained: what was trained: ``all``, ``attention``, ``new`` or ``lora``.
        trained_parameters: the number of trained parameters.
        optimizer: ``muon`` or ``adamw``.
        learning_rate: after warm-up.
        rank_curriculum: the part of the latents' channels that the result has; None where none faded out.
        cache: the engine's format that keys and values were rounded to; None where they were not.
        steps: the number of steps that were done.
        planned_steps: the number of steps that were asked for.
        tokens: the number of tokens that were trained on, passages that a text was read again for included.
        window: tokens in each window.
        batch: windows in each step.
        losses: the loss of each step, by the objective, with all its terms: in nats a token, without settings of it.
        held_out: step and loss of each measurement on held-out windows; the first is before any step.
        best_step: the step whose weights the result has, the one of the lowest held-out loss that counts.
        counted_from: the first step whose held-out loss counts: those before are of a larger cache, with
            ``rank_curriculum``.
        stopped: whether it ended early, as the held-out loss fell no more.
        rollbacks: how often a loss that was not finite made it return to what was saved.
        seconds: the seconds of training, without measurements.
        peak_rss_bytes: the peak resident memory of the process.
        before: the model that was given, with its own cache or ``cache``, beside the teacher; None if nothing was
            evaluated.
        after: the result beside the teacher, on the same text; likewise.
        notes: notes for the user.
    """

    model: str
    output: str
    teacher: str
    objective: str
    texts: tuple[str, ...]
    trained: str
    trained_parameters: int
    optimizer: str
    learning_rate: float
    steps: int
    planned_steps: int
    tokens: int
    window: int
    batch: int
    losses: tuple[float, ...]
    held_out: tuple[tuple[int, float], ...]
    best_step: int
    stopped: bool
    rollbacks: int
    seconds: float
    peak_rss_bytes: int | None
    before: Evaluation | None = None
    after: Evaluation | None = None
    notes: tuple[str, ...] = ()
    objective_settings: Mapping[str, float] = field(default_factory=dict)
    rank_curriculum: float | None = None
    cache: str | None = None
    counted_from: int = 0

    @property
    def kept_loss(self) -> float:
        """The held-out loss of the weights that the result has."""
        return dict(self.held_out)[self.best_step]

    @property
    def learns_of_teacher(self) -> bool:
        """Whether anything of the teacher was learnt: its predictions, or its layers' outputs."""
        return self.objective == "distill" or "hidden" in self.objective_settings

    @property
    def tokens_per_second(self) -> float | None:
        """Trained tokens in a second; None where nothing was trained."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def slope(self) -> float | None:
        """How the held-out loss changed in the last quarter of the steps, in nats for 100,000 tokens.

        Below 0 where it still fell; None for a curve of fewer than three measurements.
        """
        return late_slope(self.held_out, self.steps, self.batch * self.window, self.counted_from)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return as_document(self) | {"tokens_per_second": self.tokens_per_second, "slope": self.slope}


def late_slope(
    curve: Sequence[tuple[int, float]], steps: int, tokens_per_step: int, counted_from: int = 0
) -> float | None:
    """See `Healing.slope`.

    Args:
        curve: step and held-out loss of each measurement.
        steps: that were done.
        tokens_per_step: trained on.
        counted_from: the first step whose loss counts.
    """
    earlier = [one for one in curve if counted_from <= one[0] <= 0.75 * steps]
    if len(curve) < 3 or not earlier:
        return None
    (first, before), (last, after) = earlier[-1], curve[-1]
    return (after - before) / ((last - first) * tokens_per_step) * 100_000
