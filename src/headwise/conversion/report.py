"""The report of a conversion: what it gains at a context, plain quantisation beside it, and the file that keeps it.

Gains and costs at a user's context are bytes of cache and of weights, and the work of a decode step. What plain
quantisation of the source loses at about these bytes needs no conversion. What a conversion measured of itself is a
file of its folder, which `headwise advise --measured` reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from headwise.base.documents import as_document, finite
from headwise.base.options import ConvertOptions
from headwise.base.progress import Progress, silent
from headwise.conversion.budget.spread import Spread
from headwise.conversion.output.card import last_name
from headwise.conversion.output.formats import StockReport
from headwise.conversion.plan import ConversionPlan
from headwise.costs.formulas.model import cache_bytes_per_token
from headwise.costs.formulas.target import Target
from headwise.costs.prediction import Pass, check_engine, operators
from headwise.errors import HeadwiseError
from headwise.measure.evaluation import Evaluation
from headwise.measure.evaluation.beside_source import (
    EVALUATING,
    SIMILAR_BYTES,
    EvaluationSet,
    bfloat16_bytes,
    evaluate_result,
    log_perplexity_margin,
    nearest_formats,
    served_bytes,
)
from headwise.models.checkpoints import Checkpoint, open_checkpoint
from headwise.models.specs import ModelSpec

COMPARING = "comparing with plain quantisation"
"""The name of the stage, for progress."""

Loses = Literal["less", "as much", "more"]
"""What a format loses beside a conversion; as much where they differ by no more than chance."""


@dataclass(frozen=True, kw_only=True)
class ComparedFormat:
    """The source with its cache in one of the field's formats, beside a conversion on the same text.

    Attributes:
        format: the format.
        bytes_per_token: the bytes a token of the source's cache in this format.
        loses: how the format's loss compares with the conversion's: less, as much or more, by
            `headwise.measure.evaluation.beside_source.log_perplexity_margin`.
        evaluation: the source with the format beside the source without it.
    """

    format: str
    bytes_per_token: float
    loses: Loses
    evaluation: Evaluation


@dataclass(frozen=True, kw_only=True)
class PlainComparison:
    """A conversion beside its source with the cache in the nearest of the field's formats, on the same text.

    Bytes are those that a cache allocates for an evaluation window, a token; numbers that are not in codes count as
    bfloat16.

    Attributes:
        formats: the largest format that takes no more bytes than the conversion, and the smallest that takes more;
            one of them where there is no other.
        converted_bytes_per_token: the bytes a token of the conversion's cache.
        source_bytes_per_token: the bytes a token of the source's cache as it is.
        line: the comparison in words.
    """

    formats: tuple[ComparedFormat, ...]
    converted_bytes_per_token: float
    source_bytes_per_token: float
    line: str

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON-able values."""
        return as_document(self)


def compare_plain(
    source: Checkpoint,
    folder: Path,
    evaluation_set: EvaluationSet,
    evaluation: Evaluation,
    *,
    engine: str | None = None,
    progress: Progress = silent,
) -> PlainComparison | str | None:
    """Evaluate the source with its cache in the formats that are nearest to a conversion's bytes, below and above.

    Args:
        source: the model that was converted.
        folder: the converted model.
        evaluation_set: the windows that the conversion was evaluated on.
        evaluation: the evaluation of the conversion beside the source on these windows.
        engine: the engine that is to run the result, with whose own caches the result is compared; None where it is
            not known.
        progress: the callback that is told of each window.

    Returns:
        The comparison; None where the conversion's cache is no smaller than the source's in bfloat16, or no format
        suits the source; or a note why there is none.
    """
    tokens = evaluation.window
    try:
        own = bfloat16_bytes(source, tokens)
        converted = served_bytes(open_checkpoint(folder), evaluation)
        nearest = nearest_formats(source, tokens, converted, engine) if converted < own else {}
    except HeadwiseError:  # a source whose layers cache something else
        return None
    name = evaluation.against or source.path  # as the user named it
    formats: list[ComparedFormat] = []

    def comparing(stage: str, done: int, total: int) -> None:
        if stage == EVALUATING:
            stage, done, total = COMPARING, done + len(formats) * total, total * len(nearest)
        progress(stage, done, total)

    for spelling, taken in nearest.items():
        plain = evaluate_result(
            name, name, evaluation_set, comparing, cache=spelling, dtype=evaluation.dtype, device=evaluation.device
        )
        if isinstance(plain, str):
            return plain
        loses = _loses(plain, evaluation)
        formats.append(ComparedFormat(format=spelling, bytes_per_token=taken, loses=loses, evaluation=plain))
    if not formats:
        return None
    return PlainComparison(
        formats=tuple(formats),
        converted_bytes_per_token=converted,
        source_bytes_per_token=own,
        line=_line(formats, evaluation, converted, own, engine),
    )


