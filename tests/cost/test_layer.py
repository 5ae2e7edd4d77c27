from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headwise import cost
from headwise.errors import ArgumentError, SpecError
from headwise.specs import GroupedSpec, LatentSpec, ModelSpec, read_spec
from tests.strategies import grouped_specs, latent_specs, specs

AnySpec = GroupedSpec | LatentSpec
tokens, batches = st.integers(1, 300), st.integers(1, 4)

GUIDE: dict[str, Any] = {"hidden_size": 256, "num_heads": 8, "head_dim": 32, "bias": "hf"}
MLA_GUIDE = LatentSpec(
    hidden_size=256,
    num_heads=8,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=16,
    qk_rope_head_dim=26,
    v_head_dim=16,
    latent_norm=False,
    bias=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
)


# --- The figures of the guides


@pytest.mark.parametrize(
    ("spec", "parameters", "thop"),
    [
        (GroupedSpec(**GUIDE, num_kv_heads=8), 263168, 2621440),
        (GroupedSpec(**GUIDE, num_kv_heads=1), 148032, 1474560),
        (GroupedSpec(**GUIDE, num_kv_heads=4), 197376, 1966080),
        (MLA_GUIDE, 111082, 1100800),
    ],
    ids=["mha", "mqa", "gqa", "mla"],
)
def test_the_guides_parameters_and_thop_counts(spec: AnySpec, parameters: int, thop: int) -> None:
    assert cost.parameters(spec) == parameters
    assert cost.thop_count(spec, 10) == thop
    assert cost.thop_count(spec, 10, batch=2) == 2 * thop


@pytest.mark.parametrize(("kv_heads", "parameters"), [(8, 1048576), (1, 589824), (4, 786432)])
def test_the_guides_weights_alone(kv_heads: int, parameters: int) -> None:
    assert (
        cost.parameters(GroupedSpec(hidden_size=512, num_heads=8, num_kv_heads=kv_heads, head_dim=64)) == parameters
    )


# --- The closed forms, written out again


def grouped_parameters(spec: GroupedSpec) -> int:
    E, h, k, d, v = spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim
    weights = E * d * (h + k) + E * v * (h + k)
    biases = {"q_proj": h * d, "k_proj": k * d, "v_proj": k * v, "o_proj": E}
    norms = {None: 0, "head": 2 * d, "full": (h + k) * d}
    return weights + sum(biases[name] for name in spec.bias) + norms[spec.qk_norm] + (h if spec.sinks else 0)


def latent_parameters(spec: LatentSpec) -> int:
    E, h, R, q = spec.hidden_size, spec.num_heads, spec.kv_lora_rank, spec.q_lora_rank
    n, p, v = spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim
    query = E * h * (n + p) if q is None else E * q + q * h * (n + p)
    norms = (R + (q or 0)) if spec.latent_norm else 0
    outputs = {
        "q_proj": h * (n + p),
        "q_a_proj": q or 0,
        "q_b_proj": h * (n + p),
        "kv_a_proj_with_mqa": R + p,
        "kv_b_proj": h * (n + v),
        "o_proj": E,
    }
    biases = sum(outputs[name] for name in spec.bias)
    return query + E * (R + p) + R * h * (n + v) + h * v * E + norms + biases


@given(grouped_specs())
def test_grouped_parameters(spec: GroupedSpec) -> None:
    assert cost.parameters(spec) == grouped_parameters(spec)


@given(latent_specs())
def test_latent_parameters(spec: LatentSpec) -> None:
    for impl in ("expanded", "absorbed", "cached_kv"):
        assert sum(stage.parameters for stage in cost.stages(spec, impl)) == latent_parameters(spec)
    assert cost.parameters(spec) == latent_parameters(spec)


def pairs(S: int, T: int, window: int | None) -> int:
    return sum(min(position, window or position) for position in range(T - S + 1, T + 1))


@given(grouped_specs(), batches, tokens, tokens)
def test_grouped_flops(spec: GroupedSpec, B: int, S: int, past: int) -> None:
    E, h, k, d, v, T = spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim, S + past
    projections = 2 * B * S * E * (d + v) * (h + k)
    full = projections + 2 * B * h * S * T * (d + v)
    causal = projections + 2 * B * h * pairs(S, T, spec.sliding_window) * (d + v)
    assert cost.forward_flops(spec, S, T, batch=B, causal=False) == full
    assert cost.forward_flops(spec, S, T, batch=B, causal=True) == causal
    assert cost.forward_flops(spec, S, T, batch=B) == (causal if spec.is_causal else full)
    if v == d:
        assert full == 2 * B * S * E * d * (2 * h + 2 * k) + 4 * B * h * S * T * d


