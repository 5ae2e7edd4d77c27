"""Attention on several ranks: heads shared by tensor parallelism, and one long context shared by tokens."""

from headwise.runtime.parallel.heads import cut_tensor, rank_spec, share_heads, share_model
from headwise.runtime.parallel.sequence import ContextShare, share_context