def _loses(plain: Evaluation, converted: Evaluation) -> Loses:
    """Whether the source with a format loses less than the conversion, as much or more, on the same text."""
    assert plain.kl is not None
    assert converted.kl is not None
    gain = math.log(plain.perplexity / converted.perplexity)  # above 0 where the conversion loses less
    chance = log_perplexity_margin(plain.kl, converted.kl, converted.tokens)
    return "more" if gain > chance else "less" if gain < -chance else "as much"


def _line(
    formats: list[ComparedFormat], evaluation: Evaluation, converted: float, own: float, engine: str | None
) -> str:
    """The comparison in words; bytes are called the same only within a point of the source's cache."""
    title = "" if engine is None else check_engine(engine).title
    is_own = any(each.format.startswith(f"{engine}:") for each in formats)
    caches = f"{title}'s own caches of the source" if is_own else "the source's plain formats"
    if title and not is_own:
        caches += f" (headwise computes none of {title}'s own)"
    clauses: list[str] = []
    for each in formats:
        beyond = (each.bytes_per_token - converted) / own
        where = "these" if abs(beyond) <= SIMILAR_BYTES else "more" if beyond > 0 else "fewer"
        if where == "more" and not clauses:
            clauses.append("none is so small")
        loses = "as much, within chance," if each.loses == "as much" else each.loses
        ratio = f"×{each.evaluation.perplexity_ratio:.3f} at {each.bytes_per_token / own:.1%}"
        clauses.append(f"{each.format} loses {loses} at {where} bytes ({ratio})")
    return (
        f"this conversion has perplexity ×{evaluation.perplexity_ratio:.3f} at {converted / own:.1%} of a bfloat16 "
        f"cache; of {caches}, {', and '.join(clauses)}"
    )


@dataclass(frozen=True, kw_only=True)
class Balance:
    """A model before and after its conversion, with a cache of so many tokens; what is not in codes has 16 bits.

    Attributes:
        context: the number of tokens of all sequences together.
        cache_bytes: the bytes of these tokens in the cache, before and after.
        weight_bytes: the bytes of the files of weights, before and after.
        flops: the FLOPs of a decode step of one sequence of these tokens, after over before; None where they are not
            known.
        bytes_read: the bytes that this step reads, after over before, with weights and cache in 16 bits or in codes;
            None where they are not known.
    """

    context: int
    cache_bytes: tuple[float, float]
    weight_bytes: tuple[int, int]
    flops: float | None = None
    bytes_read: float | None = None

    @property
    def saved(self) -> float:
        """The bytes of cache and weights together that are saved; negative where more are taken."""
        return sum(self.cache_bytes[:1] + self.weight_bytes[:1]) - self.cache_bytes[1] - self.weight_bytes[1]

    @property
    def even_at(self) -> int | None:
        """The number of tokens from which on memory is saved; None where it never is, and 0 where it always is."""
        by_token = (self.cache_bytes[0] - self.cache_bytes[1]) / self.context
        grown = self.weight_bytes[1] - self.weight_bytes[0]
        if by_token <= 0:
            return None
        return max(math.ceil(grown / by_token), 0)


def balance(
    before: ModelSpec, after: ModelSpec, context: int, token_bytes: tuple[float, float], weight_bytes: tuple[int, int]
) -> Balance | None:
    """Weigh a conversion.

    Args:
        before: the spec of the source.
        after: the spec of the result.
        context: the number of tokens of all sequences together.
        token_bytes: the bytes of a token in the caches of both, as they are served.
        weight_bytes: the bytes of the files of weights of both.

    Returns:
        The balance; None where the source caches nothing.
    """
    if not token_bytes[0]:
        return None
    found = Balance(
        context=context, cache_bytes=(context * token_bytes[0], context * token_bytes[1]), weight_bytes=weight_bytes
    )
    try:
        (flops, read), (later_flops, later_read) = (
            _step(model, context, each) for model, each in zip((before, after), token_bytes, strict=True)
        )
    except HeadwiseError:  # layers whose costs are not known
        return found
    return replace(found, flops=later_flops / flops, bytes_read=later_read / read)


