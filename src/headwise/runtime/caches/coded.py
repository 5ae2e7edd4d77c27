"""Layers whose cached values are coded: what is stored of a token, and what attention reads of it.

A token is stored as the code of its latent and rotary key, or of all heads' keys and values, before rotation
(`headwise.runtime.quantization`). Slots of the cache stand for positions: keys are rotated by the slot they lie in,
and so are queries. That differs from the model's own positions by one rotation of all, which scores do not depend on.

Keys are coded before rotation because they vary least then. Where frequencies change with the length of a text, all
keys in the cache are rotated with those of the latest call; but the states that keys and values were computed from
are those of a shorter text, so that crossing such a change with a cache warns.

Shapes: B batch, S new tokens, T all tokens, W cached values of a token, P rotary dims.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import ArgumentError
from headwise.runtime.caches.frequencies import follow, frequencies
from headwise.runtime.caches.growing import GrowingLayer
from headwise.runtime.quantization import SINKS, TransformCode


class SlotRotation:
    """cos and sin of the slots of a cache, at every frequency that a model's rotary embedding has now.

    Where frequencies depend on how long a text is, they are those of the embedding's latest call, which the model
    makes before any of its layers; all keys in the cache are rotated with them.

    Args:
        rotary: the model's rotary embedding, one of transformers'.

    Attributes:
        version: rises when the frequencies change.
    """

    def __init__(self, rotary: nn.Module) -> None:
        self.version = 0
        self._rotary = rotary
        self._tables: tuple[Tensor, Tensor] | None = None
        self._latest: tuple[object, tuple[Tensor, Tensor]] | None = None
        follow(rotary, self._change)

    def _change(self, first: int) -> None:
        self.version += 1
        self._tables = self._latest = None

    def tables(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 ``[1, count, frequencies]``, of slots 0 … count − 1."""
        kept = self._tables
        if kept is None or kept[0].shape[1] < count or kept[0].device != device:
            # Not by calling the embedding, which would take so many slots for the length of a text.
            own: Any = self._rotary
            (inv_freq,) = frequencies(self._rotary)
            with torch.inference_mode(False), torch.no_grad():
                slots = torch.arange(max(256, 2 * count), dtype=torch.float32, device=device)
                angles = slots[None, :, None] * inv_freq.to(device=device, dtype=torch.float32)
                scaling = float(own.attention_scaling)
                kept = self._tables = angles.cos() * scaling, angles.sin() * scaling
        return kept[0][:, :count], kept[1][:, :count]

    def of_slot(self, slot: int, channels: Tensor, key: object, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin ``[1, 1, P/2]`` of one slot, kept because most layers want the same of a token.

        Args:
            slot: the slot.
            channels: int64 ``[P/2]``, each pair's frequency.
            key: what says that two layers' channels are the same.
            like: a tensor of the dtype.
        """
        wanted = (slot, key, like.dtype, channels.device)
        if self._latest is None or self._latest[0] != wanted:
            with torch.inference_mode(False), torch.no_grad():
                cos, sin = (
                    table.narrow(1, slot, 1).index_select(2, channels).to(like.dtype)
                    for table in self.tables(slot + 1, channels.device)
                )
            self._latest = wanted, (cos, sin)
        return self._latest[1]


class CodedLayer(GrowingLayer):
    """One layer's codes, as the layer's keys ``[B, 1, T, bytes]``, and the wide values of the first tokens.

    Args:
        code: of the layer.
        max_length: allocate memory for so many tokens, and refuse more; when None, memory is doubled as needed.
    """

    tensor_names = ("keys", "values", "wide", "first")

    def __init__(self, code: TransformCode, max_length: int | None = None) -> None:
        super().__init__(max_length)
        self.code = code
        self.wide: Tensor | None = None  # [B, SINKS, W], bfloat16
        self.first: Tensor | None = None  # [B], the slot of each sequence's first token

    def append(self, states: Tensor, first: Tensor) -> None:
        """Code new tokens and store them.

        Args:
            states: ``[B, 1, S, W]``.
            first: int64 ``[B]``, the slot of each sequence's first token; later calls need not repeat it.

        Raises:
            ArgumentError: there would be more than ``max_length`` tokens, or the batch size is another one.
        """
        begin = self.get_seq_length()
        codes = self.code.encode(states)
        self.update(codes, codes[..., :0])
        if begin == 0 or self.first is None or self.wide is None:
            self.first = first.clone()
            self.wide = states.new_zeros(len(states), SINKS, states.shape[-1], dtype=torch.bfloat16)
            self._last_wide = int(first.max()) + SINKS - 1  # the last slot that may have a wide value
        if begin <= self._last_wide:
            self.wide = _with_wide(self.wide, states, self.first, begin)

    @property
    def stored(self) -> tuple[Tensor, Tensor, Tensor]:
        """What is stored: codes ``[B, 1, T, bytes]``, wide values ``[B, SINKS, W]`` and first slots ``[B]``."""
        assert self.first is not None
        assert self.wide is not None
        return self.keys, self.wide, self.first

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.wide = self.first = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence so many times."""
        super().batch_repeat_interleave(repeats)
        if self.wide is not None and self.first is not None:
            self.wide, self.first = self.wide.repeat_interleave(repeats, 0), self.first.repeat_interleave(repeats, 0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some of the sequences."""
        super().batch_select_indices(indices)
        if self.wide is not None and self.first is not None:
            indices = indices.to(self.wide.device)
            self.wide, self.first = self.wide[indices], self.first[indices]


def decoded(code: TransformCode, stored: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """The values of all tokens ``[B, 1, T, W]``, before rotation.

    Args:
        code: of the layer.
        stored: see `CodedLayer.stored`.
        dtype: of the values.
    """
    codes, wide, first = stored
    return overlaid(code.decode(codes, dtype), wide.to(dtype), first, 0)


def rounded(code: TransformCode, states: Tensor, first: Tensor, begin: int) -> Tensor:
    """Values ``[B, 1, S, W]`` as a cache would give them back; derivatives pass as if they were not rounded.

    Args:
        code: of the layer.
        states: the values.
        first: int64 ``[B]``, the slot of each sequence's first token.
        begin: the slot of the first of the values.
    """
    own = states.detach()
    none = own.new_zeros(len(own), SINKS, own.shape[-1], dtype=torch.bfloat16)
    wide = _with_wide(none, own, first, begin).to(own.dtype)
    values = overlaid(code.rounded(own), wide, first, begin)
    return states + (values - own) if states.requires_grad else values


def overlaid(values: Tensor, wide: Tensor, first: Tensor, begin: int) -> Tensor:
    """Values ``[B, 1, T, W]`` of slots from ``begin`` on, those of each sequence's first tokens replaced."""
    slots = first[:, None] + torch.arange(SINKS, device=first.device) - begin  # [B, SINKS]
    inside = (slots >= 0) & (slots < values.shape[2])
    rows, places = inside.nonzero(as_tuple=True)
    if len(rows):
        values = values.clone() if values.is_inference() and not torch.is_inference_mode_enabled() else values
        values[rows, 0, slots[rows, places]] = wide[rows, places]
    return values


def first_slots(mask: Tensor | None, batch: int, device: torch.device) -> Tensor:
    """The slot of each sequence's first token: the first one that any query sees, int64 ``[B]``.

    Args:
        mask: bool ``[B, 1, S, T]`` or ``[B, T]``; None without padding.
        batch: B.
        device: of the result.
    """
    if mask is None:
        return torch.zeros(batch, dtype=torch.int64, device=device)
    seen = mask if mask.dim() == 2 else mask.flatten(1, 2).any(1)
    return (seen != 0).to(torch.int64).argmax(-1).expand(batch)


def _with_wide(wide: Tensor, states: Tensor, first: Tensor, begin: int) -> Tensor:
    """The wide values of first tokens, of which some may be among new ones at slots from ``begin`` on."""
    slots = first[:, None] + torch.arange(SINKS, device=first.device) - begin  # [B, SINKS]
    inside = (slots >= 0) & (slots < states.shape[2])
    places = slots.clamp(0, states.shape[2] - 1)[..., None].expand(-1, -1, states.shape[-1])
    return torch.where(inside[..., None], states[:, 0].gather(1, places).to(torch.bfloat16), wide)


class CodedStates:
    """One layer of a cache, or none at all, as a layer with a code sees it
    (`headwise.runtime.attention.base.CacheLike`).

    Values are rounded whether they are stored as codes, wide in another kind of cache, or not at all.

    Args:
        code: of the layer.
        past: a transformers cache, or None.
        layer_idx: the layer's index in it.
        mask: of the call, as bool.
    """

    def __init__(self, code: TransformCode, past: Any, layer_idx: int, mask: Tensor | None) -> None:
        self._code, self._past, self._layer_idx, self._mask = code, past, layer_idx, mask

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return 0 if self._past is None else int(self._past.get_seq_length(self._layer_idx))

    def update(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Append values ``[B, 1, S, W]``, and return those of all tokens, or `CodedLayer.stored`.

        Raises:
            ArgumentError: the cache was made for a model with other codes, or see `CodedLayer.append`.
        """
        (states,) = new
        begin = self.length
        layer = None if self._past is None else self._past.layers[self._layer_idx]
        kept = layer.first if begin and isinstance(layer, CodedLayer) else None
        first = first_slots(self._mask, len(states), states.device) if kept is None else kept
        if isinstance(layer, CodedLayer):
            self._refuse_other(layer)
            layer.append(states, first)
            return layer.stored
        values = rounded(self._code, states, first, begin)
        if self._past is None:
            return (values,)
        stored = self._past.update(values, values[..., :0], self._layer_idx)[0]
        return (stored if self._mask is not None else stored[:, :, : begin + states.shape[2]],)

    def _refuse_other(self, layer: CodedLayer) -> None:
        """Refuse a layer that codes values in another way than this model reads them."""
        if layer.code is self._code:
            return
        if not layer.code.equals(self._code):
            rule = "was made for another model, whose codes are not this one's; make a new cache"
            raise ArgumentError("past_key_values", f"layer {self._layer_idx}", rule)
        layer.code = self._code  # of a copy of the model

    def views(self) -> tuple[Tensor, ...]:
        """All values, of a cache that holds some, or `CodedLayer.stored`."""
        layer = self._past.layers[self._layer_idx]
        return layer.stored if isinstance(layer, CodedLayer) else (layer.keys,)
