"""What all methods need of the calibration windows: moments, derivatives, thresholds, levels, frequencies.

Moments are of all windows, the rest is of the first `WINDOWS`: so many tokens have derivatives in the authors' code
of Palu and of KVQuant. Derivatives are taken in bfloat16, everything else in float32.

The result is tensors by name, where a layer's begin with its number:

- ``0.moments``: ``[E, E]``, the sum of x xᵀ over the inputs of the attention.
- ``0.keys.fisher``, ``0.values.fisher``: ``[K·D]``, the mean over a row of the weights of the root mean square of its
  derivative, for Palu.
- ``0.keys.sparse.lower`` and so on: for KVQuant; see `kvquant.calibrated`.
- ``0.elite``: ``[K, rounds]``; see `elitekv.elite_order`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
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
                if torch.is_grad_enabled() and output.requires_grad:
                    output.retain_grad()
                elif name == "keys":
                    self.moments += (inputs[0][0].mT @ inputs[0][0]).double()
                self.outputs[name] = output

            return hear

        names = {**PROJECTIONS, "queries": "q_proj"}
        self.outputs.clear()
        hooks = [getattr(self.attention, of).register_forward_hook(listener(name)) for name, of in names.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def keep_states(self, names: Iterable[str]) -> None:
        """Keep the outputs of some projections for a window that has gone through the model."""
        for name in names:
            self.states[name].append(self.outputs[name][0].half())

    def keep_derivatives(self) -> None:
        """Keep the derivatives by a window that has gone through the model and back."""
        for name, of in PROJECTIONS.items():
            weight = getattr(self.attention, of).weight
            self.squares[name] += weight.grad.square()
            weight.grad = None
            gradient = self.outputs[name].grad
            assert gradient is not None
            self.derivatives[name].append(gradient[0].float().square())

    def result(self, rotary: Rotary) -> dict[str, Tensor]:
        """The layer's statistics."""
        found = {"moments": self.moments}
        tokens = rotary.cos.shape[1]
        for name in PROJECTIONS:
            found[f"{name}.fisher"] = (self.squares[name] / len(self.derivatives[name])).sqrt().mean(1)
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
        with ExitStack() as stack, torch.no_grad():
            for recorder in recorders:
                stack.enter_context(recorder.listening())
            model.model(ids[None], use_cache=False)
        for recorder in recorders:
            recorder.keep_states(_wanted(window))
        if window < WINDOWS:
            _differentiate(model, ids, recorders)
        progress(f"calibration window {window + 1} of {len(windows)}")
    model.requires_grad_(False)
    return _results(model, windows, recorders, progress)


def _wanted(window: int) -> list[str]:
    return [*PROJECTIONS] * (window < WINDOWS) + ["queries"] * (window < ELITE_WINDOWS)


def _differentiate(model: Any, ids: Tensor, recorders: list[_Recorder]) -> None:
    """Take the derivatives of a window's loss."""
    with ExitStack() as stack:
        for recorder in recorders:
            stack.enter_context(recorder.listening())
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids[None], use_cache=False).logits[0, :-1]
        F.cross_entropy(logits.float(), ids[1:]).backward()
    for recorder in recorders:
        recorder.keep_derivatives()


@torch.no_grad()
def _results(
    model: Any, windows: Tensor, recorders: list[_Recorder], progress: Callable[[str], None]
) -> dict[str, Tensor]:
    tokens = windows.shape[1]
    rotary = Rotary(*model.model.rotary_emb(torch.zeros(1, tokens, 1), torch.arange(tokens)[None]))
    found = {}
    for index, recorder in enumerate(recorders):
        for name, tensor in recorder.result(rotary).items():
            found[f"{index}.{name}"] = tensor.contiguous()
        recorder.states.clear()
        recorder.derivatives.clear()
        progress(f"statistics of layer {index + 1} of {len(recorders)}")
    return found
