"""What a model does: its speed, and its scores of texts beside a reference: costs, divergences and agreement.

Texts of several lengths are put together in batches that change no text's result.

Shapes: S tokens in the window, V tokens in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.base.progress import Progress, silent
from headwise.base.threads import map_in_threads
from headwise.measure.timing import cache_nbytes, time_interleaved
from headwise.runtime.attention.rope import changes_at
from headwise.runtime.hf import HeadwiseCache, check_logits

_PIECE = 1024
"""Tokens in each call, so that a long window's hidden states are never all in memory."""


@dataclass(frozen=True)
class Speed:
    """One model's cache and decoding time.

    Attributes:
        bytes_per_token: the bytes of the cache over the number of cached tokens.
        decode_ms: the median milliseconds for one more token.
        allocated: the bytes that an engine allocated for its cache; None without an engine.
    """

    bytes_per_token: float
    decode_ms: float
    allocated: int | None = None


def decode_times(
    models: dict[str, Any], prompt: Tensor, *, repeats: int = 12, progress: Progress = silent
) -> dict[str, Speed]:
    """Count the bytes of each model's cache tensors, and time one more token of each model in turn.

    For example ``decode_times({"model": load("./model")}, torch.arange(512)[None])["model"].decode_ms``.

    Args:
        models: transformers models, by name.
        prompt: token ids that fill the cache, ``[1, context]``.
        repeats: the number of tokens to time for each model.
        progress: the callback that reports each round.
    """
    caches = {name: model(prompt, use_cache=True, logits_to_keep=1).past_key_values for name, model in models.items()}
    for cache in caches.values():
        cache.activate_past_recording()  # lets layers with a sliding window undo the cropped token
    nbytes = {name: cache_nbytes(cache) / prompt.shape[1] for name, cache in caches.items()}

    def step(name: str) -> None:
        models[name](prompt[:, -1:], past_key_values=caches[name], use_cache=True)
        caches[name].crop(-1)

    seconds = time_interleaved(
        {name: partial(step, name) for name in models}, repeats=repeats, stage="decoding", progress=progress
    )
    return {name: Speed(nbytes[name], seconds[name] * 1e3) for name in models}


