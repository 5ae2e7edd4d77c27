"""The model card of a converted folder: what it came from, what was done to it and what that did."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from huggingface_hub import ModelCardData, metadata_load

from headwise.checkpoints import TensorInfo, dtype_name, versions
from headwise.conversion.planning.plan import ConversionPlan
from headwise.cost import layer as layer_cost
from headwise.cost import model as model_cost
from headwise.hf import auto_class
from headwise.specs import HOSTED_PREFIX, AttentionSpec, ModelSpec, read_config
from headwise.specs.sources import BUNDLED

Layout = Literal["stock", "headwise", "deepseek"]

_LICENSE = ("license", "license_name", "license_link")
_BUNDLED_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What a model card tells.

    Attributes:
        name: the model's, such as its folder's.
        source: what it was converted from, as the user named it.
        before: what that is.
        after: what it became.
        dtype: of the weights and of the caches that are compared.
        layout: whose classes run the folder.
        method: how the layers were made.
        stages: the method's steps that were done, in order.
        calibration: the texts it was calibrated on.
        calibration_tokens: how many tokens of them; 0 for none.
        calibration_window: tokens in each window of them.
        evaluation: an `Evaluation` as a dict, or None where nothing was measured.
        base_model: the source's name on the hub, when known (`base_model_of`).
        license: the source's, as its card names it (`source_license`).
        versions: of what did it, by name.
        auto_class: of transformers, that loads it.
        parameters: learned numbers before and after.
        seconds: that the conversion took; None leaves them out.
        notes: what else a user should know.
    """

    name: str
    source: str
    before: ModelSpec
    after: ModelSpec
    dtype: str
    layout: Layout
    method: str
    stages: Sequence[str] = ()
    calibration: Sequence[str | Path] = ()
    calibration_tokens: int = 0
    calibration_window: int = 0
    evaluation: Mapping[str, Any] | None = None
    base_model: str | None = None
    license: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    auto_class: str = "AutoModelForCausalLM"
    parameters: tuple[int, int] | None = None
    seconds: float | None = None
    notes: Sequence[str] = ()


def model_card(facts: CardFacts) -> str:
    """The text of a converted folder's ``README.md``, with the metadata that the hub reads.

    Nothing of the source's own card is in it but its licence, and no folder of the machine it was made on.
    """
    parts = {
        "": [_introduction(facts)],
        "Attention": _attention(facts),
        "Measured": list(_measured(facts.evaluation)),
        "How it was made": list(_making(facts)),
        "How to load it": _loading(facts),
        "What it is not": list(_limits(facts)),
    }
    text = [f"---\n{_metadata(facts)}---\n\n# {_line(facts.name)}"]
    for title, blocks in parts.items():
        text += [f"## {title}"] if title else []
        text += blocks
    return "\n\n".join(text) + "\n"


class CalibrationFacts(NamedTuple):
    """What a model was calibrated on.

    Attributes:
        texts: by name.
        tokens: how many of them; 0 for none.
        window: tokens in each window.
    """

    texts: Sequence[str | Path] = ()
    tokens: int = 0
    window: int = 0


def card_facts(
    plan: ConversionPlan,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    *,
    source: str,
    calibration: CalibrationFacts,
    notes: Sequence[str],
) -> CardFacts:
    """What there is to tell of a conversion whose folder is written.

    Args:
        plan: the conversion.
        config: of the result.
        tensors: of the result.
        source: as the user named it.
        calibration: what it was calibrated on.
        notes: see `CardFacts`.
    """
    after, base_model = read_config(config), base_model_of(source)
    hosted = str(config["model_type"]).startswith(HOSTED_PREFIX)
    return CardFacts(
        name=f"{(base_model or _place(source)).rpartition('/')[2]}, {after.label}",
        source=source,
        before=plan.before,
        after=after,
        dtype=dtype_name(plan.dtype),
        layout="headwise" if hosted else "deepseek" if config["model_type"] == "deepseek_v3" else "stock",
        method=plan.method.spelling,
        stages=plan.stages if calibration.tokens else [],
        calibration=calibration.texts,
        calibration_tokens=calibration.tokens,
        calibration_window=calibration.window,
        base_model=base_model,
        license=source_license(plan.checkpoint.path),
        versions=versions(),
        auto_class=auto_class(dict(config)),
        parameters=(parameters_of(plan.checkpoint.tensors), parameters_of(tensors)),
        notes=notes,
    )


