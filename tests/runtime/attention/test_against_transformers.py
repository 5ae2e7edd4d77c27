"""Layers and rotary embeddings beside those of transformers, with the same weights under the same names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DynamicCache,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

from headwise.models.specs import RopeSpec, read_config
from headwise.runtime.attention import (
    AttentionLayer,
    GroupedQueryAttention,
    MultiHeadLatentAttention,
    RotaryEmbedding,
    build,
)
from tests.closeness import assert_close

CLASSES: dict[str, tuple[type, type, type]] = {
    "llama": (LlamaConfig, LlamaAttention, LlamaRotaryEmbedding),
    "qwen2": (Qwen2Config, Qwen2Attention, Qwen2RotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3Attention, Qwen3RotaryEmbedding),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3Attention, DeepseekV3RotaryEmbedding),
}
GROUPED: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
LATENT: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GROUPED),
    "llama, biased, wide heads": ("llama", {**GROUPED, "attention_bias": True, "head_dim": 12}),
    "llama, one kv head": ("llama", {**GROUPED, "num_key_value_heads": 1}),
    "llama 3.1": ("llama", {**GROUPED, "rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", GROUPED),
    "qwen3": ("qwen3", {**GROUPED, "head_dim": 12, "rms_norm_eps": 1e-3}),
    "qwen3, biased": ("qwen3", {**GROUPED, "head_dim": 12, "attention_bias": True}),
    "deepseek": ("deepseek_v3", {**LATENT, "q_lora_rank": None}),
    "deepseek, compressed query": ("deepseek_v3", {**LATENT, "q_lora_rank": 16}),
    "deepseek, half-split": ("deepseek_v3", {**LATENT, "q_lora_rank": None, "rope_interleave": False}),
    "deepseek, biased": ("deepseek_v3", {**LATENT, "q_lora_rank": 16, "attention_bias": True}),
    "deepseek, biased, plain query": ("deepseek_v3", {**LATENT, "q_lora_rank": None, "attention_bias": True}),
    "deepseek, yarn": ("deepseek_v3", {**LATENT, "q_lora_rank": 16, "rope_parameters": YARN}),
    "deepseek, yarn, half-split": (
        "deepseek_v3",
        {**LATENT, "q_lora_rank": None, "rope_parameters": YARN, "rope_interleave": False},
    ),
    "deepseek, yarn, own mscale": (
        "deepseek_v3",
        {**LATENT, "q_lora_rank": 16, "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.3}},
    ),
}


class Theirs:
    """One attention module of transformers, its rotary embedding and cache, every parameter random."""

    def __init__(self, name: str, *, seed: int) -> None:
        model_type, values = MODELS[name]
        config_class, attention_class, rotary_class = CLASSES[model_type]
        self.config: PreTrainedConfig = config_class(max_position_embeddings=640, num_hidden_layers=1, **values)
        self.config._attn_implementation = "eager"
        self.attention: nn.Module = attention_class(self.config, layer_idx=0).eval()
        self.rotary: nn.Module = rotary_class(self.config)
        self.cache = DynamicCache()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.attention.parameters():
                spread = 0.2 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(spread if parameter.dim() == 2 else 1 + spread)

    def __call__(self, x: Tensor, *, past: int = 0) -> tuple[Tensor, Tensor]:
        S = x.shape[1]
        position_ids = torch.arange(past, past + S)[None]
        hidden = torch.arange(past + S)[None] > position_ids.T
        mask = torch.zeros(1, 1, S, past + S).masked_fill(hidden, torch.finfo(torch.float32).min)
        out, weights = self.attention(
            hidden_states=x,
            position_embeddings=self.rotary(x, position_ids),
            attention_mask=mask,
            past_key_values=self.cache,
        )
        return out, weights


def hidden(batch: int, tokens: int, seed: int) -> Tensor:
    return torch.randn(batch, tokens, 48, generator=torch.Generator().manual_seed(seed))


def from_config(theirs: Theirs, **kwargs: Any) -> AttentionLayer:
    """headwise's layer from transformers' config.json alone; DeepSeek's latent norms do not read ``rms_norm_eps``."""
    eps = 1e-6 if theirs.config.model_type == "deepseek_v3" else getattr(theirs.config, "rms_norm_eps", 1e-6)
    return build(read_config(theirs.config.to_dict()).layers[0], norm_eps=eps, **kwargs).eval()


def assert_same(ours: AttentionLayer, theirs: Theirs) -> None:
    """Compare a causal prefill, a decode step and a chunk, each with both caches."""
    ours.load_state_dict(theirs.attention.state_dict(), strict=True)
    cache, past = ours.new_cache(2, 40), 0
    for tokens in (33, 1, 4):
        x = hidden(2, tokens, seed=tokens)
        expected, expected_weights = theirs(x, past=past)
        assert_close(ours(x, is_causal=True, cache=cache), expected, 1e-5)
        cache.crop(past)
        out, weights = ours(x, is_causal=True, cache=cache, return_weights=True)
        assert_close(out, expected, 1e-5)
        assert_close(weights, expected_weights, 1e-5)
        past += tokens


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("deepseek")])
@torch.no_grad()
def test_grouped_layers(name: str) -> None:
    theirs = Theirs(name, seed=1)
    assert_same(from_config(theirs), theirs)


