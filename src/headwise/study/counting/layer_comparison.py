"""One attention layer counted three ways: by its closed forms, by `headwise.count` and by other packages.

The other packages are thop, fvcore, torchinfo, calflops and torch itself.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.metadata
import io
import logging
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from headwise.costs.formulas import forward_flops, parameters
from headwise.measure.timing.timing import filled_cache
from headwise.models.specs import AttentionSpec, ModelSpec, layer_spec
from headwise.runtime.attention import AttentionLayer, build
from headwise.study.counting.module import count


@dataclass(frozen=True, kw_only=True)
class PeerCount:
    """One counter's answer for one call of a module.

    Attributes:
        name: the name of the package.
        version: the installed version; None where the package is not installed.
        printed: the number that the package gives, in ``unit``; None where it gives none.
        unit: the unit of ``printed``: ``multiply-adds`` or ``FLOPs``.
        parameters: the number of parameters that the package counts; None where it counts none.
        error: the reason why there is no number; None where there is one.
    """

    name: str
    version: str | None
    printed: int | None = None
    unit: str = "multiply-adds"
    parameters: int | None = None
    error: str | None = None

    @property
    def flops(self) -> int | None:
        """The number in FLOPs, 2 for each multiply-add."""
        return None if self.printed is None else self.printed * (2 if self.unit == "multiply-adds" else 1)


Answer = tuple[int, int | None]
"""A counter's number for a module, in its own unit, and how many parameters it counts."""


def _thop(module: nn.Module, states: Tensor) -> Answer:
    macs, parameters = importlib.import_module("thop").profile(module, inputs=(states,), verbose=False)
    return int(macs), int(parameters)


def _fvcore(module: nn.Module, states: Tensor) -> Answer:
    nn_tools = importlib.import_module("fvcore.nn")
    analysis = nn_tools.FlopCountAnalysis(module, states)
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
    return int(analysis.total()), int(nn_tools.parameter_count(module)[""])


def _torchinfo(module: nn.Module, states: Tensor) -> Answer:
    summary = importlib.import_module("torchinfo").summary(module, input_data=(states,), verbose=0)
    return int(summary.total_mult_adds), int(summary.total_params)


def _calflops(module: nn.Module, states: Tensor) -> Answer:
    flops, _, parameters = importlib.import_module("calflops").calculate_flops(
        model=module, args=[states], print_results=False, output_as_string=False
    )
    return int(flops), int(parameters)


def _torch(module: nn.Module, states: Tensor) -> Answer:
    with FlopCounterMode(display=False) as counter:
        module(states)
    return counter.get_total_flops(), None


PEERS: dict[str, tuple[Callable[[nn.Module, Tensor], Answer], str]] = {
    "thop": (_thop, "multiply-adds"),
    "fvcore": (_fvcore, "multiply-adds"),
    "torchinfo": (_torchinfo, "multiply-adds"),
    "calflops": (_calflops, "FLOPs"),
    "torch": (_torch, "FLOPs"),
}
"""Each counter's function, and the unit of its number."""


def peer_counts(module: nn.Module, hidden_states: Tensor, **kwargs: Any) -> list[PeerCount]:
    """Ask every installed counter about the call ``module(hidden_states, **kwargs)``.

    For example ``[(peer.name, peer.flops) for peer in peer_counts(torch.nn.Linear(3, 5), torch.zeros(2, 3))]``.

    Each gets copies of the module and of the arguments, caches among them, and what it prints is discarded. For one
    that fails, the answer's ``error`` says why.

    Args:
        module: any torch module.
        hidden_states: the module's input.
        kwargs: the other arguments of the call.

    Returns:
        One answer for each counter of `PEERS`.
    """
    return [_run_counter(name, *PEERS[name], module, hidden_states, kwargs) for name in PEERS]


