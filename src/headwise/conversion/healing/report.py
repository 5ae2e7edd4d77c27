"""The report of a healing, which `heal` returns, and the model card of the healed folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, metadata_load

from headwise.base.documents import as_document
from headwise.conversion.output.card import as_code, card_text, last_name, layout_of, loading
from headwise.measure.evaluation import Evaluation
from headwise.runtime.hf import auto_class
from headwise.runtime.quantization.transform_code import FILE as CODES


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
        cache: the engine's format that keys and values were rounded to; None where they were not.
        steps: the number of steps that were done.
        planned_steps: the number of steps that were asked for.
        tokens: the number of tokens that were trained on, passages that a text was read again for included.
        window: tokens in each window.
        batch: windows in each step.
        losses: the loss of each step, by the objective, with all its terms: in nats a token, without settings of it.
        held_out: step and loss of each measurement on held-out windows; the first is before any step.
        best_step: the step whose weights the result has, the one of the lowest held-out loss.
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
    cache: str | None = None

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
        return late_slope(self.held_out, self.steps, self.batch * self.window)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return as_document(self) | {"tokens_per_second": self.tokens_per_second, "slope": self.slope}


def late_slope(curve: Sequence[tuple[int, float]], steps: int, tokens_per_step: int) -> float | None:
    """See `Healing.slope`.

    Args:
        curve: step and held-out loss of each measurement.
        steps: that were done.
        tokens_per_step: trained on.
    """
    earlier = [one for one in curve if one[0] <= 0.75 * steps]
    if len(curve) < 3 or not earlier:
        return None
    (first, before), (last, after) = earlier[-1], curve[-1]
    return (after - before) / ((last - first) * tokens_per_step) * 100_000


CONVERSION = "CONVERSION.md"
"""The name that the converted folder's own card has beside the healed one's."""

_FIELDS = ("base_model", "license", "license_name", "license_link", "library_name")

_OPTIMIZERS = {"muon": "Muon and AdamW", "adamw": "AdamW"}


def healed_card(folder: Path, config: Mapping[str, Any], report: Healing) -> str:
    """The text of a healed folder's ``README.md``; its conversion is told by `CONVERSION`, where there is a card.

    Args:
        folder: of the converted model, whose card has the licence and the base model.
        config: of the healed model.
        report: of the healing.
    """
    model_type = str(config["model_type"])
    parts = {
        "": [f"{_named(report.model)}, trained by headwise {_aim(report)}."],
        "Measured": list(_measured(report)),
        "How it was made": ["\n".join(_making(folder, report))],
        "How to load it": loading(
            layout_of(config), auto_class(dict(config)), model_type, coded=(folder / CODES).is_file()
        ),
        "What it is not": ["\n".join(_limits())],
    }
    tags = ["distillation"] if report.learns_of_teacher else []
    return card_text(_metadata(folder, tags), last_name(report.output), parts)


def _metadata(folder: Path, also: Sequence[str]) -> str:
    """The metadata of the converted folder's card, with other tags."""
    try:
        known = dict(metadata_load(folder / "README.md") or {})
    except Exception:  # no card, or neither UTF-8 nor YAML
        known = {}
    fields = {key: known[key] for key in _FIELDS if isinstance(known.get(key), str)}
    tags = [tag for tag in known.get("tags") or ["headwise", "kv-cache"] if isinstance(tag, str)]
    return str(
        ModelCardData(**{"library_name": "transformers", **fields}, tags=[*dict.fromkeys((*tags, *also))]).to_yaml()
    )


def _aim(report: Healing) -> str:
    if report.objective == "distill":
        return f"to behave like {_named(report.teacher)}"
    also = f", with layers' outputs like those of {_named(report.teacher)}" if report.learns_of_teacher else ""
    return f"to predict text{also}"


def _measured(report: Healing) -> Iterator[str]:
    if report.before is None or report.after is None:
        yield "Not measured."
        return
    rows = ["| text | tokens | ratio before healing | after | KL before, nats | after |", "|" + "---|" * 6]
    for old, new in zip(report.before.texts, report.after.texts, strict=True):
        cells = (
            _named(new.text),
            f"{new.tokens:,}",
            *(f"{score.perplexity_ratio:.4f}" for score in (old, new)),
            *(f"{score.kl:.4f}" for score in (old, new)),
        )
        rows.append(f"| {' | '.join(cells)} |")
    yield "\n".join(rows)
    yield f"The ratio is of perplexities, to {_named(report.teacher)}'s{_caching(report.after)}."


def _caching(evaluation: Evaluation) -> str:
    begin = f" that begin with {as_code(' '.join(evaluation.begin))}" if evaluation.begin else ""
    return f", in windows of {evaluation.window} tokens{begin}, in {evaluation.dtype}"


def _making(folder: Path, report: Healing) -> Iterator[str]:
    settings = "".join(f", {name} {value:g}" for name, value in report.objective_settings.items())
    yield f"- {report.objective}{settings}, on {report.tokens:,} tokens of {', '.join(map(_named, report.texts))}"
    yield f"- {report.steps:,} of {report.planned_steps:,} steps of {report.batch} × {report.window} tokens"
    yield f"- trained: {report.trained}, {report.trained_parameters:,} parameters"
    yield f"- by {_OPTIMIZERS[report.optimizer]}, at a learning rate of {report.learning_rate:.3g}"
    if report.cache is not None:
        yield f"- with keys and values rounded as {as_code(report.cache)} rounds them, and measured so"
    curve = ", ".join(f"{step}: {loss:.4f}" for step, loss in report.held_out)
    yield f"- loss on held-out windows, by step: {curve}"
    if report.slope is not None:
        yield f"- in the last quarter of the steps it changed by {report.slope:+.4f} nats for 100,000 tokens"
    if (folder / "README.md").is_file():
        yield f"- its conversion: {as_code(CONVERSION)}"
    if report.rollbacks:
        yield f"- the loss was not finite {report.rollbacks} times; the learning rate was halved each time"
    if report.best_step < report.steps:
        yield f"- the weights are those after step {report.best_step:,}, whose held-out loss was lowest"


def _limits() -> Iterator[str]:
    yield "- Not the original model, and not endorsed by its authors; its licence, uses and limits apply here too."
    yield "- Not tested beyond the table above: it was trained on few texts, and may have got worse at others."
    yield "- Not a compression of the weights: the cache is smaller, not the model."


def _named(source: str) -> str:
    return as_code(last_name(source))
