"""What a conversion did to a model: quality on text, bytes of cache, time a token; two models in one run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.checkpoints import dtype_name, load_tokenizer, model_path
from headwise.errors import ArgumentError, CheckpointError
from headwise.evaluation.text import read_text, token_windows
from headwise.hf import as_dtype, load, open_decoder
from headwise.measurement import cache_nbytes, time_interleaved
from headwise.progress import Progress, silent

WINDOW = 2048
CONTEXT = 512
_CHUNK = 256


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Measurements of a model, and of its reference on the same text in the same run.

    Attributes:
        tokens: predictions scored (each window's first token is not predicted).
        perplexity: exp of the mean negative log-likelihood.
        perplexity_ratio: the model's over the reference's.
        kl: mean KL(reference ‖ model) a token, in nats.
        top1_agreement: fraction of positions where both rank the same token first.
        cache_bytes_per_token: bytes the cache's tensors hold, over the tokens in it.
        context: tokens in the cache while decoding was timed.
        decode_ms: median milliseconds for one more token at that context.
    """

    model: str
    against: str | None
    text: str
    window: int
    windows: int
    tokens: int
    perplexity: float
    reference_perplexity: float | None = None
    perplexity_ratio: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    cache_bytes_per_token: float
    reference_cache_bytes_per_token: float | None = None
    context: int
    decode_ms: float
    reference_decode_ms: float | None = None
    dtype: str
    threads: int

    def to_dict(self) -> dict[str, Any]:
        """The measurements as JSON-able values."""
        return asdict(self)


