"""How much memory this process has taken."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

from torch import Tensor


def peak_rss_bytes() -> int:
    """The most resident memory the process has had so far, mapped files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_bytes() -> int | None:
    """Memory that can be had without swapping, as Linux has it; None where that is not known."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return int(found["MemAvailable"][0]) * 1024 if "MemAvailable" in found else None


def cache_nbytes(value: Any) -> int:
    """Bytes of every tensor a cache holds, headwise's or transformers'; 0 for anything else."""
    layers = getattr(value, "layers", None)
    if isinstance(layers, list):
        held = (getattr(layer, name, None) for layer in layers for name in ("keys", "values"))
        return sum(tensor.nbytes for tensor in held if isinstance(tensor, Tensor))
    buffers = getattr(value, "buffers", None)
    return sum(tensor.nbytes for tensor in buffers) if isinstance(buffers, list) else 0
