"""The report of a healing, which `heal` returns, and the model card of the healed folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, metadata_load

from headwise.base.documents import as_document
from headwise.base.tables import Table
from headwise.conversion.output.card import layout_of, loading, named, rendered_card
from headwise.measure.evaluation import Evaluation
from headwise.runtime.hf import auto_class
from headwise.runtime.quantization.transform_code import FILE as CODES


@dataclass(frozen=True, kw_only=True)
class Healing:
    """The report of a healing.

    Attributes:
        model: the given model, as the user named it.
        output: the folder or file of the result.
        teacher: the model that it learnt from, as the user named it.
        objective: ``distill`` or ``cross-entropy``.
        objective_settings: ``temperature``, ``hidden`` and ``text_weight``, as far as they are not the defaults.
        texts: the texts that it was trained on.
        trained: the parameters that were trained: ``all``, ``attention``, ``new`` or ``lora``.
        trained_parameters: the number of trained parameters.
        optimizer: ``muon`` or ``adamw``.
        learning_rate: the learning rate after warm-up.
        cache: the engine's format that keys and values were rounded to; None where they were not.
        steps: the number of steps that were done.
        planned_steps: the number of steps that were asked for.
        tokens: the number of tokens that were trained on, passages that a text was read again for included.
        window: the number of tokens in each window.
        batch: the number of windows in each step.
        losses: the loss of each step, by the objective with all its terms; in nats a token where the objective has
            its default settings.
        held_out: the step and the loss of each measurement on held-out windows; the first is before any step.
        best_step: the step whose weights the result has, the one of the lowest held-out loss.
        stopped: whether it ended early, as the held-out loss fell no more.
        rollbacks: the number of times that a loss that was not finite made it return to what was saved.
        seconds: the seconds of training, without measurements.
        peak_rss_bytes: the peak resident memory of the process, in bytes.
        before: the model that was given, with its own cache or ``cache``, beside the teacher; None if nothing was
            evaluated.
        after: the result beside the teacher, on the same text; None if nothing was evaluated.
        made_with: what the numbers depend on besides the model, see `circumstances`.
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
    made_with: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    objective_settings: Mapping[str, float]
    cache: str | None

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
        """The change of the held-out loss in the last quarter of the steps, in nats for 100,000 tokens.

        It is below 0 where the loss still fell; None for a curve of fewer than three measurements.
        """
        return late_slope(self.held_out, self.steps, self.batch * self.window)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return as_document(self) | {"tokens_per_second": self.tokens_per_second, "slope": self.slope}


def late_slope(curve: Sequence[tuple[int, float]], steps: int, tokens_per_step: int) -> float | None:
    """See `Healing.slope`.

    Args:
        curve: the step and the held-out loss of each measurement.
        steps: the number of steps that were done.
        tokens_per_step: the number of tokens that a step trains on.
    """
    earlier = [one for one in curve if one[0] <= 0.75 * steps]
    if len(curve) < 3 or not earlier:
        return None
    (first, before), (last, after) = earlier[-1], curve[-1]
    return (after - before) / ((last - first) * tokens_per_step) * 100_000


CONVERSION = "CONVERSION.md"
"""The name that the converted folder's own card has beside the healed one's."""

_FIELDS = ("base_model", "license", "license_name", "license_link", "library_name")


def healed_card(folder: Path, config: Mapping[str, Any], report: Healing) -> str:
    """The text of a healed folder's ``README.md``; its conversion is told by `CONVERSION`, where there is a card.

    Args:
        folder: the folder of the converted model, whose card has the licence and the base model.
        config: the config of the healed model.
        report: the report of the healing.
    """
    model_type = str(config["model_type"])
    coded = (folder / CODES).is_file()
    tags = ["distillation"] if report.learns_of_teacher else []
    return rendered_card(
        "healing/card.md",
        _metadata(folder, tags),
        **vars(report),
        learns_of_teacher=report.learns_of_teacher,
        slope=report.slope,
        scores=_scores(report),
        conversion=CONVERSION if (folder / "README.md").is_file() else None,
        loading=loading(layout_of(config), auto_class(dict(config)), model_type, coded=coded),
    )


def _metadata(folder: Path, also: Sequence[str]) -> ModelCardData:
    """The metadata of the converted folder's card, with other tags."""
    try:
        known = dict(metadata_load(folder / "README.md") or {})
    except Exception:  # no card, or neither UTF-8 nor YAML
        known = {}
    fields = {key: known[key] for key in _FIELDS if isinstance(known.get(key), str)}
    tags = [tag for tag in known.get("tags") or ["headwise", "kv-cache"] if isinstance(tag, str)]
    return ModelCardData(**{"library_name": "transformers", **fields}, tags=[*dict.fromkeys((*tags, *also))])


def _scores(report: Healing) -> str | None:
    """The table of texts before and after; None where nothing was measured."""
    if report.before is None or report.after is None:
        return None
    table = Table(["text", "tokens", "ratio before healing", "after", "KL before, nats", "after"])
    for old, new in zip(report.before.texts, report.after.texts, strict=True):
        ratios = (f"{score.perplexity_ratio:.4f}" for score in (old, new))
        table.add(named(new.text), f"{new.tokens:,}", *ratios, *(f"{score.kl:.4f}" for score in (old, new)))
    return table.markdown()
