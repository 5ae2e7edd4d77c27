"""Attention to latents in trellis codes, against their decoded values in float64."""

from __future__ import annotations

import random
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headwise.runtime.attention.rope import rotate
from headwise.runtime.kernels.mask import Scoring
from headwise.runtime.kernels.native import abi, build, built
from headwise.runtime.kernels.native.abi import TURN
from headwise.runtime.kernels.native.calls import attend_trellis
from headwise.runtime.quantization import TransformCode
from headwise.runtime.quantization.transform_code import SINKS, blocks, trellis_layout

pytestmark = pytest.mark.skipif(built().library is None, reason=f"no compiled kernel: {built().reason}")

CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Tolerances, as fractions of the largest output, or of the largest value where those nearly cancel."""


@dataclass
class Case:
    """The arguments of the kernel, and the code."""

    query: Tensor
    codes: Tensor
    wide: Tensor
    first: Tensor
    code: TransformCode
    rank: int
    angles: Tensor  # [F], float64
    frequency: Tensor  # [P/2]
    mask: Tensor | None
    is_causal: bool
    scale: float

    def tables(self, slots: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin ``[slots, F]``."""
        angles = torch.arange(slots)[:, None] * self.angles
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def attended(self) -> Tensor:
        """The kernel's output."""
        T, P = self.codes.shape[2], self.code.width - self.rank
        tables = self.tables(max(T, TURN), torch.float32)
        turn = (tables[0][:TURN, self.frequency], tables[1][:TURN, self.frequency]) if P else None
        layout = trellis_layout(self.code, turn)
        return attend_trellis(
            *(self.query, self.codes, self.wide, self.first, layout, tables, self.frequency),
            Scoring(self.mask, self.is_causal, self.scale),
        )

    def seen(self) -> Tensor:
        """``[B, H, S, T]``."""
        (B, H, S, _), T = self.query.shape, self.codes.shape[2]
        allowed = torch.ones(B, H, S, T, dtype=torch.bool)
        if self.mask is not None:
            allowed &= self.mask
        return allowed & (torch.arange(T - S, T)[:, None] >= torch.arange(T)) if self.is_causal else allowed

    def values(self) -> Tensor:
        """The decoded values ``[B, T, W]``, float64, with those of first tokens in their place."""
        code = self.code
        values = code.decode(self.codes[:, 0], torch.float64)
        for row, first in enumerate(self.first.tolist()):
            count = min(SINKS, values.shape[1] - first)
            if count > 0:
                values[row, first : first + count] = self.wide[row, :count].double()
        return values

    def expected(self) -> Tensor:
        """The output in float64."""
        values, P = self.values()[:, None], self.code.width - self.rank
        cos, sin = (table[None, :, self.frequency] for table in self.tables(values.shape[2], torch.float64))
        keys = values
        if P:
            key = rotate(values[..., self.rank :], cos, sin, interleaved=False)
            keys = torch.cat((values[..., : self.rank], key), -1)
        keys = keys[..., keys.shape[-1] - self.query.shape[-1] :]
        scores = (self.query.double() @ keys.mT * self.scale).masked_fill(~self.seen(), float("-inf"))
        return scores.softmax(-1).nan_to_num(0) @ values[..., : self.rank]


