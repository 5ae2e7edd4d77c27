"""headwise's own code of a converted layer's cache, and the file that holds it.

A code is static: an offset and a scale for each channel and a number of bits for each block of 16, all fixed at
conversion, and for each token a gain or two. The basis that makes such a code good is folded into the weights. So
programs that do not know the file read the weights alone, run the same model, and keep a cache of the model's own
numbers.

Shapes: K key–value heads, D head dim, V value dim, R latent rank, P rotary dims; W cached values of a token, in
sections (for MLA the latent and the two halves of the rotary key).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from headwise.base.disk import open_regular
from headwise.errors import CheckpointError
from headwise.models.specs import GroupedSpec, LatentSpec
from headwise.runtime.kernels import gpu
from headwise.runtime.kernels.native.abi import CHANNELS, TURN
from headwise.runtime.kernels.native.build import are_plain
from headwise.runtime.kernels.native.calls import (
    Coder,
    TrellisLayout,
    can_encode,
    choose_gains,
    code_tokens,
    decode_trellis,
)
from headwise.runtime.quantization.groups import is_on_gpu
from headwise.runtime.quantization.trellis import NOISE, REACH, UNIT, decode, encode, tables

SINKS = 4
"""The first tokens of a text whose values are stored in bfloat16 where the first one has no code of its own."""

GAIN_STEP = 1.25
GAIN_ZERO = 5
"""The gain number g stands for ``GAIN_STEP ** (g − GAIN_ZERO)``; a byte holds the numbers of two gains."""

GAINS_TRIED = 6
"""How many numbers of gains are tried for a token, from that of its values' root mean square on."""

_ROWS = 128
"""Tokens whose gains are chosen at a time on a CPU without the compiled kernel, in memory that fits in its caches."""

_MOST_PARTS = 2
"""The parts whose gains' numbers fit into a byte."""


