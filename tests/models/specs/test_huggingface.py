from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise import cost
from headwise.errors import SpecError
from headwise.models.specs import (
    AttentionSpec,
    GroupedSpec,
    LatentSpec,
    ModelSpec,
    RopeSpec,
    catalog,
    hosted_attention,
    read_config,
    read_spec,
)
from tests.strategies import specs
from tests.toy_configs import TOYS

Config = dict[str, Any]

LLAMA: Config = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
DEEPSEEK: Config = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
FALCON: Config = {"model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
GPT2: Config = {"model_type": "gpt2", "n_embd": 64, "n_head": 8, "n_layer": 3, "n_positions": 1024}
BERT: Config = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
GPT_OSS: Config = {"model_type": "gpt_oss", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
KIMI: Config = {"model_type": "kimi_linear"}
GEMMA2: Config = {"model_type": "gemma2", "sliding_window": 8}
FULL, LOCAL = "full_attention", "sliding_attention"


def grouped(config: Config) -> GroupedSpec:
    layer = read_config(config).layers[0]
    assert isinstance(layer, GroupedSpec)
    return layer


def latent(config: Config) -> LatentSpec:
    layer = read_config(config).layers[0]
    assert isinstance(layer, LatentSpec)
    return layer


def rope(config: Config, layer: int = 0) -> RopeSpec:
    rope = read_config(config).layers[layer].rope
    assert rope is not None
    return rope


def windows(config: Config) -> list[int | None]:
    return [layer.sliding_window for layer in read_config(config).layers]


# --- Llama and its kin


def test_llama() -> None:
    model = read_config({**LLAMA, "vocab_size": 100, "torch_dtype": "float16"})
    layer = GroupedSpec(
        hidden_size=64,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        rope=RopeSpec(dim=8, max_position_embeddings=2048),
    )
    assert model == ModelSpec(
        model_type="llama",
        hidden_size=64,
        layers=(layer,) * 4,
        vocab_size=100,
        max_position_embeddings=2048,
        dtype="float16",
    )


def test_no_key_value_heads_in_the_file_is_mha() -> None:
    assert grouped({**LLAMA, "num_key_value_heads": None}).num_kv_heads == 8
    assert grouped({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}).mechanism == "mha"


def test_head_dim_is_its_own_number() -> None:
    spec = grouped({**LLAMA, "model_type": "qwen3", "head_dim": 32})
    assert (spec.head_dim, spec.qk_norm) == (32, "head")
    assert cost.parameters(spec) == 64 * 32 * (2 * 8 + 2 * 2) + 2 * 32


def test_head_dim_frees_the_width_from_the_head_count() -> None:
    assert grouped({**LLAMA, "hidden_size": 65, "head_dim": 8}).head_dim == 8
    with pytest.raises(SpecError, match=r"^num_attention_heads = 8: must divide"):
        read_config({**LLAMA, "hidden_size": 65})


@pytest.mark.parametrize(
    ("fields", "bias"),
    [
        ({}, ()),
        ({"attention_bias": True}, ("q_proj", "k_proj", "v_proj", "o_proj")),
        ({"model_type": "qwen2"}, ("q_proj", "k_proj", "v_proj")),
        ({"model_type": "qwen2_moe"}, ("q_proj", "k_proj", "v_proj")),
        ({"model_type": "qwen2_moe", "qkv_bias": False}, ()),
        ({"model_type": "qwen3", "attention_bias": True}, ("q_proj", "k_proj", "v_proj", "o_proj")),
        ({**GPT_OSS, "sliding_window": 8}, ("q_proj", "k_proj", "v_proj", "o_proj")),
        ({**GPT_OSS, "sliding_window": 8, "attention_bias": False}, ()),
    ],
)
def test_attention_bias(fields: Config, bias: tuple[str, ...]) -> None:
    assert grouped({**LLAMA, **fields}).bias == bias


@pytest.mark.parametrize(
    ("model_type", "qk_norm", "norm_parameters"),
    [("llama", None, 0), ("qwen3_moe", "head", 2 * 8), ("olmo2", "full", (8 + 2) * 8)],
)
def test_qk_norm(model_type: str, qk_norm: str | None, norm_parameters: int) -> None:
    spec = grouped({**LLAMA, "model_type": model_type})
    assert spec.qk_norm == qk_norm
    assert cost.parameters(spec) == 64 * 8 * (2 * 8 + 2 * 2) + norm_parameters


def test_gpt_oss_has_a_sink_a_head() -> None:
    spec = grouped({**LLAMA, **GPT_OSS, "sliding_window": 8, "head_dim": 8})
    assert spec.sinks
    assert cost.parameters(spec) == 64 * 8 * 20 + (8 + 2 * 2) * 8 + 64 + 8


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({}, None),
        ({"model_type": "gemma2", "sliding_window": 8, "query_pre_attn_scalar": 144}, 1 / 12),
        ({"model_type": "granite", "attention_multiplier": 0.015625}, 0.015625),
    ],
)
def test_softmax_scale(fields: Config, scale: float | None) -> None:
    assert grouped({**LLAMA, **fields}).softmax_scale == scale


