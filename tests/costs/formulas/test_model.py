"""Whole models: weights and FLOPs by part, against transformers' own, error 0."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from headwise import cost
from headwise.errors import ArgumentError, SpecError
from headwise.models.specs import ModelSpec, RecurrentSpec, read_config, read_spec
from tests.meta_models import meta_model, stored_parts, transformers_config
from tests.strategies import models
from tests.toy_configs import TOYS

KNOWN = [name for name in TOYS if name != "gemma3n_text"]
VARIANTS: list[dict[str, Any]] = [
    {**TOYS["llama"], "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    {**TOYS["starcoder2"], "use_bias": False, "tie_word_embeddings": False},
    {**TOYS["glm4_moe"], "use_qk_norm": True, "attention_bias": True},
    {**TOYS["seed_oss"], "attention_out_bias": True},
    {**TOYS["stablelm"], "use_parallel_residual": True, "use_qkv_bias": True},
    {**TOYS["falcon"], "new_decoder_architecture": True, "num_kv_heads": 2},
    {**TOYS["falcon"], "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    {**TOYS["falcon"], "parallel_attn": False, "bias": True, "multi_query": False, "ffn_hidden_size": 80},
    {**TOYS["gpt2"], "n_inner": 80},
    {**TOYS["opt"], "enable_bias": False, "layer_norm_elementwise_affine": False},
    {**TOYS["glm4_moe_lite"], "mlp_layer_types": ["sparse", "dense"] * 3, "attention_bias": True},
    {**TOYS["deepseek_v3"], "q_lora_rank": None, "first_k_dense_replace": 6},
    {**TOYS["granitemoehybrid"], "num_local_experts": 0, "mamba_proj_bias": True, "mamba_conv_bias": False},
    {**TOYS["jamba"], "num_experts": 1, "num_experts_per_tok": 1, "mamba_proj_bias": True},
    {**TOYS["nemotron_h"], "hybrid_override_pattern": "M*-M", "use_bias": True, "mlp_bias": True},
    {**TOYS["lfm2"], "conv_bias": True, "tie_embedding": False, "block_ff_dim": 700, "block_multiple_of": 16},
    {**TOYS["lfm2"], "block_auto_adjust_ff_dim": False},
]


def parts(counts: Any) -> dict[str, int]:
    return {name: count for name, count in asdict(counts).items() if count}


@pytest.mark.parametrize("config", [*map(TOYS.get, KNOWN), *VARIANTS], ids=lambda config: config["model_type"])
def test_every_weight_is_in_its_part(config: dict[str, Any]) -> None:
    spec, stored = read_config(config), stored_parts(meta_model(config))
    assert parts(cost.model.weights(spec)) == stored
    assert cost.model.weights(spec).total == sum(stored.values())


def test_layers_that_share_keys_and_values_hold_none() -> None:
    config = TOYS["gemma3n_text"]
    spec, stored = read_config(config), stored_parts(meta_model(config))
    assert cost.model.parameters(spec) == stored["attention"]


RUNNABLE = [name for name in KNOWN if not any(isinstance(s, RecurrentSpec) for s in read_config(TOYS[name]).layers)]
HYBRID = [name for name in KNOWN if name not in RUNNABLE]


def run(config: dict[str, Any], *, past: int = 0, batch: int = 2, new: int = 11) -> tuple[Any, dict[str, Any]]:
    """An eager model, and the FLOPs that torch counts for a call, by module and operator.

    Experts run one by one over the tokens that chose them, so each token counts once for each expert it chose,
    whichever those are.
    """
    model = AutoModelForCausalLM.from_config(transformers_config(config), attn_implementation="eager").eval()
    if not {"num_experts_per_tok", "num_experts_per_token"}.isdisjoint(config):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        tokens = torch.randint(3, 90, (batch, past + new))
        cache = model(tokens[:, :past], use_cache=True).past_key_values if past else None
        with FlopCounterMode(display=False, depth=10) as counter:
            model(tokens[:, past:], past_key_values=cache)
    counts = {
        name: {str(operator): flops for operator, flops in own.items()}
        for name, own in counter.get_flop_counts().items()
    }
    for name, own in counts.items():
        if name.endswith("rotary_emb"):  # positions times frequencies: no layer's
            counts["Global"]["aten.bmm"] -= own["aten.bmm"]
    return model, counts


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_flop_of_a_prefill(name: str) -> None:
    spec = read_config(TOYS[name])
    impl = "expanded" if spec.mechanism == "mla" else "auto"
    flops = cost.model.forward_flops(spec, 11, batch=2, causal=False, impl=impl)
    counted = run(TOYS[name])[1]["Global"]
    experts = 0
    if name == "llama4_text":  # transformers computes every expert, times 0 where it was not chosen
        experts = flops.experts * TOYS[name]["num_local_experts"] // TOYS[name]["num_experts_per_tok"]
        counted["aten.bmm"] -= experts
        counted["aten.mm"] += flops.experts
    if name == "deepseek_v4":  # products of groups of heads, and of streams, that are no attention
        toy, tokens = TOYS[name], 2 * 11
        grouped = 2 * tokens * toy["num_attention_heads"] * toy["head_dim"] * toy["o_lora_rank"]
        mixed = 2 * tokens * 2 * 4 * 4 * toy["hidden_size"]
        counted["aten.bmm"] -= toy["num_hidden_layers"] * (grouped + mixed)
        counted["aten.mm"] += toy["num_hidden_layers"] * (grouped + mixed)
    assert flops.total == sum(counted.values())
    assert flops.attention_pairs == counted["aten.bmm"]


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "falcon"])
def test_every_flop_of_a_decode(name: str) -> None:
    flops = cost.model.forward_flops(read_config(TOYS[name]), 1, 9, batch=2, causal=False)
    assert flops.total == sum(run(TOYS[name], past=8, new=1)[1]["Global"].values())


@pytest.mark.parametrize("name", HYBRID)
def test_a_recurrent_layer_counts_its_projections_and_nothing_of_its_scan(name: str) -> None:
    flops = cost.model.forward_flops(read_config(TOYS[name]), 11, batch=2, causal=False)
    model, counts = run(TOYS[name])
    counted = counts["Global"]["aten.mm"] + counts["Global"].get("aten.addmm", 0)
    if name == "kimi_linear":  # whose scan multiplies matrices too
        prefix = type(model).__name__
        for module, mixer in model.named_modules():
            if type(mixer).__name__.endswith("DeltaAttention"):
                counted -= counts[f"{prefix}.{module}"]["aten.mm"]
                linears = [part for part, kind in mixer.named_modules() if isinstance(kind, torch.nn.Linear)]
                counted += sum(counts[f"{prefix}.{module}.{part}"]["aten.mm"] for part in linears)
    assert flops.total - flops.attention_pairs == counted


@pytest.mark.parametrize("name", HYBRID)
def test_the_state_is_what_a_cache_holds_of_it(name: str) -> None:
    spec = read_config(TOYS[name])
    model = AutoModelForCausalLM.from_config(transformers_config(TOYS[name]), attn_implementation="eager").eval()
    with torch.no_grad():
        cache = model(torch.randint(3, 90, (2, 11)), use_cache=True).past_key_values
    for index, layer in enumerate(spec.layers):
        layer_cache = cache.layers[index]
        state = [
            *getattr(layer_cache, "conv_states", {}).values(),
            *getattr(layer_cache, "recurrent_states", {}).values(),
        ]
        keys = [getattr(layer_cache, "keys", None), getattr(layer_cache, "values", None)]
        tensors = [tensor for tensor in (*state, *keys) if tensor is not None]
        values = sum(tensor.numel() for tensor in tensors)
        if isinstance(layer, RecurrentSpec):
            assert cost.cache_bytes(layer, 11, batch=2, dtype="int8") == values
            assert cost.cache_bytes(layer, 10**6, batch=2, dtype="int8") == values


# --- Sums


@given(models(), st.integers(1, 300), st.integers(0, 300), st.integers(1, 3))
def test_parts_and_layers_sum_to_the_whole(model: ModelSpec, S: int, past: int, B: int) -> None:
    T = S + past
    assert sum(cost.model.cache_bytes_by_layer(model, T, batch=B)) == cost.model.cache_bytes(model, T, batch=B)
    weights, active = cost.model.weights(model), cost.model.weights(model, active=True)
    assert weights.total == sum(asdict(weights).values())
    assert weights.attention + weights.mixers == cost.model.parameters(model)
    assert {**asdict(active), "experts": 0} == {**asdict(weights), "experts": 0}
    assert active.experts <= weights.experts
    flops = cost.model.forward_flops(model, S, T, batch=B)
    of_attention = flops.attention_projections + flops.attention_pairs + flops.mixers
    assert of_attention == cost.model.attention_flops(model, S, T, batch=B)
    assert flops.total == sum(asdict(flops).values())
    # A token's FLOPs outside the pairs are 2 for each active weight it is multiplied with.
    one = cost.model.forward_flops(model, 1)
    assert B * S * one.experts == flops.experts
    assert B * S * one.head == flops.head


@given(models())
def test_a_token_adds_to_the_cache_only_where_it_grows(model: ModelSpec) -> None:
    longest = max((s.sliding_window or 0 for s in model.layers), default=0) + 10
    step = cost.model.cache_bytes(model, longest + 1) - cost.model.cache_bytes(model, longest)
    assert step == sum(cost.cache_bytes_per_token(s) for s in model.layers if s.sliding_window is None)
    assert cost.model.cache_bytes(model, 1) == cost.model.cache_bytes_per_token(model) + cost.model.state_bytes(model)


def test_a_window_bounds_the_pairs_and_leaves_the_projections() -> None:
    flops = cost.model.forward_flops(read_spec("gpt-oss-120b"), 1, 100_000)
    assert flops.attention_pairs == 18 * 4 * 64 * 64 * (128 + 100_000)
    assert flops.attention_projections == cost.model.forward_flops(read_spec("gpt-oss-120b"), 1).attention_projections


def test_an_expert_a_token_does_not_choose_is_stored_and_not_active() -> None:
    model = read_spec("mixtral-8x7b")
    weights, active = cost.model.weights(model), cost.model.weights(model, active=True)
    assert weights.experts == 32 * 8 * 3 * 4096 * 14336 == 4 * active.experts
    assert (weights.total, active.total) == (46_702_792_704, 12_879_925_248)


def test_a_tied_head_stores_nothing_and_costs_as_much() -> None:
    model = read_spec("qwen3-0.6b")
    assert model.body is not None
    untied = replace(model, body=replace(model.body, tied=False))
    assert cost.model.weights(model).head == 0
    assert cost.model.weights(untied).head == 151936 * 1024
    assert cost.model.forward_flops(model, 7) == cost.model.forward_flops(untied, 7)


# --- Refusals


def test_a_body_has_a_network_or_none_for_each_layer() -> None:
    model = read_spec("llama-3-8b")
    assert model.body is not None
    with pytest.raises(SpecError, match=r"^feed_forward = 31: must be one for each"):
        replace(model, body=replace(model.body, feed_forward=model.body.feed_forward[1:]))


def test_a_whole_model_that_is_not_known_is_refused_and_its_attention_is_not() -> None:
    model = replace(read_spec("llama-3-8b"), body=None)
    assert cost.model.attention_flops(model, 5) > 0
    for ask in (cost.model.weights, lambda model: cost.model.forward_flops(model, 5)):
        with pytest.raises(SpecError, match=r"^model_type = 'llama': has attention that is understood"):
            ask(model)


def test_new_tokens_are_some_of_all_tokens() -> None:
    with pytest.raises(ArgumentError, match=r"^new_tokens = 5: must be from 1 to total_tokens = 4$"):
        cost.model.forward_flops(read_spec("llama-3-8b"), 5, 4)


def test_a_layer_that_caches_nothing_has_no_intensity() -> None:
    layer = RecurrentSpec(form="none", hidden_size=8)
    with pytest.raises(SpecError, match=r"^attention = 'none': has no cache that grows"):
        cost.decode_intensity(layer)
