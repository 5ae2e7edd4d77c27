"""Tied attention: a head's keys are its values."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.models.specs.base import AttentionSpec, check_positive


@dataclass(frozen=True, kw_only=True)
class TiedSpec(AttentionSpec):
    """Multi-head attention that caches one vector a head where others cache two."""

    num_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("num_heads", self.num_heads)
        check_positive("head_dim", self.head_dim)

    @property
    def label(self) -> str:
        """Heads and head dim."""
        return f"TIED {self.num_heads} × {self.head_dim}"