def test_gemma2_caps_its_scores() -> None:
    config = {**LLAMA, "model_type": "gemma2", "sliding_window": 8, "attn_logit_softcapping": 50.0}
    assert grouped(config).softcap == 50.0


# --- Layers that differ


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, [16] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({"model_type": "phi3", "sliding_window": 16}, [16] * 4),
        ({"model_type": "gemma2", "sliding_window": 16}, [16, None, 16, None]),
        ({**GPT_OSS, "sliding_window": 16}, [16, None, 16, None]),
        ({**GPT_OSS, "sliding_window": 16, "layer_types": [FULL] * 3 + [LOCAL]}, [None] * 3 + [16]),
        ({"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 3}, [16, 16, None, 16]),
        ({"model_type": "gemma3_text", "sliding_window": 16}, [16] * 4),
        ({"model_type": "gemma3_text", "sliding_window": 16, "layer_types": [LOCAL, FULL] * 2}, [16, None] * 2),
        ({"model_type": "qwen2", "sliding_window": 16, "max_window_layers": 1}, [None] * 4),
        ({"model_type": "qwen2_moe", "sliding_window": 0, "use_sliding_window": False}, [None] * 4),
        ({"model_type": "qwen2", "use_sliding_window": False, "layer_types": [LOCAL] * 4}, [None] * 4),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3},
            [None, None, None, 16],
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
            [16] * 4,
        ),
        ({"model_type": "qwen3_moe", "use_sliding_window": True, "sliding_window": 16}, [16] * 4),
        (
            {
                "model_type": "qwen2_moe",
                "use_sliding_window": True,
                "sliding_window": 16,
                "layer_types": [LOCAL, FULL, FULL, FULL],
            },
            [16, None, None, None],
        ),
    ],
)
def test_sliding_windows(fields: Config, expected: list[int | None]) -> None:
    assert windows({**LLAMA, **fields}) == expected


def test_gemma3_has_every_sixth_layer_full() -> None:
    config = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 26, "sliding_window": 512}
    assert [i for i, window in enumerate(windows(config)) if window is None] == [5, 11, 17, 23]


def test_a_window_bounds_its_own_layers_cache_alone() -> None:
    model = read_config({**LLAMA, "model_type": "gemma2", "sliding_window": 16, "head_dim": 8})
    per_layer = 2 * 2 * 8 * 2
    assert cost.model.cache_bytes(model, 10) == 4 * 10 * per_layer
    assert cost.model.cache_bytes(model, 100) == (2 * 16 + 2 * 100) * per_layer


