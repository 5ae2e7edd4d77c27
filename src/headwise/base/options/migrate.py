"""The options of `headwise.migrate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwise.base.options.convert import EVALUATION_WINDOWS, SIZES, RequiredTextOptions
from headwise.base.options.declare import Rule, at_least, not_empty, option

MOST_LOSS = 10
"""The largest rise of perplexity that can be allowed, as a fraction: what is larger is a percentage."""

_LOSS = Rule(
    f"must be above 0 and at most {MOST_LOSS}, a fraction such as 0.05", lambda loss: bool(0 < loss <= MOST_LOSS)
)


class MigrateOptions(RequiredTextOptions):
    """The loss that `headwise.migrate` allows, the sizes it tries, and the texts it uses.

    For example ``MigrateOptions(max_quality_loss=0.05, calibrate="text.txt", evaluate="other.txt")``.
    """

    max_quality_loss: float = option(
        "the largest loss: by which fraction the perplexity of the evaluation text may rise, such as 0.05",
        rule=_LOSS,
        identity=False,
    )
    targets: Sequence[str] = option(
        f"a size to try, or more: {SIZES}. The largest is tried first. mla:0.75, 0.5, 0.375, 0.25, 0.1875 and 0.125 "
        "when left out",
        default=(),
        flag="--target",
        identity=False,
    )
    evaluate: str | Path | Sequence[str | Path] = option(
        "a text to measure the loss on, or several, which nothing is calibrated or trained on",
        metavar="TEXT",
        rule=not_empty("must be at least one file"),
    )
    evaluation_windows: int = option(
        "how many windows of each text, of 2048 tokens or the model's positions",
        default=EVALUATION_WINDOWS,
        rule=at_least(1),
    )
    heal_tokens: int | None = option(
        "train a size that loses more than is allowed on so many tokens of the calibration text, as headwise heal "
        "does, before it is given up; not at all when left out",
        default=None,
        rule=at_least(2),
    )
    overwrite: bool = option("replace a model folder at the output", default=False, identity=False)