def parameters_of(tensors: Mapping[str, TensorInfo]) -> int:
    """How many learned numbers there are in a folder's tensors."""
    return sum(info.numel for info in tensors.values())


def source_license(source: Path) -> dict[str, str]:
    """The licence that a model folder's own card names: ``license``, ``license_name``, ``license_link``, if any.

    A link to a file beside that card leads nowhere in another folder, and is left out.
    """
    try:
        found = metadata_load(source / "README.md") or {}
    except Exception:  # no card, no UTF-8, or YAML of any kind that is none
        return {}
    named = {key: found[key] for key in _LICENSE if isinstance(found.get(key), str)}
    if "://" not in named.get("license_link", ""):
        named.pop("license_link", None)
    return named


def base_model_of(source: str | Path) -> str | None:
    """The hub's name of a source, where what the user typed says it."""
    name = str(source)
    if name.lower() == BUNDLED:
        return _BUNDLED_MODEL
    return name.removeprefix("hf://").partition("@")[0] if name.startswith("hf://") else None


def _metadata(facts: CardFacts) -> str:
    tags = ["headwise", facts.after.mechanism, "kv-cache", *(["deepseek_v3"] if facts.layout == "deepseek" else [])]
    kept = {key: value for key, value in facts.license.items() if key in _LICENSE}
    data = ModelCardData(library_name="transformers", base_model=facts.base_model, tags=tags, **kept)
    return f"{data.to_yaml()}\n"


def _introduction(facts: CardFacts) -> str:
    linked = _code(_place(facts.source))
    if facts.base_model:
        linked = f"[{_line(facts.base_model)}](https://huggingface.co/{_line(facts.base_model)})"
    old, new = facts.before.mechanism.upper(), facts.after.mechanism.upper()
    # The same mechanism may have other sizes.
    change = f"from {old} to {new}" if old != new else f"within {new}"
    return f"{linked} with its attention converted {change} by headwise."


def _attention(facts: CardFacts) -> list[str]:
    before, after = facts.before, facts.after
    rows = [
        (kind, at, _label(old), _label(new), f"{layer_cost.cache_values(old)} → {layer_cost.cache_values(new)}")
        for kind, olds, news in (
            ("", before.layers, after.layers),
            ("cross ", before.cross_layers, after.cross_layers),
        )
        for at, (old, new) in enumerate(zip(olds, news, strict=True))
    ]
    table = ["| layers | before | after | numbers cached a token and layer |", "|---|---|---|---|"]
    for (kind, *sizes), run in groupby(rows, key=lambda row: (row[0], *row[2:])):
        indices = [row[1] for row in run]
        span = f"{indices[0]}" if len(indices) == 1 else f"{indices[0]}–{indices[-1]}"
        table.append(f"| {kind}{span} | {' | '.join(sizes)} |")
    return ["\n".join(table), *_totals(facts)]


def _totals(facts: CardFacts) -> Iterator[str]:
    before, after, dtype = facts.before, facts.after, facts.dtype
    lines = []
    if old := model_cost.cache_bytes_per_token(before, dtype):
        new = model_cost.cache_bytes_per_token(after, dtype)
        lines.append(f"- cache a token, all layers: {old:,} → {new:,} bytes in {dtype} ({new / old:.1%})")
    else:
        lines.append("- cache: none, an encoder keeps none")
    if old := model_cost.source_cache_bytes_per_token(before, dtype):
        new = model_cost.source_cache_bytes_per_token(after, dtype)
        share = f"{new / old:.1%}"
        lines.append(f"- cache of each of the encoder's outputs: {old:,} → {new:,} bytes in {dtype} ({share})")
    if facts.parameters:
        lines.append(f"- parameters: {facts.parameters[0]:,} → {facts.parameters[1]:,}")
    yield "\n".join(lines)


