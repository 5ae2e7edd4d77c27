"""A text in a model whose cache is rounded, in many formats at once, with one layer's weights in memory.

A *stream* is the hidden states of some tokens of each window in a model whose cache has a format. They attend to the
keys and values of all tokens as the format stores them. Those of the other tokens, which rounding has changed in the
layers below, are estimated from a few formats that whole windows are run in, the *references*: their change has the
direction that it has in the first reference whose changes are as large as those that the stream's own tokens show,
and that size. Whole windows in a format are thus the model with that cache, and a stream nearly is, at a part of the
time.

Shapes: B windows, W tokens of a window, S tokens of a stream, K key–value heads, D width of a head, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax

from headwise.base.progress import Progress, silent
from headwise.runtime.caches.cache import rounded_queries
from headwise.runtime.caches.given import Update
from headwise.runtime.hf import HeadwiseCache, LayerwiseModel

STAGE = "rounding caches"
"""The name of the work, for progress."""

_PIECE = 16
"""Positions of all windows whose logits are in memory at once."""


@torch.no_grad()
def stream_losses(
    model: LayerwiseModel,
    ids: Tensor,
    references: Sequence[str],
    formats: Sequence[str] = (),
    *,
    positions: Tensor | None = None,
    progress: Progress = silent,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compute what tokens lose: KL(full cache ‖ format), in nats.

    For example ``stream_losses(model, ids, ["int4"], ["int8", "kivi4"], positions=torch.arange(0, 512, 16))``.

    Args:
        model: a decoder all of whose layers have keys and values of heads.
        ids: windows of tokens, ``[B, W]``.
        references: the formats that whole windows are run in, from the one that loses least on.
        formats: those that streams are run in.
        positions: ``[S]``, rising, of a stream's tokens in their window; all of them when None.
        progress: told of each layer.

    Returns:
        Of each reference ``[B, W]``, and of each format ``[B, S]``.
    """
    every = torch.arange(ids.shape[1])
    positions = every if positions is None else positions
    exact, rounded = _Given(every), {name: _Given(every) for name in references}
    few = _Given(positions, exact, [*rounded.values()])
    hidden = model.begin(ids)
    full, part = model.among(every, exact.update), model.among(positions, few.update)
    wholes = {name: model.among(every, given.update) for name, given in rounded.items()}
    changed, states = dict.fromkeys(references, hidden), dict.fromkeys(formats, hidden[:, positions])
    for index in range(model.num_layers):
        progress(STAGE, index, model.num_layers)
        module = model.module(index)
        hidden = full.run(index, module, hidden)
        for name, whole in wholes.items():
            changed[name] = _run(whole, index, module, changed[name], rounded[name], name)
        for name in formats:
            states[name] = _run(part, index, module, states[name], few, name)
    progress(STAGE, model.num_layers, model.num_layers)
    return _divergences(model, hidden, changed), _divergences(model, hidden[:, positions], states)


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


class _Given:
    """Gives attention the keys and values of whole windows as a format stores them, layer after layer.

    Attributes:
        latest: keys and values ``[B, K, W, D]`` of the latest call, before they were stored.
        store: what stores them; None where they stay as they are.

    Args:
        positions: of the tokens that call attention, ``[S]``.
        exact: has the keys and values of whole windows with a full cache.
        rounded: have those in each reference; none where all tokens call attention.
    """

    def __init__(self, positions: Tensor, exact: _Given | None = None, rounded: Sequence[_Given] = ()) -> None:
        self._positions, self._exact, self._rounded = positions, exact, rounded
        self.latest: tuple[Tensor, ...] = ()
        self.store: Update | None = None

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values ``[B, K, W, D]`` as they are stored, of which the given ``[B, K, S, D]`` are new."""
        if self._exact is not None:
            key_states, value_states = (
                self._completed(new, exact, [given.latest[side] for given in self._rounded])
                for side, (new, exact) in enumerate(zip((key_states, value_states), self._exact.latest, strict=True))
            )
        self.latest = key_states, value_states
        return (key_states, value_states) if self.store is None else self.store(key_states, value_states)

    def _completed(self, new: Tensor, exact: Tensor, rounded: Sequence[Tensor]) -> Tensor:
        """New keys or values among those of the other tokens, which are as far off as the new ones are."""
        at = self._positions.to(new.device)
        size, filled = (new - exact[:, :, at]).norm(), exact
        for reference in rounded:
            off = reference - exact
            most = off[:, :, at].norm()
            # Never more than a reference's: many times an error is no error that a model makes.
            filled = exact + torch.where(most > 0, size / most, 0.0).clamp_max(1.0) * off
            if size <= most:
                break
        return filled.index_copy(2, at, new)
