"""Greedy decoding on a GPU through a CUDA graph: one launch a token instead of one for every kernel."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from headwise.runtime.caches.frequencies import rotaries_by_length
from headwise.runtime.hf.attention import HostedAttention
from headwise.runtime.hf.load import check_logits

_WARM_UP = 3
"""Calls before one is recorded: they compile kernels and allocate memory."""


class Recorded:
    """A function that a GPU records as a CUDA graph and replays; on a CPU it is called.

    The tensors that it reads and writes must stay at their addresses, and it must not depend on their values.

    Args:
        step: the function, without arguments.
        device: that it computes on.
    """

    def __init__(self, step: Callable[[], object], device: torch.device) -> None:
        self.step, self.device = step, device
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Run the function once."""
        self._calls += 1
        if self.device.type != "cuda":
            self.step()
        elif self._calls <= _WARM_UP:
            side, current = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                self.step()
            current.wait_stream(side)
        else:
            if self._graph is None:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.device(self.device), torch.cuda.graph(self._graph):  # records without running
                    self.step()
            self._graph.replay()


def can_record(model: Any) -> bool:
    """Whether a decoding step of a model can be recorded: transformers says so, and no step waits for the GPU.

    Converted layers wait for it, to read the length of the cache, and so do frequencies that depend on the length.

    Args:
        model: a transformers model.
    """
    if not model._can_compile_fullgraph or rotaries_by_length(model):
        return False
    return not any(isinstance(module, HostedAttention) for module in model.modules())


@torch.inference_mode()
def decode_recorded(model: Any, ids: Tensor, max_new_tokens: int, stop: Collection[int] = ()) -> Tensor:
    """Continue a prompt greedily with a static cache, one recorded step for each token.

    Args:
        model: a decoder whose attention supports static caches.
        ids: ``[1, S]``, the prompt.
        max_new_tokens: the most tokens to add.
        stop: tokens after which to stop.

    Returns:
        ``[1, S + new]``, the prompt and the new tokens.

    Raises:
        CheckpointError: the model computes NaN or infinite logits.
    """
    count = ids.shape[1]
    sequence = torch.cat((ids, ids.new_zeros(1, max_new_tokens)), dim=1)  # [1, S + max_new_tokens]
    cache = StaticCache(config=model.config, max_cache_len=count + max_new_tokens)
    best = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].max(-1, keepdim=True)  # [1, 1] each

    def step() -> None:
        new = model(best.indices, past_key_values=cache).logits[:, -1].max(-1, keepdim=True)
        best.values.copy_(new.values)
        best.indices.copy_(new.indices)

    next_token = Recorded(step, ids.device)
    for at in range(count, count + max_new_tokens):
        check_logits(best.values, model)  # here, because nothing that is recorded may wait for the GPU
        sequence[:, at : at + 1] = best.indices
        if int(best.indices) in stop:
            return sequence[:, : at + 1]
        if at + 1 < count + max_new_tokens:
            next_token()
    return sequence