def random_code(pick: random.Random, noise: torch.Generator, rank: int, rotary: int) -> TransformCode:
    """Draw a code of any bits."""
    sections = (rank, rotary // 2, rotary // 2) if rotary else (rank,)
    parts = (rank, rotary) if rotary else (rank,)
    bits = tuple(pick.randint(1, 8) for _ in blocks(sections))
    width = rank + rotary
    offset = torch.randn(width, generator=noise)
    return TransformCode(offset, torch.rand(width, generator=noise) + 0.05, bits, sections, parts)


def draw_mask(pick: random.Random, noise: torch.Generator, shape: tuple[int, int, int, int]) -> Tensor | None:
    """Draw a mask of any kind for ``[B, H, S, T]``."""
    B, H, S, T = shape
    kinds = {
        "none": lambda: None,
        "padding": lambda: (torch.arange(T) >= torch.randint(0, T + 1, (B, 1), generator=noise))[:, None, None],
        "holes": lambda: torch.rand(B, 1, 1, T, generator=noise) < 0.5,
        "every": lambda: torch.rand(B, H, S, T, generator=noise) < 0.3,
        "tokens": lambda: torch.rand(B, 1, S, T, generator=noise) < 0.5,
        "turned": lambda: torch.rand(1, 1, T, S, generator=noise).mT < 0.5,
    }
    return kinds[pick.choice(["none", "none", *kinds])]()


def draw(seed: int) -> Case:
    """Draw a case of any shape; memory behind the codes holds other bytes."""
    pick, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    B, S, H = pick.choice([1, 1, 2, 3]), pick.choice([1, 1, 1, 2, 3, 8, 20]), pick.choice([1, 2, 3, 5, 8, 9, 12, 14])
    T = max(S, pick.choice([1, 2, 3, 4, 5, 17, 31, 63, 64, 65, 127, 130, 200]))
    rank, rotary = pick.choice([1, 7, 16, 20, 33, 48, 64]), pick.choice([0, 2, 6, 32, 34, 48, 64])
    dtype = pick.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    code = random_code(pick, noise, rank, rotary)
    room = T + pick.choice([0, 0, 5])
    memory = torch.randint(0, 256, (B, 1, room, code.token_bytes), generator=noise, dtype=torch.uint8)
    memory[..., 0] = (memory[..., 0] & 0x77) + 1  # gains that numbers of float16 can hold
    width = rank + rotary if pick.random() < 0.5 or not rotary else rotary
    query = torch.randn(B, S, H, width, generator=noise).transpose(1, 2)
    return Case(
        query.contiguous().to(dtype) if pick.random() < 0.5 else query.to(dtype),
        memory[:, :, :T],
        torch.randn(B, SINKS, rank + rotary, generator=noise).bfloat16(),
        torch.randint(0, T, (B,), generator=noise) if pick.random() < 0.5 else torch.zeros(B, dtype=torch.int64),
        code,
        rank,
        torch.rand(8, generator=noise, dtype=torch.float64),
        torch.randint(0, 8, (rotary // 2,), generator=noise),
        draw_mask(pick, noise, (B, H, S, T)),
        pick.random() < 0.6,
        pick.choice([0.2, 0.05, 1.0, -0.1]) / width**0.5,
    )


@pytest.mark.parametrize("part", range(10))
def test_it_is_attention_to_the_decoded_values(part: int) -> None:
    for seed in range(200 * part, 200 * (part + 1)):
        case = draw(seed)
        out, expected = case.attended(), case.expected()
        largest = max(expected.abs().max().item(), case.values()[..., : case.rank].abs().max().item() * 0.05)
        assert out.dtype == case.query.dtype
        assert (out.double() - expected).abs().max().item() <= CLOSE[out.dtype] * largest, seed
        assert (out[~case.seen().any(-1)] == 0).all(), seed


def check_sources(rule: str, folder: Path) -> str:
    """What a compiler says of the kernels' headers and a rule about their sizes; nothing where they hold."""
    compiler = build._compiler([])
    assert compiler is not None
    (folder / "abi.h").write_text(abi.header())
    source = f'#include "codes/trellis.h"\nstatic_assert({rule}, "not so");\n'
    folders = [f"-I{Path(build.__file__).parent}", f"-I{folder}"]
    command = [*compiler, *build._FLAGS, build._native(), "-fsyntax-only", *folders, "-x", "c++", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False).stderr


def test_sizes_that_change_in_python_change_in_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = {name: getattr(abi, name) for name in ("MOST_ROWS", "TURN", "CHANNELS")}
    rule = "MOST_ROWS == {MOST_ROWS} && TURN == {TURN} && CHANNELS == {CHANNELS}"
    assert check_sources(rule.format(**now), tmp_path) == ""
    monkeypatch.setattr(abi, "MOST_ROWS", 16)
    monkeypatch.setattr(abi, "TURN", 128)
    assert "not so" in check_sources(rule.format(**now), tmp_path)
    assert check_sources(rule.format(**now | {"MOST_ROWS": 16, "TURN": 128}), tmp_path) == ""


def test_arguments_of_other_sizes_are_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi, "sizeof", lambda _: 8)
    assert "sizeof" in check_sources("true", tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "why"), [("CHANNELS", 8, "sixteen channels"), ("TURN", 32, "share a rotated query")]
)
def test_sizes_that_the_kernels_do_not_support_are_not_compiled(
    name: str, value: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abi, name, value)
    assert why in check_sources("true", tmp_path)
