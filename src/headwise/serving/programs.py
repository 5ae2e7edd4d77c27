"""Which engines run what an option makes, and what is typed for it.

`headwise engines FOLDER` says it of a finished folder, condition by condition, and docs/engines.md of every output
that was run.
"""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from functools import partial
from pathlib import Path

from headwise.costs.prediction import SERVING_ENGINES, Pass, ServingEngine, cache_of, engine_caches
from headwise.errors import HeadwiseError
from headwise.models.families import family_names, family_of
from headwise.models.specs import GGUF_ARCHITECTURES, GroupedSpec, ModelSpec, locate

OWN = "headwise, transformers"
"""What loads a folder with headwise's layers; transformers after ``import headwise.hf``."""

UNCHANGED = "all, as now"
"""Said of what needs nothing that the original does not need."""


def conversion_format(target: str, model: ModelSpec, engine: str) -> str | None:
    """The further options of `headwise convert` for what an engine is to run; None where it cannot run the result.

    For example ``conversion_format("mla:0.5", read_spec("llama-2-7b"), "mlx")`` is ``"--format deepseek"``.

    Args:
        target: a conversion, as `headwise.decide.advice.Option.target` has it.
        model: the source.
        engine: the name of the engine.
    """
    if "@" in target:
        return None  # codes of a cache, which headwise alone reads
    served = SERVING_ENGINES[engine]
    if target.startswith("mla"):
        return served.mla if engine == "transformers" or _is_plain(model) else None
    if not served.reads_folders:
        return "--format gguf" if model.model_type in GGUF_ARCHITECTURES else None
    return "" if engine == "transformers" or not _lacks_kv_heads(model) else None


def _lacks_kv_heads(model: ModelSpec) -> bool:
    """Whether GQA of a model needs headwise's layers, because its own class has a key–value head a query head."""
    return model.model_type in family_names() and not family_of(model.model_type).stock_kv_heads


def _is_plain(model: ModelSpec) -> bool:
    """Whether a model's MLA is written as stock classes: plain RoPE in all layers, and no windows."""
    has_blocks = model.model_type in family_names() and family_of(model.model_type).deepseek_blocks
    return has_blocks and all(
        isinstance(layer, GroupedSpec)
        and layer.rope is not None
        and layer.rope.rope_type == "default"
        and layer.sliding_window is None
        and layer.qk_norm is None
        for layer in model.layers
    )


def runs(target: str, model: ModelSpec, engine: str) -> bool:
    """Whether an engine runs an option.

    For example ``runs("vllm:fp8", read_spec("llama-2-7b"), "mlx")`` is False.

    Args:
        target: the option's `headwise.decide.advice.Option.target`.
        model: the source.
        engine: the name of the engine.
    """
    if target == "as it is":
        return True
    if _is_conversion(target):
        return conversion_format(target, model, engine) is not None
    return target.startswith(f"{engine}:")


def _is_conversion(target: str) -> bool:
    return re.match(r"(mha|mqa|gqa|mla|same)(?![a-z])", target) is not None


def served_by(target: str, model: ModelSpec) -> str:
    """The programs that run an option, in words.

    For example ``served_by("mla@0.5", read_spec("llama-2-7b"))`` is ``"headwise"``.

    Args:
        target: the option's `headwise.decide.advice.Option.target`.
        model: the source.
    """
    if target == "as it is":
        return UNCHANGED
    if not _is_conversion(target):
        engine = SERVING_ENGINES.get(target.partition(":")[0])
        return "headwise" if engine is None else engine.title
    if "@" in target:
        return "headwise"
    if not target.startswith("mla"):
        return OWN if _lacks_kv_heads(model) else UNCHANGED
    return "any, by --format" if _is_plain(model) else OWN


def commands(
    target: str, convert_to: str | None, model: ModelSpec, source: str, engine: str | None, step: Pass | None = None
) -> tuple[str, ...]:
    """The command lines that serve an option, one after the other; none where headwise knows of no engine.

    For example ``commands("vllm:fp8", None, read_spec("llama-2-7b"), "./llama", None)`` is
    ``("vllm serve ./llama --kv-cache-dtype fp8",)`` where that folder is.

    Args:
        target: the option's `headwise.decide.advice.Option.target`.
        convert_to: the options of ``headwise convert`` that make it; None where nothing is converted.
        model: the source.
        source: the model's path or name, as the user gave it.
        engine: the engine that is to run the option; when None, the engine of a cache of an engine's own.
        step: the decode step whose sequences it is to hold; when None the engine chooses its sizes.
    """
    name = engine or target.partition(":")[0]
    if name not in SERVING_ENGINES:
        return (_convert(source, convert_to, ""),) if convert_to else ()
    served = SERVING_ENGINES[name]
    context, batch, ranks = (None, 1, 1) if step is None else (step.total, step.batch, step.ranks)
    command = partial(served.command, context=context, batch=batch, ranks=ranks)
    if convert_to is not None:
        made = _convert(source, convert_to, conversion_format(target, model, name) or "")
        is_own = name == "transformers" and (target.startswith("mla") or _lacks_kv_heads(model))
        imported = "import headwise.hf; " if is_own else ""
        return made, imported + command("OUT" if served.reads_folders else "OUT/model.gguf")
    steps, path = _path(source, served)
    if target == "as it is":
        return (*steps, command(path))
    if (cache := engine_caches(model, name).get(target)) is None:
        return ()
    if cache.is_simulated and all(isinstance(layer, GroupedSpec) for layer in model.layers):
        prepared = "PREPARED" if served.reads_folders else "prepared.gguf"
        steps, path = (*steps, f"headwise prepare {path} {prepared} --for {target}"), prepared
    return (*steps, command(path, cache))


def serving_commands(model: str, target: str) -> tuple[str, ...]:
    """The command lines that serve a model at hand with an engine's own cache, one after the other.

    For example ``serving_commands("./prepared", "vllm:fp8")`` is ``("vllm serve ./prepared --kv-cache-dtype fp8",)``.

    Args:
        model: the path of the model.
        target: the engine and the cache, as in `headwise.decide.advice.Option.target`.
    """
    engine, _, name = target.partition(":")
    served = SERVING_ENGINES[engine]
    steps, path = ((), shlex.quote(model)) if served.reads_folders else _path(model, served)
    return (*steps, served.command(path, cache_of(engine, name)))


def with_weights(source: str) -> str:
    """A model's name in a command line that reads its weights: ``MODEL`` where the source has none.

    For example ``with_weights("llama-3-8b")`` is ``"MODEL"``: the catalog has configs alone.

    Args:
        source: the model's path or name, as the user gave it.
    """
    with suppress(HeadwiseError):
        if locate(source).kind not in ("catalog", "config"):
            return shlex.quote(source)
    return "MODEL"


def _convert(source: str, options: str, further: str) -> str:
    return " ".join(
        filter(None, ("headwise convert", with_weights(source), "OUT", options, further, "--calibrate TEXT"))
    )


def _path(source: str, engine: ServingEngine) -> tuple[tuple[str, ...], str]:
    """What is done first so that an engine finds a model, and the model's name in its command line."""
    if not engine.reads_folders:
        if source.endswith(".gguf"):
            return (), shlex.quote(source)
        is_folder = Path(source).is_dir()
        return ((f"headwise export {shlex.quote(source)} {engine.model}",) if is_folder else ()), engine.model
    if source.startswith("hf://"):
        return (), shlex.quote(source.removeprefix("hf://"))
    return (), shlex.quote(source) if Path(source).is_dir() else engine.model
