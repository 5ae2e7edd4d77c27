"""Keys and values through latents: ``W x ≈ U (V x)``, of which V x is cached, before rotation.

Shapes: E hidden size, O = K·D outputs of a projection, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.rivals.simulation import BF16, Rotary, grouped_attention
from torch import Tensor


@dataclass(frozen=True)
class Factors:
    """A low-rank projection: ``up (down x)``, with ``down`` ``[r, E]`` and ``up`` ``[O, r]``."""

    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        """The width of the latent."""
        return len(self.down)


@dataclass(frozen=True)
class Projection:
    """Latents of one projection, each of a group of its outputs.

    Attributes:
        groups: the factors of each group of outputs.
        rounded: what becomes of a group's latent ``[…, r]`` in the cache; as it is when None.
    """

    groups: Sequence[Factors]
    rounded: Callable[[Tensor], Tensor] | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """The outputs ``[…, O]`` from inputs ``[…, E]``."""
        latents = (F.linear(hidden, group.down) for group in self.groups)
        if self.rounded is not None:
            latents = (self.rounded(latent) for latent in latents)
        outputs = [F.linear(latent, group.up) for latent, group in zip(latents, self.groups, strict=True)]
        return torch.cat(outputs, -1)


@dataclass(frozen=True)
class LowRank:
    """A layer whose cache holds latents of keys, before rotation, and of values."""

    keys: Projection
    values: Projection

    def __call__(self, attention: Any, hidden: Tensor, rotary: Rotary) -> Tensor:
        """See `simulation.Rival`."""
        return grouped_attention(attention, hidden, self.keys(hidden), self.values(hidden), rotary)


def ranks_bytes(ranks: Sequence[int]) -> int:
    """Bytes of a token's latents that are not quantised."""
    return BF16 * sum(ranks)


def whitened(weight: Tensor, root: Tensor, rank: int, *, share: float = 1.0) -> Factors:
    """The best rank-r approximation of ``weight x`` for inputs with second moments ``root rootᵀ``.

    Args:
        weight: ``[O, E]``, float64.
        root: ``[E, E]``, a square root of the inputs' second moments, of full rank.
        rank: r.
        share: the power of the singular values in ``down``; ``up`` has the rest.
    """
    left, values, right = torch.linalg.svd(weight @ root, full_matrices=False)
    down = torch.linalg.solve(root, right[:rank], left=False)  # right root⁻¹
    values = values[:rank]
    return Factors((values[:, None] ** share * down).float(), (left[:, :rank] * values ** (1 - share)).float())


def symmetric_root(moments: Tensor) -> Tensor:
    """The symmetric square root of a positive semidefinite matrix."""
    values, vectors = torch.linalg.eigh(moments)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.mT
