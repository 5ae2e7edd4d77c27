"""Attention on several ranks: heads shared by tensor parallelism, and one long context shared by tokens."""

from headwise.parallel.heads import cut_tensor, rank_spec, share_heads

__all__ = ["cut_tensor", "rank_spec", "share_heads"]
