"""What plain quantisation of the source loses at a conversion's bytes, which need no conversion."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.checkpoints import Checkpoint, open_checkpoint
from headwise.conversion.closing_evaluation import EVALUATING, Exam, prove
from headwise.documents import as_document
from headwise.errors import HeadwiseError
from headwise.evaluation import Evaluation
from headwise.evaluation.plain_cache import SAME_BYTES, bfloat16_bytes, margin, nearest_format, served_bytes
from headwise.progress import Progress, silent

COMPARING = "comparing with plain quantisation"
"""The name of the stage, for progress."""


@dataclass(frozen=True, kw_only=True)
class PlainComparison:
    """A conversion beside its source with the cache in one of the field's formats, on the same text.

    Bytes are those that a cache allocates for an evaluation window, a token; numbers that are not in codes count as
    bfloat16.

    Attributes:
        format: the format: the largest that takes no more bytes than the conversion, or else the smallest.
        bytes_per_token: of the source's cache in the format.
        converted_bytes_per_token: of the conversion's cache.
        source_bytes_per_token: of the source's cache as it is.
        is_better: whether the format takes no more bytes and has the lower perplexity, by more than chance
            (`headwise.evaluation.plain_cache.margin`).
        line: the comparison in words.
        evaluation: the source with the format beside the source without it.
    """

    format: str
    bytes_per_token: float
    converted_bytes_per_token: float
    source_bytes_per_token: float
    is_better: bool
    line: str
    evaluation: Evaluation

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON-able values."""
        return as_document(self)


def compare_plain(
    source: Checkpoint,
    folder: Path,
    exam: Exam,
    evaluation: Evaluation,
    *,
    progress: Progress = silent,
) -> PlainComparison | str | None:
    """Evaluate the source with its cache in the format that is nearest to a conversion's bytes.

    Args:
        source: what was converted.
        folder: the converted model.
        exam: the windows that the conversion was evaluated on.
        evaluation: of the conversion beside the source on them.
        progress: told of each window.

    Returns:
        The comparison; None where the conversion's cache is no smaller than the source's in bfloat16, or no format
        suits the source; or a note why there is none.
    """
    tokens = evaluation.window
    try:
        own = bfloat16_bytes(source, tokens)
        converted = served_bytes(open_checkpoint(folder), evaluation)
        spelling = nearest_format(source, tokens, converted) if converted < own else None
    except HeadwiseError:  # a source whose layers cache something else
        return None
    if spelling is None:
        return None
    name = evaluation.against or source.path  # as the user named it

    def comparing(stage: str, done: int, total: int) -> None:
        progress(COMPARING if stage == EVALUATING else stage, done, total)

    plain = prove(name, name, exam, comparing, cache=spelling, dtype=evaluation.dtype, device=evaluation.device)
    if isinstance(plain, str):
        return plain
    taken = bfloat16_bytes(source, tokens, spelling)
    outcome = _outcome(taken / converted, plain, evaluation)
    return PlainComparison(
        format=spelling,
        bytes_per_token=taken,
        converted_bytes_per_token=converted,
        source_bytes_per_token=own,
        is_better=outcome == _BETTER,
        line=f"{outcome}: {spelling} of the source has perplexity ×{plain.perplexity_ratio:.3f} at {taken / own:.1%} "
        f"of a bfloat16 cache, this conversion ×{evaluation.perplexity_ratio:.3f} at {converted / own:.1%}",
        evaluation=plain,
    )


_BETTER = "at these bytes plain quantisation loses less"


def _outcome(ratio_of_bytes: float, plain: Evaluation, converted: Evaluation) -> str:
    """In words, whether a format or a conversion loses less.

    Args:
        ratio_of_bytes: bytes of the format over those of the conversion.
        plain: the source with the format beside the source.
        converted: the conversion beside the source, on the same text.
    """
    assert plain.kl is not None
    assert converted.kl is not None
    gain = math.log(plain.perplexity / converted.perplexity)  # above 0 where the conversion loses less
    chance = margin(plain.kl, converted.kl, converted.tokens)
    if ratio_of_bytes > SAME_BYTES:
        is_worse = gain > chance
        return f"plain quantisation {'loses more at more bytes' if is_worse else 'does not go down to these bytes'}"
    if gain > chance:
        return "at these bytes plain quantisation loses more"
    return _BETTER if gain < -chance else "at these bytes plain quantisation loses as much, within chance"
