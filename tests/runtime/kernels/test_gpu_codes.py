"""The GPU kernel for integer codes, run on the CPU by Triton's interpreter, against decoded values in float64."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headwise.runtime.kernels.gpu import attend_codes, codes, why_not_codes
from headwise.runtime.kernels.mask import Scoring
from headwise.runtime.kernels.native.calls import AffineRows, KeyBlocks
from headwise.runtime.quantization.groups import GroupCode, KiviCode
from tests.runtime.kernels.test_affine import allowed, group_code, in_memory, of_bits, poison, reference, states_of
from tests.runtime.kernels.test_coded import CLOSE, draw_mask
from tests.runtime.kernels.test_split import DEVICE, on_device

with_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

WIDTHS = [1, 7, 16, 20, 33, 48, 64, 64, 80, 96, 128, 128, 160, 256]


def moved(x: Tensor) -> Tensor:
    """Move a view with its strides."""
    (there,) = on_device(x)
    assert there is not None
    return there


class Case:
    """Random keys, values and queries of any shape, with a mask, and the parts that the sequence is split into."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        pick, noise = random.Random(seed), torch.Generator().manual_seed(seed)
        B, K, S = pick.choice([1, 2, 3]), pick.choice([1, 1, 2]), pick.choice([1, 1, 2, 5])
        H = K * pick.choice([1, 2, 3, 5, 8])
        T = max(S, pick.choice([1, 2, 17, 63, 64, 65, 131]))
        self.D, self.V = pick.choice([(w, w) for w in WIDTHS] + [(pick.choice(WIDTHS), pick.choice(WIDTHS))])
        self.dtype = pick.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
        self.query = torch.randn(B, S, H, self.D, generator=noise).transpose(1, 2).to(self.dtype)
        self.keys, self.values = (states_of(noise, (B, K, T, w), self.dtype) for w in (self.D, self.V))
        self.mask = draw_mask(pick, noise, (B, H, S, T))
        self.options = (self.mask, pick.random() < 0.6, pick.choice([1.0, 0.3, -0.3]) / self.D**0.5)
        self.hidden = torch.zeros(B, T, dtype=torch.bool)  # tokens that no query of a sequence sees
        if self.mask is not None and self.mask.shape[1:3] == (1, 1):
            self.hidden = ~self.mask[:, 0, 0].expand(B, T)
        self.pick, self.seed = pick, seed
        parts = pick.choice([1, 2, 3, 7])
        monkeypatch.setattr(codes, "part_count", lambda *_: parts)
        # What the kernel leaves unwritten would be seen.
        monkeypatch.setattr(torch, "empty", lambda *size, **kind: torch.full(size, torch.nan, **kind))

    def attend(
        self, key: AffineRows, value: AffineRows, blocks: KeyBlocks | None = None, late: tuple[Tensor, ...] = ()
    ) -> Tensor:
        """The kernel's output."""
        key, value = (AffineRows(moved(x.rows), x.width, x.bits, x.groups) for x in (key, value))
        if blocks is not None:
            blocks = KeyBlocks(moved(blocks.scales), blocks.tokens)
        mask, causal, scale = self.options
        mask = None if mask is None else moved(mask)
        rest = (moved(late[0]), moved(late[1])) if late else None
        return attend_codes(
            moved(self.query), key, value, Scoring(mask, causal, scale), blocks=blocks, late=rest
        ).cpu()

    def compare(self, out: Tensor, keys: Tensor, values: Tensor) -> None:
        """Hold an output to attention to keys and values in float64."""
        expected = reference(self.query, keys, values, self.options)
        largest = max(expected.abs().max().item(), self.values.double().abs().max().item() * 0.05)
        assert out.dtype == self.dtype
        assert (out.double() - expected).abs().max().item() <= CLOSE[self.dtype] * largest, self.seed
        seen = allowed(self.mask, self.options[1], (*self.query.shape[:3], keys.shape[2])).any(-1)
        assert (out[~seen] == 0).all(), self.seed


