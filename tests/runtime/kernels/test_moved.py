"""The steps of an engine's codes after moves of keys: the kernel beside the codes' own arithmetic, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.runtime.kernels.native.calls import can_encode, moved_steps
from headwise.runtime.quantization.formats import parse_format

pytestmark = pytest.mark.skipif(not can_encode(), reason="the kernels are not compiled here")


@settings(max_examples=40, deadline=None)
@given(
    spelling=st.sampled_from(["llama.cpp:q4_0", "llama.cpp:q5_1", "mlx:4", "vllm:int8_per_token_head"]),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 70),
    moves=st.integers(1, 4),
    count=st.integers(1, 2),
    is_signs=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_steps_are_the_codes_own(
    spelling: str, heads: int, tokens: int, moves: int, count: int, is_signs: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    code, width = parse_format(spelling).keys, 64
    keys = torch.randn(heads, width, tokens, generator=generator)
    pairs = torch.randn(heads, count, tokens, generator=generator)
    steps = torch.randn(moves, count, count, generator=generator)
    rows = torch.randn(count, width, generator=generator)
    rows = rows.sign() / 8 if is_signs else rows
    assert code.spread is not None
    found = moved_steps(keys, pairs, steps, rows, block=code.block(width), spread=code.spread)
    after = keys.double() + rows.double().T @ (steps.double()[:, None] @ pairs.double())
    torch.testing.assert_close(found.double(), code.steps(after.mT).square().mean(-2), rtol=1e-5, atol=1e-6)
