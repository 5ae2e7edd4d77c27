"""Backends by what they can: headwise's own kernels compute in float32, forward only, and one of them on a GPU."""

from __future__ import annotations

from headwise.kernels import BACKENDS, Backend

SERVING: tuple[Backend, ...] = tuple(backend for backend in BACKENDS if backend not in ("split", "flex", "flash"))
"""Those that are for a CPU."""

EXACT: tuple[Backend, ...] = tuple(backend for backend in SERVING if backend != "fused")
"""Those that float64 and gradients go through."""
