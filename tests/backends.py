"""Backends by their abilities: headwise's kernels compute in float32, forward only, and one of them on a GPU."""

from __future__ import annotations

from headwise.runtime.kernels import BACKENDS, Backend

SERVING: tuple[Backend, ...] = tuple(backend for backend in BACKENDS if backend not in ("split", "flex", "flash"))
"""Backends for a CPU."""

EXACT: tuple[Backend, ...] = tuple(backend for backend in SERVING if backend != "fused")
"""Backends that support float64 and gradients."""