@dataclass(frozen=True, eq=False)
class TransformCode:
    """How a layer's cached values are coded.

    A value is decoded as ``offset + scale · gain · level``, where the level belongs to its trellis code
    (`headwise.runtime.quantization.trellis`) and the gain to its token and part. A rotary key is coded before it is
    rotated.

    The first token of a text has a code of its own, with offsets, scales and bits that suit it: most models rest
    their attention on it, and its values are unlike all others', but much the same in every text. Codes that were
    designed before it had one have none, and the values of a text's first `SINKS` tokens are stored in bfloat16
    beside theirs.

    Attributes:
        offset: float32 ``[W]``.
        scale: float32 ``[W]``, positive.
        bits: the number of bits of each block of `CHANNELS` channels, section after section.
        sections: the widths of the sections; blocks do not reach over their ends.
        parts: the widths of the parts of a token that have a gain of their own; two at most.
        first: the code of a text's first token, of the same sections and parts and no more bytes; None where first
            tokens are stored in bfloat16.
    """

    offset: Tensor
    scale: Tensor
    bits: tuple[int, ...]
    sections: tuple[int, ...]
    parts: tuple[int, ...]
    first: TransformCode | None = None

    def __post_init__(self) -> None:
        """Check what the kernels rely on.

        Raises:
            ValueError: tensors, sections, parts and bits do not belong together.
        """
        tensors, width = (self.offset, self.scale), len(self.offset)
        if any(tensor.dtype != torch.float32 or tensor.shape != (width,) for tensor in tensors):
            raise ValueError("offsets and scales must be vectors of float32 of one length")
        for widths in (self.sections, self.parts):
            if any(type(size) is not int or size < 1 for size in widths) or sum(widths) != width:
                raise ValueError(f"sections and parts must be positive and add up to {width}")
        if len(self.parts) > _MOST_PARTS or len(self.bits) != len(list(blocks(self.sections))):
            raise ValueError(f"there must be at most {_MOST_PARTS} parts, and a number of bits for each block")
        if any(type(bits) is not int or not 1 <= bits <= 8 for bits in self.bits):
            raise ValueError("bits must be from 1 to 8")
        first = self.first
        if first is not None and (
            (first.sections, first.parts, first.first) != (self.sections, self.parts, None)
            or first.token_bytes > self.token_bytes
        ):
            raise ValueError("a first token's code must have the same sections and parts, and no more bytes")

    @cached_property
    def channel_bits(self) -> Tensor:
        """The number of bits of every channel, uint8 ``[W]``."""
        counts = [bits for bits, (a, b) in zip(self.bits, blocks(self.sections), strict=True) for _ in range(a, b)]
        return torch.tensor(counts, dtype=torch.uint8, device=self.offset.device)

    @cached_property
    def weights(self) -> Tensor:
        """The cost of a squared error of a level of every channel, float32 ``[W]``."""
        return self.scale.square()

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token: one for the gains, and those of all codes."""
        return 1 + -(-int(self.channel_bits.sum()) // 8)

    @property
    def width(self) -> int:
        """W."""
        return self.offset.shape[0]

    @property
    def wide_tokens(self) -> int:
        """The number of a text's first tokens whose values are stored in bfloat16."""
        return SINKS if self.first is None else 0

    def to(self, device: torch.device) -> TransformCode:
        """The code with its tensors on a device."""
        first = None if self.first is None else self.first.to(device)
        return replace(self, offset=self.offset.to(device), scale=self.scale.to(device), first=first)

    def equals(self, other: TransformCode) -> bool:
        """Whether both give values the same codes; dataclasses with tensors cannot be compared by ``==``."""
        (own, about), (its, about_it) = code_tensors(self), code_tensors(other)
        same = about == about_it and own.keys() == its.keys()
        return same and all(torch.equal(tensor, its[name].to(tensor.device)) for name, tensor in own.items())

    def encode(self, states: Tensor, is_first: Tensor | None = None) -> Tensor:
        """Codes of some tokens: uint8 ``[…, token_bytes]`` of values ``[…, W]``.

        A token with NaN or infinite values gets codes of finite ones, and no other token does.

        Args:
            states: the values.
            is_first: bool ``[…]``, which of the tokens begin a text; None where none does.
        """
        return self._by_token(lambda code, rows: code._encode(rows, self.token_bytes), states, is_first)

    def write(self, states: Tensor, pages: Tensor, slots: Tensor, is_first: Tensor) -> None:
        """Write the codes of some tokens to pages of a cache; see `encode`.

        Args:
            states: the values, ``[n, W]``.
            pages: uint8 ``[pages, tokens of a page, token_bytes]``.
            slots: int64 ``[n]``, of each token the number of a page times its tokens, plus the place in it; below 0
                for tokens that pad a batch. Kernels write there, and do not check that the cache has such a page.
            is_first: bool ``[n]``, which of the tokens begin a text.
        """
        if not (can_encode() and are_plain(states, pages, slots, self.offset)):
            # Tokens that pad a batch go to the first page, which engines give to no text.
            slots, tokens = slots.clamp_min(0), pages.shape[1]
            pages[slots // tokens, slots % tokens] = self.encode(states, is_first)
            return
        self._write(states, pages, slots)
        if self.first is not None and bool(is_first.any()):
            self.first._write(states[is_first], pages, slots[is_first])

    def rounded(self, states: Tensor, is_first: Tensor | None = None) -> Tensor:
        """What becomes of values ``[…, W]`` when they are coded, without the bytes; see `encode` and `decode`."""

        def change(code: TransformCode, rows: Tensor) -> Tensor:
            values = code._rounded(rows)
            return values if code is self else values.bfloat16().to(values.dtype)

        return self._by_token(change, states, is_first)

    def decode(self, codes: Tensor, dtype: torch.dtype = torch.float32, is_first: Tensor | None = None) -> Tensor:
        """The values ``[…, W]`` that codes ``[…, token_bytes]`` stand for, a first token's rounded to bfloat16.

        See `encode`.
        """

        def change(code: TransformCode, rows: Tensor) -> Tensor:
            return code._decode(rows, dtype) if code is self else code._decode(rows, torch.bfloat16).to(dtype)

        return self._by_token(change, codes, is_first)

    def _by_token(
        self, change: Callable[[TransformCode, Tensor], Tensor], rows: Tensor, is_first: Tensor | None
    ) -> Tensor:
        """Change rows ``[…, n]`` of tokens by the code of each."""
        changed, own = change(self, rows), self.first
        if own is None or is_first is None:
            return changed
        if is_on_gpu(rows):  # which of them are first is not asked: that would wait for the GPU
            return torch.where(is_first[..., None], change(own, rows), changed)
        if bool(is_first.any()):
            changed[is_first] = change(own, rows[is_first])
        return changed

    def _encode(self, states: Tensor, size: int) -> Tensor:
        """Codes in rows of so many bytes, of which the last may be empty."""
        if can_encode() and are_plain(states, self.offset):
            values = states.reshape(-1, self.width)
            rows = torch.empty(1, max(1, len(values)), size, dtype=torch.uint8)
            self._write(values, rows, torch.arange(len(values)))
            return rows[0, : len(values)].view(*states.shape[:-1], size)
        normal, gains, starts = self.normalised(states)
        rows = starts.new_zeros(len(starts), size)
        rows[:, 0] = starts
        encode(normal, self.weights, self.channel_bits, starts, gains, codes=rows[:, 1 : self.token_bytes])
        return rows.view(*states.shape[:-1], size)

    def _write(self, states: Tensor, pages: Tensor, slots: Tensor) -> None:
        code_tokens(states.float(), self.coder, pages, slots)

    @cached_property
    def coder(self) -> Coder:
        """How the compiled kernel codes tokens."""
        channels = (self.offset, self.scale, self.noise, self.reach)
        rest = (self._of_numbers, self.channel_bits, tables(), GAINS_TRIED, GAIN_ZERO, GAIN_STEP)
        return Coder(channels, self.parts, *rest)

    def _decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        if can_encode() and are_plain(codes, self.offset):
            rows, exact = codes.reshape(-1, codes.shape[-1]), dtype if dtype == torch.bfloat16 else torch.float32
            values = decode_trellis(rows, self._layout, exact, self.width, self.parts[0])
            return values.view(*codes.shape[:-1], self.width).to(dtype)
        if is_on_gpu(codes) and gpu.why_not_plain(codes, self.offset) is None:
            rows = codes.reshape(-1, codes.shape[-1])
            places = torch.arange(len(rows), device=codes.device) * rows.stride(0)
            return gpu.decode_trellis(rows, places, self._gpu_layout, dtype).view(*codes.shape[:-1], self.width)
        starts = codes[..., 0]
        levels = decode(codes[..., 1:], self.channel_bits, starts)
        return (levels * self._gains(starts) * self.scale + self.offset).to(dtype)

    @cached_property
    def _layout(self) -> TrellisLayout:
        return trellis_layout(self, None)

    @cached_property
    def _gpu_layout(self) -> gpu.ChannelLayout:
        return channel_layout(self, None, None)

    def _rounded(self, states: Tensor) -> Tensor:
        normal, gains, starts = self.normalised(states)
        levels, _ = encode(normal, self.weights, self.channel_bits, starts, gains, pack=False)
        return (levels * gains * self.scale + self.offset).to(states.dtype).view(states.shape)

    def normalised(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values ``[…, W]`` over scales and gains, and the gains, each ``[n, W]``; a byte a token: its gains.

        A token's gain is the one of least expected error: small gains make small errors but few large values fit.
        """
        values = states.reshape(-1, self.width).float()
        if can_encode() and are_plain(values, self.offset, self.scale):
            channels = (self.offset, self.scale, self.noise, self.reach)
            return choose_gains(
                values, channels, self.parts, self._of_numbers, tried=GAINS_TRIED, zero=GAIN_ZERO, step=GAIN_STEP
            )
        normal = (values - self.offset) / self.scale
        rows_at_a_time = _ROWS if normal.is_cpu else max(1, len(normal))
        starts = torch.cat([self._choose_gains(rows) for rows in torch.split(normal, rows_at_a_time)])
        gains = self._gains(starts)
        return normal / gains, gains, starts

    def _choose_gains(self, normal: Tensor) -> Tensor:
        """The byte of each token's gains, uint8 ``[n]``, from values ``[n, W]`` over scales."""
        squares = torch.stack([part.square().mean(-1) for part in normal.split_with_sizes(self.parts, -1)], -1)
        middle = (squares.nan_to_num().clamp_min(1e-12).log() / (2 * math.log(GAIN_STEP))).round() + GAIN_ZERO
        tried = torch.arange(GAINS_TRIED, device=normal.device)[:, None]
        numbers = (middle[:, None] + tried).clamp(0, 15).long()  # [n, GAINS_TRIED, parts]
        gains = self._spread(numbers)
        excess = (normal.abs()[:, None] - self.reach * gains).relu_()
        errors = (self.noise * gains.square()).addcmul_(excess, excess).mul_(self.weights)
        costs = torch.stack([part.sum(-1) for part in errors.split_with_sizes(self.parts, -1)], -1)
        chosen = numbers.gather(1, costs.argmin(1, keepdim=True))[:, 0].to(torch.uint8)
        return (chosen << self._places).sum(-1).to(torch.uint8)

    @cached_property
    def noise(self) -> Tensor:
        """The mean squared error of a value of variance 1 in every channel, float32 ``[W]``."""
        return torch.tensor(NOISE, dtype=torch.float32, device=self.offset.device)[self.channel_bits.long()]

    @cached_property
    def reach(self) -> Tensor:
        """The size beyond which a value's error is its distance from it, in every channel, float32 ``[W]``."""
        return torch.tensor(REACH, dtype=torch.float32, device=self.offset.device)[self.channel_bits.long()]

    @cached_property
    def _of_numbers(self) -> Tensor:
        """The gains that numbers stand for."""
        return GAIN_STEP ** (torch.arange(16, dtype=torch.float32, device=self.offset.device) - GAIN_ZERO)

    @cached_property
    def _places(self) -> Tensor:
        return 4 * torch.arange(len(self.parts), dtype=torch.uint8, device=self.offset.device)

    def _gains(self, starts: Tensor) -> Tensor:
        """The gain of every channel, ``[…, W]``, from the byte of a token's gains ``[…]``."""
        return self._spread(((starts[..., None] >> self._places) & 15).long())

    def _spread(self, numbers: Tensor) -> Tensor:
        """The gain of every channel, ``[…, W]``, from the numbers of a token's gains ``[…, parts]``."""
        gains = self._of_numbers[numbers]
        parts = (gains[..., k, None].expand(*gains.shape[:-1], width) for k, width in enumerate(self.parts))
        return torch.cat(tuple(parts), -1)


def blocks(sections: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """First and last channel, exclusive, of each block: ``list(blocks((20,)))`` is ``[(0, 16), (16, 20)]``."""
    start = 0
    for width in sections:
        for first in range(start, start + width, CHANNELS):
            yield first, min(first + CHANNELS, start + width)
        start += width


def code_shape(spec: GroupedSpec | LatentSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sections and parts of a layer's code; see `TransformCode`."""
    if isinstance(spec, LatentSpec):
        return latent_shape(spec.kv_lora_rank, spec.qk_rope_head_dim)
    return heads_shape(spec.num_kv_heads, spec.head_dim, spec.value_dim)


def latent_shape(R: int, P: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`code_shape` of a latent of R values and, where P is not 0, a rotary key of P."""
    return ((R, P // 2, P // 2), (R, P)) if P else ((R,), (R,))


def heads_shape(K: int, D: int, V: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`code_shape` of K heads' keys of D channels, and then their values of V."""
    return (*(D,) * K, *(V,) * K), (K * D, K * V)


def channel_layout(
    code: TransformCode, turn: tuple[Tensor, Tensor] | None, frequency: Tensor | None
) -> gpu.ChannelLayout:
    """How the GPU's kernels read a code, on the device of the code; see `trellis_layout`.

    Args:
        code: the code.
        turn: cos and sin of the first `TURN` slots, each ``[TURN, P/2]``; None where P is 0.
        frequency: ``[P/2]``, each rotary pair's index among the model's frequencies; None where P is 0.
    """
    bits, device = code.channel_bits.int(), code.offset.device
    tensors = (
        bits.cumsum(0, dtype=torch.int32) - 1,
        bits,
        *_whole_levels(),
        code.scale * UNIT,
        code.offset,
        torch.zeros(2, TURN, 0) if turn is None else torch.stack(turn),
        torch.empty(0, dtype=torch.int32) if frequency is None else frequency.int(),
    )
    return gpu.ChannelLayout(*_shape(code, turn), *(tensor.to(device).contiguous() for tensor in tensors))


def _shape(code: TransformCode, turn: tuple[Tensor, Tensor] | None) -> tuple[int, int, int]:
    """The value dim, key–value heads (0 of latents) and rotary dims of what a code is of."""
    # MLA has a section for the latent and two for a rotary key's halves; heads have one for keys, one for values.
    is_latent = len(code.sections) % 2 == 1
    heads = 0 if is_latent else len(code.sections) // 2
    return code.sections[0 if is_latent else -1], heads, 0 if turn is None else 2 * turn[0].shape[-1]


def _whole_levels() -> tuple[Tensor, Tensor]:
    """Whole levels of all windows, int8 ``[9, 256]``, and the gain of each number, float32 ``[16]``."""
    return (tables() / UNIT).round().to(torch.int8), GAIN_STEP ** (torch.arange(16, dtype=torch.float32) - GAIN_ZERO)


@lru_cache
def _pairs() -> Tensor:
    """Whole levels of all windows that two neighbouring channels share; see `TrellisLayout`."""
    levels = _whole_levels()[0]
    pairs = torch.zeros(2**17, 2, dtype=torch.int8)
    for bits in range(1, 9):
        size = 2 ** (8 + bits)
        both = torch.arange(size)
        pairs[size : 2 * size] = levels[bits, torch.stack((both >> bits, both & 255), 1)]
    return pairs


def trellis_layout(code: TransformCode, turn: tuple[Tensor, Tensor] | None) -> TrellisLayout:
    """How the compiled kernels read a code.

    Args:
        code: of a latent and, behind it, a rotary key whose halves are sections; or of all heads' keys and, behind
            them, all values, each head's a section.
        turn: cos and sin of the first `TURN` slots, each ``[TURN, P/2]``; None where P is 0.
    """
    rows: list[tuple[int, int, int, int]] = []
    column = first = 0
    for bits, (begin, end) in zip(code.bits, blocks(code.sections), strict=True):
        # A byte stands before all codes, so that the 8 bits that end with a first code begin at bit first + bits.
        rows.append((column, end - begin, bits, first + bits))
        column += CHANNELS  # also for a block of fewer channels, whose other columns are empty
        first += (end - begin) * bits

    def columns(channels: Tensor) -> Tensor:
        """Numbers of channels at the columns of their levels."""
        return torch.cat([_padded(section) for section in channels.float().split_with_sizes(code.sections)])

    levels, gains = _whole_levels()
    return TrellisLayout(
        *_shape(code, turn),
        code.token_bytes,
        torch.tensor(rows, dtype=torch.int32),
        levels,
        _pairs(),
        gains,
        columns(code.scale * UNIT),
        columns(code.offset),
        torch.zeros(2, TURN, 0) if turn is None else torch.stack([_padded(table) for table in turn]),
        None if code.first is None else trellis_layout(code.first, None),
    )


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[-1] % CHANNELS)).contiguous()


FILE = "kv_cache.safetensors"
"""The name of the file."""

FORMAT = 2
"""The version of its layout. In the first one, first tokens have no code of their own."""

_FIRST = "first_"
"""What the names of a first token's code begin with."""

_KEY = "headwise"


def code_tensors(code: TransformCode) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A code's tensors, and the rest of it as JSON-able values.

    For example ``code_from(*code_tensors(code))`` is an equal code.
    """
    about = {"bits": list(code.bits), "sections": list(code.sections), "parts": list(code.parts)}
    tensors = {"offset": code.offset, "scale": code.scale}
    if code.first is not None:
        own, of_own = code_tensors(code.first)
        tensors |= {_FIRST + name: tensor for name, tensor in own.items()}
        about[_FIRST + "bits"] = of_own["bits"]
    return tensors, about


def code_from(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> TransformCode:
    """The code that `code_tensors` took apart.

    Raises:
        ValueError: the file is no code, or its numbers code nothing.
    """
    shape = tuple(about["sections"]), tuple(about["parts"])
    codes = []
    for prefix in ("", _FIRST) if _FIRST + "offset" in tensors else ("",):
        offset, scale = tensors[prefix + "offset"], tensors[prefix + "scale"]
        codes.append(TransformCode(offset, scale, tuple(about[prefix + "bits"]), *shape))
        if not (bool(offset.isfinite().all()) and bool(((scale > 0) & scale.isfinite()).all())):
            raise ValueError("offsets must be finite, and scales finite and positive")
    return codes[0] if len(codes) == 1 else replace(codes[0], first=codes[1])


def codes_content(codes: Mapping[int, TransformCode]) -> bytes:
    """The content of the file.

    Args:
        codes: the code of each layer, by the layer's number.
    """
    tensors: dict[str, Tensor] = {}
    layers: dict[str, Any] = {}
    for index, code in codes.items():
        own, layers[str(index)] = code_tensors(code)
        tensors |= {f"{index}.{name}": tensor.contiguous().clone() for name, tensor in own.items()}
    version = min((FORMAT if code.first is not None else 1 for code in codes.values()), default=FORMAT)
    return save(tensors, metadata={_KEY: json.dumps({"format": version, "layers": layers})})


def read_codes(folder: Path, layers: int | None = None) -> dict[int, TransformCode]:
    """The code of each layer of a model folder; empty where its cache is not coded.

    Args:
        folder: the folder of the model.
        layers: the number of the model's layers, each of which must have a code; not checked when None.

    Raises:
        CheckpointError: the file is damaged, of another version, or not of so many layers.
    """
    path = folder / FILE
    if not (path.exists() or path.is_symlink()):
        return {}
    try:
        open_regular(path).close()  # safetensors would wait for a pipe
        with safe_open(path, framework="pt", backend="pread") as file:
            about = json.loads(file.metadata()[_KEY])
            version = about["format"]
            if version not in (1, FORMAT):
                rule = f"is of format {version!r}; this headwise reads formats up to {FORMAT}"
                raise CheckpointError(FILE, str(path), rule)
            names = [prefix + name for prefix in ("", _FIRST)[:version] for name in ("offset", "scale")]
            codes = {
                int(index): code_from({name: file.get_tensor(f"{index}.{name}") for name in names}, own)
                for index, own in about["layers"].items()
            }
    except CheckpointError:
        raise
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError, RuntimeError):
        raise CheckpointError(FILE, str(path), "is damaged; convert the model again") from None
    if layers is not None and sorted(codes) != list(range(layers)):
        rule = f"must have a code for each of the model's {layers} layers; convert the model again"
        raise CheckpointError(FILE, f"{len(codes)} codes", rule)
    return codes
