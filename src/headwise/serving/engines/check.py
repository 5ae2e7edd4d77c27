"""`engines`: what every engine would do with a model."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from headwise.base.documents import as_document
from headwise.base.type_checks import typed
from headwise.costs.prediction import SERVING_ENGINES, engine_caches
from headwise.errors import ArgumentError
from headwise.models.specs import locate
from headwise.serving.engines.facts import ModelFacts
from headwise.serving.engines.rules import ENGINES, Engine


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one engine does with a model.

    Attributes:
        engine: its name.
        installed: its version here; None where it is not installed.
        serves: whether it loads the model and computes what the model is.
        why: the decisive condition where it does not.
        instead: what to write for it where it does not.
        command: the command line, or the Python expression, that starts it.
        caution: what must be known besides.
        checked: what the engine's conditions were checked against.
        caches: the options of the engine's own small caches that suit a model that it serves.
    """

    engine: str
    installed: str | None
    serves: bool
    why: str | None = None
    instead: str | None = None
    command: str | None = None
    caution: str | None = None
    checked: str
    caches: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """What every engine does with a model.

    Attributes:
        source: the model, as the user named it.
        model_type: transformers' name of its architecture.
        label: its attention.
        verdicts: one an engine.
    """

    source: str
    model_type: str
    label: str
    verdicts: tuple[Verdict, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return as_document(self)


@typed
def engines(source: str | Path, *, tensor_parallel: int = 1) -> EngineReport:
    """Say which engines serve a model, why others do not, and what to write for them instead.

    For example ``engines("./half").verdicts[0].serves``. Nothing is run: the conditions are those of the engines'
    loaders, of the versions that `Verdict.checked` names.

    Args:
        source: a model folder, a ``.gguf``, ``smollm2-135m`` or ``hf://owner/name``.
        tensor_parallel: devices that are to share out the heads of the model.

    Raises:
        HeadwiseError: the model cannot be read, or ``tensor_parallel`` is below 1.
    """
    if locate(source).kind in ("catalog", "config"):
        rule = (
            "has no tensors, on which it depends who serves a model: give its folder, a .gguf or hf://…; "
            f"headwise advise {source} --engine NAME reads a config alone"
        )
        raise ArgumentError("source", str(source), rule)
    if tensor_parallel < 1:
        raise ArgumentError("tensor_parallel", tensor_parallel, "must be at least 1")
    facts = ModelFacts.of(source, tensor_parallel)
    return EngineReport(
        source=str(source),
        model_type=facts.model_type,
        label=facts.spec.label,
        verdicts=tuple(_verdict(engine, facts) for engine in ENGINES),
    )


def _verdict(engine: Engine, facts: ModelFacts) -> Verdict:
    refusal = engine.refusal(facts)
    installed = _installed(engine)
    if refusal is not None:
        why, instead = refusal
        return Verdict(
            engine=engine.name, installed=installed, serves=False, why=why, instead=instead, checked=engine.checked
        )
    return Verdict(
        engine=engine.name,
        installed=installed,
        serves=True,
        command=engine.command(facts),
        caution=engine.caution(facts),
        checked=engine.checked,
        caches=_caches(engine.name, facts),
    )


def _caches(title: str, facts: ModelFacts) -> tuple[str, ...]:
    """The options of an engine's own small caches for a model; none of headwise's layers is stored in them."""
    if facts.is_own:
        return ()
    return tuple(
        cache.words
        for name, engine in SERVING_ENGINES.items()
        if engine.title == title
        for _, cache in engine_caches(facts.spec, name).values()
    )


def _installed(engine: Engine) -> str | None:
    """The version of an installed engine, or ``yes`` where only its program is found."""
    for package in (engine.package, f"{engine.package}-cpu"):
        try:
            return version(package)
        except (PackageNotFoundError, ValueError):
            continue
    return "yes" if engine.program and shutil.which(engine.program) else None
