"""FLOPs and parameters of a module as other packages count them: thop, fvcore, torchinfo, calflops, torch itself."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.metadata
import io
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True, kw_only=True)
class PeerCount:
    """One counter's answer for one call of a module.

    Attributes:
        name: the package.
        version: installed, or None when it is not.
        printed: the number it gives, in ``unit``.
        unit: ``multiply-adds`` or ``FLOPs``.
        parameters: how many it counts, None when it does not say.
        error: why there is no number, None when there is one.
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
        hidden_states: its input.
        kwargs: the other arguments of the call.

    Returns:
        One answer for each counter of `PEERS`.
    """
    return [_ask(name, *PEERS[name], module, hidden_states, kwargs) for name in PEERS]


class _WithArguments(nn.Module):
    """A module with its keyword arguments filled in: most counters pass inputs by position only."""

    def __init__(self, module: nn.Module, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.module, self.kwargs = module, kwargs

    def forward(self, hidden_states: Tensor) -> Any:
        return self.module(hidden_states, **self.kwargs)


def _ask(
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