def _step(model: ModelSpec, context: int, token_bytes: float) -> tuple[float, float]:
    """The FLOPs of a decode step, and the bytes that it reads."""
    step = Pass(total=context)
    found = operators(replace(model, stored=None), step)
    weights = sum(each.times * each.weight_bytes for each in found)
    return sum(each.times * each.flops for each in found), weights + context * token_bytes


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The report of a conversion, or of its dry run.

    Attributes:
        source: the source, as the user named it.
        output: the folder of the result.
        model_type: the result's ``model_type``: the family's, with ``headwise_`` before it if headwise's layers are
            in the model.
        mechanism: the result's mechanism.
        label: the result's mechanism and sizes, in words.
        format: the format of the folder, as the user names it.
        method: the method that converted the layers, such as ``aligned``, or ``headwise`` for mla.
        dtype: the dtype of the result.
        kv_bytes_per_token_before: cache bytes a token of the source, in the output's dtype, without cross-attention.
        kv_bytes_per_token_after: cache bytes a token of the result, counted so too; in codes where it has them, each
            sequence's first tokens apart.
        coded: whether the result's cache is stored in codes.
        parameters_before: the number of parameters of the source.
        parameters_after: the number of parameters of the result.
        disk_bytes: the size of the result's weights, in bytes.
        calibration_tokens: the number of calibration tokens, held-out tokens included; 0 without a text.
        calibration_window: tokens in each calibration window.
        seconds: the seconds that it took, without the evaluation; estimated with ``dry_run`` (`estimate_stages`).
        seconds_reading: the seconds spent on reading and checking weights and statistics.
        seconds_writing: the seconds spent on writing tensors; solving layers, and running them on a text, took the
            rest.
        seconds_evaluating: the seconds of the evaluations that ended it; estimated with ``dry_run``.
        peak_rss_bytes: the peak resident memory of the process up to the written folder; None with ``dry_run``.
        peak_device_bytes: the most memory of a GPU that the conversion had, in bytes; None on a CPU.
        dry_run: whether nothing was written.
        balance: its gains and costs at the user's context; None where the source caches nothing.
        evaluation: the result beside its source, on text that it was not calibrated on; None if it was skipped.
        plain: the source with its cache in the nearest plain formats below and above these bytes, on the same text;
            None if it was not evaluated or its cache is no larger.
        stock: the loss by a stock folder's format; None for ``format="headwise"``.
        spread: the allocation of an MLA's cache to layers; None if none was searched.
        made_with: what the numbers depend on besides the model, see `circumstances`.
        notes: notes for the user.
    """

    source: str
    output: str
    model_type: str
    mechanism: str
    label: str
    method: str
    dtype: str
    format: str = "headwise"
    kv_bytes_per_token_before: int
    kv_bytes_per_token_after: int
    coded: bool = False
    parameters_before: int
    parameters_after: int
    disk_bytes: int
    calibration_tokens: int = 0
    calibration_window: int = 0
    seconds: float
    seconds_reading: float = 0.0
    seconds_writing: float = 0.0
    seconds_evaluating: float = 0.0
    peak_rss_bytes: int | None = None
    peak_device_bytes: int | None = None
    dry_run: bool = False
    balance: Balance | None = None
    evaluation: Evaluation | None = None
    plain: PlainComparison | None = None
    stock: StockReport | None = None
    spread: Spread | None = None
    made_with: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return as_document(self)


def measured_json(plan: ConversionPlan, target: Target, options: ConvertOptions, report: Conversion) -> str | None:
    """A frontier's JSON with one point, this conversion's; None where nothing was measured, or it has no spelling.

    A conversion with stages left out, by another method than headwise's, or into another format, says so in ``way``:
    its quality is not that of the target by itself.
    """
    evaluation = report.evaluation
    if evaluation is None or target.spelling is None:
        return None
    # Codes are compared with the source's cache in bfloat16, and numbers with numbers of the same dtype.
    whole = cache_bytes_per_token(plan.before) if report.coded else report.kv_bytes_per_token_before
    others = [f"by {report.method}"] if options.method else []
    others += [f"without {', '.join(options.without)}"] if options.without else []
    others += [f"as {report.format}"] if report.format != "headwise" else []
    point = {
        "target": target.spelling,
        "way": " ".join(("headwise", *others)),
        "label": report.label,
        "cache_fraction": report.kv_bytes_per_token_after / whole,
        "perplexity_ratio": evaluation.perplexity_ratio,
        "kl": evaluation.kl,
        "kl_999": evaluation.kl_999,
        "top1_agreement": evaluation.top1_agreement,
        "top1_changed": evaluation.top1_changed,
    }
    # The folder may be published, so that names of texts are without their folders.
    made_with = {**report.made_with, "texts": [*map(last_name, report.made_with["texts"])]}
    document = {"label": plan.before.label, "tokens": evaluation.tokens, "window": evaluation.window}
    document |= {"made_with": made_with}
    return json.dumps(finite(document | {"points": [point]}), indent=1) + "\n"
