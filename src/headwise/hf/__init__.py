"""Converted models in transformers: importing this package registers them with transformers' Auto classes."""

from headwise.caches.cache import HeadwiseCache, default_cache
from headwise.hf.attention import HostedAttention, HostedGroupedAttention, HostedLatentAttention, LayerCache
from headwise.hf.codes import has_codes
from headwise.hf.config import auto_class, model_class, stock_config
from headwise.hf.generate import Generation, generate
from headwise.hf.interface import attention_forward
from headwise.hf.interface import register as register_attention
from headwise.hf.layerwise import AttentionCall, LayerwiseModel, seen_positions
from headwise.hf.load import as_device, as_dtype, check_logits, follow_lengths, load, open_decoder
from headwise.hf.missing_weights import check_complete, expected_tensors
from headwise.hf.models import hosted_classes, install_attention, register
from headwise.hf.optimize import optimize

__all__ = [
    "AttentionCall",
    "Generation",
    "HeadwiseCache",
    "HostedAttention",
    "HostedGroupedAttention",
    "HostedLatentAttention",
    "LayerCache",
    "LayerwiseModel",
    "as_device",
    "as_dtype",
    "attention_forward",
    "auto_class",
    "check_complete",
    "check_logits",
    "default_cache",
    "expected_tensors",
    "follow_lengths",
    "generate",
    "has_codes",
    "hosted_classes",
    "install_attention",
    "load",
    "model_class",
    "open_decoder",
    "optimize",
    "register",
    "seen_positions",
    "stock_config",
]

register()
register_attention()
