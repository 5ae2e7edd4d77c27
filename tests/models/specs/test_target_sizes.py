from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise import cost
from headwise.errors import ArgumentError, SpecError
from headwise.models.specs import (
    GroupedSpec,
    LatentSpec,
    RopeSpec,
    as_grouped,
    as_latent,
    read_spec,
    rotary_width,
    rotated_dims,
    split_budget,
    split_in_blocks,
)
from tests.strategies import grouped_specs

LLAMA = read_spec("llama-3-8b").layers[0]
MLA = read_spec("deepseek-v3").layers[0]


@given(grouped_specs(), st.data())
def test_another_number_of_key_value_heads_changes_nothing_else(spec: GroupedSpec, data: st.DataObject) -> None:
    own, heads = spec.num_kv_heads, spec.num_heads
    divisors = [k for k in range(1, heads + 1) if heads % k == 0 and max(own, k) % min(own, k) == 0]
    kv_heads = data.draw(st.sampled_from(divisors))
    target = as_grouped(spec, kv_heads)
    assert target.num_kv_heads == kv_heads
    assert dataclasses.replace(target, num_kv_heads=own) == spec


@pytest.mark.parametrize(
    ("kv_heads", "message"),
    [
        (0, r"num_kv_heads = 0: must divide the 32"),
        (-8, r"num_kv_heads = -8: must divide the 32"),
        (3, r"num_kv_heads = 3: must divide the 32"),
        (64, r"num_kv_heads = 64: must divide the 32"),
    ],
)
def test_key_value_heads_that_cannot_be(kv_heads: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}"):
        as_grouped(LLAMA, kv_heads)


def test_heads_are_merged_or_split_whole() -> None:
    spec = GroupedSpec(hidden_size=24, num_heads=12, num_kv_heads=6, head_dim=2)
    with pytest.raises(ArgumentError, match=r"^num_kv_heads = 4: must divide or"):
        as_grouped(spec, 4)


def test_llama_as_mla() -> None:
    assert as_latent(LLAMA, 512, 64) == LatentSpec(
        hidden_size=4096,
        num_heads=32,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        latent_norm=False,
    )


def test_every_rotary_channel_kept_leaves_nothing_unrotated() -> None:
    target = as_latent(LLAMA, 1024, 1024)
    assert (target.qk_nope_head_dim, target.qk_head_dim) == (0, 1024)


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        ((), ()),
        (("q_proj", "k_proj", "v_proj"), ("q_proj", "kv_a_proj_with_mqa")),
        (("v_proj",), ("q_proj", "kv_a_proj_with_mqa")),
        (("o_proj",), ("o_proj",)),
        (("q_proj", "k_proj", "v_proj", "o_proj"), ("q_proj", "kv_a_proj_with_mqa", "o_proj")),
    ],
)
def test_biases_that_a_latent_layer_inherits(bias: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert as_latent(dataclasses.replace(LLAMA, bias=bias), 512, 64).bias == expected


def test_a_window_stays_with_its_layer() -> None:
    assert as_latent(dataclasses.replace(LLAMA, sliding_window=128), 512, 64).sliding_window == 128


@pytest.mark.parametrize("rope_dim", [0, -2, 63, 1026])
def test_a_rotary_width_that_cannot_be(rope_dim: int) -> None:
    rule = r"must be even, at least 2 and at most num_kv_heads · rotated dims of a head = 1024"
    with pytest.raises(ArgumentError, match=rf"^qk_rope_head_dim = {rope_dim}: {rule}$"):
        as_latent(LLAMA, 512, rope_dim)


@pytest.mark.parametrize("rank", [0, -1, 2048 - 64 + 1])
def test_a_latent_width_that_cannot_be(rank: int) -> None:
    with pytest.raises(ArgumentError, match=rf"^kv_lora_rank = {rank}: must be at least 1 and at most 1984"):
        as_latent(LLAMA, rank, 64)
    assert as_latent(LLAMA, 1984, 64).kv_lora_rank == 1984


@given(grouped_specs().map(lambda spec: dataclasses.replace(spec, head_dim=2 * spec.head_dim)), st.integers(3, 1200))
def test_a_budget_is_spent_to_the_last_value_on_a_layer_that_can_be(spec: GroupedSpec, values: int) -> None:
    whole = spec.num_kv_heads * (spec.head_dim + spec.value_dim)
    rank, rope_dim = split_budget(spec, values)
    target = as_latent(spec, rank, rope_dim)
    assert cost.formulas(target).cache_values(target) == min(values, whole)
    assert rope_dim <= rotary_width(spec)
    if values >= whole:
        assert rope_dim == rotary_width(spec)
        assert target.qk_nope_head_dim == spec.head_dim - rotated_dims(spec)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (4096, (1024, 1024)),
        (2048, (1024, 1024)),
        (2047, (1919, 128)),
        (1024, (896, 128)),
        (512, (384, 128)),
        (47, (35, 12)),
        (40, (30, 10)),
        (3, (1, 2)),
    ],
)
def test_how_llama_splits_a_budget(values: int, expected: tuple[int, int]) -> None:
    assert split_budget(LLAMA, values) == expected


