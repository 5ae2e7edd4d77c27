"""``headwise evaluate``: what a conversion did to a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from headwise.cli.app import SOURCES, Json, app, emit, numbers_table, out, progress_bar
from headwise.errors import ArgumentError

if TYPE_CHECKING:
    from headwise.evaluation import ChoiceEvaluation, Evaluation, PlantedEvaluation, Rate, RetrievalEvaluation


@app.command(epilog="Example: headwise evaluate ./smollm2-mla --against smollm2-135m --text text.txt --windows 6")
def evaluate(
    model: Annotated[str, typer.Argument(help=SOURCES, show_default=False)],
    text: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="UTF-8 text to predict; may be repeated.")
    ] = None,
    choices: Annotated[
        str | None, typer.Option(metavar="FILE", help="A .jsonl of questions, choices and answers, such as PIQA.")
    ] = None,
    planted: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Plant a fact in a context this long of the text; ask for it."),
    ] = None,
    retrieval: Annotated[
        str | None, typer.Option(metavar="FILE", help="A .jsonl of questions and passages, for an encoder.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="The reference, such as what it was converted from.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens a window; 2048, or the model's positions if fewer, when left out.")
    ] = None,
    windows: Annotated[int, typer.Option(help="How many windows of each text, from its beginning.")] = 6,
    by_position: Annotated[
        bool, typer.Option("--by-position", help="Show the cost by position in the window.")
    ] = False,
    context: Annotated[
        int | None, typer.Option(help="Tokens in the cache while decoding is timed; 512, or as many as fit.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Items of --choices or --retrieval; all when left out.")] = None,
    dtype: Annotated[str | None, typer.Option(help="To run in; as stored when left out.")] = None,
    device: Annotated[str | None, typer.Option(help="To run on, such as cuda; the CPU when left out.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a model on text: perplexity, divergence, agreement, bytes of cache, time a token; and on tasks."""
    if not (text or choices or retrieval):
        raise ArgumentError("text", None, "is required, unless --choices or --retrieval is given")
    if planted is not None and not text:
        raise ArgumentError("planted", planted, "needs --text, to plant the fact in")
    document: dict[str, Any] = {"model": model, "against": against}
    with progress_bar() as progress:
        from headwise import evaluation

        where: dict[str, Any] = {"dtype": dtype, "device": device, "progress": progress}
        of_text = of_choices = of_planted = of_retrieval = None
        if text or choices:
            pair = evaluation.open_pair(model, against=against, **where)
            if text:
                of_text = evaluation.evaluate(
                    pair, text=text, window=window, windows=windows, context=context, progress=progress
                )
                document |= of_text.to_dict()
            if choices:
                of_choices = evaluation.evaluate_choices(pair, file=choices, limit=limit, progress=progress)
                document["choices"] = of_choices.to_dict()
            if planted is not None and text:
                of_planted = evaluation.evaluate_planted(pair, text=text[0], context=planted, progress=progress)
                document["planted"] = of_planted.to_dict()
        if retrieval:
            of_retrieval = evaluation.evaluate_retrieval(model, against=against, file=retrieval, limit=limit, **where)
            document["retrieval"] = of_retrieval.to_dict()
    if as_json:
        emit(document)
        return
    if of_text is not None:
        show_text(of_text, by_position=by_position)
    if of_choices is not None:
        _show_choices(of_choices)
    if of_planted is not None:
        _show_planted(of_planted)
    if of_retrieval is not None:
        _show_retrieval(of_retrieval)


