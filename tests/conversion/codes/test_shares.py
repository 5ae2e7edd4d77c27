"""Bytes of codes for each layer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headwise.conversion.codes import code_shape, whole_shares
from headwise.models.specs import LatentSpec
from headwise.runtime.quantization.transform_code import blocks


def layer(rank: int, rotary: int) -> LatentSpec:
    return LatentSpec(
        hidden_size=64, num_heads=4, kv_lora_rank=rank, qk_nope_head_dim=16, qk_rope_head_dim=rotary, v_head_dim=16
    )


@given(st.lists(st.tuples(st.integers(4, 80), st.integers(0, 20), st.floats(0.2, 0.9)), min_size=1, max_size=12))
def test_the_sum_is_the_wanted_one_within_a_step(layers: list[tuple[int, int, float]]) -> None:
    specs = [layer(4 * rank, 4 * pairs) for rank, pairs, _ in layers]
    wanted = [1 + share * 4 * (rank + pairs) for rank, pairs, share in layers]
    counts = whole_shares(wanted, specs)
    assert -1e-6 <= sum(wanted) - sum(counts) < 2 + 1e-6
    assert all(abs(count - bytes_) <= 4 for count, bytes_ in zip(counts, wanted, strict=True))


def test_no_layer_gets_more_than_it_can_spend() -> None:
    assert whole_shares([64.9, 64.9, 50.0], [layer(32, 32)] * 3) == (63, 65, 51)
    assert whole_shares([90.0, 30.0], [layer(32, 32)] * 2) == (65, 55)


def test_blocks_can_spend_them() -> None:
    specs = [layer(160, 96)] * 3
    assert {end - start for start, end in blocks(code_shape(specs[0])[0])} == {16}
    assert whole_shares([100.5, 100.5, 100.5], specs) == (99, 101, 101)
