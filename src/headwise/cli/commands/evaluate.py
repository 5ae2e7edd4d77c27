"""``headwise evaluate``: measure a model on text and on tasks, beside its reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.base.options import (
    CACHE,
    ENGINE,
    ChoiceOptions,
    ContinuationOptions,
    EngineOptions,
    EvaluateOptions,
    FactOptions,
    ItemOptions,
    PlantedOptions,
    PythonOptions,
    RetrievalOptions,
    RulerOptions,
    RulerTaskOptions,
    TextOptions,
    declarations,
    option,
)
from headwise.base.progress import Progress
from headwise.cli.app import MEASURE, SOURCES, Json, app, emit, progress_bar
from headwise.cli.options import SHOW, takes_options
from headwise.cli.pages import Html, first_question, model_page, refuse_no_page, write_page
from headwise.cli.torchrun import as_one_process
from headwise.errors import ArgumentError, naming


class TaskOptions(TextOptions, ContinuationOptions, ItemOptions, FactOptions, RulerTaskOptions, PythonOptions):
    """The texts and tasks that the command evaluates a model on."""

    text: Sequence[str | Path] = option("a UTF-8 file to predict", default=(), metavar="FILE")
    choices: str | Path | None = option(
        "a .jsonl of questions, choices and answers, such as PIQA", default=None, metavar="FILE"
    )
    planted: int | None = option(
        "plant a fact in a context this long of the first text, and ask for it", default=None, metavar="TOKENS"
    )
    ruler: int | None = option(
        "ask RULER's synthetic tasks, at most this long, in haystacks of the first text",
        default=None,
        metavar="TOKENS",
    )
    retrieval: str | Path | None = option(
        "a .jsonl of questions and passages, for an encoder", default=None, metavar="FILE"
    )
    cache: Sequence[str] = option(CACHE, default=(), metavar="FORMAT")
    engine: str | None = option(ENGINE, default=None)
    by_position: bool = option("show the cost by position in the window", default=False, identity=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.text or self.choices or self.retrieval):
            raise ArgumentError("text", None, "is required, unless --choices or --retrieval is given")
        if self.planted is not None and not self.text:
            raise ArgumentError("planted", self.planted, "needs --text, to plant the fact in")
        if self.ruler is not None and not self.text:
            raise ArgumentError("ruler", self.ruler, "needs --text, to cut haystacks from")
        if self.continuations and not self.text:
            raise ArgumentError("continuations", self.continuations, "needs --text, to cut prompts from")
        if self.cache and not (self.text or self.choices):
            raise ArgumentError("cache", self.cache[0], "needs --text or --choices: an encoder has no cache")
        declared = declarations(TaskOptions)
        others = ("choices", "planted", "ruler", "retrieval", "continuations", "dtype", "device")
        for name in others if self.engine is not None else ():
            if (given := getattr(self, name)) != declared[name].default:
                raise ArgumentError(
                    name, given, "must be left out with --engine, which runs models as they are, on text"
                )


@app.command(
    epilog="Example: headwise evaluate ./smollm2-mla --against smollm2-135m --text text.txt --windows 6",
    rich_help_panel=MEASURE,
)
@takes_options(TaskOptions)
def evaluate(
    model: Annotated[str, typer.Argument(help=SOURCES, show_default=False)],
    options: TaskOptions,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model on text (perplexity, divergence, agreement, cache bytes, time a token) and on tasks."""
    refuse_no_page(html)
    with as_one_process(), progress_bar() as progress:
        from headwise.base.processes import process_index

        _check_caches(options)
        found = [_results(model, options, cache, progress) for cache in options.cache or (None,)]
        is_first = process_index() == 0
    if not is_first:
        return
    documents = [_document(model, options.against, results) for results in found]
    if html is not None:
        from headwise.models.specs import read_spec

        spec = read_spec(model)
        write_page(html, model_page(model, spec, first_question(spec), documents=documents), is_silent=as_json)
    if as_json:
        about = {"made_with": _circumstances(model, options, found[0])}
        emit(({"caches": documents} if len(documents) > 1 else documents[0]) | about)
        return
    for task, result in (each for results in found for each in results.items()):
        SHOW[task](result)
        if task == "text" and options.by_position:
            SHOW["by_position"](result)


def _check_caches(options: TaskOptions) -> None:
    """Refuse unknown formats before the first of several is measured."""
    from headwise.runtime.quantization.formats import parse_format
    from headwise.serving.engines import RUNNABLE

    for cache in options.cache:
        if options.engine is None:
            parse_format(cache, name="cache")
        elif options.engine in RUNNABLE:
            RUNNABLE[options.engine].check_cache(cache)


def _circumstances(model: str, options: TaskOptions, results: dict[str, Any]) -> dict[str, Any]:
    """What the results of all tasks depend on besides the model."""
    from headwise.measure.texts.circumstances import circumstances
    from headwise.models.checkpoints import model_path

    texts = [*(options.text or ()), *(file for file in (options.choices, options.retrieval) if file)]
    dtype, device = next(iter(results.values())).dtype, options.device
    return circumstances(model_path(model), dtype=dtype, texts=texts, device=device)


def _document(model: str, against: Any, results: dict[str, Any]) -> dict[str, Any]:
    """The results of all tasks with one cache, as JSON-able values."""
    documents = {task: result.to_dict() for task, result in results.items()}
    return {"model": model, "against": against, **documents.pop("text", {}), **documents}


def _results(model: str, options: TaskOptions, cache: str | None, progress: Progress) -> dict[str, Any]:
    """The result of each requested task with one cache, by its name; models are loaded once for all tasks on text."""
    from headwise.measure import evaluation

    if options.engine is not None:
        from headwise.serving.engines import evaluate_in_engine

        return {"text": evaluate_in_engine(model, EngineOptions.of(options, cache=cache), progress=progress)}
    in_pair: dict[str, Any] = dict.fromkeys(("against", "dtype", "device"))  # an open pair has its own
    in_pair |= {"cache": cache}
    results: dict[str, Any] = {}
    if options.text or options.choices:
        pair = evaluation.open_pair(
            model, against=options.against, dtype=options.dtype, device=options.device, progress=progress
        )
        if options.text:
            texts = EvaluateOptions.of(options, **in_pair)
            results["text"] = evaluation.evaluate(pair, texts, progress=progress, shared=True)
        if options.choices:
            items = ChoiceOptions.of(options, file=options.choices, **in_pair)
            results["choices"] = evaluation.evaluate_choices(pair, items, progress=progress)
        if options.planted is not None:
            with naming(context="planted", window="planted"):
                facts = PlantedOptions.of(options, text=options.text[0], context=options.planted, **in_pair)
                results["planted"] = evaluation.evaluate_planted(pair, facts, progress=progress)
        if options.ruler is not None:
            with naming(length="ruler"):
                tasks = RulerOptions.of(options, text=options.text[0], length=options.ruler, **in_pair)
                results["ruler"] = evaluation.evaluate_ruler(pair, tasks, progress=progress)
    if options.retrieval:
        results["retrieval"] = evaluation.evaluate_retrieval(
            model, RetrievalOptions.of(options, file=options.retrieval), against=options.against, progress=progress
        )
    return results
