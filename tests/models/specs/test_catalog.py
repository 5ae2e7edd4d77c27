from __future__ import annotations

from dataclasses import asdict

import pytest

from headwise import cost
from headwise.models.specs import GroupedSpec, LatentSpec, catalog, read_spec
from tests.meta_models import meta_model, stored_parts

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
# name: layers, all weights, weights a token goes through, bf16 bytes of cache a token, of state
WHOLE = {
    "llama-3.2-1b": (16, 1_235_814_400, 1_235_814_400, 32768, 0),
    "mistral-7b": (32, 7_241_732_096, 7_241_732_096, 131072, 0),
    "mixtral-8x22b": (56, 140_620_634_112, 39_152_031_744, 229376, 0),
    "qwen2.5-7b": (28, 7_615_616_512, 7_615_616_512, 57344, 0),
    "qwen3-8b": (36, 8_190_735_360, 8_190_735_360, 147456, 0),
    "qwen3-30b-a3b": (48, 30_532_122_624, 3_353_032_704, 98304, 0),
    "qwen3-next-80b-a3b": (48, 79_674_391_296, 3_874_929_408, 24576, 40108032),
    "gemma-2-9b": (42, 9_241_705_984, 9_241_705_984, 344064, 0),
    "gemma-3-1b": (26, 999_885_952, 999_885_952, 26624, 0),
    "phi-2": (32, 2_779_683_840, 2_779_683_840, 327680, 0),
    "phi-4": (40, 14_659_507_200, 14_659_507_200, 204800, 0),
    "deepseek-v4-flash": (43, 284_332_240_471, 13_799_632_471, 6880, 11_375_616),
    "llama-4-scout": (48, 107_769_861_120, 17_172_894_720, 196608, 0),
    "gpt-oss-20b": (24, 20_914_757_184, 4_187_440_704, 49152, 0),
    "olmo-2-7b": (32, 7_298_617_344, 7_298_617_344, 524288, 0),
    "olmoe-1b-7b": (16, 6_919_161_856, 1_282_017_280, 131072, 0),
    "smollm3-3b": (36, 3_075_098_624, 3_075_098_624, 73728, 0),
    "starcoder2-3b": (30, 3_030_371_328, 3_030_371_328, 30720, 0),
    "glm-4.5-air": (46, 106_852_251_264, 13_424_129_664, 188416, 0),
    "glm-4.7-flash": (47, 29_943_393_920, 3_896_766_080, 54144, 0),
    "seed-oss-36b": (64, 36_151_104_512, 36_151_104_512, 262144, 0),
    "minimax-m2": (62, 228_689_764_864, 11_030_553_088, 253952, 0),
    "kimi-linear-48b-a3b": (27, 49_122_681_728, 3_484_459_904, 8064, 22937600),
    "jamba-v0.1": (32, 51_570_323_328, 12_110_311_296, 16384, 9175040),
    "granite-4.0-h-tiny": (40, 6_939_037_248, 1_465_470_528, 8192, 29270016),
    "nemotron-h-8b": (52, 8_100_852_736, 8_100_852_736, 16384, 52297728),
    "lfm2-1.2b": (16, 1_170_340_608, 1_170_340_608, 12288, 122880),
    "gpt2": (12, 124_439_808, 124_439_808, 36864, 0),
    "gpt-neox-20b": (44, 20_554_567_680, 20_554_567_680, 1081344, 0),
}
# As published beside the weights, a tied head counted once.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-32b": 32_762_123_264,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
}
# name: layers, E, h, (q, R, n, p, v), bf16 bytes of cache a token
LATENT = {
    "deepseek-v2-lite": (27, 2048, 16, (None, 512, 128, 64, 128), 31104),
    "deepseek-v2": (60, 5120, 128, (1536, 512, 128, 64, 128), 69120),
    "deepseek-v3": (61, 7168, 128, (1536, 512, 128, 64, 128), 70272),
    "deepseek-v3.2": (61, 7168, 128, (1536, 512, 128, 64, 128), 85888),
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
    assert set(catalog()) == {*GROUPED, *LATENT, *WHOLE}
    for name, entry in catalog().items():
        assert name == name.lower()
        assert entry["source"].startswith("config.json of huggingface.co/")
        assert set(entry) == {"source", "config"}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_model(name: str) -> None:
    model = read_spec(name)
    layers, total, active, cached, state = WHOLE[name]
    assert model.num_layers == layers
    assert cost.model.weights(model).total == total
    assert cost.model.weights(model, active=True).total == active
    assert cost.model.cache_bytes_per_token(model) == cached
    assert cost.model.state_bytes(model) == state


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_are_as_many_as_published(name: str) -> None:
    assert cost.model.weights(read_spec(name)).total == PUBLISHED[name]


@pytest.mark.parametrize("name", catalog())
def test_every_weight_is_in_its_part(name: str) -> None:
    weights = cost.model.weights(read_spec(name))
    assert {part: count for part, count in asdict(weights).items() if count} == stored_parts(
        meta_model(catalog()[name]["config"])
    )


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
