"""The options of `headwise.frontier`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwise.options.convert import CalibrationOptions
from headwise.options.declare import at_least, not_empty, option

_REQUIRED = not_empty("is required: what a conversion can do shows on a text")


class FrontierOptions(CalibrationOptions):
    """What `headwise.frontier` tries, and what it measures it on."""

    calibrate: str | Path | Sequence[str | Path] = option(
        "a text to calibrate on, or several", metavar="TEXT", rule=_REQUIRED
    )
    evaluate: str | Path | Sequence[str | Path] | None = option(
        "a text to measure on, or several; when left out, text beyond the calibration's, or Python's language "
        "reference",
        default=None,
        metavar="TEXT",
    )
    targets: Sequence[str] = option(
        "a target to try: mla:F (a fraction of the source's cache), mla:R+P (latent and rotary key), gqa:K, mqa or "
        "mha; a ladder of them when left out",
        default=(),
        flag="--target",
    )
    methods: bool = option(
        "compare methods at each target: headwise's own, the same without each stage in turn, and the baselines",
        default=False,
    )
    window: int | None = option(
        "tokens a window that is measured on; 2048, or the model's positions if fewer, when left out", default=None
    )
    windows: int = option("how many windows of each text", default=6, rule=at_least(1))
    dtype: str | None = option(
        "dtype of the conversions, and to measure in; the source's when left out", default=None
    )
    keep: bool = option(
        "leave the converted models in the folder models of the output", default=False, identity=False
    )
    plot: bool = option("write the page, which needs plotly", default=True, flag="--plot/--no-plot", identity=False)
