"""The model card of a converted folder: its source, its conversion, and the measured loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import ModelCard, ModelCardData, metadata_load
from jinja2 import StrictUndefined, Template

from headwise.base.printable import printable
from headwise.base.tables import Table
from headwise.costs.formulas import layer as layer_cost
from headwise.costs.formulas import model as model_cost
from headwise.models.specs import HOSTED_PREFIX, AttentionSpec, ModelSpec
from headwise.models.specs.sources import BUNDLED

Layout = Literal["stock", "headwise", "deepseek", "gguf"]
"""The owner of the classes that load a folder."""

_LICENSE = ("license", "license_name", "license_link")
_BUNDLED_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """The content of a model card.

    Attributes:
        name: the model's name.
        source: the source, as the user named it.
        before: the source's spec.
        after: the converted model's spec.
        dtype: the dtype of the weights and of the compared caches.
        layout: the owner of the classes that load the folder.
        method: the method that converted the layers.
        stages: the stages that were carried out, in order.
        calibration: the calibration texts.
        calibration_tokens: the number of calibration tokens; 0 without a text.
        calibration_window: tokens in each calibration window.
        evaluation: an `Evaluation` as a dict; None if the result was not evaluated.
        plain: the source in plain formats of about these bytes, a `PlainComparison` as a dict; None if not measured.
        base_model: the source's name on the hub, if it has one (`base_model_of`).
        license: the licence that the source's card names (`source_license`).
        versions: the versions of headwise and its libraries, by name.
        auto_class: the class of transformers that loads the folder.
        parameters: the numbers of parameters before and after.
        code_bytes: cache bytes a token, all layers, of a cache that is stored in codes; None without codes.
        seconds: the seconds that the conversion took; None leaves them out.
        notes: other facts for the user.
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
    plain: Mapping[str, Any] | None = None
    base_model: str | None = None
    license: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    auto_class: str = "AutoModelForCausalLM"
    parameters: tuple[int, int] | None = None
    code_bytes: int | None = None
    seconds: float | None = None
    notes: Sequence[str] = ()


def model_card(facts: CardFacts) -> str:
    """The text of a converted folder's ``README.md``, with the metadata that the hub reads.

    Of the source's own card it has the licence alone. Of paths it has the last name alone, so that nothing of the
    user's machine is in it.
    """
    old, new = facts.before.mechanism.upper(), facts.after.mechanism.upper()
    coded = facts.code_bytes is not None
    return rendered_card(
        "output/card.md",
        _metadata(facts),
        **vars(facts),
        **_attention(facts),
        # A conversion can keep the mechanism and change its sizes.
        change=f"from {old} to {new}" if old != new else f"within {new}",
        scores=None if facts.evaluation is None else _scores(facts.evaluation, facts.plain),
        facts=list(_measured(facts.evaluation or {}, facts.plain)),
        loading=loading(facts.layout, facts.auto_class, facts.after.model_type, coded=coded),
    )


def rendered_card(template: str, metadata: ModelCardData, **values: Any) -> str:
    """The text of a card from a Jinja template, in which ``code``, ``line`` and ``named`` write names as plain text.

    Args:
        template: the template's file within `headwise.conversion`.
        metadata: the metadata that the hub reads.
        values: the values that the template shows, by name.
    """
    escapes = {"code": as_code, "line": one_line, "last_name": last_name, "named": named}
    # Not by `ModelCard.from_template`, which writes nothing for a name that it is not given.
    content = _template(template).render(card_data=metadata.to_yaml(), **values, **escapes)
    return f"{ModelCard(content)}\n"


@cache
def _template(name: str) -> Template:
    text = (files("headwise.conversion") / name).read_text(encoding="utf-8")
    template: Template = Template(text, undefined=StrictUndefined)
    return template


