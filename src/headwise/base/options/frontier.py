"""The options of `headwise.frontier` and of `headwise.quick_frontier`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwise.base.options.convert import SIZES, ConversionOptions, RequiredTextOptions
from headwise.base.options.declare import not_empty, option
from headwise.base.options.evaluate import WindowOptions


class QuickFrontierOptions(RequiredTextOptions):
    """The formats whose loss `headwise.quick_frontier` predicts, and the text that it reads.

    For example ``QuickFrontierOptions(calibrate="text.txt", targets=["kivi4", "llama.cpp:q4_0"])``.
    """

    targets: Sequence[str] = option(
        f"a target to try: {SIZES}; or a format of the source's own cache, such as int8 or kivi4; a ladder of them "
        "when left out",
        default=(),
        flag="--target",
        identity=False,  # as for methods: they say which results there are, and decide none
    )


class FrontierOptions(QuickFrontierOptions, WindowOptions, ConversionOptions):
    """The targets and methods that `headwise.frontier` tries, and the texts it uses.

    For example ``FrontierOptions(calibrate="text.txt", evaluate="other.txt", targets=["kivi4", "mla@0.25"])``.
    """

    evaluate: str | Path | Sequence[str | Path] | None = option(
        "a text to evaluate on, or several; when left out, text beyond the calibration's, or Python's language "
        "reference",
        default=None,
        metavar="TEXT",
        rule=not_empty("must be at least one file"),
    )
    methods: bool = option(
        "compare methods at each target: headwise's, its ablations without each stage in turn, and the baselines",
        default=False,
        identity=False,
    )
    keep: bool = option(
        "keep the converted models, in the folder models of the output", default=False, identity=False
    )
    plot: bool = option("write a web page with plots, which needs matplotlib", default=True, identity=False)
