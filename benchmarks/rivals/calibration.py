"""One pass over the calibration windows, for all methods: moments, derivatives, thresholds, levels, frequencies.

The result is tensors by name, where a layer's begin with its number:

- ``0.moments``: ``[E, E]``, the sum of x xᵀ over the inputs of the attention.
- ``0.keys.fisher``, ``0.values.fisher``: ``[K·D]``, the mean over a row of the weights of the root mean square of its
  derivative, for Palu.
- ``0.keys.sparse.lower`` and so on: for KVQuant; see `kvquant.calibrated`.
- ``0.elite``: ``[K, rounds]``; see `elitekv.elite_order`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.rivals.elitekv import elite_order
from benchmarks.rivals.kvquant import SINKS, WINDOWS, calibrated
from benchmarks.rivals.simulation import Rotary, split_heads
from torch import Tensor

ELITE_WINDOWS = 8
"""Windows that frequencies are chosen on."""
PROJECTIONS = {"keys": "k_proj", "values": "v_proj"}


class _Recorder:
    """What a pass over the windows leaves of one layer."""

    def __init__(self, attention: Any) -> None:
        E = attention.q_proj.in_features
        self.attention = attention
        self.moments = torch.zeros(E, E, dtype=torch.float64)
        self.squares = {name: torch.zeros_like(getattr(attention, of).weight) for name, of in PROJECTIONS.items()}
        self.states: dict[str, list[Tensor]] = {"queries": [], "keys": [], "values": []}
        self.derivatives: dict[str, list[Tensor]] = {"keys": [], "values": []}
        self.outputs: dict[str, Tensor] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to the projections."""

        def listener(name: str) -> Callable[..., None]:
            def hear(_: Any, inputs: tuple[Tensor], output: Tensor) -> None:
                if name == "keys":
                    x = inputs[0].detach()[0]
                    self.moments += (x.mT @ x).double()
                if name != "queries":
                    output.retain_grad()
                self.outputs[name] = output

            return hear

        names = {**PROJECTIONS, "queries": "q_proj"}
        hooks = [getattr(self.attention, of).register_forward_hook(listener(name)) for name, of in names.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self, window: int) -> None:
        """Keep what is needed of a window that has gone through the model and back."""
        for name, of in PROJECTIONS.items():
            weight, output = getattr(self.attention, of).weight, self.outputs[name]
            self.squares[name] += weight.grad.square()
            weight.grad = None
            if window < WINDOWS:
                self.states[name].append(output.detach()[0].half())
                self.derivatives[name].append(output.grad[0].square())
        if window < ELITE_WINDOWS:
            self.states["queries"].append(self.outputs["queries"].detach()[0].half())
        self.outputs.clear()

    def result(self, windows: int, rotary: Rotary) -> dict[str, Tensor]:
        """The layer's statistics."""
        found = {"moments": self.moments}
        tokens = rotary.cos.shape[1]
        for name in PROJECTIONS:
            found[f"{name}.fisher"] = (self.squares[name] / windows).sqrt().mean(1)
            states, weights = torch.cat(self.states[name]).float(), torch.cat(self.derivatives[name])
            first = torch.arange(len(states)) % tokens < SINKS
            found |= calibrated(name, states, weights, first)
        D = self.attention.head_dim
        queries = torch.stack(self.states["queries"]).float()
        keys = torch.stack(self.states["keys"][: len(queries)]).float()
        found["elite"] = elite_order(split_heads(queries, D), split_heads(keys, D), rotary)
        return found


def collect(model: Any, windows: Tensor, progress: Callable[[str], None] = lambda _: None) -> dict[str, Tensor]:
    """Statistics of all layers on windows ``[N, S]``.

    Args:
        model: a llama model of transformers, in float32.
        windows: token ids.
        progress: told of windows and layers.
    """
    model.requires_grad_(False)
    recorders = [_Recorder(layer.self_attn) for layer in model.model.layers]
    for recorder in recorders:
        for of in PROJECTIONS.values():
            getattr(recorder.attention, of).weight.requires_grad_(True)
    for window, ids in enumerate(windows):
        _through(model, ids, recorders)
        for recorder in recorders:
            recorder.take(window)
        progress(f"calibration window {window + 1} of {len(windows)}")
    model.requires_grad_(False)
    return _results(model, windows, recorders, progress)


def _through(model: Any, ids: Tensor, recorders: list[_Recorder]) -> None:
    """A window through the model and its loss's derivatives back."""
    listening = [recorder.listening() for recorder in recorders]
    for one in listening:
        one.__enter__()
    try:
        logits = model(ids[None], use_cache=False).logits[0, :-1]
        F.cross_entropy(logits, ids[1:]).backward()
    finally:
        for one in listening:
            one.__exit__(None, None, None)


@torch.no_grad()
def _results(
    model: Any, windows: Tensor, recorders: list[_Recorder], progress: Callable[[str], None]
) -> dict[str, Tensor]:
    tokens = windows.shape[1]
    rotary = Rotary(*model.model.rotary_emb(torch.zeros(1, tokens, 1), torch.arange(tokens)[None]))
    found = {}
    for index, recorder in enumerate(recorders):
        for name, tensor in recorder.result(len(windows), rotary).items():
            found[f"{index}.{name}"] = tensor.contiguous()
        recorder.states.clear()
        recorder.derivatives.clear()
        progress(f"statistics of layer {index + 1} of {len(recorders)}")
    return found
