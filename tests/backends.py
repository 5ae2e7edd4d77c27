"""Backends by what they can: the fused kernel computes in float32, and forward only."""

from __future__ import annotations

from headwise.kernels import BACKENDS, Backend

EXACT: tuple[Backend, ...] = tuple(backend for backend in BACKENDS if backend != "fused")
"""Those that float64 and gradients go through."""
