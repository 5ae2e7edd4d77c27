"""Converted models in transformers: importing this package registers them with transformers' Auto classes."""

from headwise.runtime.caches.cache import HeadwiseCache, default_cache
from headwise.runtime.hf.attention import HostedAttention, HostedGroupedAttention, HostedLatentAttention, LayerCache
from headwise.runtime.hf.codes import has_codes
from headwise.runtime.hf.generate import Generation, generate
from headwise.runtime.hf.interface import attention_forward
from headwise.runtime.hf.interface import register as register_attention
from headwise.runtime.hf.layerwise import AttentionCall, LayerwiseModel, seen_positions
from headwise.runtime.hf.load import (
    as_device,
    as_dtype,
    check_complete,
    check_logits,
    expected_tensors,
    follow_lengths,
    load,
    open_decoder,
    tensors_of,
)
from headwise.runtime.hf.models import (
    auto_class,
    hosted_classes,
    install_attention,
    model_class,
    register,
    stock_config,
)
from headwise.runtime.hf.optimize import optimize

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
    "tensors_of",
]

register()
register_attention()
