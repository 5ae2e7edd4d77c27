"""The attention layers, their rotary embedding and their cache; one file a mechanism."""

from headwise.attention.base import AttentionLayer
from headwise.attention.build import build
from headwise.attention.cache import AttentionCache
from headwise.attention.grouped import GroupedQueryAttention, MultiHeadAttention, MultiQueryAttention
from headwise.attention.latent import MultiHeadLatentAttention
from headwise.attention.norm import RMSNorm
from headwise.attention.rope import RotaryEmbedding, rotate

__all__ = [
    "AttentionCache",
    "AttentionLayer",
    "GroupedQueryAttention",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "MultiQueryAttention",
    "RMSNorm",
    "RotaryEmbedding",
    "build",
    "rotate",
]
