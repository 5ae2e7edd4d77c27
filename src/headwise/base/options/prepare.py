"""The options of `headwise.prepare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwise.base.options.convert import ProofOptions
from headwise.base.options.declare import at_least, not_empty, option
from headwise.base.options.evaluate import PythonOptions


class PrepareOptions(ProofOptions, PythonOptions):
    """The caches that a model is prepared for, the text that it is fitted on, and how the result is measured.

    For example ``PrepareOptions(cache=["llama.cpp:q4_0"], evaluate="text.txt")``.
    """

    cache: str | Sequence[str] = option(
        "an engine's cache to prepare for, or several: llama.cpp: with a type of --cache-type-k, or two types for"
        " keys and values (llama.cpp:q4_0, llama.cpp:q8_0/q4_0); mlx:4 or mlx:8; vllm:fp8, int8_per_token_head,"
        " int4_per_token_head or a turboquant_; sglang:fp8 or fp4; transformers:quanto4 or quanto2",
        flag="--for",
        metavar="ENGINE:FORMAT",
        rule=not_empty("must be at least one cache"),
    )
    calibrate: str | Path | Sequence[str | Path] = option(
        "a text to fit on, or several; the weights alone are enough where there is none", default=(), metavar="TEXT"
    )
    calibration_tokens: int = option("tokens of the text to read", default=4096, rule=at_least(256))
    refit: bool = option(
        "shift the biases of keys as well, where they have some: this is not exact, and is measured", default=False
    )
    context: int | None = option(
        "refit: the most tokens of a text that the model will be served with (llama-server -c); all of the model's"
        " positions when left out. The shorter they are, the more of a key is the same for all of them",
        default=None,
        rule=at_least(2),
    )
    evaluate: str | Path | Sequence[str | Path] = option(
        "a text to measure the result on beside its source: that both compute the same, and what each loses in every"
        " cache, simulated here and in the engine itself where that is installed; when left out, products of queries"
        " and keys are compared alone",
        default=(),
        metavar="TEXT",
        identity=False,
    )
    overwrite: bool = option("replace what is at the output", default=False, identity=False)
