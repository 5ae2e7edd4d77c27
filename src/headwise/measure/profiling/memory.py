"""Predicted memory beside measured: every tensor that a decoder holds while it reads a prompt and decodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from headwise.costs.prediction import Pass, peak_memory
from headwise.costs.prediction.memory import CHUNK
from headwise.measure.profiling.decoder import Decoder, decode_step, filled_cache, prompt_call
from headwise.measure.profiling.pace import HERE

BATCH, CONTEXT = 4, 2048
"""Sequences, and tokens of each."""


@dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """One decoder: what it holds at most, with the caches of all sequences, while one prompt is read or all decode.

    Attributes:
        mechanism: of its attention.
        dtype: of weights, activations and cache.
        measured: bytes of its tensors; not what the process has besides.
        predicted: bytes, by `headwise.costs.prediction.peak_memory`.
    """

    mechanism: str
    dtype: str
    measured: int
    predicted: int

    @property
    def error(self) -> float:
        """The prediction's relative error."""
        return self.predicted / self.measured - 1


def memory_point(mechanism: str, decoder: Decoder, dtype: str, device: torch.device = HERE) -> MemoryPoint:
    """Measure the tensors of a decoder on a device, and predict them.

    For example ``memory_point("MQA", Decoder(num_kv_heads=1), "float32").error``.
    """
    model = decoder.build(getattr(torch, dtype), device)
    weights = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    cache = filled_cache(model, decoder.spec(), batch=BATCH, tokens=CONTEXT)
    held = cache.nbytes
    tokens = min(CHUNK, CONTEXT)
    # A prompt is read into a cache of its own, which is one of those that are counted already.
    prompt, step = prompt_call(model, tokens), decode_step(model, cache, BATCH)
    for call in (prompt, step):
        call()  # what is made once does not count
    most = max(peak_bytes(step, device), peak_bytes(prompt, device) - held * tokens // (BATCH * CONTEXT))
    predicted = peak_memory(decoder.spec(), Pass(batch=BATCH, total=CONTEXT, dtype=dtype)).total
    return MemoryPoint(
        mechanism=mechanism, dtype=dtype, measured=sum(weights.values()) + held + most, predicted=predicted
    )


def peak_bytes(call: Callable[[], object], device: torch.device = HERE) -> int:
    """The most bytes of tensors that a call makes and holds at once, with torch's for LAPACK on a processor.

    For example ``peak_bytes(lambda: a @ b)``.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with _silenced(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    found = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(found, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@contextmanager
def _silenced() -> Iterator[None]:
    """Keep what torch's profiler writes to stderr from the user."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
