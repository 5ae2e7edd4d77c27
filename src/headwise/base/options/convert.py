"""The options of what makes models: `convert`, `calibrate`, `prepare`, `frontier`, `quick_frontier` and `migrate`."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from headwise.base.options.declare import Options, Rule, at_least, each_of, not_empty, option
from headwise.base.options.evaluate import ContinuationOptions, PythonOptions, WindowOptions

EVALUATION_WINDOWS = 2
"""The default number of windows of each text that a conversion is evaluated on; two take some seconds."""

TARGET = Rule(
    "must be mha, gqa:K, mqa, mla or same, K the number of key–value heads",
    lambda to: re.fullmatch(r"mha|mqa|mla|same|gqa:[0-9]{1,9}", to.strip().lower()) is not None,
)
"""The spellings of a target."""

SIZES = (
    "mla:F (a fraction of the source's cache), mla:R+P (latent and rotary key), gqa:K, mqa or mha; or mla@F, gqa:K@F,"
    " mqa@F, mha@F or same@F (a cache in codes, F of the bytes of the source's in bfloat16)"
)
"""Every spelling of a target and its size in one, in words."""

_FRACTION = "a fraction above 0 and at most 1"
KV_BUDGET = Rule(f"must be {_FRACTION}", lambda budget: bool(0 < budget <= 1))
"""The fractions of a cache that a conversion can keep."""

BITS = Rule("must be between 1 and 8", lambda bits: bool(1 <= bits <= 8))
"""The numbers of bits that a cached value can have, on average."""


_TEXT = "a text to calibrate on: a file, a folder or hf-dataset://…"

STAGES = ("recall", "starts", "sensitivity", "spread", "channels", "sequence", "refine", "refit")
"""The stages that a method can have; each can be left out by name, as an ablation.

