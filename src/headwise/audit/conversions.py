"""SmolLM2's conversions that claims about quality are tested by: each is made and measured once in a process."""

from __future__ import annotations

import shutil
import tempfile
from atexit import register
from functools import cache
from pathlib import Path
from typing import Any

SOURCE = "smollm2-135m"
TOKENS, WINDOW = 4096, 512
"""Of Python's reference, to calibrate on."""
WINDOWS, LENGTH = 4, 1024
"""Of other topics of it, to evaluate on."""


@cache
def folder() -> Path:
    """A folder that is removed when the process ends."""
    path = Path(tempfile.mkdtemp(prefix="headwise-audit-"))
    register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def texts() -> tuple[Path, Path]:
    """A text to calibrate on, and one that shares no topic with it."""
    from headwise.texts.files import python_reference

    study, exam = folder() / "study.txt", folder() / "exam.txt"
    study.write_text(python_reference(slice(1, None, 2)), encoding="utf-8")
    exam.write_text(python_reference(slice(0, None, 2)), encoding="utf-8")
    return study, exam


@cache
def converted(to: str, method: str) -> Path:
    """The conversion to a target, by a baseline or by headwise's own method (``headwise``).

    Raises:
        HeadwiseError: the package with the model is not installed.
    """
    from headwise import convert
    from headwise.cost.target import target_options

    path = folder() / f"{to}-{method}".replace(":", "-")
    study, _ = texts()
    calibration = {"calibrate": study, "calibration_tokens": TOKENS, "calibration_window": WINDOW}
    options: dict[str, Any] = calibration if method == "headwise" else {"method": method}
    convert(SOURCE, path, **target_options(to), evaluate=False, **options)
    return path


@cache
def perplexity(to: str, method: str) -> float:
    """The perplexity of a conversion, or of the source (``own``), on the text that was not calibrated on."""
    from headwise import evaluate

    _, exam = texts()
    model = SOURCE if to == "own" else converted(to, method)
    return evaluate(model, text=exam, window=LENGTH, windows=WINDOWS, dtype="float32").perplexity


@cache
def layer_similarity(to: str, method: str) -> tuple[float, float]:
    """A conversion's attention beside the source's, each layer with the source's own inputs.

    Returns:
        The relative error and the cosine of the layers' outputs, each the mean over layers.
    """
    import torch

    from headwise import load
    from headwise.audit.mechanisms import similarity
    from headwise.checkpoints import load_tokenizer, tokenize

    _, exam = texts()
    source, other = load(SOURCE, dtype="float32"), load(converted(to, method), dtype="float32")
    ids = torch.tensor(tokenize(load_tokenizer(SOURCE), exam.read_text(encoding="utf-8")[:20_000])[None, :LENGTH])
    found = []

    def compare(index: int, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        mine = other.model.layers[index].self_attn(*args, **{**kwargs, "past_key_values": None})
        found.append(similarity(mine[0], output[0]))

    for index, layer in enumerate(source.model.layers):
        layer.self_attn.register_forward_hook(
            lambda *a, index=index: compare(index, *a), with_kwargs=True
        )
    with torch.inference_mode():
        source(ids, use_cache=False)
    errors, cosines = zip(*((one.relative_error, one.cosine) for one in found), strict=True)
    return sum(errors) / len(errors), sum(cosines) / len(cosines)
