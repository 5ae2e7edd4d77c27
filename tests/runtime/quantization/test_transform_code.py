"""Static codes of cached values: bytes, gains, blocks, and the file beside a model's weights."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from headwise.errors import CheckpointError
from headwise.runtime.kernels.native.abi import CHANNELS
from headwise.runtime.quantization import TransformCode, transform_code
from headwise.runtime.quantization.transform_code import (
    FILE,
    GAIN_STEP,
    blocks,
    code_from,
    code_tensors,
    codes_content,
    read_codes,
)
from tests.closeness import assert_close


@st.composite
def transform_codes(draw: st.DrawFn) -> TransformCode:
    latent, pairs = draw(st.integers(1, 70)), draw(st.integers(0, 24))
    sections = (latent, pairs, pairs) if pairs else (latent,)
    bits = tuple(draw(st.integers(1, 8)) for _ in blocks(sections))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    width = sum(sections)
    scales, offsets = torch.rand(2, width, generator=generator) + 0.2, torch.randn(2, width, generator=generator)
    shape = sections, (latent, 2 * pairs) if pairs else (latent,)
    first = None
    if draw(st.booleans()):
        first = TransformCode(offsets[1] * 50, scales[1] * 3, tuple(draw(st.integers(1, b)) for b in bits), *shape)
    return TransformCode(offsets[0], scales[0], bits, *shape, first)


def sample(code: TransformCode, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, code.width) * code.scale + code.offset


@given(transform_codes())
def test_rounded_is_what_codes_decode_to(code: TransformCode) -> None:
    values, is_first = sample(code, 2, 1, 9), torch.zeros(2, 1, 9, dtype=torch.bool)
    is_first[0, 0, 2] = is_first[1, 0, 7] = True
    codes = code.encode(values, is_first)
    assert codes.shape == (2, 1, 9, code.token_bytes)
    assert codes.dtype == torch.uint8
    decoded = code.decode(codes, is_first=is_first)
    assert torch.equal(decoded, code.rounded(values, is_first))
    others = ~is_first
    assert torch.equal(codes[others], code.encode(values)[others])
    own = code if code.first is None else code.first
    expected = own.rounded(values[is_first])
    assert torch.equal(decoded[is_first], expected if own is code else expected.bfloat16().float())
    expected = sum(b * (stop - start) for b, (start, stop) in zip(code.bits, blocks(code.sections), strict=True))
    assert code.token_bytes == 1 + math.ceil(expected / 8)


@given(transform_codes())
def test_tokens_are_coded_one_by_one(code: TransformCode) -> None:
    values = sample(code, 7)
    assert torch.equal(code.encode(values), torch.cat([code.encode(values[i : i + 1]) for i in range(7)]))


def test_gains_follow_the_size_of_a_token() -> None:
    code = TransformCode(torch.zeros(64), torch.ones(64), (4,) * 4, (32, 32), (32, 32))
    small = torch.randn(500, 64)
    large = torch.cat((small[:, :32] * GAIN_STEP**4, small[:, 32:] / GAIN_STEP**2), 1)
    first, second = code.encode(small)[:, 0], code.encode(large)[:, 0]
    assert torch.equal((second & 15).int() - (first & 15).int(), torch.full((500,), 4, dtype=torch.int32))
    assert torch.equal((second >> 4).int() - (first >> 4).int(), torch.full((500,), -2, dtype=torch.int32))
    relative = (code.rounded(large) - large) / large.square().mean(0).sqrt()
    assert float(relative.square().mean()) < 0.01  # 4 bits: 22 decibel of each part's own size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": (16,)}, "add up to 20"),
        ({"parts": (8, 8, 4)}, "at most 2 parts"),
        ({"parts": (20.0,)}, "add up"),
        ({"sections": (24,)}, "add up"),
        ({"scale": torch.ones(19)}, "of one length"),
        ({"offset": torch.zeros(20, dtype=torch.float64)}, "float32"),
        ({"first": TransformCode(torch.zeros(20), torch.ones(20), (3, 2), (16, 4), (20,))}, "the same sections"),
        ({"first": TransformCode(torch.zeros(20), torch.ones(20), (4, 2), (20,), (20,))}, "no more bytes"),
        ({"bits": (3,)}, "for each block"),
        ({"bits": (3, 9)}, "from 1 to 8"),
    ],
)
def test_a_code_whose_parts_do_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    fields = {"offset": torch.zeros(20), "scale": torch.ones(20), "bits": (3, 2), "sections": (20,), "parts": (20,)}
    with pytest.raises(ValueError, match=message):
        TransformCode(**{**fields, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    fields = ((3,) * 2, (20,), (20,))
    values = torch.randn(9, 20)
    expected = TransformCode(torch.zeros(20), torch.ones(20), *fields).encode(values)
    code = TransformCode(torch.zeros(40)[::2], torch.ones(20), *fields)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(code.encode(values), expected)
    finally:
        torch.set_default_dtype(before)


def test_no_tokens_have_no_codes() -> None:
    code = TransformCode(torch.zeros(20), torch.ones(20), (3, 2), (20,), (20,))
    assert code.encode(torch.empty(2, 1, 0, 20)).shape == (2, 1, 0, code.token_bytes)


@given(transform_codes(), st.integers(1, 300))
def test_the_kernel_chooses_gains_of_the_same_expected_error_as_torch(code: TransformCode, tokens: int) -> None:
    values = sample(code, tokens) * 3 ** torch.randn(tokens, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transform_code, "can_encode", lambda: False)
        _, expected, _ = code.normalised(values)
    normal, gains, starts = code.normalised(values)
    assert torch.equal(gains, code._gains(starts))
    assert_close(normal * gains * code.scale + code.offset, values, 1e-5)
    # A size halfway between two gains may be rounded to either, and the gains that are tried begin there.
    sizes = ((values - code.offset) / code.scale).double().square().split_with_sizes(code.parts, -1)
    steps = torch.stack([part.mean(-1).log() for part in sizes]) / (2 * math.log(transform_code.GAIN_STEP))
    is_clear = (steps - steps.floor() - 0.5).abs() > 1e-4
    errors = []
    for tried in (gains, expected):
        excess = (((values - code.offset) / code.scale).abs() - code.reach * tried).clamp_min(0)
        of_channel = (code.noise * tried.square() + excess.square()) * code.weights
        errors.append(torch.stack([part.sum(-1) for part in of_channel.split_with_sizes(code.parts, -1)]).double())
    torch.testing.assert_close(*(error[is_clear] for error in errors), rtol=1e-4, atol=0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e30])
def test_a_value_beyond_all_gains_has_one(value: float) -> None:
    code = TransformCode(torch.zeros(20), torch.ones(20), (3, 2), (20,), (20,))
    values = torch.randn(1, 20)
    values[0, 3] = value
    assert code.encode(values).shape == (1, code.token_bytes)


def test_more_bits_lose_less() -> None:
    errors = []
    for bits in range(1, 9):
        code = TransformCode(torch.zeros(32), torch.ones(32), (bits,) * 2, (32,), (32,))
        values = torch.randn(400, 32, generator=torch.Generator().manual_seed(1))
        errors.append(float((code.rounded(values) - values).square().mean()))
    assert errors == sorted(errors, reverse=True)


def test_blocks_end_with_their_section() -> None:
    assert list(blocks((20, 5))) == [(0, CHANNELS), (CHANNELS, 20), (20, 25)]


def test_the_file_gives_codes_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    code = TransformCode(
        torch.randn(20, generator=generator), torch.rand(20, generator=generator), (3, 2), (20,), (20,)
    )
    (tmp_path / FILE).write_bytes(codes_content({1: code, 0: code}))
    codes = read_codes(tmp_path)
    assert sorted(codes) == [0, 1]
    values = sample(code, 5)
    assert torch.equal(codes[1].encode(values), code.encode(values))
    assert not read_codes(tmp_path / "other")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(CheckpointError, match="damaged"):
        read_codes(tmp_path)


@pytest.mark.parametrize("cut", [0, 5, 100, -3])
def test_a_damaged_file_is_refused(tmp_path: Path, cut: int) -> None:
    code = TransformCode(torch.zeros(20), torch.ones(20), (3, 2), (20,), (20,))
    (tmp_path / FILE).write_bytes(codes_content({0: code})[:cut])
    with pytest.raises(CheckpointError, match="damaged"):
        read_codes(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2, torch.complex64, torch.uint16, torch.bool])
def test_numbers_of_another_type_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    about = {"format": 1, "layers": {"0": {"bits": [4], "sections": [8], "parts": [8]}}}
    tensors = {f"0.{name}": torch.ones(8).to(dtype) for name in ("offset", "scale")}
    (tmp_path / FILE).write_bytes(save(tensors, metadata={"headwise": json.dumps(about)}))
    with pytest.raises(CheckpointError, match="damaged"):
        read_codes(tmp_path)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"format": 3, "layers": {}}, "is of format 3; this headwise reads formats up to 2"),
        ({"format": 1, "layers": [1]}, "damaged"),
        ({"format": 2, "layers": {"0": {"bits": [1], "sections": [1], "parts": [1]}}}, "damaged"),
        ({"layers": {}}, "damaged"),
        (None, "damaged"),
    ],
)
def test_metadata_that_cannot_be_read_is_refused(tmp_path: Path, about: Any, message: str) -> None:
    metadata = "[" * 100_000 if about is None else json.dumps(about)
    (tmp_path / FILE).write_bytes(save({"0.offset": torch.zeros(1)}, {"headwise": metadata}))
    with pytest.raises(CheckpointError, match=message):
        read_codes(tmp_path)


@pytest.mark.parametrize(
    ("offset", "scale"), [(math.nan, 1.0), (math.inf, 1.0), (0.0, 0.0), (0.0, -1.0), (0.0, math.nan), (0.0, math.inf)]
)
def test_numbers_that_code_nothing_are_refused(offset: float, scale: float) -> None:
    code = TransformCode(torch.full((16,), offset), torch.full((16,), scale), (3,), (16,), (16,))
    with pytest.raises(ValueError, match="offsets must be finite, and scales finite and positive"):
        code_from(*code_tensors(code))


def test_codes_are_equal_by_their_content() -> None:
    code = TransformCode(torch.zeros(20), torch.ones(20), (3, 2), (20,), (20,))
    assert code.equals(replace(code, offset=code.offset.clone()))
    for other in (replace(code, scale=2 * code.scale), replace(code, bits=(2, 3)), replace(code, parts=(10, 10))):
        assert not code.equals(other)


def test_values_that_are_no_numbers_spoil_their_own_token_alone() -> None:
    code = TransformCode(torch.zeros(20), torch.ones(20), (3, 2), (20,), (20,))
    values = torch.randn(3, 20)
    expected = code.rounded(values)
    values[1, 4] = torch.nan
    assert torch.equal(code.rounded(values)[::2], expected[::2])
