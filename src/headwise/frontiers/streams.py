"""A text in a model whose cache is rounded, in many formats at once, with one layer's weights in memory.

A *stream* is the hidden states of the last tokens of each window in a model whose cache has a format. They attend to
the keys and values of all tokens as the format stores them. Those of the tokens before them, which rounding has
changed in the layers below, are estimated from one format that whole windows are run in, the *reference*: their
change has the reference's direction, and the size that the stream's own tokens show. Whole windows in a format are
thus the model with that cache, and a stream nearly is, at a part of the time.

Shapes: B windows, W tokens of a window, S tokens of a stream, K key–value heads, D width of a head, E hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax
from transformers import DynamicCache

from headwise.caches.cache import rounded_queries
from headwise.hf import HeadwiseCache, LayerwiseModel
from headwise.progress import Progress, silent

STAGE = "rounding caches"
"""The name of the work, for progress."""

_PIECE = 16
"""Positions of all windows whose logits are in memory at once."""

Store = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Keys and values ``[B, K, W, D]`` as a format stores them, for attention."""


@torch.no_grad()
def stream_losses(
    model: LayerwiseModel,
    ids: Tensor,
    reference: str,
    formats: Sequence[str] = (),
    *,
    tokens: int = 0,
    progress: Progress = silent,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute what tokens lose: KL(full cache ‖ format), in nats.

    For example ``stream_losses(model, ids, "int4", ["int8", "kivi4"], tokens=32)``.

    Args:
        model: a decoder all of whose layers have keys and values of heads.
        ids: windows of tokens, ``[B, W]``.
        reference: the format that whole windows are run in.
        formats: those that streams are run in.
        tokens: S, the tokens of a stream: the last ones of each window.
        progress: told of each layer.

    Returns:
        Of the reference ``[B, W]``, and of each format ``[B, S]``.
    """
    window = ids.shape[1]
    exact = _Past()
    rounded = _Past()
    late = _Past(window - tokens, exact, rounded)
    hidden = model.begin(ids)
    full, whole = model.behind(exact, window), model.behind(rounded, window)
    part = model.behind(late, tokens) if formats else full
    states = dict.fromkeys(formats, hidden[:, window - tokens :])
    changed = hidden
    for index in range(model.num_layers):
        progress(STAGE, index, model.num_layers)
        module = model.module(index)
        hidden = full.run(index, module, hidden)
        changed = _run(whole, index, module, changed, rounded, reference)
        for name in formats:
            states[name] = _run(part, index, module, states[name], late, name)
    progress(STAGE, model.num_layers, model.num_layers)
    found = _divergences(model, hidden, {None: changed, **states})
    return found.pop(None), {name: found[name] for name in formats}


def _run(view: LayerwiseModel, index: int, module: nn.Module, states: Tensor, past: _Past, quantize: str) -> Tensor:
    """A layer's output ``[B, S, E]`` of its inputs, where its keys and values have a format."""
    with rounded_queries(view.model, quantize):
        past.store = HeadwiseCache(view.model.config, quantize=quantize).layers[index].update
        return view.run(index, module, states)


def _divergences(model: LayerwiseModel, exact: Tensor, states: dict[str | None, Tensor]) -> dict[str | None, Tensor]:
    """KL of each token, ``[B, S]``, from the last layer's outputs: exact ``[B, W, E]``, and streams ``[B, S, E]``."""
    window = exact.shape[1]
    firsts = {name: window - part.shape[1] for name, part in states.items()}
    found: dict[str | None, list[Tensor]] = {name: [] for name in states}
    for start, stop in itertools.pairwise(sorted({*range(0, window, _PIECE), *firsts.values(), window})):
        target = log_softmax(model.finish(exact[:, start:stop]).float(), -1)
        for name, part in states.items():
            if firsts[name] <= start:
                logits = model.finish(part[:, start - firsts[name] : stop - firsts[name]]).float()
                loss = kl_div(log_softmax(logits, -1), target, reduction="none", log_target=True).sum(-1)
                found[name].append(loss)
    return {name: torch.cat(parts, 1) for name, parts in found.items()}


class _Past(DynamicCache):
    """A cache that gives attention the keys and values of whole windows as a format stores them, layer after layer.

    Attributes:
        latest: keys and values ``[B, K, W, D]`` of the latest call, before they were stored.
        store: what stores them; None where they stay as they are.

    Args:
        first: the position of the first token that calls attention.
        exact: has the keys and values of the tokens before it with a full cache.
        rounded: has those in the reference's format.
    """

    def __init__(self, first: int = 0, exact: _Past | None = None, rounded: _Past | None = None) -> None:
        super().__init__()
        self._first, self._exact, self._rounded = first, exact, rounded
        self.latest: tuple[Tensor, ...] = ()
        self.store: Store | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All keys and values ``[B, K, W, D]`` as they are stored, of which the given ``[B, K, S, D]`` are new."""
        if self._exact is not None and self._rounded is not None:
            both = zip((key_states, value_states), self._exact.latest, self._rounded.latest, strict=True)
            key_states, value_states = (self._completed(*sides) for sides in both)
        self.latest = key_states, value_states
        return (key_states, value_states) if self.store is None else self.store(key_states, value_states)

    def _completed(self, new: Tensor, exact: Tensor, rounded: Tensor) -> Tensor:
        """New keys or values behind those of the tokens before them, as far off as the new ones are."""
        off = rounded - exact
        size, most = (new - exact[:, :, self._first :]).norm(), off[:, :, self._first :].norm()
        share = torch.where(most > 0, size / most, 0.0)
        return torch.cat(((exact + share * off)[:, :, : self._first], new), 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The tokens before the first."""
        return self._first

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the first."""
        return self._first

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many keys attention is given, and the position of their first."""
        return self._first + query_length, 0
