"""The options of `headwise.heal`, and of `headwise.sample`, which writes a text to train on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from headwise.base.options.convert import ProofOptions
from headwise.base.options.declare import Options, Rule, at_least, not_empty, option
from headwise.errors import ArgumentError

HEALING_TOKENS = 1_000_000
"""The default number of tokens that a model is trained on."""

_POSITIVE = Rule("must be above 0", lambda number: bool(number > 0))
_PART = Rule("must be at least 0 and below 1", lambda part: bool(0 <= part < 1))

Objective = Literal["distill", "cross-entropy"]
Trained = Literal["all", "attention", "new", "lora"]
Optimizer = Literal["muon", "adamw"]


class ObjectiveOptions(Options):
    """What training minimises."""

    objective: Objective = option(
        "distill, the divergence of the model's next-token distribution from the teacher's; or cross-entropy, which "
        "needs no teacher's logits and learns the text itself, as uptraining does",
        default="distill",
    )
    temperature: float = option(
        "distill: both distributions are softened by it, and the divergence is multiplied by its square",
        default=1.0,
        rule=_POSITIVE,
    )
    hidden: float = option(
        "the weight of a second term: the squared error of every layer's output, as a part of its variance in the "
        "teacher; 0 leaves it out",
        default=0.0,
        rule=at_least(0),
    )
    text_weight: float = option(
        "distill: the weight of a further term: the cost of the text's own tokens, so that the model also learns "
        "what is written; 0 leaves it out",
        default=0.0,
        rule=at_least(0),
    )
    teacher_top: int | None = option(
        "distill: run the teacher first, and keep only so many of its likeliest tokens for each token, on disk, so "
        "that it need not stay in memory; 64 take 388 bytes a token",
        default=None,
        rule=at_least(1),
    )
    recall: bool = option(
        "let one window in three repeat passages of itself from far behind, so that far facts are found again",
        default=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective != "distill":
            self._require(
                {"temperature": 1.0, "text_weight": 0.0, "teacher_top": None}, f"objective {self.objective}"
            )
        elif self.teacher_top is not None:
            self._require({"temperature": 1.0, "hidden": 0.0}, "teacher_top")

    def _require(self, values: dict[str, float | None], beside: str) -> None:
        for name, value in values.items():
            if (given := getattr(self, name)) != value:
                raise ArgumentError(name, given, f"must be {value} with {beside}")

    @property
    def objective_settings(self) -> dict[str, float]:
        """What the objective has beside its name: the options of it that are not the defaults."""
        values = {"temperature": self.temperature, "hidden": self.hidden, "text_weight": self.text_weight}
        return {name: value for name, value in values.items() if value != getattr(type(self), name)}


class StepOptions(Options):
    """How long and in what steps a model is trained."""

    tokens: int | None = option(
        f"how many tokens to train on; {HEALING_TOKENS:,} when left out; a shorter text is read several times",
        default=None,
        rule=at_least(2),
    )
    steps: int | None = option("how many steps to train, in place of tokens", default=None, rule=at_least(1))
    alpha: float | None = option(
        "train on this fraction of pretraining_tokens, in place of tokens, as the GQA paper counts uptraining",
        default=None,
        rule=_POSITIVE,
    )
    pretraining_tokens: int | None = option(
        "the tokens that the source was trained on, with alpha", default=None, rule=at_least(1)
    )
    window: int | None = option(
        "tokens in each window; 1024, or as many as the model has positions, when left out",
        default=None,
        rule=at_least(2),
    )
    batch: int = option("windows in each step, over all processes", default=1, rule=at_least(1))
    micro_batch: int | None = option(
        "windows in one computation; more take more memory. When left out, all of a process's share of a step on a "
        "GPU, and one on a CPU, where two threads compute side by side",
        default=None,
        rule=at_least(1),
        identity=False,
    )
    optimizer: Optimizer = option(
        "muon, which moves all directions of a matrix alike (embeddings, the output head and vectors by AdamW); or "
        "adamw for all",
        default="muon",
    )
    learning_rate: float | None = option(
        "the learning rate after warm-up; steps of more windows take more, such as 3e-4 with a batch of 16. When "
        "left out, 1.8e-4 times the square root of the held-out loss before training; and 1e-4 where that is no "
        "divergence (cross-entropy, hidden)",
        default=None,
        rule=_POSITIVE,
    )
    warmup: float = option(
        "the part of the steps in which the learning rate rises; it then falls to 0 by a cosine",
        default=0.05,
        rule=_PART,
    )
    patience: int = option(
        "stop when so many measurements in a row, in the second half of the steps, have not found a lower loss on "
        "held-out windows; 0 never stops",
        default=4,
        rule=at_least(0),
    )
    measurements: int = option(
        "how often, evenly over the steps, held-out windows are measured and everything is saved, so that a killed "
        "run goes on from there",
        default=16,
        rule=at_least(1),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        named = [name for name in ("tokens", "steps", "alpha") if getattr(self, name) is not None]
        if len(named) > 1:
            raise ArgumentError(named[1], getattr(self, named[1]), f"must be left out beside {named[0]}")
        if (self.alpha is None) != (self.pretraining_tokens is None):
            one, other = (
                ("alpha", "pretraining_tokens") if self.alpha is not None else ("pretraining_tokens", "alpha")
            )
            raise ArgumentError(one, getattr(self, one), f"goes with {other}")


class HealOptions(StepOptions, ObjectiveOptions, ProofOptions):
    """How `headwise.heal` trains a converted model.

    For example ``HealOptions(teacher="smollm2-135m", text="text.txt", tokens=200_000)``.
    """

    teacher: str | Path = option(
        "the model whose outputs are learnt: the source of the conversion, or a larger one of the same vocabulary",
        metavar="SOURCE",
    )
    text: str | Path | Sequence[str | Path] = option(
        "a text to train on: a file, a folder or hf-dataset://…, or several, an equal share of each",
        metavar="TEXT",
        rule=not_empty("must name at least one text"),
    )
    train: Trained = option(
        "what is trained: all weights; attention, the attention of all layers; new, only tensors that the teacher "
        "does not have in that shape; or lora, low-rank changes of all linear layers but the output head, merged at "
        "the end. What computes the values of a cache in codes is never trained, nor what a .gguf has in blocks of "
        "codes",
        default="all",
    )
    cache: str | None = option(
        "round keys and values while training as an engine's own cache does, such as llama.cpp:q4_0, and measure the "
        "model with it; see headwise prepare. A .gguf is trained for one alone, of an engine that loads such a file",
        default=None,
        metavar="ENGINE:FORMAT",
    )
    lora_rank: int = option("train lora: the rank of the changes", default=32, rule=at_least(1))
    dtype: Literal["bfloat16", "float32"] | None = option(
        "dtype of matrix products; weights and their moments are float32. bfloat16 when left out, where the "
        "processor multiplies it",
        default=None,
    )
    device: str | None = option(
        "device to train on, such as cuda; the CPU when left out", default=None, identity=False
    )
    checkpointing: bool = option(
        "compute each layer a second time in the backward pass, in place of keeping what it needs", default=False
    )
    seed: int = option(
        "seed of the order of the windows",
        default=0,
        rule=Rule("must be at least 0 and below 2**32", lambda seed: bool(0 <= seed < 2**32)),
    )
    overwrite: bool = option("replace a model folder at the output", default=False, identity=False)


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
