"""A text in a model whose cache is rounded, in many formats at once, with one layer's weights in memory.

A *stream* is the hidden states of some tokens of each window in a model whose cache has a format. They attend to the
keys and values of all tokens as the format stores them. Those of the other tokens, which rounding has changed in the
layers below, are estimated from one format that whole windows are run in, the *reference*: their change has the
reference's direction, and the size that the stream's own tokens show, but at most the reference's. Whole windows in a
format are thus the model with that cache, and a stream nearly is, at a part of the time.

Shapes: B windows, W tokens of a window, S tokens of a stream, K key–value heads, D width of a head, E hidden size.
"""

from __future__ import annotations

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
    positions: Tensor | None = None,
    progress: Progress = silent,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute what tokens lose: KL(full cache ‖ format), in nats.

    For example ``stream_losses(model, ids, "int4", ["int8", "kivi4"], positions=torch.arange(0, 512, 16))``.

    Args:
        model: a decoder all of whose layers have keys and values of heads.
        ids: windows of tokens, ``[B, W]``.
        reference: the format that whole windows are run in.
        formats: those that streams are run in.
        positions: ``[S]``, rising, of a stream's tokens in their window; all of them when None.
        progress: told of each layer.

    Returns:
        Of the reference ``[B, W]``, and of each format ``[B, S]``.
    """
    every = torch.arange(ids.shape[1])
    positions = every if positions is None else positions
    exact = _Given(every)
    rounded = _Given(every)
    few = _Given(positions, exact, rounded)
    hidden = model.begin(ids)
    full, whole, part = model.among(exact, every), model.among(rounded, every), model.among(few, positions)
    states = dict.fromkeys(formats, hidden[:, positions])
    changed = hidden
    for index in range(model.num_layers):
        progress(STAGE, index, model.num_layers)
        module = model.module(index)
        hidden = full.run(index, module, hidden)
        changed = _run(whole, index, module, changed, rounded, reference)
        for name in formats:
            states[name] = _run(part, index, module, states[name], few, name)
    progress(STAGE, model.num_layers, model.num_layers)
    of_whole = _divergences(model, hidden, {reference: changed})[reference]
    return of_whole, _divergences(model, hidden[:, positions], states)


def _run(view: LayerwiseModel, index: int, module: nn.Module, states: Tensor, given: _Given, quantize: str) -> Tensor:
    """A layer's output ``[B, S, E]`` of its inputs, where its keys and values have a format."""
    with rounded_queries(view.model, quantize):
        given.store = HeadwiseCache(view.model.config, quantize=quantize).layers[index].update
        return view.run(index, module, states)


def _divergences(model: LayerwiseModel, exact: Tensor, states: dict[str, Tensor]) -> dict[str, Tensor]:
    """KL of each token, ``[B, S]``, from the last layer's outputs ``[B, S, E]`` with a full cache and with others."""
    found: dict[str, list[Tensor]] = {name: [] for name in states}
    for start in range(0, exact.shape[1], _PIECE):
        piece = slice(start, start + _PIECE)
        target = log_softmax(model.finish(exact[:, piece]).float(), -1)
        for name, part in states.items():
            logits = log_softmax(model.finish(part[:, piece]).float(), -1)
            found[name].append(kl_div(logits, target, reduction="none", log_target=True).sum(-1))
    return {name: torch.cat(parts, 1) for name, parts in found.items()}


class _Given(DynamicCache):
    """A cache that gives attention the keys and values of whole windows as a format stores them, layer after layer.

    Attributes:
        latest: keys and values ``[B, K, W, D]`` of the latest call, before they were stored.
        store: what stores them; None where they stay as they are.

    Args:
        positions: of the tokens that call attention, ``[S]``.
        exact: has the keys and values of whole windows with a full cache.
        rounded: has those in the reference's format; None where all tokens call attention.
    """

    def __init__(self, positions: Tensor, exact: _Given | None = None, rounded: _Given | None = None) -> None:
        super().__init__()
        self._positions, self._exact, self._rounded = positions, exact, rounded
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
        """New keys or values among those of the other tokens, which are as far off as the new ones are."""
        off = rounded - exact
        size, most = (new - exact[:, :, self._positions]).norm(), off[:, :, self._positions].norm()
        # No more than the reference's: a sum of many times an error is no error that a model makes.
        share = torch.where(most > 0, size / most, 0.0).clamp_max(1.0)
        return (exact + share * off).index_copy(2, self._positions.to(new.device), new)