def test_gemma3_turns_its_local_layers_by_another_base() -> None:
    old = {
        **LLAMA,
        "model_type": "gemma3_text",
        "head_dim": 8,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    new = {
        **LLAMA,
        "model_type": "gemma3_text",
        "head_dim": 8,
        "sliding_window": 16,
        "layer_types": [LOCAL, FULL] * 2,
        "rope_parameters": {
            LOCAL: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    }
    local = RopeSpec(dim=8, theta=1e4, max_position_embeddings=2048)
    full = RopeSpec(dim=8, theta=1e6, rope_type="linear", parameters=(("factor", 8.0),), max_position_embeddings=2048)
    for config in (old, new):
        assert [rope(config, i) for i in range(4)] == [local, full, local, full]


@pytest.mark.parametrize(
    ("fields", "rotated"),
    [
        ({}, [True, True, True, False]),
        ({"no_rope_layer_interval": 2}, [True, False, True, False]),
        ({"no_rope_layers": [0, 1, 1, 1]}, [False, True, True, True]),
    ],
)
def test_smollm3_leaves_layers_unrotated(fields: Config, rotated: list[bool]) -> None:
    layers = read_config({**LLAMA, "model_type": "smollm3", **fields}).layers
    assert [layer.rope is not None for layer in layers] == rotated


# --- Rotary embeddings

YARN = {"factor": 4.0, "original_max_position_embeddings": 512}


def test_rope_scaling_in_three_spellings_is_one_rope() -> None:
    oldest = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "yarn", **YARN}}
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", **YARN}}
    new = {**LLAMA, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **YARN}}
    both = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "type": "yarn", **YARN}}
    expected = RopeSpec(
        dim=8, theta=5e5, rope_type="yarn", parameters=tuple(YARN.items()), max_position_embeddings=2048
    )
    assert [rope(config) for config in (oldest, old, new, both)] == [expected] * 4


def test_rope_without_a_word_is_the_default() -> None:
    assert rope(LLAMA) == RopeSpec(dim=8, theta=10000.0, max_position_embeddings=2048)
    assert rope({**LLAMA, "rope_scaling": None}) == rope(LLAMA)
    assert rope({**LLAMA, "rope_scaling": {"rope_type": "default", "factor": None}}) == rope(LLAMA)


@pytest.mark.parametrize("where", ["top", "rope_parameters"])
def test_a_part_of_the_head_may_rotate(where: str) -> None:
    part = {"partial_rotary_factor": 0.5}
    config = {**LLAMA, "model_type": "phi3", **(part if where == "top" else {"rope_parameters": part})}
    assert rope(config).dim == 4
    assert rope(config).parameters == ()


def test_longrope_keeps_both_lists_and_its_original_length() -> None:
    scaling = {"type": "longrope", "long_factor": [1.0, 2.0], "short_factor": [1.0, 1.5]}
    config = {**LLAMA, "model_type": "phi3", "rope_scaling": scaling, "original_max_position_embeddings": 256}
    assert dict(rope(config).parameters) == {
        "long_factor": (1.0, 2.0),
        "short_factor": (1.0, 1.5),
        "original_max_position_embeddings": 256,
    }


# --- MLA


def test_mla_is_known_by_its_latent_not_by_key_value_heads_or_head_dim() -> None:
    spec = latent(DEEPSEEK)
    assert spec == LatentSpec(
        hidden_size=64,
        num_heads=8,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        q_lora_rank=24,
        rope=RopeSpec(dim=4, interleaved=True),
    )
    for ignored in ({"num_key_value_heads": 1}, {"num_key_value_heads": None}, {"head_dim": 999}):
        assert latent({**DEEPSEEK, **ignored}) == spec
    assert cost.cache_bytes_per_token(spec) == 2 * (16 + 4)


def test_a_query_without_a_latent() -> None:
    assert latent({**DEEPSEEK, "q_lora_rank": None}).q_lora_rank is None


def test_mla_bias_is_on_the_three_transformers_covers() -> None:
    assert latent({**DEEPSEEK, "attention_bias": True}).bias == ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")


def test_rope_interleave() -> None:
    assert not rope({**DEEPSEEK, "rope_interleave": False}).interleaved
    assert rope({**DEEPSEEK, "model_type": "deepseek_v2"}).interleaved


def test_yarn_warms_the_softmax_of_deepseek() -> None:
    # DeepSeek-V3's published inference code: scale · (0.1 · mscale_all_dim · ln(factor) + 1)².
    expected = (128 + 64) ** -0.5 * (0.1 * math.log(40.0) + 1) ** 2
    assert read_spec("deepseek-v3").layers[0].softmax_scale == pytest.approx(expected, rel=1e-12)
    scaling = {"type": "yarn", "factor": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}
    assert latent({**DEEPSEEK, "rope_scaling": scaling}).softmax_scale is None


