"""The options of `headwise.frontier`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwise.options.convert import CalibrationOptions
from headwise.options.declare import at_least, not_empty, option

_REQUIRED = not_empty("is required: a frontier compares calibrated conversions")


class FrontierOptions(CalibrationOptions):
    """The targets and methods that `headwise.frontier` tries, and the texts it uses."""

    calibrate: str | Path | Sequence[str | Path] = option(
        "a text to calibrate on, or several", metavar="TEXT", rule=_REQUIRED
    )
    evaluate: str | Path | Sequence[str | Path] | None = option(
        "a text to evaluate on, or several; when left out, text beyond the calibration's, or Python's language "
        "reference",
        default=None,
        metavar="TEXT",
    )
    targets: Sequence[str] = option(
        "a target to try: mla:F (a fraction of the source's cache), mla:R+P (latent and rotary key), gqa:K, mqa or "
        "mha; a ladder of them when left out",
        default=(),
        flag="--target",
        identity=False,  # as for methods: they say which results there are, and decide none
    )
    methods: bool = option(
        "compare methods at each target: headwise's, its ablations without each stage in turn, and the baselines",
        default=False,
        identity=False,
    )
    window: int | None = option(
        "tokens in each evaluation window; 2048, or the model's positions if fewer, when left out", default=None
    )
    windows: int = option("how many windows of each text", default=6, rule=at_least(1))
    dtype: str | None = option(
        "dtype of the conversions and of their evaluation; the source's when left out", default=None
    )
    keep: bool = option(
        "keep the converted models, in the folder models of the output", default=False, identity=False
    )
    plot: bool = option(
        "write a web page with plots, which needs plotly", default=True, flag="--plot/--no-plot", identity=False
    )
