"""Memory: of this process, of the machine, and of caches."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

from torch import Tensor


def peak_rss_bytes() -> int:
    """The most resident memory the process has had so far, in bytes, mapped files included.

    For example ``peak_rss_bytes()``.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_bytes() -> int | None:
    """Bytes of memory that Linux can give without swapping; None on other systems.

    For example ``available_bytes()``.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return int(fields["MemAvailable"][0]) * 1024 if "MemAvailable" in fields else None


def cache_nbytes(value: Any) -> int:
    """Bytes of every tensor a cache holds, headwise's or transformers'; 0 for anything else.

    For example ``cache_nbytes(AttentionCache(1, [(3, 64), (3, 64)], 100, dtype=torch.float32))`` is 153,600.
    """
    layers = getattr(value, "layers", None)
    if isinstance(layers, list):
        usual = ("keys", "values")
        names = ((layer, name) for layer in layers for name in getattr(layer, "tensor_names", usual))
        tensors = (getattr(layer, name, None) for layer, name in names)
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
    buffers = getattr(value, "buffers", None)
    return sum(tensor.nbytes for tensor in buffers) if isinstance(buffers, list) else 0