# --- GPT-2, GPT-BigCode, Falcon, BERT, nested configs


def test_gpt2_has_names_of_its_own() -> None:
    model = read_config(GPT2)
    assert (model.hidden_size, model.num_layers, model.max_position_embeddings) == (64, 3, 1024)
    assert grouped(GPT2) == GroupedSpec(hidden_size=64, num_heads=8, num_kv_heads=8, head_dim=8, bias="hf")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model_type", "fields", "kv_heads"),
    [
        ("gpt_bigcode", {}, 1),
        ("gpt_bigcode", {"multi_query": True}, 1),
        ("gpt_bigcode", {"multi_query": False}, 8),
        ("gpt2", {"multi_query": True}, 8),
    ],
)
def test_gpt_bigcode_is_multi_query_unless_it_says_no(model_type: str, fields: Config, kv_heads: int) -> None:
    assert grouped({**GPT2, "model_type": model_type, **fields}).num_kv_heads == kv_heads


@pytest.mark.parametrize(
    ("fields", "kv_heads"),
    [
        ({}, 1),
        ({"multi_query": True}, 1),
        ({"multi_query": True, "num_kv_heads": 71}, 1),
        ({"multi_query": True, "num_kv_heads": 4, "new_decoder_architecture": False}, 1),
        ({"multi_query": False}, 8),
        ({"new_decoder_architecture": True, "num_kv_heads": 4}, 4),
        ({"new_decoder_architecture": True, "multi_query": True, "num_kv_heads": 4}, 4),
        ({"new_decoder_architecture": True}, 8),
        ({"model_type": "RefinedWebModel", "multi_query": True, "n_head_kv": 2}, 1),
        ({"model_type": "RefinedWeb", "n_head_kv": 2}, 2),
    ],
)
def test_falcon_key_value_heads(fields: Config, kv_heads: int) -> None:
    assert grouped({**FALCON, **fields}).num_kv_heads == kv_heads


def test_falcon_in_its_first_spelling() -> None:
    first = {"model_type": "RefinedWebModel", "hidden_size": 64, "n_layer": 2, "n_head": 8, "multi_query": True}
    assert read_config(first).layers == read_config(FALCON).layers


def test_falcon_bias_and_positions() -> None:
    spec = grouped({**FALCON, "bias": True, "alibi": True})
    assert spec.bias == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert spec.rope is None
    assert rope(FALCON).dim == 8


@pytest.mark.parametrize(
    "config",
    [
        BERT,
        {**BERT, "model_type": "roberta"},
        {"model_type": "distilbert", "dim": 64, "n_layers": 2, "n_heads": 8},
    ],
)
def test_bert_sees_both_ways_and_caches_nothing(config: Config) -> None:
    model = read_config(config)
    assert not model.is_causal
    assert model.num_layers == 2
    assert cost.model.cache_bytes_per_token(model) == 0
    assert cost.model.cache_bytes(model, 512, batch=3) == 0
    # Every pair, and no triangle: 4 products E×E and 2 of the scores.
    assert cost.model.attention_flops(model, 10) == 2 * (2 * 10 * 4 * 64 * 64 + 4 * 10 * 10 * 64)


def test_the_text_half_of_a_larger_model() -> None:
    nested = {"model_type": "mistral3", "torch_dtype": "bfloat16", "text_config": {**LLAMA, "model_type": "mistral"}}
    model = read_config(nested)
    assert (model.model_type, model.dtype, model.num_layers) == ("mistral", "bfloat16", 4)
    nested["text_config"]["torch_dtype"] = "float32"
    assert read_config(nested).dtype == "float32"


# --- What headwise wrote


def hosted(*attention: Any, num_hidden_layers: int = 4) -> Config:
    return {**LLAMA, "model_type": "headwise_llama", "num_hidden_layers": num_hidden_layers} | {
        "headwise": {"attention": list(attention)}
    }


