"""Greedy decoding on a GPU as one recorded graph: a token costs one launch, not one of every kernel in the model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from headwise.hf.attention import HostedAttention

_WARM_UP = 3
"""Calls before one is recorded: kernels are compiled and memory is found in them."""


class Recorded:
    """A step without arguments that a GPU records and then plays back; on a CPU it is called.

    What it reads and writes must stay where it is, and it must not look at a tensor's numbers.

    Args:
        step: what to do.
        device: where it is done.
    """

    def __init__(self, step: Callable[[], object], device: torch.device) -> None:
        self.step, self.device = step, device
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Do the step once."""
        self._calls += 1
        if self.device.type != "cuda":
            self.step()
        elif self._calls <= _WARM_UP:
            beside, current = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
            beside.wait_stream(current)
            with torch.cuda.stream(beside):
                self.step()
            current.wait_stream(beside)
        else:
            if self._graph is None:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.device(self.device), torch.cuda.graph(self._graph):  # this does not do it yet
                    self.step()
            self._graph.replay()


def can_record(model: Any) -> bool:
    """Whether a model's step can be recorded: transformers says so, and no layer is converted.

    Converted layers ask a cache how long it is, and wait for the GPU.
    """
    return bool(model._can_compile_fullgraph) and not any(
        isinstance(module, HostedAttention) for module in model.modules()
    )


@torch.inference_mode()
def decode_recorded(model: Any, ids: Tensor, max_new_tokens: int, stop: Collection[int] = ()) -> Tensor:
    """A greedy continuation through a static cache, a token a recorded step.

    Args:
        model: a decoder whose attention takes static caches.
        ids: ``[1, S]``, the prompt.
        max_new_tokens: how many to add at most.
        stop: tokens to stop behind.

    Returns:
        ``[1, S + new]``.
    """
    count = ids.shape[1]
    made = torch.cat((ids, ids.new_zeros(1, max_new_tokens)), dim=1)
    cache = StaticCache(config=model.config, max_cache_len=count + max_new_tokens)
    token = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)

    def step() -> None:
        token.copy_(model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True))

    next_token = Recorded(step, ids.device)
    for at in range(count, count + max_new_tokens):
        made[:, at : at + 1] = token
        if int(token) in stop:
            return made[:, : at + 1]
        if at + 1 < count + max_new_tokens:
            next_token()
    return made