@pytest.mark.parametrize("impl", ["expanded", "absorbed", "auto"])
@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("deepseek")])
@torch.no_grad()
def test_latent_layers(name: str, impl: str) -> None:
    theirs = Theirs(name, seed=2)
    assert_same(from_config(theirs, impl=impl), theirs)


CONSTRUCTED: dict[str, AttentionLayer] = {
    "llama": GroupedQueryAttention(48, 6, 2, rope=RopeSpec(dim=8)),
    "llama, biased, wide heads": GroupedQueryAttention(48, 6, 2, head_dim=12, bias=True, rope=RopeSpec(dim=12)),
    "qwen2": GroupedQueryAttention(48, 6, group_size=3, bias="qkv", rope=RopeSpec(dim=8)),
    "qwen3": GroupedQueryAttention(
        48, 6, 2, head_dim=12, qk_norm="head", norm_eps=1e-3, rope=RopeSpec(dim=12, theta=10000.0)
    ),
    "deepseek": MultiHeadLatentAttention(
        48, 4, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10
    ),
    "deepseek, half-split": MultiHeadLatentAttention(
        48, 4, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, rope=RopeSpec(dim=8)
    ),
    "deepseek, biased": MultiHeadLatentAttention(
        48, 4, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, q_lora_rank=16, bias="hf"
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTED)
@torch.no_grad()
def test_plain_constructors(name: str) -> None:
    assert_same(CONSTRUCTED[name].eval(), Theirs(name, seed=3))


@torch.no_grad()
def test_gradients_of_a_prefill() -> None:
    """The gradient of every parameter is the same."""
    for name in ("qwen3", "deepseek, biased"):
        theirs = Theirs(name, seed=4)
        ours = from_config(theirs)
        ours.load_state_dict(theirs.attention.state_dict())
        x = hidden(2, 9, seed=5)
        with torch.enable_grad():
            theirs(x)[0].square().sum().backward()
            ours(x, is_causal=True).square().sum().backward()
        expected = dict(theirs.attention.named_parameters())
        for parameter_name, parameter in ours.named_parameters():
            wanted = expected[parameter_name].grad
            assert parameter.grad is not None
            assert wanted is not None
            assert_close(parameter.grad, wanted, 1e-4)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0],
    "original_max_position_embeddings": 64,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {**YARN, "mscale": None, "mscale_all_dim": None, "original_max_position_embeddings": 64},
    "yarn, attention factor": {**YARN, "attention_factor": 0.8, "factor": 4.0},
    "yarn, mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn, not truncated": {**YARN, "truncate": False},
    "longrope": LONGROPE,
    "longrope, factor": {**LONGROPE, "factor": 32.0},
    "longrope, attention factor": {**LONGROPE, "attention_factor": 1.25},
    "llama3": LLAMA3,
    "proportional": {
        "rope_type": "proportional",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "partial_rotary_factor": 0.5,
    },
}


def scaled_config(scaling: str) -> LlamaConfig:
    """Heads 16 wide; trained to 256 tokens (64 before scaling, where the scaling says so)."""
    values = {key: value for key, value in SCALINGS[scaling].items() if value is not None}
    return LlamaConfig(hidden_size=32, num_attention_heads=2, max_position_embeddings=256, rope_parameters=values)


def our_spec(scaling: str) -> RopeSpec:
    values = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in SCALINGS[scaling].items()
        if value is not None
    }
    rope_type, theta = values.pop("rope_type"), values.pop("rope_theta")
    parameters = tuple(sorted(values.items()))
    return RopeSpec(dim=16, theta=theta, rope_type=rope_type, parameters=parameters, max_position_embeddings=256)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("length", [1, 64, 65, 256, 257, 2000])
def test_scaled_rotary_embeddings(scaling: str, length: int) -> None:
    # Fresh each time: theirs keeps a longer sequence's frequencies for the shorter ones that follow.
    theirs, ours = LlamaRotaryEmbedding(scaled_config(scaling)), RotaryEmbedding(our_spec(scaling))
    position_ids = torch.arange(length)[None]
    cos, sin = ours(position_ids, torch.float32, length)
    for our, their in zip((cos, sin), theirs(torch.zeros(1), position_ids), strict=True):
        doubled = torch.cat((our, our), dim=-1)
        if scaling == "dynamic":
            # Theirs stretches the base in float32: an ulp of the base is up to 1e-7 of the largest angles.
            assert_close(doubled, their, 1e-7 * max(100, length))
        else:
            assert torch.equal(doubled, their)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_config_reader_finds_the_scaling(scaling: str) -> None:
    spec = read_config(scaled_config(scaling).to_dict()).layers[0]
    assert spec.rope is not None
    expected = RotaryEmbedding(our_spec(scaling))
    position_ids = torch.arange(300)[None]
    ours = RotaryEmbedding(spec.rope)(position_ids, torch.float32, 300)
    for our, wanted in zip(ours, expected(position_ids, torch.float32, 300), strict=True):
        assert torch.equal(our, wanted)


def test_scalings_are_not_all_one() -> None:
    position_ids = torch.arange(300)[None]
    tables = [torch.stack(RotaryEmbedding(our_spec(name))(position_ids, torch.float32, 300)) for name in SCALINGS]
    for i, table in enumerate(tables):
        for other in tables[i + 1 :]:
            assert not torch.equal(table, other)
