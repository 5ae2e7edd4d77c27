"""Conversions of SmolLM2, by which claims about quality are tested; each is made and measured once in a process."""

from __future__ import annotations

import shutil
import tempfile
from atexit import register
from functools import cache
from pathlib import Path
from typing import Any

from headwise.study.audit.audit import Effort, current_effort

SOURCE = "smollm2-135m"
WINDOW = 512
"""Tokens in a window of Python's reference, to calibrate on."""
LENGTH = 1024
"""Tokens in a window of other topics of it, to evaluate on."""


@cache
def working_folder() -> Path:
    """A folder that is removed when the process ends."""
    path = Path(tempfile.mkdtemp(prefix="headwise-audit-"))
    register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def text_pair() -> tuple[Path, Path]:
    """A text to calibrate on, and one that shares no passage with it.

    Raises:
        HeadwiseError: the package with the model is not installed.
    """
    from headwise.measure.texts import write_reference_texts
    from headwise.models.checkpoints import load_tokenizer
    from headwise.models.specs.sources import bundled_gguf

    return write_reference_texts(working_folder(), load_tokenizer(bundled_gguf()))


def converted(to: str, method: str) -> Path:
    """The conversion to a target, by a baseline or by headwise's own method (``headwise``).

    Raises:
        HeadwiseError: the package with the model is not installed.
    """
    return _converted(to, method, current_effort())


@cache
def _converted(to: str, method: str, work: Effort) -> Path:
    from headwise import convert
    from headwise.costs.formulas.target import target_options

    path = working_folder() / f"{to}-{method}-{work.calibration_tokens}".replace(":", "-")
    study, _ = text_pair()
    calibration = {"calibrate": study, "calibration_tokens": work.calibration_tokens, "calibration_window": WINDOW}
    options: dict[str, Any] = calibration if method == "headwise" else {"method": method}
    convert(SOURCE, path, **target_options(to), evaluate=False, **options)
    return path


def perplexity(to: str, method: str) -> float:
    """The perplexity of a conversion, or of the source (``own``), on the text that was not calibrated on.

    For example ``perplexity("mqa", "mean")``.
    """
    return _perplexity(to, method, current_effort())


@cache
def _perplexity(to: str, method: str, work: Effort) -> float:
    from headwise import evaluate

    _, evaluation_text = text_pair()
    model = SOURCE if to == "own" else converted(to, method)
    return evaluate(model, text=evaluation_text, window=LENGTH, windows=work.windows, dtype="float32").perplexity


def layer_similarity(to: str, method: str) -> tuple[float, float]:
    """A conversion's attention beside the source's, each layer with the source's own inputs.

    For example ``layer_similarity("mqa", "mean")``.

    Returns:
        The relative error and the cosine of the layers' outputs, each the mean over layers.
    """
    return _layer_similarity(to, method, current_effort())


@cache
def _layer_similarity(to: str, method: str, work: Effort) -> tuple[float, float]:
    import torch

    from headwise import load
    from headwise.models.checkpoints import load_tokenizer, tokenize
    from headwise.study.audit.mechanisms import similarity

    _, evaluation_text = text_pair()
    source, other = load(SOURCE, dtype="float32"), load(_converted(to, method, work), dtype="float32")
    tokenizer = load_tokenizer(_converted(to, method, work))
    text = evaluation_text.read_text(encoding="utf-8")[: 8 * LENGTH]
    ids = tokenize(tokenizer, text, return_tensors="pt")["input_ids"][:, :LENGTH]
    found = []

    def compare(index: int, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        mine = other.model.layers[index].self_attn(*args, **{**kwargs, "past_key_values": None})
        found.append(similarity(mine[0], output[0]))

    for index, layer in enumerate(source.model.layers):
        layer.self_attn.register_forward_hook(lambda *a, index=index: compare(index, *a), with_kwargs=True)
    with torch.inference_mode():
        source(ids, use_cache=False)
    errors, cosines = zip(*((one.relative_error, one.cosine) for one in found), strict=True)
    return sum(errors) / len(errors), sum(cosines) / len(cosines)
