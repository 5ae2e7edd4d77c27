"""Properties of the costs of every mechanism: monotonic, sums of their parts, equal for equivalent mechanisms."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headwise import cost
from headwise.costs.formulas.layer import call_of
from headwise.costs.formulas.stages import KERNELS, Core, Kernel, Linear
from headwise.errors import ArgumentError, SpecError
from headwise.models.specs import ExpertLatentSpec, GroupedSpec, LatentSpaceSpec, LatentSpec
from tests.strategies import (
    AnySpec,
    causal,
    expert_latent_specs,
    grouped_specs,
    impls,
    latent_space_specs,
    latent_specs,
    runnable_specs,
    specs,
)

tokens, batches, kernels = st.integers(1, 300), st.integers(1, 4), st.sampled_from(KERNELS)
dtypes = st.sampled_from(["float32", "float64", "bfloat16"])


def all_costs(spec: AnySpec, S: int, past: int, B: int, **call: Any) -> dict[str, int]:
    """Every cost of a layer; ``call`` says how training is run."""
    T, impl = S + past, call.get("impl", "auto")
    training = {key: value for key, value in call.items() if key != "dtype"}
    return {
        "parameters": cost.parameters(spec),
        "forward": cost.forward_flops(spec, S, T, batch=B, impl=impl),
        "backward": cost.backward_flops(spec, S, batch=B, **training),
        "cross": cost.forward_flops(
            dataclasses.replace(spec, sliding_window=None), S, T, batch=B, impl=impl, cross=True
        ),
        "prefill": cost.prefill_flops(spec, T, chunk=S, batch=B),
        "decode": cost.decode_flops(spec, past, 3, batch=B),
        "cache": cost.cache_bytes(spec, T, batch=B),
        "activations": cost.activation_bytes(spec, S, batch=B, **call),
    }


# --- One mechanism is another at the edge


@given(grouped_specs(), tokens, tokens)
def test_as_many_key_value_heads_as_heads_cost_mha_and_one_costs_mqa(spec: GroupedSpec, S: int, past: int) -> None:
    E, h, d, v = spec.hidden_size, spec.num_heads, spec.head_dim, spec.value_dim
    plain = {"bias": (), "qk_norm": None, "sinks": False, "is_causal": True, "sliding_window": None}
    plain |= {"output_projection": True}
    mha = dataclasses.replace(spec, num_kv_heads=h, **plain)
    mqa = dataclasses.replace(spec, num_kv_heads=1, **plain)
    pairs = S * past + S * (S + 1) // 2
    for k, same in ((h, mha), (1, mqa)):
        projections, core = 2 * S * E * (h + k) * (d + v), 2 * h * (d + v) * pairs
        assert cost.parameters(same) == E * (h + k) * (d + v)
        assert cost.forward_flops(same, S, S + past) == projections + core
        assert cost.backward_flops(same, S, kernel="unfused") == 2 * projections + 2 * h * (d + v) * S * (S + 1)
        assert cost.cache_bytes_per_token(same, "int8") == k * (d + v)
        assert cost.decode_intensity(same) == h // k


@given(latent_space_specs(), tokens, tokens, batches)
def test_a_latent_as_wide_as_the_queries_costs_mha_and_one_more_projection(
    spec: LatentSpaceSpec, S: int, past: int, B: int
) -> None:
    wide = dataclasses.replace(spec, latent_dim=spec.num_heads * spec.head_dim, bias=())
    sizes = ("hidden_size", "num_heads", "head_dim", "is_causal", "sliding_window", "rope")
    mha = GroupedSpec(num_kv_heads=spec.num_heads, **{name: getattr(spec, name) for name in sizes})
    square = wide.latent_dim**2
    assert cost.parameters(wide) == cost.parameters(mha) + square
    assert cost.forward_flops(wide, S, S + past, batch=B) == (
        cost.forward_flops(mha, S, S + past, batch=B) + 2 * B * S * square
    )
    assert cost.cache_bytes(wide, S + past, batch=B) == cost.cache_bytes(mha, S + past, batch=B)


# --- More is more


@given(specs(), tokens, st.integers(1, 50), tokens)
def test_costs_grow_with_tokens(spec: AnySpec, S: int, more: int, past: int) -> None:
    T = S + past
    for impl in cost.formulas(spec).IMPLS:
        flops = cost.forward_flops(spec, S, T, impl=impl)
        assert cost.forward_flops(spec, S + more, T + more, impl=impl) > flops
        assert cost.forward_flops(spec, S, T + more, impl=impl) >= flops
        assert cost.backward_flops(spec, S + more, impl=impl) > cost.backward_flops(spec, S, impl=impl)
    assert cost.cache_bytes(spec, T + more) >= cost.cache_bytes(spec, T)
    assert cost.decode_flops(spec, past, 1 + more) > cost.decode_flops(spec, past, 1)
    assert cost.prefill_flops(spec, S + more) > cost.prefill_flops(spec, S)
    unbounded = dataclasses.replace(causal(spec), sliding_window=None)
    assert cost.cache_bytes(unbounded, T + more) > cost.cache_bytes(unbounded, T)


@given(runnable_specs(), tokens, st.integers(1, 50), batches, kernels, dtypes)
def test_activations_grow_with_tokens_and_batch(
    spec: AnySpec, S: int, more: int, B: int, kernel: Kernel, dtype: str
) -> None:
    for impl in impls(spec):
        call: dict[str, Any] = {"impl": impl, "kernel": kernel, "dtype": dtype}
        kept = cost.activation_bytes(spec, S, batch=B, **call)
        assert cost.activation_bytes(spec, S + more, batch=B, **call) > kept
        assert cost.activation_bytes(spec, S, batch=B + 1, **call) > kept


@given(runnable_specs(), tokens, tokens, batches, st.integers(2, 4), kernels, dtypes)
def test_no_cost_falls_with_heads(
    spec: AnySpec, S: int, past: int, B: int, times: int, kernel: Kernel, dtype: str
) -> None:
    changes = {"num_heads": spec.num_heads * times}
    if isinstance(spec, LatentSpaceSpec):
        changes["latent_dim"] = spec.latent_dim * times  # a head is as wide as it was
    wider = dataclasses.replace(spec, **changes)
    for impl in impls(spec):
        call: dict[str, Any] = {"impl": impl, "kernel": kernel, "dtype": dtype}
        few, many = all_costs(spec, S, past, B, **call), all_costs(wider, S, past, B, **call)
        assert all(many[name] >= few[name] for name in few)
        assert all(many[name] > few[name] for name in ("parameters", "forward", "backward", "cross", "activations"))
        if not isinstance(spec, LatentSpaceSpec):
            assert many["cache"] == few["cache"]  # query heads are not cached


WIDTHS = {
    GroupedSpec: ("hidden_size", "head_dim", "v_head_dim"),
    LatentSpec: ("hidden_size", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "q_lora_rank"),
    LatentSpaceSpec: ("hidden_size", "head_dim"),
    ExpertLatentSpec: ("hidden_size", "head_dim", "kv_dim", "num_experts"),
}


@given(runnable_specs(), tokens, tokens, batches, kernels, dtypes, st.data())
def test_no_cost_falls_with_a_width(
    spec: AnySpec, S: int, past: int, B: int, kernel: Kernel, dtype: str, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(WIDTHS[type(spec)]))
    assume(getattr(spec, name) is not None)
    wider = dataclasses.replace(spec, **{name: getattr(spec, name) + data.draw(st.integers(1, 9))})
    for impl in impls(spec):
        call: dict[str, Any] = {"impl": impl, "kernel": kernel, "dtype": dtype}
        narrow, wide = all_costs(spec, S, past, B, **call), all_costs(wider, S, past, B, **call)
        assert [(key, narrow[key], wide[key]) for key in narrow if wide[key] < narrow[key]] == []
        assert wide["parameters"] > narrow["parameters"]


@given(grouped_specs(), st.integers(2, 4))
def test_costs_grow_with_key_value_heads(spec: GroupedSpec, times: int) -> None:
    spec = dataclasses.replace(spec, num_heads=spec.num_heads * times, is_causal=True)
    wider = dataclasses.replace(spec, num_kv_heads=spec.num_kv_heads * times)
    assert cost.parameters(wider) > cost.parameters(spec)
    assert cost.forward_flops(wider, 5, 9) > cost.forward_flops(spec, 5, 9)
    assert cost.cache_bytes_per_token(wider) == times * cost.cache_bytes_per_token(spec)


@given(specs(), tokens, tokens, st.integers(2, 5), kernels)
def test_costs_are_a_batch_times_one(spec: AnySpec, S: int, past: int, B: int, kernel: Kernel) -> None:
    assert cost.forward_flops(spec, S, S + past, batch=B) == B * cost.forward_flops(spec, S, S + past)
    assert cost.backward_flops(spec, S, batch=B, kernel=kernel) == B * cost.backward_flops(spec, S, kernel=kernel)
    assert cost.cache_bytes(spec, S, batch=B) == B * cost.cache_bytes(spec, S)


# --- Less is less


@given(specs(), tokens, tokens, kernels)
def test_a_mask_saves_flops(spec: AnySpec, S: int, past: int, kernel: Kernel) -> None:
    spec = causal(spec)
    unbounded = dataclasses.replace(spec, sliding_window=None)
    for impl in impls(spec):
        full, masked, windowed = (
            cost.forward_flops(some, S, S + past, causal=seen, impl=impl, kernel=kernel)
            for some, seen in ((unbounded, False), (unbounded, True), (spec, True))
        )
        assert windowed <= masked <= full
        full, masked, windowed = (
            cost.backward_flops(some, S, causal=seen, impl=impl, kernel=kernel)
            for some, seen in ((unbounded, False), (unbounded, True), (spec, True))
        )
        assert windowed <= masked <= full
        assert masked < full or S == 1


@given(runnable_specs(), st.integers(1000, 5000), batches, dtypes)
def test_a_fused_kernel_keeps_less_of_long_sequences(spec: AnySpec, S: int, B: int, dtype: str) -> None:
    for impl in impls(spec):
        fused, unfused = (
            cost.activation_bytes(spec, S, batch=B, dtype=dtype, impl=impl, kernel=kernel)
            for kernel in ("fused", "unfused")
        )
        assert fused <= unfused
        if cost.stages(spec, impl, new_tokens=S) and all(
            stage.can_fuse for stage in cost.stages(spec, impl, new_tokens=S) if isinstance(stage, Core)
        ):
            assert unfused - fused > B * spec.num_heads * S * S  # the scores, among others


@given(specs(), tokens, tokens, batches)
def test_cross_attention_from_a_cache_saves_its_keys_and_values(spec: AnySpec, S: int, T: int, B: int) -> None:
    spec = dataclasses.replace(spec, sliding_window=None)
    for impl in impls(spec):
        computed, cached = (
            cost.forward_flops(spec, S, T, batch=B, impl=impl, cross=True, cached=cached) for cached in (False, True)
        )
        of_source = [
            stage.in_features * stage.out_features
            for stage in cost.stages(spec, impl, new_tokens=S)
            if isinstance(stage, Linear) and stage.over == "source"
        ]
        assert computed - cached == 2 * B * T * sum(of_source) > 0
        # Tokens that attend to as many of their own are cross-attention to themselves.
        assert cost.forward_flops(spec, S, S, batch=B, impl=impl, cross=True) == cost.forward_flops(
            spec, S, batch=B, impl=impl, causal=False
        )


# --- Parts make wholes


@given(specs(), tokens, st.integers(1, 90), batches, st.none() | st.booleans())
def test_a_chunked_prefill_is_its_chunks(
    spec: AnySpec, total: int, chunk: int, B: int, is_causal: bool | None
) -> None:
    is_causal = None if isinstance(spec, ExpertLatentSpec) and spec.conditioning == "sequence" else is_causal
    parts, start = 0, 0
    while start < total:
        end = min(start + chunk, total)
        parts += cost.forward_flops(spec, end - start, end, batch=B, causal=is_causal)
        start = end
    assert cost.prefill_flops(spec, total, chunk=chunk, batch=B, causal=is_causal) == parts
    whole = cost.forward_flops(spec, total, batch=B, causal=is_causal)
    assert cost.prefill_flops(spec, total, batch=B, causal=is_causal) == whole
    decoded_again = isinstance(spec, LatentSpec | ExpertLatentSpec)
    if not decoded_again and (spec.is_causal if is_causal is None else is_causal):
        assert parts == whole


@given(specs(), st.integers(0, 300), st.integers(1, 20), batches)
def test_decoding_is_its_steps_each_at_its_own_length(spec: AnySpec, context: int, new: int, B: int) -> None:
    steps = [cost.forward_flops(spec, 1, context + i, batch=B) for i in range(1, new + 1)]
    assert cost.decode_flops(spec, context, new, batch=B) == sum(steps)
    assert cost.decode_flops(spec, context, batch=B) == steps[0]
    if spec.sliding_window is None and isinstance(spec, GroupedSpec):
        first, last = steps[0], steps[-1]
        assert sum(steps) == new * (first + last) // 2  # a straight line


@given(specs(), tokens, tokens, batches)
def test_unfused_backward_is_twice_forward(spec: AnySpec, S: int, T: int, B: int) -> None:
    spec = dataclasses.replace(spec, sliding_window=None)
    for impl in impls(spec):
        forward = cost.forward_flops(spec, S, batch=B, impl=impl)
        assert cost.backward_flops(spec, S, batch=B, impl=impl, kernel="unfused") == 2 * forward
        forward = cost.forward_flops(spec, S, T, batch=B, impl=impl, cross=True)
        assert cost.backward_flops(spec, S, T, batch=B, impl=impl, kernel="unfused") == 2 * forward
        inputs = [
            (stage.over, stage.in_features * stage.out_features)
            for stage in cost.stages(spec, impl, new_tokens=S)
            if isinstance(stage, Linear) and stage.reads == "input"
        ]
        assert {size // spec.hidden_size for _, size in inputs}  # they read E
        saved = 2 * B * sum(size * (S if over == "new" else T) for over, size in inputs)
        unfused = cost.backward_flops(spec, S, T, batch=B, impl=impl, kernel="unfused", input_gradient=False)
        assert unfused == 2 * forward - saved


@given(grouped_specs(), tokens, batches)
def test_fused_backward_is_two_and_a_half_times_the_core(spec: GroupedSpec, S: int, B: int) -> None:
    equal = dataclasses.replace(spec, v_head_dim=spec.head_dim)
    unfused = cost.backward_flops(equal, S, batch=B, kernel="unfused")
    forward = cost.forward_flops(equal, S, batch=B)
    assert cost.forward_flops(equal, S, batch=B, kernel="fused") == forward
    (core,) = [stage for stage in cost.stages(equal) if isinstance(stage, Core)]
    of_core = (
        2
        * B
        * equal.num_heads
        * 2
        * equal.head_dim
        * cost.attended_pairs(S, S, causal=spec.is_causal, window=spec.sliding_window)
    )
    assert core.qk_dim == core.v_dim
    assert 2 * (cost.backward_flops(equal, S, batch=B, kernel="fused") - unfused) == of_core


# --- Ranks


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@given(grouped_specs() | expert_latent_specs(), st.data())
def test_ranks_share_query_heads_and_keep_at_least_one_key_value_head(spec: Any, data: st.DataObject) -> None:
    heads, field = spec.num_heads, "num_kv_heads" if isinstance(spec, GroupedSpec) else "latent_kv_heads"
    kv_heads = getattr(spec, field)
    ranks = data.draw(st.sampled_from(divisors(heads)))
    if ranks % kv_heads and kv_heads % ranks:
        with pytest.raises(ArgumentError, match=rf"^ranks = {ranks}: must divide num_heads = {heads}, and divide or"):
            cost.shard(spec, ranks)
        return
    part = cost.shard(spec, ranks)
    assert part == dataclasses.replace(spec, num_heads=heads // ranks, **{field: max(kv_heads // ranks, 1)})
    spec, part = causal(spec), causal(part)
    whole_heads = cost.cache_bytes_per_token(spec) // kv_heads
    assert cost.cache_bytes_per_token(part) == -(-kv_heads // ranks) * whole_heads
    assert_query_work_adds_up(spec, part, ranks)


@given(latent_specs(), st.data())
def test_ranks_share_mla_heads_and_each_keep_the_latent(spec: LatentSpec, data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from(divisors(spec.num_heads)))
    part = cost.shard(spec, ranks)
    assert part == dataclasses.replace(spec, num_heads=spec.num_heads // ranks)
    assert cost.cache_bytes_per_token(part) == cost.cache_bytes_per_token(spec)
    assert_query_work_adds_up(spec, part, ranks)


def assert_query_work_adds_up(spec: AnySpec, part: AnySpec, ranks: int) -> None:
    """Everything but the shared keys, latents and query latents is split, nothing done twice."""
    shared = ("k_proj", "v_proj", "k_norm", "kv_a_proj", "kv_a_proj_with_mqa", "q_a_proj")
    for impl in impls(spec):
        for whole, piece in zip(cost.stages(spec, impl), cost.stages(part, impl), strict=True):
            if whole.name not in shared:
                call = call_of(spec, 5, 9, batch=2)
                assert ranks * piece.forward_flops(call, "unfused") == whole.forward_flops(call, "unfused")


@given(specs(), st.integers(0, 40))
def test_ranks_that_cannot_share_the_heads_are_refused(spec: AnySpec, ranks: int) -> None:
    assume(ranks != 1 and (isinstance(spec, LatentSpaceSpec) or ranks == 0 or spec.num_heads % ranks))
    with pytest.raises(ArgumentError, match=rf"^ranks = {ranks}: must "):
        cost.shard(spec, ranks)


@given(specs())
def test_one_rank_is_the_whole_layer(spec: AnySpec) -> None:
    assert cost.shard(spec, 1) is spec


def test_gates_of_a_sequence_are_not_causal() -> None:
    sizes = {
        "hidden_size": 8,
        "num_heads": 2,
        "head_dim": 4,
        "latent_kv_heads": 1,
        "kv_dim": 4,
        "conditioning": "sequence",
    }
    with pytest.raises(SpecError, match=r"^is_causal = True: must be false"):
        ExpertLatentSpec(**sizes)
    assert cost.cache_bytes_per_token(ExpertLatentSpec(**sizes, is_causal=False)) == 0
