"""Attention layers, one file for each mechanism, with their rotary embedding and their cache."""

from headwise.runtime.attention.base import AttentionLayer, RMSNorm, build
from headwise.runtime.attention.cache import AttentionCache
from headwise.runtime.attention.expert_latent import ExpertLatentAttention
from headwise.runtime.attention.grouped import (
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiQueryAttention,
    SelfAttention,
)
from headwise.runtime.attention.latent import MultiHeadLatentAttention
from headwise.runtime.attention.latent_space import LatentSpaceAttention
from headwise.runtime.attention.rope import RotaryEmbedding, rotate
