"""The options of `headwise.sample`."""

from __future__ import annotations

from headwise.base.options.declare import Options, Rule, at_least, option

LENGTH = 512
"""The default number of tokens of a document."""

SHORTEST = 32
"""Documents of fewer tokens are left out: many of them are one heading."""

_TEMPERATURE = Rule("must be from 0.01 to 100", lambda number: bool(0.01 <= number <= 100))


class SampleOptions(Options):
    """How much text a model writes, and how its tokens are drawn.

    For example ``SampleOptions(tokens=250_000, dtype="bfloat16")``.
    """

    tokens: int = option("how many tokens to write at least", default=200_000, rule=at_least(1))
    length: int | None = option(
        f"the most tokens of a document, which the model may end earlier; {LENGTH}, or one fewer than it has "
        "positions, when left out",
        default=None,
        rule=at_least(SHORTEST),
    )
    temperature: float = option("logits are divided by it before a token is drawn", default=1.0, rule=_TEMPERATURE)
    top_p: float = option(
        "a token is drawn from the likeliest ones that together have this probability",
        default=0.9,
        rule=Rule("must be above 0 and at most 1", lambda part: bool(0 < part <= 1)),
    )
    batch: int = option("documents that are written at once; more take more memory", default=32, rule=at_least(1))
    seed: int = option("seed of the draws", default=0, rule=at_least(0))
    dtype: str | None = option(
        "dtype of the weights and the arithmetic, such as bfloat16; the stored one when left out", default=None
    )
    device: str | None = option("device to run on, such as cuda; the CPU when left out", default=None, identity=False)
    overwrite: bool = option("replace a file at the output", default=False, identity=False)
