"""The options of `headwise.evaluate` and of the evaluations on tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwise.base.options.declare import Options, Rule, at_least, not_empty, option

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

ENGINE = (
    "measure text in an engine itself: llama.cpp, mlx-lm or vllm; beside the reference, or the same model, with the "
    "engine's full cache"
)

CACHE = (
    "run the model, and not its reference, with its keys and values stored as int8, int4, int3, int2, fp8, kivi4,"
    " kivi3 or kivi2, or in two formats, as int8/int4, or as an engine has it, as llama.cpp:q4_0, mlx:4,"
    " vllm:fp8, sglang:fp4 or transformers:quanto4; docs/speed.md has all. With --engine the format is in the"
    " engine's own words: q4_0, q8_0/q4_0; 8, 4; fp8"
)

_FRACTIONS = Rule(
    "must be numbers from 0 to 1", lambda depths: len(depths) > 0 and 0 <= min(depths) <= max(depths) <= 1
)


class RunOptions(Options):
    """The dtype and device that models are run with."""

    dtype: str | None = option(
        "dtype to run both models in; when left out their own, or the wider of the two where text is predicted",
        default=None,
    )
    device: str | None = option(
        "device to run both models on, such as cuda; the CPU when left out", default=None, identity=False
    )


class ReferenceOptions(Options):
    """The reference that a model is compared with."""

    against: str | Path | None = option(
        "the reference, usually the model before its conversion; the reference's tokenizer is used",
        default=None,
        metavar="SOURCE",
    )


class ModelOptions(RunOptions, ReferenceOptions):
    """The reference that a model is compared with, and how both are run."""


class CacheOptions(Options):
    """The format of the evaluated model's cache."""

    cache: str | None = option(CACHE, default=None, metavar="FORMAT")


class WindowOptions(Options):
    """The windows of text that are scored."""

    window: int | None = option(
        "tokens in each window to evaluate on; 2048, or all the models' positions if those are fewer, when left out",
        default=None,
    )
    windows: int | None = option("how many windows of each text to evaluate on", default=6, rule=at_least(1))


class PassageOptions(WindowOptions):
    """The windows of text that are scored, and the context at which decoding is timed."""

    context: int | None = option(
        "tokens in the cache while decoding is timed; 512, or one less than the positions, when left out",
        default=None,
    )


class TextOptions(ModelOptions, PassageOptions):
    """The models, and the windows of text that they are scored on."""


class ContinuationOptions(Options):
    """The prompts that a model and its reference continue."""

    continuations: int = option(
        "how many prompts of 128 tokens of each text to continue greedily for 256 tokens, beside the reference; none"
        " by default, because 8 take minutes",
        default=0,
        rule=at_least(0),
    )


class FileOptions(Options):
    """The texts to predict."""

    text: str | Path | Sequence[str | Path] = option(
        "a UTF-8 file to predict, or several", metavar="FILE", rule=not_empty("must be at least one file")
    )


class EvaluateOptions(CacheOptions, ContinuationOptions, FileOptions, TextOptions):
    """How `headwise.evaluate` measures a model on text.

    For example ``EvaluateOptions(text="text.txt", window=1024, against="smollm2-135m")``.
    """


class PythonOptions(Options):
    """Where an engine is installed."""

    engine_python: str | Path | None = option(
        "the Python interpreter of the environment where the engine is installed; headwise's own when left out",
        default=None,
        metavar="PATH",
        identity=False,
    )


class EngineOptions(CacheOptions, FileOptions, ReferenceOptions, PassageOptions, PythonOptions):
    """How `headwise.evaluate_in_engine` measures a model on text.

    For example ``EngineOptions(text="text.txt", engine="llama.cpp", cache="q4_0")``.
    """

    engine: str = option(ENGINE)


class SeedOptions(Options):
    """The seed of a task."""

    seed: int = option("seed of bootstrap intervals, of the codes of planted facts and of RULER's samples", default=0)


class FactOptions(Options):
    """The numbers of planted facts and of contexts."""

    trials: int = option("how many contexts have facts at each depth", default=4, rule=at_least(1))
    keys: int = option(
        "how many facts are planted in each context; with several, each code is that of a city, and one is asked for",
        default=1,
        rule=at_least(1),
    )
    strings: int | None = option(
        "plant strings of so many random tokens of the text in place of sentences, and ask for the second half of "
        "one by its first half",
        default=None,
        metavar="TOKENS",
        rule=at_least(2),
    )
    together: bool = option(
        "plant a fact at every depth of each context, and ask for each after reading it once", default=False
    )


class ContextTextOptions(Options):
    """The text of long contexts."""

    text: str | Path = option("a UTF-8 file that contexts are cut from", metavar="FILE")


class PlantedOptions(FactOptions, ContextTextOptions, ModelOptions, CacheOptions, SeedOptions):
    """The text, the planted facts and the questions of `headwise.evaluate_planted`.

    For example ``PlantedOptions(text="text.txt", against="smollm2-135m", context=4096)``.
    """

    context: int = option("tokens of the text, the fact, the question and the code together", default=2048)
    depths: Sequence[float] = option(
        "positions of the fact, from 0 (the beginning of the context) to 1 (right before the question)",
        default=DEPTHS,
        rule=_FRACTIONS,
    )
    codes: int = option("how many codes the right one is ranked among, itself included", default=10, rule=at_least(2))


class RulerTaskOptions(Options):
    """The tasks of RULER, their samples and their prompts."""

    samples: int = option(
        "how many samples of each of RULER's tasks", default=10, flag="--ruler-samples", rule=at_least(1)
    )
    tasks: Sequence[str] = option(
        "a task of RULER, as niah_single_2, niah_multikey_3, vt, cwe or fwe, which docs/evaluation.md lists; all when"
        " left out",
        default=(),
        flag="--ruler-task",
        metavar="TASK",
    )
    chat: bool = option(
        "ask in the tokenizer's chat template; the raw prompt when left out", default=False, flag="--ruler-chat"
    )


class RulerOptions(RulerTaskOptions, ContextTextOptions, ModelOptions, CacheOptions, SeedOptions):
    """The text, the tasks and their length of `headwise.evaluate_ruler`.

    For example ``RulerOptions(text="text.txt", against="smollm2-135m", length=8192)``.
    """

    length: int = option("the most tokens of a sample, its answer included", default=4096, rule=at_least(1))


class ItemOptions(RunOptions):
    """The amount of a task's items."""

    limit: int | None = option(
        "how many items of a task's file, from its beginning; all when left out", default=None, rule=at_least(1)
    )


class ChoiceOptions(ItemOptions, ModelOptions, CacheOptions, SeedOptions):
    """The items of `headwise.evaluate_choices`, and the models.

    For example ``ChoiceOptions(file="piqa.jsonl", against="smollm2-135m", limit=500)``.
    """

    file: str | Path = option(
        "a .jsonl of questions, choices and answers, such as PIQA; see `headwise.measure.evaluation.read_choices`",
        metavar="FILE",
    )


class RetrievalOptions(ItemOptions, SeedOptions):
    """The items of `headwise.evaluate_retrieval`, and how the encoders are run.

    For example ``RetrievalOptions(file="boolq.jsonl", limit=500)``.
    """

    file: str | Path = option(
        "a .jsonl of objects with ``question`` and ``passage``; equal passages count as one", metavar="FILE"
    )
