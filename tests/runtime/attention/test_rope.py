from __future__ import annotations

import math
import re

import pytest
import torch

from headwise.errors import ArgumentError, SpecError
from headwise.models.specs import RopeSpec
from headwise.runtime.attention import (
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    RotaryEmbedding,
    rotate,
)
from tests.by_hand import rotate_by_hand
from tests.closeness import assert_close

LAYOUTS = [False, True]


def random(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turn(rope: RotaryEmbedding, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    cos, sin = rope(position_ids, x.dtype, int(position_ids.max()) + 1)
    return rotate(x, cos, sin, interleaved=rope.spec.interleaved)


@pytest.mark.parametrize("interleaved", LAYOUTS)
def test_it_turns_pairs_by_position_times_frequency(interleaved: bool) -> None:
    rope = RotaryEmbedding(RopeSpec(dim=8, theta=100.0, interleaved=interleaved))
    assert rope.frequencies == pytest.approx([100.0 ** (-2 * i / 8) for i in range(4)], rel=1e-6)
    x, position_ids = random(2, 3, 5, 8, seed=1), torch.tensor([[0, 1, 2, 3, 4], [7, 900, 3, 3, 0]])
    out = turn(rope, x, position_ids)
    for b in range(2):
        for h in range(3):
            expected = rotate_by_hand(x[b, h], position_ids[b], rope.frequencies, interleaved=interleaved)
            assert_close(out[b, h], expected, 1e-12)


def test_layouts_are_permutations_of_each_other() -> None:
    x, position_ids = random(2, 3, 5, 12, seed=2), torch.arange(5)[None]
    # Half-split dim i of pair p is interleaved dim 2p, dim i + P/2 is 2p + 1.
    order = torch.arange(12).view(6, 2).T.flatten()
    interleaved = turn(RotaryEmbedding(RopeSpec(dim=12, interleaved=True)), x, position_ids)
    halves = turn(RotaryEmbedding(RopeSpec(dim=12)), x[..., order], position_ids)
    assert torch.equal(interleaved[..., order], halves)
    assert not torch.equal(interleaved, turn(RotaryEmbedding(RopeSpec(dim=12)), x, position_ids))


@pytest.mark.parametrize("interleaved", LAYOUTS)
def test_scores_depend_only_on_distance(interleaved: bool) -> None:
    rope = RotaryEmbedding(RopeSpec(dim=8, interleaved=interleaved))
    query, key = random(1, 1, 1, 8, seed=3), random(1, 1, 1, 8, seed=4)

    def score(m: int, n: int) -> float:
        turned_query = turn(rope, query, torch.tensor([[m]]))
        return float((turned_query * turn(rope, key, torch.tensor([[n]]))).sum())

    near = score(5, 2)
    for shift in (1, 17, 4000):
        assert score(5 + shift, 2 + shift) == pytest.approx(near, abs=1e-11)
    assert abs(score(6, 2) - near) > 1e-3
    assert abs(score(2, 5) - near) > 1e-3


@pytest.mark.parametrize("interleaved", LAYOUTS)
def test_rotation_keeps_lengths_and_position_0(interleaved: bool) -> None:
    rope = RotaryEmbedding(RopeSpec(dim=8, interleaved=interleaved))
    x = random(1, 2, 4, 8, seed=5)
    out = turn(rope, x, torch.tensor([[0, 3, 50, 700]]))
    assert torch.equal(out[:, :, 0], x[:, :, 0])
    assert_close(out.norm(dim=-1), x.norm(dim=-1), 1e-14)


@pytest.mark.parametrize("interleaved", LAYOUTS)
def test_partial_rotation_leaves_the_last_dims(interleaved: bool) -> None:
    rope = RotaryEmbedding(RopeSpec(dim=4, interleaved=interleaved))
    x, position_ids = random(2, 3, 5, 10, seed=6), torch.arange(5)[None]
    out = turn(rope, x, position_ids)
    assert torch.equal(out[..., 4:], x[..., 4:])
    assert torch.equal(out[..., :4], turn(rope, x[..., :4], position_ids))


def test_a_frequency_list_may_repeat() -> None:
    frequencies = [1.0, 1.0, 0.25, 0.25]
    spec = RopeSpec(dim=8)
    rope = RotaryEmbedding(spec, frequencies)
    assert rope.frequencies == tuple(frequencies)
    x, position_ids = random(1, 1, 6, 8, seed=7), torch.arange(6)[None]
    out = turn(rope, x, position_ids)
    assert_close(out[0, 0], rotate_by_hand(x[0, 0], position_ids[0], tuple(frequencies), interleaved=False), 1e-12)
    # Pairs that turn alike may swap places: what a converter needs to mix them.
    swap = torch.tensor([1, 0, 2, 3, 5, 4, 6, 7])
    assert torch.equal(turn(rope, x[..., swap], position_ids), out[..., swap])


def test_a_layer_takes_a_rotary_module() -> None:
    rope = RotaryEmbedding(RopeSpec(dim=4), [0.5, 0.5])
    layer = MultiHeadAttention(16, 4, rope=rope)
    assert layer.rope is rope
    assert layer.spec.rope == rope.spec


def test_frequencies_survive_a_narrow_dtype() -> None:
    wide = RotaryEmbedding(RopeSpec(dim=64))
    layer = GroupedQueryAttention(128, 2, 1, rope=RopeSpec(dim=64)).to(torch.bfloat16)
    latent = MultiHeadLatentAttention(
        32, 2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=64, v_head_dim=4, rope=RopeSpec(dim=64)
    )
    latent.half()
    position_ids = torch.tensor([[0, 1, 1000, 30000]])
    expected = wide(position_ids, torch.float32, 30001)
    for rope in (layer.rope, latent.rope):
        assert rope is not None
        assert rope.frequencies == wide.frequencies
        for narrow, exact in zip(rope(position_ids, torch.bfloat16, 30001), expected, strict=True):
            assert torch.equal(narrow, exact.to(torch.bfloat16))


def test_it_has_no_state() -> None:
    rope = RotaryEmbedding(RopeSpec(dim=8))
    assert not rope.state_dict()
    assert not list(rope.parameters())
    assert not list(rope.buffers())
    assert str(rope) == "RotaryEmbedding(8, theta=10000, default, half-split)"


def test_float64_angles_are_not_rounded_to_float32() -> None:
    rope = RotaryEmbedding(RopeSpec(dim=4))
    cos, sin = rope(torch.tensor([[123457]]), torch.float64, 123458)
    angle = 123457 * rope.frequencies[1]
    assert cos[0, 0, 1].item() == pytest.approx(math.cos(angle), abs=1e-12)
    assert sin[0, 0, 1].item() == pytest.approx(math.sin(angle), abs=1e-12)


def test_dynamic_scaling_starts_beyond_the_trained_length() -> None:
    spec = RopeSpec(dim=8, rope_type="dynamic", parameters=(("factor", 2.0),), max_position_embeddings=64)
    rope, plain = RotaryEmbedding(spec), RotaryEmbedding(RopeSpec(dim=8))
    position_ids = torch.arange(64)[None]
    within, unscaled = rope(position_ids, torch.float64, 64), plain(position_ids, torch.float64, 64)
    assert torch.equal(torch.stack(within), torch.stack(unscaled))
    beyond = rope(position_ids, torch.float64, 65)
    assert not torch.equal(torch.stack(beyond), torch.stack(unscaled))


@pytest.mark.parametrize("dim", [7, 1])
def test_odd_dims_are_refused(dim: int) -> None:
    with pytest.raises(SpecError, match=f"rope dim = {dim}: must be an even number of at least 2"):
        RopeSpec(dim=dim)


def test_odd_mla_rope_dims_are_refused() -> None:
    with pytest.raises(SpecError, match="qk_rope_head_dim = 5: must be even: rotation works on pairs"):
        MultiHeadLatentAttention(16, 2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=5, v_head_dim=4)


def test_unknown_scaling_is_refused() -> None:
    rule = "rope_type = 'spiral': must be one of default, linear, dynamic, yarn, longrope, llama3, proportional"
    with pytest.raises(SpecError, match=rule):
        RotaryEmbedding(RopeSpec(dim=8, rope_type="spiral"))


@pytest.mark.parametrize(
    ("rope_type", "missing"),
    [
        ("linear", "factor"),
        ("yarn", "factor"),
        ("llama3", "factor"),
        ("longrope", "long_factor"),
        ("dynamic", "factor"),
    ],
)
def test_missing_scaling_numbers_are_refused(rope_type: str, missing: str) -> None:
    spec = RopeSpec(dim=8, rope_type=rope_type, parameters=(("original_max_position_embeddings", 32),))
    message = f"rope parameters = {dict(spec.parameters)}: do not make a {rope_type}: KeyError('{missing}')"
    with pytest.raises(SpecError, match=re.escape(message)):
        RotaryEmbedding(spec)


def test_wrong_number_of_frequencies_is_refused() -> None:
    with pytest.raises(SpecError, match="rope frequencies = 3: must be 4, one a pair"):
        RotaryEmbedding(RopeSpec(dim=8), [1.0, 0.5, 0.25])


def test_more_rotated_dims_than_there_are_is_refused() -> None:
    with pytest.raises(SpecError, match="rope dim = 8: must be at most head_dim = 4"):
        MultiHeadAttention(16, 4, rope=RopeSpec(dim=8))
    with pytest.raises(SpecError, match="rope dim = 8: must equal qk_rope_head_dim = 4"):
        MultiHeadLatentAttention(
            16, 2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, rope=RopeSpec(dim=8)
        )


@pytest.mark.parametrize("size", [(1, 4), (2, 6), (3, 5), (1, 1, 5), (4,)])
def test_position_ids_of_a_wrong_shape_are_refused(size: tuple[int, ...]) -> None:
    grouped = MultiHeadAttention(16, 4, rope=RopeSpec(dim=4))
    latent = MultiHeadLatentAttention(16, 2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
    shown = size if len(size) > 1 else (1, *size)
    message = re.escape(f"position_ids shape = {shown}: must be [2 or 1, 5]")
    for layer in (grouped, latent):
        with pytest.raises(ArgumentError, match=message):
            layer(torch.zeros(2, 5, 16), position_ids=torch.zeros(size, dtype=torch.long))
