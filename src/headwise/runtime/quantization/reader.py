"""Attention to a layer's codes as they are stored, where a kernel can read them: on a CPU, and latents on a GPU.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim, R latent rank,
P rotary dims, F frequencies of the model.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from headwise.runtime.kernels.gpu import LatentLayout, attend_latents, why_not_latents
from headwise.runtime.kernels.mask import as_bool_mask
from headwise.runtime.kernels.native import are_plain, why_not
from headwise.runtime.kernels.native.codes.attention import CodedLayout, attend_coded
from headwise.runtime.kernels.native.codes.heads import HeadsLayout, attend_heads
from headwise.runtime.kernels.native.codes.sizes import TURN
from headwise.runtime.kernels.packed import FEW_TOKENS
from headwise.runtime.quantization.layout import heads_layout, kernel_layout, latent_layout
from headwise.runtime.quantization.stored import is_on_gpu
from headwise.runtime.quantization.transform_code import TransformCode

_Layout = TypeVar("_Layout")
_CPU = torch.device("cpu")


class Slots(Protocol):
    """The rotation of a cache's slots, whose frequencies may change.

    Attributes:
        version: rises when they do.
    """

    version: int

    def tables(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 ``[1, count, F]``, of so many slots."""
        ...


class CodeReader(Generic[_Layout]):
    """What the readers of both mechanisms share.

    Args:
        code: of the layer.
        frequencies: each rotary pair's index among the model's frequencies.
        slots: how slots are rotated, where the layer has rotary dims.
    """

    def __init__(self, code: TransformCode, frequencies: list[int], slots: Slots | None) -> None:
        self._code, self._slots = code, slots if frequencies else None
        with torch.inference_mode(False):  # a tensor made in inference mode cannot be used elsewhere
            self._frequency = torch.tensor(frequencies, dtype=torch.int64)
        self._layout: _Layout | None = None
        self._version = 0

    def _new_layout(self) -> _Layout | None:
        """How the kernel reads the code; None where it cannot."""
        raise NotImplementedError

    def can_read(self, states: Tensor, stored: tuple[Tensor, ...], mask: Tensor | None, *, needs_grad: bool) -> bool:
        """Whether a kernel can attend to the codes, and is the fastest way: for few queries.

        Args:
            states: ``[B, S, hidden size]`` of the new tokens.
            stored: codes, wide values and first slots; see `attend`.
            mask: of the call.
            needs_grad: whether gradients are needed.
        """
        if states.shape[1] > FEW_TOKENS or why_not(states.dtype, states.device, needs_grad=needs_grad) is not None:
            return False
        if not are_plain(states, *stored, mask):
            return False
        if self._layout is None or self._version != self._rotation_now:
            with torch.inference_mode(False), torch.no_grad():
                self._layout, self._version = self._new_layout(), self._rotation_now
        return self._layout is not None

    @property
    def _rotation_now(self) -> int:
        """The version of the slots' rotation, which a layout is made for."""
        return 0 if self._slots is None else self._slots.version

    def _turn(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """cos and sin ``[TURN, P/2]`` of the first slots, without the factor of a scaled rotary embedding."""
        if self._slots is None:
            return None
        tables = self._slots.tables(TURN, device)
        cos, sin = (table[0, :TURN, self._frequency.to(table.device)] for table in tables)
        return cos / cos[:1], sin / cos[:1]

    def _call(
        self, query: Tensor, stored: tuple[Tensor, ...], mask: Tensor | None
    ) -> tuple[Tensor | None, tuple[Tensor, Tensor]]:
        """The mask as the kernels take it, and cos and sin ``[slots, F]``."""
        B, H, S, _ = query.shape
        T = stored[0].shape[2]
        mask = None if mask is None else as_bool_mask(mask, (B, H, S, T))
        if self._slots is None:
            none = torch.empty(1, 0, device=query.device)
            return mask, (none, none)
        cos, sin = self._slots.tables(T, query.device)
        return mask, (cos[0], sin[0])


class LatentReader(CodeReader[CodedLayout]):
    """Attends to the codes of one layer of MLA.

    Args:
        code: of the layer.
        rank: R.
        frequencies: see `CodeReader`.
        slots: see `CodeReader`.
    """

    def __init__(self, code: TransformCode, rank: int, frequencies: list[int], slots: Slots | None) -> None:
        super().__init__(code, frequencies, slots)
        self._rank = rank
        self._on_gpu: LatentLayout | None = None
        self._version_on_gpu = 0

    def _new_layout(self) -> CodedLayout | None:
        return kernel_layout(self._code, self._rank, self._turn(_CPU))

    def can_read(self, states: Tensor, stored: tuple[Tensor, ...], mask: Tensor | None, *, needs_grad: bool) -> bool:
        """See `CodeReader.can_read`."""
        if not is_on_gpu(states):
            return super().can_read(states, stored, mask, needs_grad=needs_grad)
        if (
            states.shape[1] > FEW_TOKENS
            or needs_grad
            or why_not_latents(states, stored, mask, self._rank) is not None
        ):
            return False
        is_elsewhere = self._on_gpu is None or self._on_gpu.ends.device != states.device
        if is_elsewhere or self._version_on_gpu != self._rotation_now:
            with torch.inference_mode(False), torch.no_grad():
                frequency = self._frequency.to(states.device)
                self._on_gpu = latent_layout(self._code, self._rank, self._turn(states.device), frequency)
                self._version_on_gpu = self._rotation_now
        return self._on_gpu is not None

    def attend(
        self,
        query: Tensor,
        stored: tuple[Tensor, ...],
        mask: Tensor | None,
        *,
        is_causal: bool,
        scale: float,
        has_sums: bool,
    ) -> Tensor:
        """Attend to codes that `can_read` said yes to; see `attend_coded` and `attend_latents`.

        Args:
            query: absorbed and rotated by slots, ``[B, H, S, R + P]`` or ``[B, H, S, P]``.
            stored: codes ``[B, 1, T, bytes]``, wide values ``[B, sinks, R + P]`` and first slots ``[B]``.
            mask: ``[B, T]`` or broadcastable to ``[B, H, S, T]``.
            is_causal: apply the bottom-right causal mask.
            scale: multiplies the scores.
            has_sums: add the sum of each row's weights as a last column.

        Returns:
            The mixed latents ``[B, H, S, R]``, or ``R + 1``.
        """
        mask, tables = self._call(query, stored, mask)
        codes, wide, first = stored
        if is_on_gpu(query):
            assert self._on_gpu is not None
            call = (tables, mask, is_causal, scale)
            return attend_latents(query, codes, wide, first, self._on_gpu, *call, has_sums=has_sums)
        assert self._layout is not None
        options = (tables, self._frequency, mask, is_causal, scale)
        return attend_coded(query, codes, wide, first, self._layout, *options, has_sums=has_sums)


class HeadsReader(CodeReader[HeadsLayout]):
    """Attends to the codes of one layer of MHA, GQA or MQA.

    Args:
        code: of the layer.
        shapes: ``(K, D)`` of the keys and ``(K, V)`` of the values.
        frequencies: see `CodeReader`.
        slots: see `CodeReader`.
    """

    def __init__(
        self,
        code: TransformCode,
        shapes: tuple[tuple[int, int], ...],
        frequencies: list[int],
        slots: Slots | None,
    ) -> None:
        super().__init__(code, frequencies, slots)
        self._shapes = shapes

    def _new_layout(self) -> HeadsLayout | None:
        return heads_layout(self._code, self._shapes, self._turn(_CPU))

    def attend(
        self, query: Tensor, stored: tuple[Tensor, ...], mask: Tensor | None, *, is_causal: bool, scale: float
    ) -> Tensor:
        """Attend to codes that `can_read` said yes to; see `attend_heads`.

        Args:
            query: rotated by slots, ``[B, H, S, D]``.
            stored: codes ``[B, 1, T, bytes]``, wide values ``[B, sinks, K · (D + V)]`` and first slots ``[B]``.
            mask: ``[B, T]`` or broadcastable to ``[B, H, S, T]``.
            is_causal: apply the bottom-right causal mask.
            scale: multiplies the scores.

        Returns:
            ``[B, H, S, V]``.
        """
        assert self._layout is not None
        mask, tables = self._call(query, stored, mask)
        codes, wide, first = stored
        return attend_heads(query, codes, wide, first, self._layout, tables, self._frequency, mask, is_causal, scale)