def source_license(source: Path) -> dict[str, str]:
    """The licence that a model folder's own card names: ``license``, ``license_name``, ``license_link``, if any.

    A link to a file beside that card is left out: it leads nowhere in another folder.
    """
    try:
        metadata = metadata_load(source / "README.md") or {}
    except Exception:  # no card, or neither UTF-8 nor YAML
        return {}
    license_fields = {key: metadata[key] for key in _LICENSE if isinstance(metadata.get(key), str)}
    if "://" not in license_fields.get("license_link", ""):
        license_fields.pop("license_link", None)
    return license_fields


def base_model_of(source: str | Path) -> str | None:
    """A source's name on the hub, if the user's name for it says so; otherwise None."""
    name = str(source)
    if name.lower() == BUNDLED:
        return _BUNDLED_MODEL
    return name.removeprefix("hf://").partition("@")[0] if name.startswith("hf://") else None


def _metadata(facts: CardFacts) -> ModelCardData:
    layout_tags: dict[str, list[str]] = {"deepseek": ["deepseek_v3"], "gguf": ["gguf", "llama.cpp"]}
    tags = ["headwise", facts.after.mechanism, "kv-cache", *layout_tags.get(facts.layout, [])]
    license_fields = {key: value for key, value in facts.license.items() if key in _LICENSE}
    library = "gguf" if facts.layout == "gguf" else "transformers"
    return ModelCardData(library_name=library, base_model=facts.base_model, tags=tags, **license_fields)


def _attention(facts: CardFacts) -> dict[str, str | None]:
    """The table of layers, and the bytes of caches before and after."""
    before, after, dtype = facts.before, facts.after, facts.dtype
    rows = [
        (kind, index, _label(old), _label(new), f"{layer_cost.cache_values(old)} → {layer_cost.cache_values(new)}")
        for kind, olds, news in (
            ("", before.layers, after.layers),
            ("cross ", before.cross_layers, after.cross_layers),
        )
        for index, (old, new) in enumerate(zip(olds, news, strict=True))
    ]
    table = Table(["layers", "before", "after", "numbers cached a token and layer"], words=range(4))
    for (kind, *sizes), run in groupby(rows, key=lambda row: (row[0], *row[2:])):
        indices = [row[1] for row in run]
        span = f"{indices[0]}" if len(indices) == 1 else f"{indices[0]}–{indices[-1]}"
        table.add(f"{kind}{span}", *sizes)
    codes = None
    if facts.code_bytes is not None and model_cost.cache_bytes_per_token(before, dtype):
        of_bfloat16 = facts.code_bytes / model_cost.cache_bytes_per_token(before, "bfloat16")
        codes = f"{facts.code_bytes:,} bytes a token ({of_bfloat16:.1%} of the source's in bfloat16)"
    return {
        "layers": table.markdown(),
        "cache": _change(facts, model_cost.cache_bytes_per_token),
        "codes": codes,
        "source_cache": _change(facts, model_cost.source_cache_bytes_per_token),
    }


def _change(facts: CardFacts, count: Callable[[ModelSpec, str], int]) -> str | None:
    """The bytes before and after; None where there were none."""
    old, new = (count(model, facts.dtype) for model in (facts.before, facts.after))
    return f"{old:,} → {new:,} bytes in {facts.dtype} ({new / old:.1%})" if old else None


def _scores(evaluation: Mapping[str, Any], plain: Mapping[str, Any] | None) -> str:
    """The table of texts, with a row for all together where there are several, and one for each plain format."""
    measured = ("KL, nats", "its 99.9 %", "top-1 agreement", "top-1 changed")
    table = Table(["text", "tokens", "perplexity before", "after", "ratio", *measured])
    total = {**evaluation, "text": "all"}
    texts = list(evaluation.get("texts") or ())
    rows = [
        (as_code(", ".join(last_name(name) for name in str(score["text"]).split(", "))), score)
        for score in ([*texts, total] if len(texts) > 1 else texts or [evaluation])
    ]
    rows += [
        (f"the source's cache in {as_code(each['format'])}", each["evaluation"])
        for each in ([] if plain is None else plain["formats"])
    ]
    for name, score in rows:
        table.add(
            name,
            f"{score['tokens']:,}",
            _number(score.get("reference_perplexity"), ".3f"),
            _number(score["perplexity"], ".3f"),
            _number(score.get("perplexity_ratio"), ".3f"),
            _number(score.get("kl"), ".4f"),
            _number(score.get("kl_999"), ".4f"),
            _number(score.get("top1_agreement"), ".1%"),
            _number(score.get("top1_changed"), ","),
        )
    return table.markdown()