@torch.inference_mode()
def evaluate(
    model: str | Path,
    *,
    text: str | Path,
    against: str | Path | None = None,
    window: int | None = None,
    windows: int | None = 6,
    context: int | None = None,
    dtype: str | None = None,
    progress: Progress = silent,
) -> Evaluation:
    """Measure a model on text, beside its reference when there is one.

    Perplexity is over windows without overlap, each from its own first token; the last distribution of a window is
    not scored. Decoding is timed in turn for both models, one token at a time on a cache of ``context`` tokens.

    Args:
        model: a model folder, ``.gguf`` or other source with weights.
        text: a UTF-8 file.
        against: the reference, usually what the model was converted from; its tokenizer is used.
        window: tokens a window; 2048, or all the models' positions where they have fewer, when None.
        windows: how many, from the beginning of the text; None for all.
        context: tokens in the cache while decoding is timed; 512, or one less than the positions, when None.
        dtype: to run both in; the wider of those they are stored in when None.
        progress: told of each window.

    Raises:
        ArgumentError: the text is missing or shorter than a window, or a number is out of range.
        CheckpointError: a model could not be read.
    """
    if dtype is not None:
        as_dtype(dtype)  # or refused, before any work
    content = read_text(text)
    sources = {"model": model} if against is None else {"model": model, "against": against}
    paths = {name: model_path(source) for name, source in sources.items()}
    # Before the tokenizer, which says less of what is wrong with a folder.
    checkpoints = {name: open_decoder(path) for name, path in paths.items()}
    longest = min(c.spec.max_position_embeddings or WINDOW for c in checkpoints.values())
    window = _within("window", window, WINDOW, 2, longest)
    context = _within("context", context, CONTEXT, 1, longest - 1)  # the token that is timed has a position too
    tokenizer = load_tokenizer(paths.get("against", paths["model"]))
    batches = token_windows(tokenizer, content, window=window, windows=windows)
    # One dtype for both, the wider of the two: bytes and times then differ by the attention alone.
    common = reduce(torch.promote_types, (checkpoint.dtype for checkpoint in checkpoints.values()))
    models = {}
    for step, (name, path) in enumerate(paths.items()):
        progress("loading", step, len(sources))
        models[name] = load(path, dtype=dtype or common)
    progress("loading", len(sources), len(sources))
    check_vocabulary(models, int(batches.max()))

    totals = {"nll": 0.0, "reference_nll": 0.0, "kl": 0.0, "agree": 0.0}
    for index, batch in enumerate(batches):
        progress("perplexity", index, len(batches))
        logits = {name: _logits(m, batch) for name, m in models.items()}
        _score(logits["model"], logits.get("against"), batch, totals)
        for name, total in (("model", totals["nll"]), ("against", totals["reference_nll"])):
            if not math.isfinite(total):
                rule = f"computes NaN or infinite logits in {models[name].dtype}, so there is nothing to measure"
                raise CheckpointError(name, str(sources[name]), rule)
    progress("perplexity", len(batches), len(batches))
    tokens = len(batches) * (window - 1)
    prompt = batches.flatten()[None, :context]
    if prompt.shape[1] < context:
        prompt = prompt.repeat(1, -(-context // prompt.shape[1]))[:, :context]
    speed = decode_times(models, prompt, progress=progress)
    perplexity = _exp(totals["nll"] / tokens)
    result: dict[str, Any] = {
        "tokens": tokens,
        "perplexity": perplexity,
        "cache_bytes_per_token": speed["model"].bytes_per_token,
        "decode_ms": speed["model"].decode_ms,
    }
    if against is not None:
        reference = _exp(totals["reference_nll"] / tokens)
        result |= {
            "reference_perplexity": reference,
            "perplexity_ratio": perplexity / reference,
            "kl": max(totals["kl"] / tokens, 0.0),  # never negative but by rounding
            "top1_agreement": totals["agree"] / tokens,
            "reference_cache_bytes_per_token": speed["against"].bytes_per_token,
            "reference_decode_ms": speed["against"].decode_ms,
        }
    return Evaluation(
        model=str(model),
        against=None if against is None else str(against),
        text=str(text),
        window=window,
        windows=len(batches),
        context=context,
        dtype=dtype_name(models["model"].dtype),
        threads=torch.get_num_threads(),
        **result,
    )


def _within(name: str, asked: int | None, usual: int, least: int, most: int) -> int:
    """A number of tokens that fits the models' positions: the usual one, or as many as there are."""
    if asked is None:
        return min(usual, most)
    if not least <= asked <= most:
        raise ArgumentError(name, asked, f"must be at least {least} and at most {most}, by the models' positions")
    return asked


def check_vocabulary(models: dict[str, Any], largest: int) -> None:
    """Refuse models that cannot be compared token by token.

    Raises:
        ArgumentError: their vocabularies differ in size, or the text has a token beyond them.
    """
    sizes = {name: int(m.get_input_embeddings().weight.shape[0]) for name, m in models.items()}
    if len(set(sizes.values())) > 1:
        raise ArgumentError("against", sizes["against"], f"has another vocabulary than the model's {sizes['model']}")
    if largest >= sizes["model"]:
        raise ArgumentError("token", largest, f"is outside the model's vocabulary of {sizes['model']}")


@dataclass(frozen=True)
class Speed:
    """One model's cache and time a token."""

    bytes_per_token: float
    decode_ms: float


def decode_times(
    models: dict[str, Any], prompt: Tensor, *, repeats: int = 12, progress: Progress = silent
) -> dict[str, Speed]:
    """Bytes of cache a token, read off the tensors, and the median time of one more token, the models in turn.

    Args:
        models: transformers models.
        prompt: ``[1, context]`` token ids that fill the cache.
        repeats: timed tokens of each.
        progress: told of each round.
    """
    caches = {name: m(prompt, use_cache=True, logits_to_keep=1).past_key_values for name, m in models.items()}
    for cache in caches.values():
        cache.activate_past_recording()  # a layer with a sliding window has to be told that tokens will be taken back
    nbytes = {name: cache_nbytes(cache) / prompt.shape[1] for name, cache in caches.items()}

    def step(name: str) -> None:
        models[name](prompt[:, -1:], past_key_values=caches[name], use_cache=True)
        caches[name].crop(-1)

    seconds = time_interleaved(
        {name: partial(step, name) for name in models}, repeats=repeats, stage="decoding", progress=progress
    )
    return {name: Speed(nbytes[name], seconds[name] * 1e3) for name in models}


def _exp(mean: float) -> float:
    """A broken model's perplexity can be beyond what a float holds; it is infinite then, and no error."""
    try:
        return math.exp(mean)
    except OverflowError:
        return math.inf


def _logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids[None].to(model.device), use_cache=False).logits[0, :-1]
    return logits


def _score(logits: Tensor, reference: Tensor | None, ids: Tensor, totals: dict[str, float]) -> None:
    """Add one window's sums, a chunk of positions at a time: a window of log-probabilities is large."""
    targets = ids[1:].to(logits.device)
    for start in range(0, len(targets), _CHUNK):
        piece = slice(start, start + _CHUNK)
        own = F.log_softmax(logits[piece].float(), -1)
        totals["nll"] += float(F.nll_loss(own, targets[piece], reduction="sum"))
        if reference is not None:
            other = F.log_softmax(reference[piece].float(), -1)
            totals["reference_nll"] += float(F.nll_loss(other, targets[piece], reduction="sum"))
            totals["kl"] += float(F.kl_div(own, other, log_target=True, reduction="sum"))
            totals["agree"] += float((own.argmax(-1) == other.argmax(-1)).sum())