def entry(spec: GroupedSpec | LatentSpec, *layers: Any) -> Config:
    return {**spec.to_dict(), "layers": list(layers)}


def test_a_converted_model_says_what_it_is_layer_by_layer() -> None:
    mla, gqa = latent(DEEPSEEK), grouped(LLAMA)
    config = json.loads(json.dumps(hosted(entry(mla, 1, 3), entry(gqa, 0, 2))))
    model = read_config(config)
    assert model.layers == (gqa, mla, gqa, mla)
    assert (model.model_type, model.mechanism) == ("headwise_llama", "mixed")


GQA_ENTRY = entry(grouped(LLAMA), 0, 1, 2, 3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "model_type": "headwise_llama"}, r"headwise = None: must hold"),
        ({**hosted(), "headwise": [1]}, r"headwise = \[1\]: must hold"),
        ({**hosted(), "headwise": {}}, r"headwise = \{\}: must hold"),
        ({**hosted(), "headwise": {"attention": "gqa"}}, r"headwise = \{'attention': 'gqa'\}: must hold"),
        (hosted(), r"headwise.attention = \[\]: must cover"),
        (hosted("gqa"), r"headwise.attention = 'gqa': must be a JSON object"),
        (hosted({"kind": "grouped"}), r"headwise.attention.layers = None: must be a list of layer numbers"),
        (
            hosted({**GQA_ENTRY, "layers": ["0"]}),
            r"headwise.attention.layers = \['0'\]: must be a list of layer",
        ),
        (
            hosted({**GQA_ENTRY, "layers": [0, 1, 2]}),
            r"headwise.attention = \[0, 1, 2\]: must cover",
        ),
        (
            hosted(GQA_ENTRY, {**GQA_ENTRY, "layers": [3]}),
            r"headwise.attention = \[0, 1, 2, 3, 3\]: must cover",
        ),
        (
            hosted(GQA_ENTRY, num_hidden_layers=5),
            r"headwise.attention = \[0, 1, 2, 3\]: must cover",
        ),
        (hosted({**GQA_ENTRY, "kind": "hyena"}), r"attention kind = 'hyena': there is no module"),
        (hosted({**GQA_ENTRY, "num_heads": "8"}), r"num_heads = '8': must be a whole number"),
        (hosted({**GQA_ENTRY, "rope": 8}), r"grouped spec = \{.*cannot be read"),
    ],
)
def test_a_broken_headwise_block_is_refused(config: Config, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        read_config(config)


# --- Refusals


@pytest.mark.parametrize("model_type", ["zamba2", "gemma3n", "hunyuan", ""])
def test_an_architecture_that_is_not_understood_is_refused_by_name(model_type: str) -> None:
    with pytest.raises(SpecError, match=rf"^model_type = '{model_type}': is not understood; known: .*qwen3_moe"):
        read_config({**LLAMA, "model_type": model_type})


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("t5", "is an encoder–decoder"),
        ("marian", "is an encoder–decoder"),
        ("mamba2", "has no attention"),
        ("longcat_flash", "has two attentions in a layer"),
        ("falcon_h1", "has attention and Mamba side by side"),
    ],
)
def test_an_architecture_that_cannot_be_exact_is_refused_for_a_reason(model_type: str, reason: str) -> None:
    with pytest.raises(SpecError, match=rf"^model_type = '{model_type}': {reason}"):
        read_config({**DEEPSEEK, "model_type": model_type, "d_kv": 64, "d_model": 64})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_lora_rank": 16}, r"kv_lora_rank = 16: belongs to MLA \(a latent\), and llama is not an MLA model"),
        ({"model_type": "deepseek_v9", "kv_lora_rank": 16}, r"kv_lora_rank = 16: belongs to MLA"),
        ({"use_cla": True}, r"use_cla = True: is not understood"),
        ({"num_kv_shared_layers": 2}, r"num_kv_shared_layers = 2: is not understood"),
        ({"block_configs": [{}]}, r"block_configs = \[\{\}\]: is not understood"),
        ({"attention_chunk_size": 8192}, r"attention_chunk_size = 8192: is not understood"),
        ({"is_encoder_decoder": True}, r"is_encoder_decoder = True: is not understood"),
        ({**DEEPSEEK, "index_topk": 2048}, r"index_topk = 2048: is not understood"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, r"use_bidirectional_attention = True: is not"),
        ({"model_type": "cohere", "use_qk_norm": True}, r"use_qk_norm = True: is not understood"),
        ({"model_type": "stablelm", "qk_layernorm": True}, r"qk_layernorm = True: is not understood"),
        ({"model_type": "phi", "qk_layernorm": True}, r"qk_layernorm = True: is not understood"),
        ({"model_type": "gpt_oss", "sliding_window": 8}, r"rope_parameters = None: is required"),
        (
            {key: value for key, value in DEEPSEEK.items() if key != "q_lora_rank"},
            r"q_lora_rank = None: is required",
        ),
        ({**KIMI, "mla_use_output_gate": True}, r"mla_use_output_gate = True: is not understood"),
        ({"model_type": "ministral3"}, r"rope_parameters = None: is required"),
        ({**GPT2, "add_cross_attention": True}, r"add_cross_attention = True: is not understood"),
        ({**BERT, "position_embedding_type": "relative_key"}, r"position_embedding_type = 'relative_key': is not"),
    ],
)
def test_a_field_that_makes_another_layer_of_it_is_refused_by_name(fields: Config, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        read_config({**LLAMA, **fields})


@pytest.mark.parametrize("value", [None, 3, ["llama"]])
def test_the_model_type_is_needed(value: object) -> None:
    with pytest.raises(SpecError, match=r"^model_type = .*: must be present"):
        read_config({**LLAMA, "model_type": value})


@pytest.mark.parametrize("config", [None, [], "llama", 3])
def test_a_config_is_an_object(config: Any) -> None:
    with pytest.raises(SpecError, match=rf"^config.json = '{type(config).__name__}': must hold"):
        read_config(config)


NEEDED = [
    (LLAMA, "hidden_size"),
    (LLAMA, "num_attention_heads"),
    (LLAMA, "num_hidden_layers"),
    *((DEEPSEEK, name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
    *((DEEPSEEK, name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")),
    *((GPT2, name) for name in ("n_embd", "n_head", "n_layer")),
    *((FALCON, name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")),
    *((BERT, name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")),
]


@pytest.mark.parametrize(("config", "field"), NEEDED)
def test_a_missing_field_is_named(config: Config, field: str) -> None:
    with pytest.raises(SpecError, match=rf"^{field} = None: is required"):
        read_config({key: value for key, value in config.items() if key != field})


@pytest.mark.parametrize("value", ["64", True, -64, 0, 64.0, [64], {}])
@pytest.mark.parametrize(
    ("config", "field"),
    [*NEEDED, (LLAMA, "num_key_value_heads"), (LLAMA, "head_dim"), (LLAMA, "vocab_size"), (DEEPSEEK, "q_lora_rank")],
)
def test_a_size_of_the_wrong_type_is_named(config: Config, field: str, value: object) -> None:
    if (field, value) == ("qk_nope_head_dim", 0):
        assert latent({**config, field: value}).qk_nope_head_dim == 0  # all of a head rotates
        return
    with pytest.raises(SpecError) as caught:
        read_config({**config, field: value})
    assert str(caught.value) == f"{field} = {value!r}: must be a whole number of at least 1"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 3}, r"num_kv_heads = 3: must divide"),
        ({"num_attention_heads": 7}, r"num_attention_heads = 7: must divide"),
        ({"model_type": "mistral", "sliding_window": "4k"}, r"sliding_window = '4k': must be a whole number"),
        ({"layer_types": [FULL] * 3}, r"layer_types = \['full_attention'.*: must list"),
        ({"layer_types": FULL}, r"layer_types = 'full_attention': must list"),
        ({"layer_types": [FULL] * 3 + ["linear_attention"]}, r"layer_types = 'linear_attention': is not understood"),
        ({"layer_types": [FULL] * 3 + ["mamba"]}, r"layer_types = 'mamba': is not understood"),
        ({"layer_types": [FULL] * 3 + [None]}, r"layer_types = None: is not understood"),
        ({"layer_types": [FULL] * 3 + [LOCAL]}, r"sliding_window = None: is required"),
        ({"model_type": "gemma2"}, r"sliding_window = None: is required"),
        (
            {"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 0},
            r"sliding_window_pattern = 0: must be a whole number",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": None},
            r"max_window_layers = None: must be a whole number",
        ),
        (
            {"model_type": "qwen2_moe", "use_sliding_window": True, "sliding_window": 8},
            r"layer_types = None: is required",
        ),
        (
            {"model_type": "smollm3", "no_rope_layers": [1, 0]},
            r"no_rope_layers = \[1, 0\]: must list",
        ),
        ({"rope_theta": "1e4"}, r"rope_theta = '1e4': must be a number"),
        ({"rope_theta": 0}, r"rope_theta = 0.0: must be a number"),
        ({"rope_theta": math.inf}, r"rope_theta = inf: must be a number"),
        ({"rope_scaling": "yarn"}, r"rope_scaling = 'yarn': must be a JSON object"),
        (
            {"rope_scaling": {"type": "linear", "factor": {}}},
            r"rope factor = \{\}: must be a number",
        ),
        (
            {"model_type": "phi3", "partial_rotary_factor": "half"},
            r"partial_rotary_factor = 'half': must be a number",
        ),
        ({"model_type": "phi3", "partial_rotary_factor": 0.4}, r"rope dim = 3: must be an even number"),
        (
            {"model_type": "phi3", "partial_rotary_factor": 2.0},
            r"partial_rotary_factor = 2.0: must be above 0",
        ),
        (
            {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            r"partial_rotary_factor = 0.5: must be 1",
        ),
        (
            {"rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0}}},
            r"rope_parameters.full_attention = \{.*\}: is not understood",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}},
            r"rope_type = 'linear': is not understood",
        ),
        (
            {
                "model_type": "gemma3_text",
                "sliding_window": 8,
                "rope_parameters": {"rope_type": "default"},
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            r"rope_scaling = \{.*\}: cannot be read",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}, "max_position_embeddings": None},
            r"max_position_embeddings = None: is required",
        ),
        ({**GEMMA2, "query_pre_attn_scalar": 0}, r"query_pre_attn_scalar = 0: must be a number"),
        (
            {"model_type": "granite", "attention_multiplier": "small"},
            r"attention_multiplier = 'small': must be a number",
        ),
        ({**GEMMA2, "attn_logit_softcapping": [50]}, r"attn_logit_softcapping = \[50\]: must be a number"),
    ],
)
def test_what_a_grouped_config_refuses(fields: Config, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        read_config({**LLAMA, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qk_rope_head_dim": 5}, r"rope dim = 5: must be an even number"),
        (
            {"rope_scaling": {"type": "yarn", "mscale_all_dim": 1, "original_max_position_embeddings": 8}},
            r"rope factor = None: must be a number",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": "one"}},
            r"mscale_all_dim = 'one': must be a number",
        ),
    ],
)
def test_what_an_mla_config_refuses(fields: Config, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        read_config({**DEEPSEEK, **fields})


def test_bert_as_a_decoder_is_refused() -> None:
    with pytest.raises(SpecError, match=r"^is_decoder = True: bert as a decoder is not understood$"):
        read_config({**BERT, "is_decoder": True})


GEMMA3: Config = {
    **LLAMA,
    "model_type": "gemma3_text",
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "query_pre_attn_scalar": 64,
    "attn_logit_softcapping": 50.0,
}
YARN_DEEPSEEK: Config = {
    **DEEPSEEK,
    "rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0, "original_max_position_embeddings": 64, "factor": 4.0},
}
HOSTED = hosted(entry(latent(DEEPSEEK), 1, 3), entry(grouped(LLAMA), 0, 2))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def paths(value: Any) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, inner in items for path in ((key,), *((key, *rest) for rest in paths(inner)))]


@settings(max_examples=500)
@given(st.data())
def test_a_config_damaged_anywhere_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    config = json.loads(json.dumps(data.draw(st.sampled_from([GEMMA3, YARN_DEEPSEEK, BERT, HOSTED, *TOYS.values()]))))
    *parents, last = data.draw(st.sampled_from(paths(config)))
    place = config
    for key in parents:
        place = place[key]
    place[last] = data.draw(json_values)
    with contextlib.suppress(SpecError):
        assert read_config(config).distinct_layers()


# --- Against the models themselves

BUILT: list[Config] = [
    LLAMA,
    {**LLAMA, "attention_bias": True, "head_dim": 4},
    {**LLAMA, "model_type": "qwen2"},
    {**LLAMA, "model_type": "qwen3", "head_dim": 16},
    {**LLAMA, "model_type": "gemma2", "head_dim": 16, "sliding_window": 8},
    {**LLAMA, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8, "layer_types": [LOCAL, FULL] * 2},
    {**LLAMA, **GPT_OSS, "head_dim": 16, "sliding_window": 8, "num_local_experts": 8},
    {**LLAMA, "model_type": "olmo2"},
    {**FALCON, "multi_query": True},
    {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 4, "bias": True},
    {**GPT2, "model_type": "gpt_bigcode", "multi_query": True},
    GPT2,
    {**DEEPSEEK, "n_group": 1, "topk_group": 1, "n_routed_experts": 8},
    {**DEEPSEEK, "q_lora_rank": None, "attention_bias": True, "n_group": 1, "topk_group": 1, "n_routed_experts": 8},
]


@pytest.mark.parametrize("config", BUILT, ids=lambda config: config["model_type"])
def test_the_spec_has_the_parameters_and_windows_of_the_built_model(config: Config) -> None:
    import torch
    from transformers import AutoConfig, AutoModel

    built = AutoConfig.for_model(
        **{**config, "vocab_size": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    )
    with torch.device("meta"):
        model = AutoModel.from_config(built)
    layers = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
    specs = read_config(config).layers
    assert [sum(p.numel() for p in layer.parameters()) for layer in layers] == [cost.parameters(s) for s in specs]
    assert [getattr(layer, "sliding_window", None) for layer in layers] == [s.sliding_window for s in specs]


def test_what_transformers_saves_reads_as_what_was_saved() -> None:
    from transformers import AutoConfig

    for config in BUILT:
        saved = json.loads(AutoConfig.for_model(**config).to_json_string())
        # A plain file leaves the sizes of the vocabulary and of the context to the class; the attention it states.
        ours, theirs = read_config(config).layers, read_config(saved).layers
        assert [cost.parameters(layer) for layer in theirs] == [cost.parameters(layer) for layer in ours]
        assert [layer.sliding_window for layer in theirs] == [layer.sliding_window for layer in ours]


def test_a_window_on_a_model_that_has_none_is_refused() -> None:
    config = dict(read_catalog_llama(), sliding_window=4096)
    with pytest.raises(SpecError, match="sliding_window = 4096: must be null"):
        read_config(config)
    assert read_config(dict(config, sliding_window=None)).layers[0].sliding_window is None


@pytest.mark.parametrize("name", ["attention_bias"])
def test_a_switch_is_true_or_false(name: str) -> None:
    with pytest.raises(SpecError, match=f"{name} = 'false': must be true or false"):
        read_config({**read_catalog_llama(), name: "false"})


def read_catalog_llama() -> dict[str, object]:
    return dict(catalog()["llama-3-8b"]["config"])


@given(st.lists(specs(), min_size=1, max_size=4))
def test_any_spec_comes_back_from_a_config_headwise_writes(layers: list[AttentionSpec]) -> None:
    model = ModelSpec(model_type="headwise_llama", hidden_size=layers[0].hidden_size, layers=tuple(layers))
    config = {
        "model_type": "headwise_llama",
        "num_hidden_layers": len(layers),
        "hidden_size": layers[0].hidden_size,
        "headwise": {"attention": hosted_attention(model)},
    }
    assert read_config(json.loads(json.dumps(config))).layers == model.layers