@given(latent_specs(), batches, tokens, tokens)
def test_latent_flops(spec: LatentSpec, B: int, S: int, past: int) -> None:
    E, h, R, q, T = spec.hidden_size, spec.num_heads, spec.kv_lora_rank, spec.q_lora_rank, S + past
    n, p, v = spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim
    query = E * h * (n + p) if q is None else E * q + q * h * (n + p)
    common = 2 * B * S * (query + E * (R + p) + h * v * E)
    compared = p + (R if n else 0)
    for causal, seen in ((False, S * T), (True, pairs(S, T, spec.sliding_window))):
        expected = {
            "expanded": common + 2 * B * T * h * R * (n + v) + 2 * B * h * seen * (n + p + v),
            "cached_kv": common + 2 * B * S * h * R * (n + v) + 2 * B * h * seen * (n + p + v),
            "absorbed": common
            + 2 * B * S * h * R * (n + v)
            + 2 * B * h * seen * (compared + R + ("kv_b_proj" in spec.bias)),
        }
        for impl, flops in expected.items():
            assert cost.forward_flops(spec, S, T, batch=B, causal=causal, impl=impl) == flops


@given(specs(), batches, tokens, st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]))
def test_cache_bytes(spec: AnySpec, B: int, T: int, dtype: str) -> None:
    size = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}[dtype]
    if isinstance(spec, GroupedSpec):
        values = spec.num_kv_heads * spec.head_dim + spec.num_kv_heads * spec.value_dim
    else:
        values = spec.kv_lora_rank + spec.qk_rope_head_dim
    per_token = values * size if spec.is_causal else 0
    assert cost.cache_bytes_per_token(spec, dtype) == per_token
    assert cost.cache_bytes(spec, T, batch=B, dtype=dtype) == B * min(T, spec.sliding_window or T) * per_token


# --- One mechanism is another at the edge


@given(grouped_specs(), tokens, tokens)
def test_as_many_key_value_heads_as_heads_cost_mha_and_one_costs_mqa(spec: GroupedSpec, S: int, past: int) -> None:
    E, h, d, v = spec.hidden_size, spec.num_heads, spec.head_dim, spec.value_dim
    plain = {"bias": (), "qk_norm": None, "sinks": False, "is_causal": True, "sliding_window": None}
    mha = dataclasses.replace(spec, num_kv_heads=h, **plain)
    mqa = dataclasses.replace(spec, num_kv_heads=1, **plain)
    core = 2 * h * (d + v) * pairs(S, S + past, None)
    assert cost.parameters(mha) == 2 * E * h * (d + v)
    assert cost.forward_flops(mha, S, S + past) == 2 * S * 2 * E * h * (d + v) + core
    assert cost.cache_bytes_per_token(mha, "int8") == h * (d + v)
    assert cost.decode_intensity(mha) == 1
    assert cost.parameters(mqa) == E * (h + 1) * (d + v)
    assert cost.forward_flops(mqa, S, S + past) == 2 * S * E * (h + 1) * (d + v) + core
    assert cost.cache_bytes_per_token(mqa, "int8") == d + v
    assert cost.decode_intensity(mqa) == h


# --- More is more


@given(specs(), tokens, st.integers(1, 50), tokens)
def test_costs_grow_with_tokens(spec: AnySpec, S: int, more: int, past: int) -> None:
    T = S + past
    for impl in cost.formulas(spec).IMPLS:
        flops = cost.forward_flops(spec, S, T, impl=impl)
        assert cost.forward_flops(spec, S + more, T + more, impl=impl) > flops
        assert cost.forward_flops(spec, S, T + more, impl=impl) >= flops
    assert cost.cache_bytes(spec, T + more) >= cost.cache_bytes(spec, T)
    unbounded = dataclasses.replace(spec, sliding_window=None, is_causal=True)
    assert cost.cache_bytes(unbounded, T + more) > cost.cache_bytes(unbounded, T)


@given(specs(), tokens, tokens, st.integers(2, 4))
def test_costs_grow_with_heads(spec: AnySpec, S: int, past: int, times: int) -> None:
    wider = dataclasses.replace(spec, num_heads=spec.num_heads * times)
    assert cost.parameters(wider) > cost.parameters(spec)
    for impl in cost.formulas(spec).IMPLS:
        flops = [cost.forward_flops(s, S, S + past, impl=impl) for s in (spec, wider)]
        assert flops[0] < flops[1]
    # Query heads are not cached.
    assert cost.cache_bytes_per_token(wider) == cost.cache_bytes_per_token(spec)


@given(grouped_specs(), st.integers(2, 4))
def test_costs_grow_with_key_value_heads(spec: GroupedSpec, times: int) -> None:
    spec = dataclasses.replace(spec, num_heads=spec.num_heads * times, is_causal=True)
    wider = dataclasses.replace(spec, num_kv_heads=spec.num_kv_heads * times)
    assert cost.parameters(wider) > cost.parameters(spec)
    assert cost.forward_flops(wider, 5, 9) > cost.forward_flops(spec, 5, 9)
    assert cost.cache_bytes_per_token(wider) == times * cost.cache_bytes_per_token(spec)


@given(specs(), tokens, tokens, st.integers(2, 5))
def test_costs_are_a_batch_times_one(spec: AnySpec, S: int, past: int, B: int) -> None:
    assert cost.forward_flops(spec, S, S + past, batch=B) == B * cost.forward_flops(spec, S, S + past)
    assert cost.cache_bytes(spec, S, batch=B) == B * cost.cache_bytes(spec, S)


