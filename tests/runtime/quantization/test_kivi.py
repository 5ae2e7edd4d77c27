"""KIVI: keys by channel and block, every byte by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.runtime.quantization.groups import KIVI_BITS, GroupCode, KiviCode
from tests.runtime.quantization.by_hand import codes_of, halves
from tests.runtime.quantization.test_groups import states_of


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(KIVI_BITS),
    st.sampled_from((16, 32, 64)),
    st.integers(1, 3),
    st.sampled_from((8, 20, 64)),
    st.integers(),
)
def test_keys_are_within_half_a_scale_of_their_channel_and_block(
    bits: int, block: int, blocks: int, width: int, seed: int
) -> None:
    code = KiviCode(bits, block)
    keys = states_of(seed % 2**31, 1, 2, block * blocks, width)
    rows, scales = code.encode_keys(keys)
    assert (rows.dtype, scales.dtype) == (torch.uint8, torch.float16)
    assert rows.shape == (1, 2, block * blocks, -(-width * bits // 8))
    assert scales.shape == (1, 2, blocks, 2 * width)
    decoded = code.decode_keys(rows, scales, torch.float64)
    for head in range(2):
        for token in range(block * blocks):
            data = scales[0, head, token // block].numpy().tobytes()
            scale, zero = halves(data).reshape(2, width)
            codes = np.array(codes_of(bytes(rows[0, head, token].tolist()), bits, width))
            by_hand = zero + scale * codes
            exact = keys[0, head, token].double().numpy()
            assert np.abs(decoded[0, head, token].numpy() - by_hand).max() <= 1e-6 * np.abs(exact).max()
            assert (np.abs(by_hand - exact) <= scale * (0.5 + 1e-4)).all()


def test_bytes_of_a_block_are_those_of_its_tensors() -> None:
    for code in (KiviCode(4), KiviCode(3, 32), KiviCode(2, 16)):
        keys, values = torch.randn(1, 1, code.block, 64), torch.randn(1, 1, code.block, 32)
        tensors = (*code.encode_keys(keys), code.values.encode(values))
        assert code.block_bytes(64, 32) == sum(tensor.nbytes for tensor in tensors)
        assert code.values == GroupCode(code.bits, code.block)


@pytest.mark.parametrize(("tokens", "coded"), [(0, 0), (9, 0), (41, 0), (42, 32), (73, 32), (74, 64), (1000, 960)])
def test_whole_blocks_before_the_recent_tokens_are_coded(tokens: int, coded: int) -> None:
    assert KiviCode(2, 32, recent=10).coded(tokens) == coded


def test_a_channel_that_is_large_in_every_token_costs_others_nothing() -> None:
    """The reason for codes by channel: by token, the large channel's range is the others' too."""
    keys = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    keys[..., 3] += 100
    kivi, tokens = KiviCode(4), GroupCode(4)
    by_channel = kivi.decode_keys(*kivi.encode_keys(keys), torch.float32) - keys
    by_token = tokens.decode(tokens.encode(keys), 64, torch.float32) - keys
    assert by_channel.norm() < 0.2 * by_token.norm()


def test_what_is_no_number_is_nan_in_its_channel_and_block_alone() -> None:
    keys = torch.randn(1, 1, 64, 16)
    keys[0, 0, 40, 5] = float("inf")
    code = KiviCode(4, 32)
    back = code.decode_keys(*code.encode_keys(keys), torch.float32)
    expected = torch.zeros(1, 1, 64, 16, dtype=torch.bool)
    expected[0, 0, 32:, 5] = True
    assert torch.equal(back.isnan(), expected)
