"""The codec of a layer whose cached values have a code of their own.

Where a kernel can read codes, attention is given the codes themselves. Where none can, the layer decodes, and results
differ by rounding alone.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim, R latent rank,
P rotary dims, F frequencies of the model; W cached values of a token.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from headwise.runtime.kernels import gpu
from headwise.runtime.kernels.mask import Scoring, as_bool_mask
from headwise.runtime.kernels.native.build import are_plain, why_not
from headwise.runtime.kernels.native.calls import TrellisLayout, attend_trellis
from headwise.runtime.kernels.pages import Pages
from headwise.runtime.kernels.sdpa import FEW_TOKENS
from headwise.runtime.quantization.codec import Codec, Stored
from headwise.runtime.quantization.groups import is_on_gpu
from headwise.runtime.quantization.transform_code import TransformCode, channel_layout, trellis_layout


class KeyRotation(NamedTuple):
    """How keys are rotated when they are read: by the slots of the cache that they lie in.

    Attributes:
        cos: the cosines of at least T slots, float32 ``[slots, F]``.
        sin: the sines of the same slots, float32 ``[slots, F]``.
        frequency: int64 ``[P/2]``, each rotary pair's index among the model's frequencies.
        turn: cos and sin of the first `TURN` slots, each ``[TURN, P/2]``, without the factor of a scaled embedding;
            the same object in every call, until frequencies change.
    """

    cos: Tensor
    sin: Tensor
    frequency: Tensor
    turn: tuple[Tensor, Tensor]


class TrellisFormat(Codec):
    """The codec of a layer whose cached values have a code of their own: of its latents, or of its heads.

    What is stored are a token's codes, as the layer's keys ``[B, 1, T, bytes]``; no values; the values of each
    sequence's first `TransformCode.wide_tokens` tokens, bfloat16 ``[B, n, W]``; and the slot of each sequence's
    first token, int64 ``[B]``, below 0 where a sliding window no longer holds it.

    Args:
        code: the code of the layer's values.
    """

    tensors: ClassVar[tuple[str, ...]] = ("keys", "values", "unquantised", "first")

    def __init__(self, code: TransformCode) -> None:
        self.code = code
        self._kept: tuple[tuple[Tensor, Tensor] | None, gpu.ChannelLayout | TrellisLayout] | None = None

    def __deepcopy__(self, _: object) -> TrellisFormat:
        """A copy of a cache or a model reads the same code, to which another thread may be adding what it keeps."""
        return TrellisFormat(self.code)

    def encode(self, keys: Tensor, values: Tensor, first: Tensor | None = None, begin: int = 0) -> tuple[Tensor, ...]:
        """Codes of ``[B, 1, S, W]`` cached values, which come as keys; see `Codec.encode`.

        Args:
            keys: the values.
            values: are not read.
            first: int64 ``[B]``, the slot of each sequence's first token; None where all are in the cache already.
            begin: the slot of the first of the values.
        """
        codes = self.code.encode(keys, None if first is None else _are_first(keys, first, begin))
        return codes, codes[..., :0]

    def decode(self, stored: Stored) -> tuple[Tensor, Tensor]:
        """The values of all tokens ``[B, 1, T, W]``, before rotation, as keys; see `Codec.decode`."""
        (codes, _, unquantised, first), _, dtype = stored
        wide = self.first_values(codes, unquantised, first)
        states = replace_first_tokens(self.code.decode(codes, dtype), wide.to(dtype), first, 0)
        return states, states[..., :0]

    def first_values(self, codes: Tensor, unquantised: Tensor, first: Tensor, pages: Pages | None = None) -> Tensor:
        """The values of each sequence's first tokens, which replace their codes: bfloat16 ``[B, n, W]``.

        Arguments are those of `attend`.
        """
        own = self.code.first
        if own is None:
            return unquantised
        if pages is not None:
            return own.decode(codes[pages.table[:, 0].long(), 0, :1], torch.bfloat16)
        # A first token may be one of those to come, or lie before those that a window holds.
        slots = first.clamp(0, codes.shape[2] - 1)
        return own.decode(codes[torch.arange(len(codes), device=first.device), 0, slots, None], torch.bfloat16)

    def rounded(self, states: Tensor, first: Tensor, begin: int) -> Tensor:
        """Values ``[B, 1, S, W]`` as a cache would give them back; derivatives pass as if they were not rounded.

        Args:
            states: the values.
            first: int64 ``[B]``, the slot of each sequence's first token.
            begin: the slot of the first of the values.
        """
        own = states.detach()
        none = own.new_zeros(len(own), self.code.wide_tokens, own.shape[-1], dtype=torch.bfloat16)
        kept = keep_first_tokens(none, own, first, begin).to(own.dtype)
        values = replace_first_tokens(self.code.rounded(own, _are_first(own, first, begin)), kept, first, begin)
        return states + (values - own) if states.requires_grad else values

    def can_attend_to(
        self, states: Tensor, stored: tuple[Tensor, ...], mask: Tensor | None, *, needs_grad: bool
    ) -> bool:
        """Whether a kernel can attend to what is stored, and is the fastest way: for few new tokens.

        Args:
            states: ``[B, S, hidden size]`` of the new tokens.
            stored: see `TrellisFormat`.
            mask: the mask of the call; None for none.
            needs_grad: whether gradients are needed.
        """
        if states.shape[1] > FEW_TOKENS:
            return False
        codes, _, *others = stored
        if is_on_gpu(states):
            widths = (self.code.sections[0], self.code.sections[-1])
            return not needs_grad and gpu.why_not_trellis(states, (codes, *others), mask, widths) is None
        return why_not(states.dtype, states.device, needs_grad=needs_grad) is None and are_plain(
            states, codes, *others, mask
        )

    def attend(
        self,
        query: Tensor,
        stored: Stored,
        scoring: Scoring,
        rotation: KeyRotation | None = None,
        *,
        has_sums: bool = False,
        pages: Pages | None = None,
    ) -> Tensor:
        """Attend to codes that `can_attend_to` said yes to; see `attend_trellis`.

        Args:
            query: rotated by slots: of latents, absorbed, ``[B, H, S, R + P]`` or ``[B, H, S, P]``; of heads ``[B, H,
                S, D]``.
            stored: see `TrellisFormat`.
            scoring: that of `headwise.runtime.quantization.codec.Codec.attend`; the mask may be ``[B, T]``.
            rotation: how keys are rotated as they are read; None where P is 0.
            has_sums: add the sum of each row's weights as a last column, of latents.
            pages: where the codes lie in pages; None where each sequence's lie in a row.

        Returns:
            The mixed latents ``[B, H, S, R]``, or ``R + 1``; or the heads' mixed values ``[B, H, S, V]``.
        """
        codes, _, unquantised, first = stored.tensors
        B, H, S, _ = query.shape
        if scoring.mask is not None:  # sequences in pages have lengths instead
            scoring = scoring._replace(mask=as_bool_mask(scoring.mask, (B, H, S, codes.shape[2])))
        layout = self.layout_for(rotation, of_gpu=is_on_gpu(query))
        if rotation is None:
            none = torch.empty(1, 0, device=query.device)
            tables, frequency = (none, none), none[0].long()
        else:
            tables, frequency = (rotation.cos, rotation.sin), rotation.frequency
        if isinstance(layout, gpu.ChannelLayout):
            tokens = query, codes, self.first_values(codes, unquantised, first, pages), first
            return gpu.attend_trellis(*tokens, layout, tables, scoring, has_sums=has_sums, pages=pages)
        tokens = query, codes, unquantised, first
        return attend_trellis(*tokens, layout, tables, frequency, scoring, has_sums=has_sums, pages=pages)

    def layout_for(self, rotation: KeyRotation | None, *, of_gpu: bool) -> gpu.ChannelLayout | TrellisLayout:
        """How a kernel reads the code; it is the same object until frequencies change.

        Args:
            rotation: see `attend`.
            of_gpu: whether the kernel is one of the GPU's.
        """
        turn, kept = None if rotation is None else rotation.turn, self._kept
        if kept is None or kept[0] is not turn:
            with torch.inference_mode(False), torch.no_grad():
                if of_gpu:
                    frequency = None if rotation is None else rotation.frequency
                    kept = turn, channel_layout(self.code, turn, frequency)
                else:
                    kept = turn, trellis_layout(self.code, turn)
            self._kept = kept
        return kept[1]


def _are_first(states: Tensor, first: Tensor, begin: int) -> Tensor:
    """Which of the tokens ``[B, 1, S, W]`` from a slot on begin their sequences, bool ``[B, 1, S]``."""
    slots = torch.arange(begin, begin + states.shape[2], device=first.device)
    return (slots == first[:, None])[:, None]


def keep_first_tokens(kept: Tensor, states: Tensor, first: Tensor, begin: int) -> Tensor:
    """The first tokens of each sequence, bfloat16 ``[B, n, W]``, of which some may be among new ones.

    Args:
        kept: the values kept so far, ``[B, n, W]``.
        states: values of new tokens, ``[B, 1, S, W]``.
        first: int64 ``[B]``, the slot of each sequence's first token.
        begin: the slot of the first new token.
    """
    slots = first[:, None] + torch.arange(kept.shape[1], device=first.device) - begin  # [B, n]
    is_new = (slots >= 0) & (slots < states.shape[2])
    places = slots.clamp(0, states.shape[2] - 1)[..., None].expand(-1, -1, states.shape[-1])
    return torch.where(is_new[..., None], states[:, 0].gather(1, places).to(torch.bfloat16), kept)


def replace_first_tokens(values: Tensor, unquantised: Tensor, first: Tensor, begin: int) -> Tensor:
    """Values ``[B, 1, T, W]`` of slots from ``begin`` on, those of each sequence's first tokens replaced."""
    slots = first[:, None] + torch.arange(unquantised.shape[1], device=first.device) - begin  # [B, n]
    is_held = (slots >= 0) & (slots < values.shape[2])
    rows, places = is_held.nonzero(as_tuple=True)
    if len(rows):
        values = values.clone() if values.is_inference() and not torch.is_inference_mode_enabled() else values
        values[rows, 0, slots[rows, places]] = unquantised[rows, places]
    return values