def similar_length_batches(model: Any, lengths: Sequence[int], *, tokens: int) -> Iterator[list[int]]:
    """Put texts of similar lengths together, the longest first.

    For example ``list(similar_length_batches(model, [3, 8, 4], tokens=8))`` is ``[[1], [2, 0]]``.

    Where rotary frequencies depend on the longest text of a batch, long texts share a batch only with texts of the
    same length.

    Args:
        model: the transformers model that reads the texts.
        lengths: the number of tokens of each text.
        tokens: the most tokens in a batch of several texts, padding included.

    Yields:
        The numbers of the texts in a batch, with the longest first.
    """
    usual = changes_at(model)
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    done = 0
    while done < len(order):
        longest = lengths[order[done]]
        batch = order[done : done + max(1, tokens // max(longest, 1))]
        if usual is not None and longest > usual:
            batch = [number for number in batch if lengths[number] == longest]
        yield batch
        done += len(batch)


_WHOLE = 2048
"""The longest window whose logits are computed in one call."""
_ROWS = 256
"""Positions whose log-probabilities are in memory at once; those of a whole window would take too much."""


@torch.inference_mode()
def score_window(
    models: dict[str, Any], ids: Tensor, caches: Mapping[str, HeadwiseCache] | None = None
) -> dict[str, Tensor]:
    """Score each token of a window after the first.

    For example ``score_window({"model": load("./model")}, ids)["nll"].mean().exp()`` is the perplexity of a
    window.

    A window of more than 2048 tokens is read in pieces through the cache, as a server does, so that its logits are
    never all in memory. Where rotary frequencies change with the length of a text, a cache holds keys of other
    frequencies than the latest: such a window is read twice, up to the change and whole.

    Args:
        models: transformers models, under ``model`` and, where there is a reference, ``against``.
        ids: the token ids of the window, ``[S]``.
        caches: empty caches of some of the models, under the same names, which the window is read through whole.

    Returns:
        float64 vectors ``[S - 1]`` on the CPU: ``nll`` in nats; with a reference also ``reference_nll``, ``kl``
        (reference ‖ model) and ``agree``, 1 where both rank the same token first.
    """
    rows: list[dict[str, Tensor]] = []
    targets = ids[1:]
    change = min((length for length in map(changes_at, models.values()) if length is not None), default=None)
    generators = [_logits(model, ids, change, (caches or {}).get(name)) for name, model in models.items()]
    on_cpu = all(model.device.type == "cpu" for model in models.values())
    each = map_in_threads if on_cpu else map
    # Also the last token is read, which a cache has to hold; a piece of it alone has no logits, as the end has none.
    while len((logits := [*each(lambda pieces: next(pieces, ids[:0]), generators)])[0]):
        current, targets = targets[: len(logits[0])], targets[len(logits[0]) :]
        for start in range(0, len(current), _ROWS):
            piece = slice(start, start + _ROWS)
            rows.append(_score(*(part[piece] for part in logits), targets=current[piece]))
    return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}


def _logits(model: Any, ids: Tensor, change: int | None, cache: HeadwiseCache | None) -> Iterator[Tensor]:
    """Yield the logits ``[·, V]`` of all tokens but the last, a piece at a time.

    Args:
        model: a transformers model.
        ids: the token ids of the window, ``[S]``.
        change: the length, in tokens, beyond which rotary frequencies are others; None where they never change.
        cache: an empty cache to read the window through; one of the model's own, if it needs any, when None.
    """
    ids = ids.to(model.device)[None]
    if change is not None and ids.shape[1] > change:
        yield model(ids[:, :change], use_cache=False).logits[0]
        yield model(ids, past_key_values=cache, use_cache=cache is not None).logits[0, change:-1]
        return
    if ids.shape[1] <= _WHOLE:
        yield model(ids, past_key_values=cache, use_cache=cache is not None).logits[0, :-1]
        return
    used: Any = cache
    left = ids.shape[1] - 1
    for piece in torch.split(ids, _PIECE, 1):
        out = model(piece, past_key_values=used, use_cache=True)
        used = out.past_key_values
        yield out.logits[0, :left]
        left -= piece.shape[1]


def greedy(model: Any, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Continue prompts greedily, without end: one token at a time, through the cache that the model makes itself.

    For example ``[int(token) for token, _ in islice(greedy(load("./model"), prompt), 8)]`` with a prompt ``[1, P]``.

    Args:
        model: a transformers model.
        ids: token ids of the prompts, ``[B, P]``, on the model's device.

    Yields:
        The likeliest token of each prompt, ``[B]``, and the logits ``[B, V]`` that it is the likeliest by.

    Raises:
        CheckpointError: the model computes NaN or infinite logits.
    """
    # Where frequencies change with the length of a text, a prompt in pieces would have keys of several.
    pieces, cache = [ids] if changes_at(model) is not None else torch.split(ids, _PIECE, 1), None
    for piece in pieces:
        out = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
    while True:
        logits = out.logits[:, -1]
        check_logits(logits, model)
        token = logits.argmax(-1)
        yield token, logits
        out = model(token[:, None], past_key_values=cache, use_cache=True, logits_to_keep=1)


def kl_divergence(reference: Tensor, model: Tensor) -> Tensor:
    """KL(reference ‖ model) of each position, in nats, from logarithms of probabilities ``[…, V]`` of both.

    For example ``kl_divergence(source_logits.log_softmax(-1), logits.log_softmax(-1)).mean()``.

    Healing, which also needs its gradient, computes it in place (`headwise.conversion.healing.divergence`), trials of
    sizes from the logits' difference (`headwise.conversion.budget.trials.small_divergence`), and an engine's own
    process in NumPy.

    Args:
        reference: ``[…, V]``.
        model: likewise.

    Returns:
        ``[…]``.
    """
    return F.kl_div(model, reference, log_target=True, reduction="none").sum(-1)


def _score(logits: Tensor, reference: Tensor | None = None, *, targets: Tensor) -> dict[str, Tensor]:
    """The scores of some positions, from logits ``[rows, V]``; see `score_window`."""
    targets = targets.to(logits.device)
    log_probs = F.log_softmax(logits.float(), -1)  # [rows, V]
    scores = {"nll": F.nll_loss(log_probs, targets, reduction="none")}
    if reference is not None:
        reference_log_probs = F.log_softmax(reference.float(), -1)  # [rows, V]
        scores["reference_nll"] = F.nll_loss(reference_log_probs, targets, reduction="none")
        scores["kl"] = kl_divergence(reference_log_probs, log_probs)
        scores["agree"] = log_probs.argmax(-1) == reference_log_probs.argmax(-1)
    return {key: values.double().cpu() for key, values in scores.items()}