class _WithArguments(nn.Module):
    """A module with its keyword arguments filled in: most counters pass inputs by position only."""

    def __init__(self, module: nn.Module, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.module, self.kwargs = module, kwargs

    def forward(self, hidden_states: Tensor) -> Any:
        return self.module(hidden_states, **self.kwargs)


def _run_counter(
    name: str,
    counter: Callable[[nn.Module, Tensor], Answer],
    unit: str,
    module: nn.Module,
    hidden_states: Tensor,
    kwargs: dict[str, Any],
) -> PeerCount:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return PeerCount(name=name, version=None, unit=unit, error="is not installed (pip install 'headwise[bench]')")
    disabled = logging.root.manager.disable
    wrapped = _WithArguments(copy.deepcopy(module), copy.deepcopy(kwargs)).eval()
    try:
        with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            printed, parameters = counter(wrapped, hidden_states)
    except Exception as error:  # another package's code may raise anything
        return PeerCount(name=name, version=version, unit=unit, error=f"{type(error).__name__}: {error}"[:200])
    finally:
        logging.disable(disabled)
    return PeerCount(name=name, version=version, printed=printed, unit=unit, parameters=parameters)


@dataclass(frozen=True, kw_only=True)
class LayerCounts:
    """FLOPs and parameters of one call of a layer: by closed form, by `headwise.count` and by other counters.

    Attributes:
        label: the layer's mechanism and sizes.
        new_tokens: S, the number of new tokens.
        total_tokens: T, the number of tokens, those in the cache included.
        parameters: the number of parameters by closed form, which is what the layer has.
        formula_flops: FLOPs by closed form, over all S·T pairs.
        counted_flops: FLOPs by `headwise.count`, over all pairs.
        causal_flops: FLOPs by `headwise.count`, over the pairs that causal kernels compute.
        peers: the other counters' answers.
    """

    label: str
    new_tokens: int
    total_tokens: int
    parameters: int
    formula_flops: int
    counted_flops: int
    causal_flops: int
    peers: tuple[PeerCount, ...]

    def to_dict(self) -> dict[str, Any]:
        """The counts as JSON-able values, with each peer's FLOPs beside the number it printed."""
        return {**asdict(self), "peers": [{**asdict(peer), "flops": peer.flops} for peer in self.peers]}


@torch.inference_mode()
def count_layer(
    source: str | Path | ModelSpec | AttentionSpec,
    new_tokens: int,
    total_tokens: int | None = None,
    *,
    index: int = 0,
) -> LayerCounts:
    """Build one layer with random float32 weights, run one causal call of it, and ask every counter.

    For example ``count_layer("smollm2-135m", 16).formula_flops`` is 28,901,376.

    Args:
        source: a layer's spec, or a model as `headwise.inspect` takes it.
        new_tokens: S, the number of new tokens; 1 for a decode step.
        total_tokens: T; S when None (prefill). T − S tokens are in the cache.
        index: the layer's number in a model, from 0.

    Raises:
        ArgumentError: a number is impossible, or there is no such source.
        SpecError: the architecture is not understood, or there is no such layer to run.
    """
    spec = layer_spec(source, index)
    total = new_tokens if total_tokens is None else total_tokens
    formula = forward_flops(spec, new_tokens, total, causal=False)
    layer = build(spec)
    states, kwargs = _call(layer, new_tokens, total)
    counted = count(layer, states, **kwargs)
    states, kwargs = _call(layer, new_tokens, total)
    return LayerCounts(
        label=spec.label,
        new_tokens=new_tokens,
        total_tokens=total,
        parameters=parameters(spec),
        formula_flops=formula,
        counted_flops=counted.forward_flops,
        causal_flops=counted.causal_flops,
        peers=tuple(peer_counts(layer, states, **kwargs)),
    )


def _call(layer: AttentionLayer, new_tokens: int, total_tokens: int) -> tuple[torch.Tensor, dict[str, Any]]:
    states = torch.randn(1, new_tokens, layer.spec.hidden_size)
    kwargs: dict[str, Any] = {"is_causal": layer.spec.is_causal}
    if total_tokens > new_tokens:
        kwargs["cache"] = filled_cache(layer, 1, total_tokens - new_tokens, total_tokens)
    return states, kwargs
