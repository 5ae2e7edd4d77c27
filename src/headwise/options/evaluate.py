"""The options of `headwise.evaluate` and of `headwise.evaluate_planted`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwise.options.declare import Options, Rule, at_least, not_empty, option

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

_FRACTIONS = Rule(
    "must be numbers from 0 to 1", lambda depths: len(depths) > 0 and 0 <= min(depths) <= max(depths) <= 1
)


class ModelOptions(Options):
    """The reference that a model is compared with, and the dtype and device of both."""

    against: str | Path | None = option(
        "the reference, usually the model before its conversion; the reference's tokenizer is used",
        default=None,
        metavar="SOURCE",
    )
    dtype: str | None = option(
        "dtype to run both models in; the wider of those they are stored in when left out", default=None
    )
    device: str | None = option(
        "device to run both models on, such as cuda; the CPU when left out", default=None, identity=False
    )


class TextOptions(ModelOptions):
    """The windows of text that are scored, and the context at which decoding is timed."""

    window: int | None = option(
        "tokens a window; 2048, or all the models' positions where they have fewer, when left out", default=None
    )
    windows: int | None = option("how many windows of each text, from its beginning", default=6, rule=at_least(1))
    context: int | None = option(
        "tokens in the cache while decoding is timed; 512, or one less than the positions, when left out",
        default=None,
    )


class EvaluateOptions(TextOptions):
    """How `headwise.evaluate` measures a model on text.

    For example ``EvaluateOptions(text="text.txt", window=1024, against="smollm2-135m")``.
    """

    text: str | Path | Sequence[str | Path] = option(
        "a UTF-8 file to predict, or several", metavar="FILE", rule=not_empty("must be at least one file")
    )


class PlantedOptions(ModelOptions):
    """The text, the planted facts and the questions of `headwise.evaluate_planted`."""

    text: str | Path = option("a UTF-8 file of at least ``context`` tokens", metavar="FILE")
    context: int = option("tokens of the text, the fact, the question and the code together", default=2048)
    depths: Sequence[float] = option(
        "positions of the fact, from 0 (the beginning of the context) to 1 (right before the question)",
        default=DEPTHS,
        rule=_FRACTIONS,
    )
    trials: int = option("contexts at each depth", default=4, rule=at_least(1))
    codes: int = option("how many codes the right one is ranked among, itself included", default=10, rule=at_least(2))
    seed: int = option("seed of the codes", default=0)