- ``recall``: some calibration windows repeat passages from far behind.
- ``starts``: many tokens are calibrated on as the first of a text.
- ``sensitivity``: errors are counted in nats, by the derivative of the loss at each layer's attention output.
- ``spread``: one total of cached values is divided unevenly over layers, where few are kept.
- ``channels``: key heads are mixed so that rotation is concentrated in few rotary channels.
- ``sequence``: each layer is solved for the inputs that the converted layers before it produce.
- ``refine``: a short descent on each layer's own error.
- ``refit``: a closed-form regression of the output projection.
"""

GROUPED_STAGES = tuple(stage for stage in STAGES if stage not in ("spread", "channels"))
"""The stages of a method that merges heads, and of one that has none of its own where its result gets codes."""

CALIBRATION_TOKENS = 16_384
"""The default number of calibration tokens."""

NARROWEST, WIDEST = 512, 2048
"""The least and the most tokens in a window whose width the user leaves open."""

ENOUGH = 32
"""The number of windows beyond which more text makes them longer, not more numerous. Many short windows treat more
subjects; long ones have what a model looks up far back, without which contexts of thousands of tokens lose more and
more."""

STEP = 128
"""The number of tokens in a window is a multiple of this."""

SPREAD_BELOW = 0.45
"""The part of the source's values below which ranks are allocated to layers unless the user asks. Above it, refits
make up for most of what an even allocation loses, in a fraction of the time, and SmolLM2 finds no fewer facts."""


class CalibrationOptions(Options):
    """The amount of text to calibrate on."""

    calibration_tokens: int | None = option(
        f"how many tokens to calibrate on; {CALIBRATION_TOKENS} when left out", default=None, rule=at_least(2)
    )
    calibration_window: int | None = option(
        f"tokens in each window of them; when left out {NARROWEST}, up to {WIDEST} from"
        f" {ENOUGH * (NARROWEST + STEP):,} tokens on, or as many as the model or a text has",
        default=None,
        rule=at_least(2),
    )
    device: str | None = option(
        "device to run and solve layers on, such as cuda; the CPU when left out", default=None, identity=False
    )


class RequiredTextOptions(CalibrationOptions):
    """The texts to calibrate on, where there has to be one."""

    calibrate: str | Path | Sequence[str | Path] = option(
        f"{_TEXT}, or several", metavar="TEXT", rule=not_empty("is required: must name at least one text")
    )


class CalibrateOptions(RequiredTextOptions):
    """How `headwise.calibrate` collects statistics of a model.

    For example ``CalibrateOptions(calibrate="text.txt", calibration_tokens=65_536)``.
    """

    overwrite: bool = option("replace statistics in the output folder", default=False, identity=False)


class ConversionOptions(Options):
    """The form of converted models."""

    dtype: str | None = option("dtype of converted models; the source's when left out", default=None)


class ProofOptions(Options):
    """The evaluation that ends the work on a model."""

    evaluate: bool | str | Path | Sequence[str | Path] = option(
        "a text to evaluate the result on beside its source; when left out, text beyond what was calibrated "
        "or trained on, or Python's language reference",
        default=True,
        metavar="TEXT",
        rule=not_empty("must be at least one file"),
        identity=False,
    )
    evaluation_windows: int = option(
        "how many windows of each text to evaluate on, of 2048 tokens or the model's positions",
        default=EVALUATION_WINDOWS,
        rule=at_least(1),
        identity=False,
    )


class ConvertOptions(CalibrationOptions, ConversionOptions, ProofOptions):
    """The target, evidence, method and output of `headwise.convert`.

    For example ``ConvertOptions(to="mla", kv_budget=0.5, calibrate="text.txt")``.
    """

    to: str = option(
        "the mechanism to convert to: mha, gqa:K, mqa or mla; or same, to store the cache in codes alone", rule=TARGET
    )
    kv_budget: float | None = option(
        f"mla: how much of the source's cache to keep, {_FRACTION}, which is lossless", default=None, rule=KV_BUDGET
    )
    kv_lora_rank: int | None = option("mla: the width of the latent, in place of a budget", default=None)
    qk_rope_head_dim: int | None = option("mla: the width of the rotary key, with kv_lora_rank", default=None)
    kv_bytes: float | None = option(
        f"how many of the bytes of the source's cache in bfloat16 to keep, {_FRACTION}, in codes; for mla, ranks, "
        "rotary keys and bits of every layer are chosen together, by measured loss, in place of a budget",
        default=None,
        rule=KV_BUDGET,
    )
    bits: float | None = option(
        "store the cache in codes of so many bits a value on average, 1 to 8; each block of 16 "
        "channels is given its own",
        default=None,
        rule=BITS,
    )
    calibrate: str | Path | Sequence[str | Path] | None = option(
        f"{_TEXT}; only the weights are used when left out", default=None, metavar="TEXT"
    )
    statistics: str | Path | None = option(
        "a folder written by headwise calibrate, in place of a text: no model is run to convert, and each layer is "
        "solved by itself",
        default=None,
        metavar="FOLDER",
    )
    method: str | None = option(
        "a baseline to use instead of headwise's method, such as mean or transmla:4; the error for an unknown name "
        "lists them",
        default=None,
    )
    without: Collection[str] = option(
        f"a stage to leave out, as an ablation: {', '.join(STAGES[:-1])} or {STAGES[-1]}; without sensitivity, "
        "spread is left out too",
        default=(),
        metavar="STAGE",
        rule=each_of(STAGES),
    )
    spread: bool = option(
        "mla: spread the cache over layers however many values are kept; otherwise it is spread where less than "
        f"{SPREAD_BELOW} of them are, and for kv_bytes",
        default=False,
    )
    format: Literal["headwise", "deepseek", "deepseek-longrope", "gguf", "gguf-q8_0"] = option(
        "the folder format: headwise, the family's own for all but mla; deepseek, for mla, a stock deepseek_v3 "
        "folder as engines load it, with one size for all layers and plain RoPE; deepseek-longrope, for mla, with "
        "any list of rotary channels, which transformers loads; gguf, one file for llama.cpp in the result's dtype; "
        "or gguf-q8_0, in eight bits a weight",
        default="headwise",
    )
    bias_free: bool = option(
        "mla in format deepseek, and always in gguf: no biases, which most engines do not load; the constant that "
        "the latent's norm needs is then a function of the inputs, fitted to the text",
        default=False,
    )
    pad_to: str | None = option(
        "format deepseek: fill the latent and the rotary key up with zeros to these widths, R+P such as 512+64, and "
        "heads to what a kernel has; the cache is then as large as these",
        default=None,
    )
    served_context: int = option(
        "tokens of all sequences together, at which what the cache saves is weighed against what the weights gain",
        default=4096,
        rule=at_least(1),
        identity=False,
    )
    served_by: str | None = option(
        "what is to run the result, such as llama.cpp, with whose own caches it is then compared; llama.cpp for "
        "format gguf",
        default=None,
        identity=False,
    )
    overwrite: bool = option("replace a model folder at the output", default=False, identity=False)
    dry_run: bool = option("only estimate time and memory, and write nothing", default=False, identity=False)


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


class FrontierOptions(QuickFrontierOptions, WindowOptions, ContinuationOptions, ConversionOptions):
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
