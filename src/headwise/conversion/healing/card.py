"""The model card of a healed folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, metadata_load

from headwise.conversion.healing.report import Healing
from headwise.conversion.output.card import as_code, card_text, last_name, layout_of, loading
from headwise.measure.evaluation import Evaluation
from headwise.runtime.hf import auto_class
from headwise.runtime.quantization.files import FILE as CODES

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
    if report.rank_curriculum is not None:
        yield (
            f"- latents fell to {report.rank_curriculum:g} of their channels in the first half of the steps: what "
            "was measured before healing is of the larger cache"
        )
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
        among = "" if report.rank_curriculum is None else " of those after the channels were gone"
        yield f"- the weights are those after step {report.best_step:,}, whose held-out loss was lowest{among}"


def _limits() -> Iterator[str]:
    yield "- Not the original model, and not endorsed by its authors; its licence, uses and limits apply here too."
    yield "- Not tested beyond the table above: it was trained on few texts, and may have got worse at others."
    yield "- Not a compression of the weights: the cache is smaller, not the model."


def _named(source: str) -> str:
    return as_code(last_name(source))
