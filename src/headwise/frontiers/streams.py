"""A text in a model whose cache is rounded, in many formats at once, with one layer's weights in memory.

A *stream* is the hidden states of the last tokens of each window in a model whose cache has a format. The tokens
before them attend as they do with a full cache, but their keys and values are rounded where those of a stream attend
to them. A stream of whole windows is thus the model with that cache, and a shorter one nearly is, at a part of the
time: what is left out is how far rounding changes the earlier tokens' own hidden states.

Shapes: B windows, W tokens of a window, S tokens of a stream, K key–value heads, D width of a head, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax
from transformers import DynamicCache

from headwise.caches.cache import rounded_queries
from headwise.hf import HeadwiseCache, LayerwiseModel
from headwise.progress import Progress, silent

STAGE = "rounding caches"
"""The name of the work, for progress."""

_PIECE = 16
"""Positions of all windows whose logits are in memory at once."""


class Stream(NamedTuple):
    """The last tokens of each window in a model whose cache has a format.

    Attributes:
        quantize: the format.
        first: the position of the first of the tokens.
    """

    quantize: str
    first: int


@torch.no_grad()
def stream_losses(
    model: LayerwiseModel, ids: Tensor, streams: Collection[Stream], *, progress: Progress = silent
) -> dict[Stream, Tensor]:
    """Compute what each token of a stream loses: KL(full cache ‖ format), in nats.

    For example ``stream_losses(model, ids, [Stream("int4", 0)])`` is what the windows lose in ``int4``.

    Args:
        model: a decoder all of whose layers have keys and values of heads.
        ids: windows of tokens, ``[B, W]``.
        streams: what to compute; none twice.
        progress: told of each layer.

    Returns:
        ``[B, S]`` of each.
    """
    window = ids.shape[1]
    hidden = model.begin(ids)
    full = _Past(0)
    exact = model.behind(full, window)
    pasts = {first: _Past(first) for first in {stream.first for stream in streams}}
    views = {first: model.behind(past, window - first) for first, past in pasts.items()}
    states = {stream: hidden[:, stream.first :] for stream in streams}
    for index in range(model.num_layers):
        progress(STAGE, index, model.num_layers)
        module = model.module(index)
        hidden = exact.run(index, module, hidden)
        for stream in streams:
            with rounded_queries(model.model, stream.quantize):
                past = pasts[stream.first]
                past.follow(full, HeadwiseCache(model.model.config, quantize=stream.quantize).layers[index].update)
                states[stream] = views[stream.first].run(index, module, states[stream])
    progress(STAGE, model.num_layers, model.num_layers)
    return _divergences(model, hidden, states)


def _divergences(model: LayerwiseModel, exact: Tensor, states: dict[Stream, Tensor]) -> dict[Stream, Tensor]:
    """KL of each token of each stream, ``[B, S]``, from the last layer's outputs ``[B, W, E]`` and ``[B, S, E]``."""
    window = exact.shape[1]
    found: dict[Stream, list[Tensor]] = {stream: [] for stream in states}
    edges = sorted({*range(0, window, _PIECE), *(stream.first for stream in states), window})
    for start, stop in zip(edges, edges[1:], strict=False):
        reading = {stream: part for stream, part in states.items() if stream.first <= start}
        if not reading:
            continue
        target = log_softmax(model.finish(exact[:, start:stop]).float(), -1)
        for stream, part in reading.items():
            logits = model.finish(part[:, start - stream.first : stop - stream.first]).float()
            loss = kl_div(log_softmax(logits, -1), target, reduction="none", log_target=True).sum(-1)
            found[stream].append(loss)
    return {stream: torch.cat(parts, 1) for stream, parts in found.items()}


class _Past(DynamicCache):
    """A cache of one layer at a time, that knows all tokens of a window and gives what a format stores of them.

    Attributes:
        keys: of the latest call, ``[B, K, W, D]``, exact.
        values: likewise.

    Args:
        first: the position of the first token that calls attention.
    """

    def __init__(self, first: int) -> None:
        super().__init__()
        self._first = first
        self.keys = self.values = torch.empty(0)
        self._past: _Past | None = None
        self._store: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def follow(self, past: _Past, store: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        """Take the tokens before the first from another cache, and give attention what is stored of all."""
        self._past, self._store = past, store

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All keys and values ``[B, K, W, D]`` as they are stored, of which ``[B, K, S, D]`` are new."""
        if self._past is not None:
            key_states = torch.cat((self._past.keys[:, :, : self._first], key_states), 2)
            value_states = torch.cat((self._past.values[:, :, : self._first], value_states), 2)
        self.keys, self.values = key_states, value_states
        return (key_states, value_states) if self._store is None else self._store(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The tokens before the first."""
        return self._first

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the first."""
        return self._first

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many keys attention is given, and the position of their first."""
        return self._first + query_length, 0
