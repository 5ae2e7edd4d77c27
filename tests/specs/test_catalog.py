from __future__ import annotations

import pytest

from headwise import cost
from headwise.specs import GroupedSpec, LatentSpec, catalog, read_spec

# name: layers, E, h, k, d, bf16 bytes of cache a token
GROUPED = {
    "llama-2-7b": (32, 4096, 32, 32, 128, 524288),
    "llama-2-70b": (80, 8192, 64, 8, 128, 327680),
    "llama-3-8b": (32, 4096, 32, 8, 128, 131072),
    "llama-3-70b": (80, 8192, 64, 8, 128, 327680),
    "llama-3.1-70b": (80, 8192, 64, 8, 128, 327680),
    "llama-3.1-405b": (126, 16384, 128, 8, 128, 516096),
    "falcon-7b": (32, 4544, 71, 1, 64, 8192),
    "gemma-2b": (18, 2048, 8, 1, 256, 18432),
    "gemma-7b": (28, 3072, 16, 16, 256, 458752),
    "qwen2.5-72b": (80, 8192, 64, 8, 128, 327680),
    "qwen3-0.6b": (28, 1024, 16, 8, 128, 114688),
    "qwen3-32b": (64, 5120, 64, 8, 128, 262144),
    "qwen3-235b-a22b": (94, 4096, 64, 4, 128, 192512),
    "mixtral-8x7b": (32, 4096, 32, 8, 128, 131072),
    "gpt-oss-120b": (36, 2880, 64, 8, 64, 73728),
}
# name: layers, E, h, (q, R, n, p, v), bf16 bytes of cache a token
LATENT = {
    "deepseek-v2-lite": (27, 2048, 16, (None, 512, 128, 64, 128), 31104),
    "deepseek-v2": (60, 5120, 128, (1536, 512, 128, 64, 128), 69120),
    "deepseek-v3": (61, 7168, 128, (1536, 512, 128, 64, 128), 70272),
    "kimi-k2": (61, 7168, 64, (1536, 512, 128, 64, 128), 70272),
}


@pytest.mark.parametrize("name", GROUPED)
def test_a_grouped_model(name: str) -> None:
    layers, hidden_size, heads, kv_heads, head_dim, cached = GROUPED[name]
    model = read_spec(name)
    assert (model.num_layers, model.hidden_size) == (layers, hidden_size)
    for layer in model.layers:
        assert isinstance(layer, GroupedSpec)
        assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (heads, kv_heads, head_dim)
    assert cost.model.cache_bytes_per_token(model) == cached
    assert cost.model.cache_bytes_per_token(model, "float32") == 2 * cached


@pytest.mark.parametrize("name", LATENT)
def test_an_mla_model(name: str) -> None:
    layers, hidden_size, heads, (q, rank, nope, rope, value), cached = LATENT[name]
    model = read_spec(name)
    assert (model.num_layers, model.hidden_size) == (layers, hidden_size)
    for layer in model.layers:
        assert isinstance(layer, LatentSpec)
        widths = (layer.q_lora_rank, layer.kv_lora_rank, layer.qk_nope_head_dim, layer.qk_rope_head_dim)
        assert (layer.num_heads, *widths, layer.v_head_dim) == (heads, q, rank, nope, rope, value)
    assert cost.model.cache_bytes_per_token(model) == cached


def test_the_catalog_holds_these_models_and_says_where_each_is_from() -> None:
    assert set(catalog()) == {*GROUPED, *LATENT}
    for name, entry in catalog().items():
        assert name == name.lower()
        assert entry["source"].startswith("config.json of huggingface.co/")
        assert set(entry) == {"source", "config"}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-2-7b", 67108864),
        ("llama-3-8b", 41943040),
        ("llama-3-70b", 150994944),
        ("deepseek-v3", 187107328),
        ("deepseek-v2-lite", 13763072),
        ("kimi-k2", 101124096),
    ],
)
def test_attention_parameters_per_layer(name: str, parameters: int) -> None:
    model = read_spec(name)
    assert {cost.parameters(layer) for layer in model.layers} == {parameters}
    assert cost.model.parameters(model) == model.num_layers * parameters


@pytest.mark.parametrize(
    ("name", "intensity"),
    [("llama-2-7b", 1), ("llama-3-8b", 4), ("llama-3-70b", 8), ("falcon-7b", 71), ("deepseek-v3", 128 * 1088 / 576)],
)
def test_decode_intensity_at_bf16(name: str, intensity: float) -> None:
    assert cost.decode_intensity(read_spec(name).layers[0]) == intensity


def test_deepseek_v3_decodes_at_241_8_flops_a_byte() -> None:
    assert round(cost.decode_intensity(read_spec("deepseek-v3").layers[0]), 1) == 241.8


def test_half_of_gpt_oss_looks_back_128_tokens() -> None:
    model = read_spec("gpt-oss-120b")
    assert [layer.sliding_window for layer in model.layers] == [128, None] * 18
    per_layer = 73728 // 36
    assert cost.model.cache_bytes(model, 128) == 128 * 73728
    assert cost.model.cache_bytes(model, 131072) == 18 * per_layer * (128 + 131072)


def test_qwen2_5_leaves_its_window_unused() -> None:
    assert {layer.sliding_window for layer in read_spec("qwen2.5-72b").layers} == {None}
