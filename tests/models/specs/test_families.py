"""The readers of families: defaults of the transformers class, and layers that are no plain attention."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from headwise import cost
from headwise.errors import SpecError
from headwise.models.specs import (
    FeedForwardSpec,
    GroupedSpec,
    LatentSpec,
    RecurrentSpec,
    as_grouped,
    as_latent,
    read_config,
    read_spec,
)
from headwise.models.specs.readers import READERS
from headwise.runtime.attention import build
from tests.meta_models import meta_model, stored_parts, transformers_config
from tests.toy_configs import TOYS, UNBUILT

Config = dict[str, Any]


def grouped(name: str, layer: int = 0, **fields: Any) -> GroupedSpec:
    spec = read_config({**TOYS[name], **fields}).layers[layer]
    assert isinstance(spec, GroupedSpec)
    return spec


def test_every_reader_has_a_toy() -> None:
    assert set(TOYS) | UNBUILT == set(READERS)


@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize("name", TOYS)
def test_what_a_file_leaves_out_is_what_the_familys_class_would_take(name: str, everything: bool) -> None:
    """transformers fills in the fields and saves them, all or those unlike its defaults; either reads the same."""
    saved = json.loads(transformers_config(TOYS[name]).to_json_string(use_diff=not everything))
    ours, theirs = read_config(TOYS[name]), read_config({**saved, "model_type": name})
    assert theirs.layers == ours.layers
    assert theirs.body == ours.body


@pytest.mark.parametrize("name", TOYS)
def test_scale_windows_and_rotated_width_are_those_of_the_built_layers(name: str) -> None:
    model = meta_model(TOYS[name])
    built = [m for m in model.modules() if re.search(r"(?<!Delta)Attention$", type(m).__name__)]
    specs = [layer for layer in read_config(TOYS[name]).layers if layer.kind != "recurrent"]
    for module, spec in zip(built, specs, strict=True):
        width = spec.qk_head_dim if isinstance(spec, LatentSpec) else spec.head_dim
        assert getattr(module, "scaling", width**-0.5) == pytest.approx(spec.softmax_scale or width**-0.5)
        # Masks know the window of some families, not their modules; a window beside entries has a field of its own.
        if name not in ("mistral", "exaone4", "llama4_text", "deepseek_v4"):
            assert (getattr(module, "sliding_window", None) or None) == spec.sliding_window
    rotary = [m for n, m in model.named_modules() if n.endswith("rotary_emb") and hasattr(m, "inv_freq")]
    rotated = {module.inv_freq.shape[0] for module in rotary}
    assert rotated in (set(), {layer.rope.dim // 2 for layer in specs if layer.rope})


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("mistral", {}, {"num_kv_heads": 8, "sliding_window": 4096}),
        ("mixtral", {"num_key_value_heads": None, "num_attention_heads": 4}, {"num_kv_heads": 4}),
        ("mistral", {"sliding_window": None}, {"sliding_window": None}),
        ("mixtral", {"num_key_value_heads": 2}, {"num_kv_heads": 2, "sliding_window": None}),
        ("qwen3", {}, {"head_dim": 128}),
        ("qwen3", {"head_dim": None}, {"head_dim": 8}),
        ("gemma2", {}, {"head_dim": 256, "num_kv_heads": 4, "softcap": 50.0, "softmax_scale": 1 / 16}),
        ("gemma2", {"attn_logit_softcapping": None, "query_pre_attn_scalar": None}, {"softcap": None}),
        ("gemma", {"head_dim": 16}, {"head_dim": 16}),
        ("granite", {}, {"softmax_scale": 1.0}),
        ("llama", {"attention_multiplier": 3.0, "query_pre_attn_scalar": 3, "attn_logit_softcapping": 3.0}, {
            "softmax_scale": None,
            "softcap": None,
        }),
        ("glm4", {}, {"bias": ("q_proj", "k_proj", "v_proj")}),
        ("seed_oss", {"attention_out_bias": True}, {"bias": ("q_proj", "k_proj", "v_proj", "o_proj")}),
        ("starcoder2", {"use_bias": False}, {"bias": ()}),
        ("glm4_moe", {}, {"qk_norm": None}),
        ("glm4_moe", {"use_qk_norm": True}, {"qk_norm": "head"}),
        ("phi", {"num_key_value_heads": 2}, {"num_kv_heads": 2}),
        ("gpt2", {"scale_attn_weights": False}, {"softmax_scale": 1.0}),
    ],
)  # fmt: skip
def test_a_field_of_a_family(name: str, fields: Config, expected: Config) -> None:
    spec = grouped(name, **fields)
    assert {key: getattr(spec, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "fields", "dim", "theta", "interleaved"),
    [
        ("phi", {}, 4, 1e4, False),
        ("stablelm", {}, 2, 1e4, False),
        ("glm4", {}, 64, 1e4, True),
        ("gpt_neox", {}, 2, 1e4, False),
        ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 500}, 4, 500.0, False),
        ("minimax_m2", {}, 64, 5e6, False),
        ("cohere", {}, 8, 5e5, True),
        ("mixtral", {}, 8, 1e6, False),
        ("smollm3", {}, 8, 2e6, False),
        ("bamba", {"partial_rotary_factor": 1.0}, 4, 1e4, False),
        ("qwen3_next", {}, 64, 1e4, False),
    ],
)
def test_rotation_is_the_familys_where_the_file_is_silent(
    name: str, fields: Config, dim: int, theta: float, interleaved: bool
) -> None:
    (rope,) = {layer.rope for layer in read_config({**TOYS[name], **fields}).layers if layer.rope}
    assert (rope.dim, rope.theta, rope.interleaved) == (dim, theta, interleaved)


@pytest.mark.parametrize(
    ("name", "rotated"),
    [
        ("cohere2", [True, True, True, False, True, True]),
        ("exaone4", [True, True, True, False, True, True]),
        ("llama4_text", [True, True, False] * 2),
        ("jamba", [False] * 6),
        ("nemotron_h", [False] * 6),
        ("granitemoehybrid", [False] * 6),
        ("kimi_linear", [False] * 6),
    ],
)
def test_layers_without_positions(name: str, rotated: list[bool]) -> None:
    assert [layer.rope is not None for layer in read_config(TOYS[name]).layers] == rotated


def test_exaone_without_windows_rotates_everywhere() -> None:
    layers = read_config({**TOYS["exaone4"], "sliding_window": None}).layers
    assert {(layer.sliding_window, layer.rope is None) for layer in layers} == {(None, False)}


def test_gpt2_may_scale_its_scores_by_the_layer() -> None:
    layers = read_config({**TOYS["gpt2"], "scale_attn_by_inverse_layer_idx": True}).layers
    assert [layer.softmax_scale for layer in layers] == pytest.approx([8**-0.5, 8**-0.5 / 2, 8**-0.5 / 3])


def test_olmo3_scales_the_positions_of_its_full_layers_alone() -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    layers = read_config({**TOYS["olmo3"], "rope_scaling": scaling}).layers
    assert [layer.rope.rope_type for layer in layers if layer.rope] == ["default"] * 3 + ["yarn"] + ["default"] * 2


# --- Layers that are no softmax attention


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("qwen3_next", ["gated_delta_net"] * 3 + ["gqa"] + ["gated_delta_net"] * 2),
        ("jamba", ["mamba", "gqa", "mamba", "mamba", "gqa", "mamba"]),
        ("bamba", ["mamba2", "mamba2", "gqa", "mamba2", "mamba2", "mamba2"]),
        ("granitemoehybrid", ["mamba2", "mha"] * 3),
        ("nemotron_h", ["mamba2", "gqa", "none", "none", "mamba2", "none"]),
        ("lfm2", ["short_conv", "gqa", "short_conv", "short_conv", "gqa", "short_conv"]),
        ("kimi_linear", ["kimi_delta", "kimi_delta", "mla"] * 2),
    ],
)
def test_a_hybrid_stack_layer_by_layer(name: str, kinds: list[str]) -> None:
    assert [layer.mechanism for layer in read_config(TOYS[name]).layers] == kinds


def test_layer_types_in_todays_words_and_in_older_ones() -> None:
    old = {**TOYS["qwen3_next"], "layer_types": ["mamba", "attention"] * 3}
    new = {**TOYS["qwen3_next"], "layer_types": ["linear_attention", "full_attention"] * 3}
    assert read_config(old) == read_config(new)
    with pytest.raises(SpecError, match=r"^layer_types = 'rwkv': is not understood"):
        read_config({**new, "layer_types": ["rwkv"] * 6})


def test_the_state_of_a_delta_net_is_keys_by_values() -> None:
    # Qwen3-Next: 32 heads of 128 × 128, and 4 taps of 32 · 128 values and 2 · 16 · 128 keys and queries.
    layer = read_spec("qwen3-next-80b-a3b").layers[0]
    assert cost.state_bytes(layer) == 2 * (32 * 128 * 128 + 4 * (32 * 128 + 2 * 16 * 128))
    assert cost.cache_bytes_per_token(layer) == 0
    assert cost.cache_bytes(layer, 10**6, batch=3) == 3 * cost.state_bytes(layer)


def test_an_attention_layer_has_no_state() -> None:
    assert cost.state_bytes(read_spec("llama-3-8b").layers[0], batch=5) == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"form": "hyena"}, r"form = 'hyena': must be one of"),
        ({"form": "mamba2", "num_heads": 2}, r"head_dim = 0: must be a whole number"),
        ({"form": "none", "num_heads": 2}, r"num_heads = 2: must be 0"),
        ({"form": "none", "bias": ("in_proj",)}, r"bias = 'in_proj': must name one of \[\]"),
        ({"form": "short_conv", "num_heads": 8, "head_dim": 1, "conv_kernel": 3, "bias": ("q_proj",)}, r"bias = 'q"),
    ],
)
def test_what_a_recurrent_spec_refuses(fields: Config, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        RecurrentSpec(hidden_size=8, **fields)


def test_no_layer_is_built_for_what_has_only_a_cost() -> None:
    with pytest.raises(SpecError, match=r"^attention = 'Mamba 128 × 5': has costs"):
        build(read_config(TOYS["jamba"]).layers[0])
    with pytest.raises(SpecError, match=r"^shares_kv = True: is not supported"):
        build(grouped("gemma3n_text", 5))
    with pytest.raises(SpecError, match=r"^output_gate = True: is not supported"):
        build(grouped("qwen3_next", 3))
    for convert in (lambda spec: as_grouped(spec, 1), lambda spec: as_latent(spec, 8, 4)):
        with pytest.raises(SpecError, match=r"a layer with an output gate or another's keys is not converted$"):
            convert(grouped("qwen3_next", 3))


# --- Layers that share, and layers without attention


def test_layers_that_share_keys_and_values_cache_none() -> None:
    layers = read_config(TOYS["gemma3n_text"]).layers
    assert [layer.shares_kv for layer in layers if isinstance(layer, GroupedSpec)] == [False] * 4 + [True] * 2
    assert [cost.cache_bytes_per_token(layer) for layer in layers] == [2 * 2 * 256 * 2] * 4 + [0] * 2
    assert layers[4].label == "GQA 8/2 × 256 shared"
    # Queries, output and scores are still its own.
    assert cost.parameters(layers[4]) == 2 * 64 * 8 * 256 + 256
    assert cost.forward_flops(layers[5], 1, 100) == 2 * (2 * 64 * 8 * 256 + 100 * 2 * 8 * 256)


def test_a_type_that_no_lower_layer_has_cannot_be_shared() -> None:
    with pytest.raises(SpecError, match=r"^num_kv_shared_layers = 5: must leave"):
        read_config({**TOYS["gemma3n_text"], "num_kv_shared_layers": 5})


NAS: Config = {
    "model_type": "nemotron-nas",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "num_key_value_heads": None,
    "block_configs": [
        {"attention": {"n_heads_in_group": 4, "no_op": False}, "ffn": {"ffn_mult": 2.5}},
        {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"n_heads_in_group": 8, "no_op": False, "replace_with_linear": False}},
    ],
}


def test_a_search_leaves_layers_without_attention() -> None:
    model = read_config(NAS)
    assert [layer.label for layer in model.layers] == ["GQA 8/2 × 8", "none", "MQA 8/1 × 8"]
    assert [cost.cache_bytes_per_token(layer) for layer in model.layers] == [2 * 2 * 8 * 2, 0, 2 * 8 * 2]
    assert model.body is None


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (None, r"block_configs = None: must list"),
        ([{}] * 3, r"block_configs = \{\}: must have"),
        ([{"attention": {"replace_with_linear": True}}] * 3, r"replace_with_linear = True: is not understood"),
        ([{"attention": {"n_heads_in_group": None}}] * 3, r"n_heads_in_group = None: is required"),
    ],
)
def test_what_block_configs_must_say(blocks: Any, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        read_config({**NAS, "block_configs": blocks})


OPENELM_270M: Config = {
    "model_type": "openelm",
    "model_dim": 1280,
    "num_transformer_layers": 16,
    "head_dim": 64,
    "num_query_heads": [12] * 5 + [16] * 7 + [20] * 4,
    "num_kv_heads": [3] * 5 + [4] * 7 + [5] * 4,
    "normalize_qk_projections": True,
    "ffn_multipliers": [0.5, 0.73, 0.97, 1.2, 1.43, 1.67, 1.9, 2.13, 2.37, 2.6, 2.83, 3.07, 3.3, 3.53, 3.77, 4.0],
    "ffn_dim_divisor": 256,
    "ffn_with_glu": True,
    "share_input_output_layers": True,
    "vocab_size": 32000,
    "max_context_length": 2048,
}


def test_openelm_grows_layer_by_layer_to_the_weights_it_publishes() -> None:
    model = read_config(OPENELM_270M)
    assert [group[0].label for group in model.distinct_layers()] == [
        "GQA 12/3 × 64",
        "GQA 16/4 × 64",
        "GQA 20/5 × 64",
    ]
    assert cost.model.weights(model).total == 271_527_168
    assert cost.model.cache_bytes_per_token(model) == 2 * 2 * 64 * (5 * 3 + 7 * 4 + 4 * 5)
    assert model.max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_heads": [3] * 15}, r"num_kv_heads = \[3.*\]: must list"),
        ({"num_kv_heads": 3}, r"num_kv_heads = 3: must list"),
        ({"num_query_heads": [None] * 16}, r"num_heads = None: must be a whole number"),
        ({"ffn_multipliers": ["a"] * 16}, r"ffn_multipliers = 'a': must be a number"),
    ],
)
def test_what_openelm_must_list(fields: Config, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        read_config({**OPENELM_270M, **fields})


# --- What stands around the attention


@pytest.mark.parametrize("missing", ["vocab_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok"])
def test_an_incomplete_body_is_not_read(missing: str) -> None:
    config = {key: value for key, value in TOYS["qwen3_moe"].items() if key != missing}
    model = read_config(config)
    assert model.body is None
    assert model.layers == read_config(TOYS["qwen3_moe"]).layers


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama", {"intermediate_size": "96"}, r"intermediate_size = '96': must be a whole number"),
        ("llama", {"tie_word_embeddings": "no"}, r"tie_word_embeddings = 'no': must be true or false"),
        ("mixtral", {"num_experts_per_tok": 9}, r"experts_per_token = 9: must be at least 1"),
        ("qwen3_moe", {"mlp_only_layers": "all"}, r"mlp_only_layers = 'all': must list"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, r"first_k_dense_replace = -1: must be a whole number"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, r"mlp_layer_types = \['dense'\]: must list"),
        ("bamba", {"attn_layer_indices": [9]}, r"attn_layer_indices = \[9\]: must list"),
        ("bamba", {"mamba_d_head": 5}, r"mamba_d_head = 5: times mamba_n_heads = 8 must be"),
        ("nemotron_h", {"hybrid_override_pattern": "MXM"}, r"hybrid_override_pattern = 'MXM': must be of M \* - E"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, r"position_embedding_type = 'alibi': must be"),
        ("lfm2", {"full_attn_idxs": None}, r"full_attn_idxs = None: is required"),
    ],
)
def test_a_wrong_word_about_the_body_is_refused(name: str, fields: Config, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        read_config({**TOYS[name], **fields})


@pytest.mark.parametrize(
    ("name", "fields", "sparse"),
    [
        ("qwen3_moe", {}, [1, 3, 5]),
        ("qwen3_moe", {"decoder_sparse_step": 3}, [2, 5]),
        ("qwen2_moe", {}, [0, 2, 3, 4, 5]),
        ("deepseek_v3", {"first_k_dense_replace": 4}, [4, 5]),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "dense"] * 2}, [0, 3]),
        ("jamba", {}, [1, 3, 5]),
        ("nemotron_h", {}, [3]),
        ("lfm2_moe", {}, [2, 3, 4, 5]),
    ],
)
def test_which_layers_have_experts(name: str, fields: Config, sparse: list[int]) -> None:
    body = read_config({**TOYS[name], **fields}).body
    assert body is not None
    assert [i for i, network in enumerate(body.feed_forward) if network and network.num_experts] == sparse


@pytest.mark.parametrize("shared", [None, 0])
def test_no_shared_experts_in_either_spelling(shared: int | None) -> None:
    body = read_config({**TOYS["dots1"], "n_shared_experts": shared}).body
    assert body is not None
    assert {network.shared_intermediate_size for network in body.feed_forward if network} == {None}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("deepseek_v2", {"moe_layer_freq": 2}),
        ("opt", {"do_layer_norm_before": False}),
        ("opt", {"word_embed_proj_dim": 32}),
        ("nemotron_h", {"moe_latent_size": 8}),
    ],
)
def test_a_body_nobody_has_written_down_is_left_unread(name: str, fields: Config) -> None:
    model = read_config({**TOYS[name], **fields})
    assert model.body is None
    assert model.layers == read_config(TOYS[name]).layers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 4}, r"experts_per_token = None: must be at least 1"),
        ({"experts_per_token": 1}, r"num_experts = None: is required"),
        ({"shared_intermediate_size": 8}, r"num_experts = None: is required"),
        ({"intermediate_size": 0}, r"intermediate_size = 0: must be a whole number"),
    ],
)
def test_what_a_feed_forward_spec_refuses(fields: Config, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        FeedForwardSpec(**{"hidden_size": 8, "intermediate_size": 8, **fields})


def test_gemma3_4b_says_only_what_is_unlike_its_class() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    model = read_config({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text})
    assert [layer.label for layer in model.layers] == ["GQA 8/4 × 256"] * 34
    assert [layer.sliding_window for layer in model.layers[4:7]] == [1024, None, 1024]
    assert (model.vocab_size, model.max_position_embeddings) == (262208, 131072)
    assert cost.model.weights(model).total == sum(stored_parts(meta_model(text)).values()) == 3_880_263_168


def test_the_text_half_takes_what_the_whole_says_of_it() -> None:
    text = {key: value for key, value in TOYS["mistral"].items() if key != "tie_word_embeddings"}
    whole = {"model_type": "mistral3", "tie_word_embeddings": True, "dtype": "float16", "text_config": text}
    model = read_config(whole)
    assert model.body is not None
    assert (model.body.tied, model.dtype) == (True, "float16")


def test_a_converted_model_keeps_its_familys_body() -> None:
    config = {**TOYS["llama"], "model_type": "headwise_llama"}
    attention = [{**layer.to_dict(), "layers": [i]} for i, layer in enumerate(read_config(TOYS["llama"]).layers)]
    model = read_config({**config, "headwise": {"attention": attention}})
    assert model.body == read_config(TOYS["llama"]).body


def test_minicpm3_leaves_the_width_of_a_value_to_its_code() -> None:
    layer = read_config({**TOYS["minicpm3"], "v_head_dim": None}).layers[0]
    assert isinstance(layer, LatentSpec)
    assert layer.v_head_dim == 64 // 8
