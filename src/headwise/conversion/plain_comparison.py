"""What plain quantisation of the source loses at about a conversion's bytes, which needs no conversion."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headwise.base.documents import as_document
from headwise.base.progress import Progress, silent
from headwise.costs.prediction import check_engine
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