@given(st.integers(96, 2047))
def test_about_a_quarter_goes_to_the_rotary_key_in_sixteens_up_to_what_a_head_rotates(values: int) -> None:
    _, rope_dim = split_budget(LLAMA, values)
    assert rope_dim % 16 == 0
    assert abs(rope_dim - min(values / 4, 128)) <= 8


def test_a_rotary_key_does_not_grow_with_the_number_of_heads() -> None:
    heads = 32
    spec = GroupedSpec(
        hidden_size=4096, num_heads=heads, num_kv_heads=heads, head_dim=128, rope=RopeSpec(dim=128), is_causal=True
    )
    assert split_budget(spec, 4096) == (3968, 128)
    small = GroupedSpec(
        hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64, rope=RopeSpec(dim=64), is_causal=True
    )
    assert [split_budget(small, values) for values in (96, 128, 192, 216)] == [
        (64, 32),
        (96, 32),
        (144, 48),
        (168, 48),
    ]


@pytest.mark.parametrize("values", [2, 0, -5])
def test_a_budget_too_small_for_a_latent_and_a_pair(values: int) -> None:
    rule = r"must be at least 3 \(a latent and a rotary pair\) of the source's 2048"
    with pytest.raises(ArgumentError, match=rf"^cache values per token and layer = {values}: {rule}$"):
        split_budget(LLAMA, values)


def test_dims_that_never_rotated_are_content() -> None:
    spec = GroupedSpec(hidden_size=30, num_heads=6, num_kv_heads=2, head_dim=5, rope=RopeSpec(dim=4))
    assert split_budget(spec, 20) == (12, 8)
    assert as_latent(spec, 12, 8).qk_nope_head_dim == 1
    assert as_latent(spec, 12, 6).qk_nope_head_dim == 5


def test_without_rope_all_of_a_budget_is_latent() -> None:
    spec = GroupedSpec(hidden_size=30, num_heads=6, num_kv_heads=6, head_dim=5, is_causal=False)
    assert [split_budget(spec, values) for values in (1, 2, 30, 60, 70)] == [
        (1, 0),
        (2, 0),
        (30, 0),
        (60, 0),
        (60, 0),
    ]
    target = as_latent(spec, 30, 0)
    assert (target.qk_nope_head_dim, target.qk_rope_head_dim, target.is_causal) == (5, 0, False)
    with pytest.raises(ArgumentError, match=r"^qk_rope_head_dim = 2: must be 0"):
        as_latent(spec, 30, 2)


def test_mla_is_not_converted() -> None:
    rule = r"^attention = 'MLA 512 \+ 64': only MHA, MQA and GQA layers are converted$"
    with pytest.raises(SpecError, match=rule):
        as_grouped(MLA, 1)
    with pytest.raises(SpecError, match=rule):
        as_latent(MLA, 512, 64)
    with pytest.raises(SpecError, match=rule):
        split_budget(MLA, 100)


@pytest.mark.parametrize(
    ("model", "values", "sizes"),
    [
        ("smollm2-135m", 192, (128, 64)),  # nine heads in three groups of 64
        ("smollm2-135m", 200, (128, 64)),
        ("smollm2-135m", 230, (160, 64)),  # 192 is too far below
        ("smollm2-135m", 345, (256, 64)),
        ("smollm2-135m", 115, (64, 32)),
        ("smollm2-135m", 64, (32, 32)),
        ("smollm2-135m", 63, None),
        ("llama-3-8b", 600, (512, 64)),
        ("llama-3-8b", 1024, (896, 128)),
    ],
)
def test_a_budget_in_blocks_prefers_sizes_with_kernels(
    model: str, values: int, sizes: tuple[int, int] | None
) -> None:
    layer = read_spec(model).layers[0]
    assert isinstance(layer, GroupedSpec)
    assert split_in_blocks(layer, values, 32) == sizes


@given(grouped_specs(), st.integers(1, 4096))
def test_blocks_are_whole_and_never_more_than_the_budget(spec: GroupedSpec, values: int) -> None:
    sizes = split_in_blocks(spec, values, 32)
    if sizes is None:
        assert values < 64 or rotated_dims(spec) < 32
        return
    rank, rotary = sizes
    assert rank % 32 == rotary % 32 == 0
    assert 32 <= rotary <= rotated_dims(spec)
    assert rank >= 32
    assert rank + rotary <= values
    assert rank + rotary > 0.9 * values - 32
