"""Attention on several ranks: heads shared by tensor parallelism, and one long context shared by tokens."""

from headwise.parallel.heads import cut_tensor, rank_spec, share_heads
from headwise.parallel.models import share_model
from headwise.parallel.sequence import ContextShare, share_context

__all__ = [
    "ContextShare",
    "cut_tensor",
    "rank_spec",
    "share_context",
    "share_heads",
    "share_model",
]