@with_triton
@pytest.mark.parametrize("seed", range(40))
def test_codes_of_tokens_are_attended_to_as_their_values(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(seed, monkeypatch)
    ways = group_code(case.pick, case.D), group_code(case.pick, case.V)
    states, widths = (case.keys, case.values), (case.D, case.V)
    rows = [in_memory(code.encode(x), case.pick) for code, x in zip(ways, states, strict=True)]
    wide = [code.decode(part, w, torch.float64) for code, part, w in zip(ways, rows, widths, strict=True)]
    for part in rows:
        poison(part, case.hidden)
    key, value = (AffineRows(p, w, c.bits, c.groups(w)) for c, p, w in zip(ways, rows, widths, strict=True))
    case.compare(case.attend(key, value), *wide)


@with_triton
@pytest.mark.parametrize("seed", range(100, 125))
def test_blocks_of_keys_and_the_latest_tokens_are(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(seed, monkeypatch)
    fitting = [block for block in (16, 32, 64, 128) if block >= case.V or case.V % block == 0]
    code = KiviCode(case.pick.choice([2, 3, 4]), case.pick.choice(fitting or [128]), case.pick.choice([0, 3]))
    if not fitting:
        case.values, case.V = case.values[..., :64].contiguous(), min(case.V, 64)
    N = code.coded(case.keys.shape[2])
    rows, scales = code.encode_keys(case.keys[:, :, :N])
    key_rows, value_rows = (in_memory(x, case.pick) for x in (rows, code.values.encode(case.values[:, :, :N])))
    late = case.keys[:, :, N:], case.values[:, :, N:]
    keys = torch.cat((code.decode_keys(rows, scales, torch.float64), late[0].double()), 2)
    values = torch.cat((code.values.decode(value_rows, case.V, torch.float64), late[1].double()), 2)
    for part in (key_rows, value_rows):
        poison(part, case.hidden[:, :N])
    key = AffineRows(key_rows, case.D, code.bits, 0)
    value = AffineRows(value_rows, case.V, code.bits, code.values.groups(case.V))
    case.compare(case.attend(key, value, KeyBlocks(in_memory_of_halves(scales), code.block), late), keys, values)


def in_memory_of_halves(scales: Tensor) -> Tensor:
    """The same scales with NaN behind them."""
    memory = scales.new_full((*scales.shape[:2], scales.shape[2] + 3, scales.shape[3]), torch.nan)
    memory[:, :, : scales.shape[2]] = scales
    return memory[:, :, : scales.shape[2]]


@with_triton
@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_every_number_of_bits_are_read(bits: int) -> None:
    (key, value), states, query = of_bits(bits)
    out = attend_codes(
        moved(query), *(replace(x, rows=moved(x.rows)) for x in (key, value)), Scoring(None, False, 0.1)
    )
    expected = reference(query, *states, (None, False, 0.1))
    assert (out.cpu() - expected).abs().max() < 1e-5 * expected.abs().max()
    blocks = KiviCode(bits, 16)
    rows, scales = blocks.encode_keys(states[0])
    out = attend_codes(
        moved(query),
        AffineRows(moved(rows), 48, bits, 0),
        replace(value, rows=moved(value.rows)),
        Scoring(None, False, 0.1),
        blocks=KeyBlocks(moved(scales), 16),
    )
    expected = reference(query, blocks.decode_keys(rows, scales, torch.float64), states[1], (None, False, 0.1))
    assert (out.cpu() - expected).abs().max() < 1e-5 * expected.abs().max()


@with_triton
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_what_a_code_cannot_hold_is_no_number(bits: int) -> None:
    torch.manual_seed(0)
    code, (keys, values) = GroupCode(bits, 32), torch.randn(2, 1, 1, 70, 64)
    values[0, 0, 20, 40] = torch.inf
    query = torch.randn(1, 3, 1, 64, device=DEVICE)
    key, value = (AffineRows(moved(code.encode(x)), 64, bits, 2) for x in (keys, values))
    out = attend_codes(query, key, value, Scoring(None, False, 0.1)).cpu()
    assert out[..., 32:].isnan().all()
    assert not out[..., :32].isnan().any()
    mask = (torch.arange(70, device=DEVICE) != 20)[None, None, None]
    assert not attend_codes(query, key, value, Scoring(mask, False, 0.1)).isnan().any()


def test_what_it_cannot_read_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("headwise.runtime.kernels.gpu.split.has_triton", lambda: True)
    x = torch.zeros(1, 2, 1, 64)
    assert why_not_codes(x, x) is None
    assert why_not_codes(x, x.bfloat16()) == "it takes tensors of one dtype"
    assert why_not_codes(x, x.to("meta")) == "it takes tensors on one device"
    assert why_not_codes(x.requires_grad_(), x) == "it has no backward pass"
    assert why_not_codes(x, x.new_zeros(1, 2, 1, 513)) == "heads are 513 wide, and it takes 512 at most"
    x = x.detach()
    assert why_not_codes(x.to_sparse(), x) == "it takes plain tensors"
    with torch.autocast("cpu"):
        assert "autocast" in str(why_not_codes(x, x))