def show_text(
    found: Evaluation, *, by_position: bool = False, columns: tuple[str, str] = ("model", "reference")
) -> None:
    """Print what was measured on text: two columns, and the cost by position if that is asked for."""
    how = f"windows of {found.window}; {found.dtype}, {found.threads} thread{'s' * (found.threads != 1)}"
    out.print(f"{found.tokens:,} tokens of {escape(found.text)}, {how}")
    table = _table("", found.against, columns)
    for score in found.texts if len(found.texts) > 1 else ():
        _row(table, f"perplexity of {escape(score.text)}", score.perplexity, score.reference_perplexity, ".3f")
    _row(table, "perplexity", found.perplexity, found.reference_perplexity, ".3f")
    _row(table, "cache B/token", found.cache_bytes_per_token, found.reference_cache_bytes_per_token, ",.0f")
    _row(table, f"decode ms/token at {found.context}", found.decode_ms, found.reference_decode_ms, ".1f")
    out.print(table)
    for score in found.texts if found.against is not None else ():
        named = f"{escape(score.text)}: " if len(found.texts) > 1 else ""
        out.print(
            f"{named}perplexity ratio {score.perplexity_ratio:.4f} · KL {score.kl:.4f} nats a token"
            f" · top-1 agreement {score.top1_agreement:.1%}"
        )
    for score in found.texts if by_position else ():
        table = _table(f"nats at positions of {escape(score.text)}", found.against, columns)
        for bucket in score.by_position:
            _row(table, f"{bucket.start}–{bucket.stop - 1}", bucket.nll, bucket.reference_nll, ".4f")
        out.print(table)


def _show_choices(found: ChoiceEvaluation) -> None:
    out.print(f"{found.items:,} items of {escape(found.file)}, zero-shot")
    rates = {"accuracy": found.accuracy, "accuracy by length": found.accuracy_norm}
    _show_rates(rates, found.against)


def _show_planted(found: PlantedEvaluation) -> None:
    out.print(
        f"a fact planted in {found.context:,} tokens of {escape(found.text)}, {found.trials} trials at each depth"
    )
    table = _table(f"probability among {found.codes} codes", found.against)
    for row in found.depths:
        _row(table, f"at depth {row.depth:.0%}", row.probability, row.reference_probability, ".3f")
    for row in found.depths:
        _row(table, f"nats at depth {row.depth:.0%}", row.nll, row.reference_nll, ".3f")
    out.print(table)
    _show_rates({"likeliest of the codes": found.first, "said": found.found}, found.against)


def _show_retrieval(found: RetrievalEvaluation) -> None:
    out.print(f"{found.questions:,} questions, {found.passages:,} passages of {escape(found.file)}")
    _show_rates({"R@1": found.recall_at_1, "R@10": found.recall_at_10}, found.against)
    reference = "" if found.reference_mrr is None else f", reference {found.reference_mrr:.4f}"
    out.print(f"MRR {found.mrr:.4f}{reference}")


def _show_rates(rates: dict[str, Rate], against: str | None) -> None:
    """Fractions with their 95 % intervals, and the difference in points of 100."""
    table = _table("with 95 % intervals", against)
    for name, rate in rates.items():
        cells = [f"{rate.rate:.1%} ({_span(rate.low, rate.high)})"]
        if rate.reference_rate is not None:
            cells.append(f"{rate.reference_rate:.1%} ({_span(rate.reference_low, rate.reference_high)})")
        table.add_row(name, *cells)
    out.print(table)
    for name, rate in rates.items():
        if rate.difference is not None:
            out.print(
                f"{name} {100 * rate.difference:+.1f} points"
                f" ({_span(rate.difference_low, rate.difference_high, '+.1f')});"
                f" only the model {rate.only_model}, only the reference {rate.only_reference}"
            )


def _span(low: float | None, high: float | None, style: str = ".1f") -> str:
    assert low is not None
    assert high is not None
    return f"{100 * low:{style}} to {100 * high:{style}}"


def _table(heading: str, against: str | None, columns: tuple[str, str] = ("model", "reference")) -> Any:
    return numbers_table(heading, *columns[: 1 if against is None else 2])


def _row(table: Any, name: str, own: float, reference: float | None, style: str) -> None:
    table.add_row(name, format(own, style), *([] if reference is None else [format(reference, style)]))