# --- Absorbed or expanded


@given(latent_specs(), tokens, tokens)
def test_the_best_way_is_the_one_with_fewer_flops(spec: LatentSpec, S: int, past: int) -> None:
    T = S + past
    absorbed, expanded = (
        cost.forward_flops(spec, S, T, causal=False, impl=impl) for impl in ("absorbed", "expanded")
    )
    assert cost.formulas(spec).best_impl(spec, S, T) == ("absorbed" if absorbed < expanded else "expanded")
    assert cost.forward_flops(spec, S, T, causal=False) == min(absorbed, expanded)


def test_a_draw_is_expanded() -> None:
    spec = dataclasses.replace(MLA_GUIDE, kv_lora_rank=16, bias=())
    assert [cost.forward_flops(spec, 9, impl=impl) for impl in ("absorbed", "expanded")] == [
        cost.forward_flops(spec, 9)
    ] * 2
    assert cost.formulas(spec).best_impl(spec, 9, 9) == "expanded"


def test_deepseek_v3_absorbs_below_171_new_tokens() -> None:
    spec = read_spec("deepseek-v3").layers[0]
    best = cost.formulas(spec).best_impl
    assert [best(spec, S, 10**9) for S in (1, 170, 171)] == ["absorbed", "absorbed", "expanded"]
    assert best(spec, 4096, 4096) == "expanded"


@given(specs(), st.sampled_from([1, 2, 7, 200, 5000]))
def test_intensity_is_the_flops_that_one_more_cached_token_costs(spec: AnySpec, S: int) -> None:
    # A spec at its own crossover is decided by the last token of a long cache; both answers are right there.
    impl = cost.formulas(spec).best_impl(spec, S, 1_000_000 * S)
    assume(impl == cost.formulas(spec).best_impl(spec, S, 10**15))
    spec = dataclasses.replace(spec, is_causal=True)
    step = cost.forward_flops(spec, S, 10**9 + 1, causal=False, impl=impl)
    step -= cost.forward_flops(spec, S, 10**9, causal=False, impl=impl)
    assert cost.decode_intensity(spec, new_tokens=S) == step / cost.cache_bytes_per_token(spec)


@given(grouped_specs(), st.integers(1, 9))
def test_grouped_intensity_is_the_closed_form(spec: GroupedSpec, S: int) -> None:
    assert cost.decode_intensity(spec, new_tokens=S) == pytest.approx(spec.group_size * S, rel=1e-12)
    assert cost.decode_intensity(spec, dtype="float32") == pytest.approx(spec.group_size / 2, rel=1e-12)


# --- What may be asked


@pytest.mark.parametrize(("S", "T"), [(0, None), (-1, 4), (5, 4), (0, 0)])
def test_new_tokens_are_some_of_all_tokens(S: int, T: int | None) -> None:
    shown = rf"\({S}, {S if T is None else T}\)"
    rule = r"must satisfy 1 <= new_tokens <= total_tokens"
    with pytest.raises(ArgumentError, match=rf"^new_tokens, total_tokens = {shown}: {rule}$"):
        cost.forward_flops(MLA_GUIDE, S, T)


@pytest.mark.parametrize("dtype", ["bf16", "int4", "", "torch.bool"])
def test_an_unknown_dtype(dtype: str) -> None:
    with pytest.raises(
        ArgumentError, match=rf"^dtype = '{dtype}': must be one of float64, float32, float16, bfloat16"
    ):
        cost.cache_bytes_per_token(MLA_GUIDE, dtype)


def test_dtypes_by_torchs_names() -> None:
    import torch

    for name, size in cost.DTYPE_BYTES.items():
        dtype = getattr(torch, name)
        assert cost.dtype_bytes(str(dtype)) == cost.dtype_bytes(name) == size == dtype.itemsize


def test_an_unknown_implementation() -> None:
    with pytest.raises(SpecError, match=r"^impl = 'fused': must be one of \('expanded', 'absorbed', 'cached_kv'\)$"):
        cost.forward_flops(MLA_GUIDE, 1, impl="fused")
    with pytest.raises(SpecError, match=r"^impl = 'absorbed': mqa has only \('direct',\)$"):
        cost.forward_flops(GroupedSpec(**GUIDE, num_kv_heads=1), 1, impl="absorbed")


# --- A stack of layers


@given(st.lists(specs(), min_size=1, max_size=4), tokens, tokens, batches)
def test_a_model_costs_the_sum_of_its_layers(layers: list[AnySpec], S: int, past: int, B: int) -> None:
    model = ModelSpec(model_type="toy", hidden_size=1, layers=tuple(layers))
    T = S + past
    assert cost.model.parameters(model) == sum(cost.parameters(s) for s in layers)
    assert cost.model.cache_bytes_per_token(model) == sum(cost.cache_bytes_per_token(s) for s in layers)
    assert cost.model.cache_bytes(model, T, batch=B) == sum(cost.cache_bytes(s, T, batch=B) for s in layers)
    assert cost.model.attention_flops(model, S, T, batch=B) == sum(
        cost.forward_flops(s, S, T, batch=B) for s in layers
    )
