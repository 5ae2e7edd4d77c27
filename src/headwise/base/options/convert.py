"""The options of `headwise.convert` and of `headwise.calibrate`."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from headwise.base.options.declare import Options, Rule, at_least, each_of, not_empty, option

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


class CalibrationOptions(Options):
    """The amount of text to calibrate on."""

    calibration_tokens: int | None = option(
        "how many tokens to calibrate on; 16384 when left out", default=None, rule=at_least(2)
    )
    calibration_window: int | None = option(
        "tokens in each window of them; when left out 512, up to 2048 from 20,480 tokens on, or as many as the model"
        " or a text has",
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
        "mla: spread the cache over layers however many values are kept; otherwise it is spread where less than 0.45 "
        "of them are, and for kv_bytes",
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