def _measured(evaluation: Mapping[str, Any], plain: Mapping[str, Any] | None) -> Iterator[str]:
    """The sentences on what else was measured."""
    if plain is not None:
        yield one_line(plain["line"])
    if window := evaluation.get("window"):
        yield f"windows of {window} tokens, in {evaluation.get('dtype', 'their dtype')}"
    if (after := evaluation.get("decode_ms")) is not None:
        place = f"{evaluation.get('device', 'cpu')}, {evaluation.get('threads', 1)} threads"
        context = f"{evaluation['context']} tokens in the cache" if "context" in evaluation else "a cache"
        before = _number(evaluation.get("reference_decode_ms"), ".2f")
        yield f"decoding a token with {context}: {before} → {after:.2f} ms ({place})"


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The owner of the classes that load a folder of this config."""
    model_type = str(config["model_type"])
    if model_type.startswith(HOSTED_PREFIX):
        return "headwise"
    return "deepseek" if model_type == "deepseek_v3" else "stock"


def loading(layout: Layout, auto_class: str, model_type: str, *, coded: bool) -> str:
    """The part of a card that says how the folder is loaded.

    Args:
        layout: the owner of the classes that load the folder.
        auto_class: the class of transformers that loads the folder.
        model_type: the ``model_type`` of the folder's config.
        coded: whether the cache is stored in codes.
    """
    if coded:
        words = "`headwise.load` stores the cache in codes; transformers' own loading would store it whole."
        code = "```python\nimport headwise\n\nmodel = headwise.load(folder)\n```"
        served = "Over HTTP (`transformers serve` would ignore the codes, or refuse the folder):"
        return f"{words}\n\n{code}\n\n{served}\n\n```sh\nheadwise serve folder\n```"
    if layout == "gguf":
        words = "llama.cpp, and programs that are built on it, load `model.gguf`; so does `headwise.load(folder)`."
        return f"{words}\n\n```sh\nllama-server -m model.gguf\n```"
    load = f"model = {auto_class}.from_pretrained(folder)"
    code = f"from transformers import {auto_class}\n\n{load}"
    if layout == "headwise":
        words = (
            "With headwise installed, transformers loads it like any model; so does `headwise.load(folder)`. "
            "`headwise engines folder` says which other programs serve it."
        )
        code = f"import headwise.hf  # registers the model's class with transformers\n{code}"
    elif layout == "deepseek":
        words = (
            "A stock `deepseek_v3` model: transformers loads it without headwise, and caches the latent. "
            "`headwise.optimize(model)` also attends to the latent without decoding keys and values."
        )
    else:
        words = f"A stock `{model_type}` model: transformers loads it without headwise."
    return f"{words}\n\n```python\n{code}\n```"


def _label(spec: AttentionSpec) -> str:
    window = f", window {spec.sliding_window}" if spec.sliding_window else ""
    return f"{spec.label}{window}"


def last_name(source: str | Path) -> str:
    """A source's name without its folders, which are private to the user's machine."""
    name = str(source)
    return name if "://" in name or "/" not in name.replace("\\", "/") else Path(name.replace("\\", "/")).name


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def one_line(text: str) -> str:
    """Text as one line of plain Markdown: no HTML, no link, no heading."""
    return re.sub(r"([\\`*<>\[\]|])", r"\\\1", printable(" ".join(text.split())))


def as_code(text: str) -> str:
    """Text as code in one line of Markdown."""
    return f"`{printable(' '.join(text.replace('`', chr(39)).split()))}`"


def named(source: str | Path) -> str:
    """A source as code, without its folders."""
    return as_code(last_name(source))
