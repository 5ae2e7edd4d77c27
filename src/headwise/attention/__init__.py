"""Attention layers, one file for each mechanism, with their rotary embedding and their cache."""

from headwise.attention.base import AttentionLayer
from headwise.attention.build import build
from headwise.attention.cache import AttentionCache
from headwise.attention.expert_latent import ExpertLatentAttention
from headwise.attention.grouped import (
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiQueryAttention,
    SelfAttention,
)
from headwise.attention.latent import MultiHeadLatentAttention
from headwise.attention.latent_space import LatentSpaceAttention
from headwise.attention.norm import RMSNorm
from headwise.attention.rope import RotaryEmbedding, rotate

__all__ = [
    "AttentionCache",
    "AttentionLayer",
    "ExpertLatentAttention",
    "GroupedQueryAttention",
    "LatentSpaceAttention",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "MultiQueryAttention",
    "RMSNorm",
    "RotaryEmbedding",
    "SelfAttention",
    "build",
    "rotate",
]