def _measured(evaluation: Mapping[str, Any] | None) -> Iterator[str]:
    if evaluation is None:
        yield "Not measured."
        return
    rows = ["| text | tokens | perplexity before | after | ratio | KL, nats | top-1 agreement |", "|" + "---|" * 7]
    whole = {**evaluation, "text": "all"}
    texts = list(evaluation.get("texts") or ())
    for score in [*texts, whole] if len(texts) > 1 else texts or [evaluation]:
        cells = (
            _cell(", ".join(_place(name) for name in str(score["text"]).split(", "))),
            f"{score['tokens']:,}",
            _number(score.get("reference_perplexity"), ".3f"),
            _number(score["perplexity"], ".3f"),
            _number(score.get("perplexity_ratio"), ".3f"),
            _number(score.get("kl"), ".4f"),
            _number(score.get("top1_agreement"), ".1%"),
        )
        rows.append(f"| {' | '.join(cells)} |")
    yield "\n".join(rows)
    lines = []
    if window := evaluation.get("window"):
        lines.append(f"- windows of {window} tokens, in {evaluation.get('dtype', 'their dtype')}")
    if (after := evaluation.get("decode_ms")) is not None:
        place = f"{evaluation.get('device', 'cpu')}, {evaluation.get('threads', 1)} threads"
        context = f"{evaluation['context']} tokens in the cache" if "context" in evaluation else "a cache"
        before = _number(evaluation.get("reference_decode_ms"), ".2f")
        lines.append(f"- one more token with {context}: {before} → {after:.2f} ms ({place})")
    if lines:
        yield "\n".join(lines)


def _making(facts: CardFacts) -> Iterator[str]:
    lines = [f"- source: {_code(_place(facts.source))}", f"- method: {_line(facts.method)}"]
    if facts.stages:
        lines.append(f"- steps: {', '.join(map(_line, facts.stages))}")
    if facts.calibration_tokens:
        texts = ", ".join(_code(_place(text)) for text in facts.calibration)
        windows = f", in windows of {facts.calibration_window}" if facts.calibration_window else ""
        lines.append(f"- calibrated on {facts.calibration_tokens:,} tokens of {texts or 'a text'}{windows}")
    else:
        lines.append("- calibrated on nothing: the weights alone decided")
    if facts.seconds is not None:
        lines.append(f"- took {facts.seconds:,.0f} s")
    if facts.versions:
        lines.append(f"- versions: {', '.join(f'{name} {number}' for name, number in facts.versions.items())}")
    lines += [f"- {_line(note)}" for note in facts.notes]
    yield "\n".join(lines)


def _loading(facts: CardFacts) -> list[str]:
    load = f"model = {facts.auto_class}.from_pretrained(folder)"
    code = f"from transformers import {facts.auto_class}\n\n{load}"
    if facts.layout == "headwise":
        words = "With headwise installed, transformers loads it like any model; so does `headwise.load(folder)`."
        code = f"import headwise.hf  # tells transformers of the model's class\n{code}"
    elif facts.layout == "deepseek":
        words = (
            "A stock `deepseek_v3` model: transformers loads it alone, and caches the latent. With headwise, "
            "`headwise.optimize(model)` also attends to it without decoding keys and values."
        )
    else:
        words = f"A stock `{facts.after.model_type}` model: transformers loads it alone."
    return [words, f"```python\n{code}\n```"]


def _limits(facts: CardFacts) -> Iterator[str]:
    lines = [
        "- Not trained: no weight was moved by a gradient through the whole model, so some quality is lost wherever "
        "the cache is smaller than the source needs.",
        "- Not the original, and not endorsed by those who made it; its licence, uses and limits hold here too.",
        "- Not tested beyond the table above: other languages, tasks, longer texts and its safety may have suffered "
        "more."
        if facts.evaluation is not None
        else "- Not tested: measure it with `headwise evaluate` before it is used.",
        "- Not a compression of the weights: what got smaller is the cache.",
    ]
    if facts.layout == "headwise":
        lines.append("- Not for tools that do not know headwise, such as vLLM or llama.cpp.")
    yield "\n".join(lines)


def _label(spec: AttentionSpec) -> str:
    window = f", window {spec.sliding_window}" if spec.sliding_window else ""
    return f"{spec.label}{window}"


def _place(source: str | Path) -> str:
    """A source without the folders it lies in: they are the maker's, and nobody else's business."""
    name = str(source)
    return name if "://" in name or "/" not in name.replace("\\", "/") else Path(name.replace("\\", "/")).name


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _line(text: str) -> str:
    """Text that begins nothing in Markdown but a word: one line, no HTML, no link."""
    return re.sub(r"([\\`*<>\[\]|])", r"\\\1", " ".join(text.split()))


def _cell(text: str) -> str:
    return _code(text).replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"
