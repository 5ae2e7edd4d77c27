"""Attention to tokens in headwise's codes, in the pages of a paged cache; torch and headwise's codes and kernels.

A page is ``[N, C]`` bytes: the codes of each of its N tokens. A page says all that a cache knows of its tokens:
engines may share it among sequences, move it and store it without knowing what it means.

Keys are coded before they are rotated, and rotated by their slots when they are read. A kernel of headwise's attends
to few new tokens of several requests at once, from codes; for many, a request's codes are decoded first. New tokens
too are attended to as their codes are decoded, so that a token's result depends neither on how a prompt is cut nor on
what is cached already.

Shapes: Q new tokens of all requests, n requests, S new tokens and T all tokens of each, H query heads, K key–value
heads, D head dim, V value dim, R latent rank, P rotary dims, W values of a token, F frequencies of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headwise.runtime.kernels.mask import Scoring
from headwise.runtime.kernels.native.abi import TURN
from headwise.runtime.kernels.pages import Pages
from headwise.runtime.kernels.sdpa import FEW_TOKENS
from headwise.runtime.quantization import TransformCode
from headwise.runtime.quantization.codec import Stored
from headwise.runtime.quantization.transform_code import heads_shape, latent_shape
from headwise.runtime.quantization.trellis_format import KeyRotation, TrellisFormat
from headwise_vllm.paged import (
    Batch,
    Decoders,
    absorbed_query,
    attend_to_heads,
    attend_to_latents,
    decoded_values,
    rotated,
)


def slot_tables(inv_freq: Tensor, factor: float, slots: int) -> tuple[Tensor, Tensor]:
    """cos and sin of slots of a cache, float32 ``[slots, F]``; the layers of a model share them.

    Args:
        inv_freq: ``[F]``, the model's rotary frequencies.
        factor: multiplies cos and sin.
        slots: how many; at least as many as keys are ever rotated by.
    """
    angles = torch.arange(max(slots, TURN), dtype=torch.float32, device=inv_freq.device)[:, None] * inv_freq.float()
    return angles.cos() * factor, angles.sin() * factor


def key_rotation(tables: tuple[Tensor, Tensor], channels: Sequence[int]) -> KeyRotation | None:
    """How a layer's keys are rotated; None where they are not.

    Args:
        tables: see `slot_tables`.
        channels: of each rotary pair, the index of the model's frequency.
    """
    if not channels:
        return None
    frequency = torch.tensor(channels, device=tables[0].device)
    cos, sin = (table[:TURN, frequency] for table in tables)
    return KeyRotation(*tables, frequency, (cos / cos[:1], sin / cos[:1]))


class CodedPages:
    """The pages of a layer whose values are coded.

    Args:
        code: the code of the layer's values.
        rotation: of its keys; None where they are not rotated.
        shape: sections and parts that the code must have.

    Raises:
        ValueError: the code is one of another layer, or stores first tokens without codes.
    """

    def __init__(
        self,
        code: TransformCode,
        rotation: KeyRotation | None,
        shape: tuple[tuple[int, ...], tuple[int, ...]],
    ) -> None:
        if (code.sections, code.parts) != shape:
            raise ValueError(f"kv_cache.safetensors: sections = {code.sections}: must be {shape[0]}")
        if code.wide_tokens:
            raise ValueError("kv_cache.safetensors: is of format 1, which pages cannot hold; convert the model again")
        self.code, self.rotation, self.format = code, rotation, TrellisFormat(code)

    @property
    def row_bytes(self) -> int:
        """C, the bytes of a token's row in a page."""
        return self.code.token_bytes

    def store(self, cache: Tensor, states: Tensor, batch: Batch) -> None:
        """Code and write new tokens.

        Args:
            cache: uint8 ``[pages, 1, N, C]``.
            states: ``[Q, W]``, keys not rotated.
            batch: the batch that the tokens are of.
        """
        self.code.write(states, cache[:, 0], batch.slots.long(), batch.are_first)

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        batch: Batch,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Attend to the codes of each request, causally.

        Args:
            query: ``[Q, H, …]``, rotated.
            cache: uint8 ``[pages, 1, N, C]``; it holds the new tokens.
            batch: the batch that the new tokens are of.
            scale: multiplies the scores.
            window: the latest tokens that a query attends to; None for all.

        Returns:
            ``[Q, H, V]``; rows of no request are 0.
        """
        S, reads_codes = batch.new, self._reads_codes(query, cache)
        if reads_codes and 0 < S <= FEW_TOKENS:
            rows = self._absorbed(query).unflatten(0, (-1, S))
            pages = Pages(batch.block_table.int(), batch.lengths)
            mixed = self._attend_to_codes(rows, cache, pages, scale, window)
            return self._values(mixed.flatten(0, 1))
        out = query.new_zeros(*query.shape[:2], self._value_dim())
        groups = batch.groups(FEW_TOKENS if reads_codes else 0)
        for new, group in groups.items():
            requests = torch.tensor(group, device=query.device)
            rows = torch.tensor([batch.requests[at].begin for at in group], device=query.device)[:, None]
            rows = rows + torch.arange(new, device=query.device)  # [n, S]
            absorbed = self._absorbed(query[rows].flatten(0, 1)).unflatten(0, rows.shape)
            pages = Pages(batch.block_table[requests].int(), batch.lengths[requests])
            mixed = self._attend_to_codes(absorbed, cache, pages, scale, window)
            out[rows] = self._values(mixed.flatten(0, 1)).unflatten(0, rows.shape)
        together = {at for group in groups.values() for at in group}
        for at, request in enumerate(batch.requests):
            if request.new and at not in together:
                own = query[request.begin : request.end]
                values = self.decoded(cache, batch.block_table[at], request.length, query.dtype)
                out[request.begin : request.end] = self._attend_to_values(own, values, scale=scale, window=window)
        return out

    def decoded(self, cache: Tensor, pages: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """The values of one request's tokens, ``[T, W]``, keys not rotated.

        Args:
            cache: uint8 ``[pages, 1, N, C]``.
            pages: ``[most pages]``, those of the request in their order.
            length: T.
            dtype: the dtype of the values.
        """
        own = pages[: -(-length // cache.shape[2])].long()
        codes = cache[own, 0].flatten(0, 1)[:length]
        return self.code.decode(codes, dtype, torch.arange(length, device=codes.device) == 0)

    def _reads_codes(self, query: Tensor, cache: Tensor) -> bool:
        """Whether a kernel attends to codes of few new tokens."""
        return self.format.can_attend_to(query[None, :1], (cache, cache), None, needs_grad=False)

    def _attend_to_codes(
        self, query: Tensor, cache: Tensor, pages: Pages, scale: float, window: int | None
    ) -> Tensor:
        """Attend to codes of several requests as they lie in their pages: ``[n, S, H, …]``, as the queries come."""
        nothing = torch.empty(query.shape[0], 0, self.code.width, dtype=torch.bfloat16, device=query.device)
        first = torch.zeros(query.shape[0], dtype=torch.int64, device=query.device)
        stored = Stored((cache, cache[..., :0], nothing, first), (self.code.width, 0), query.dtype)
        scoring = Scoring(None, True, scale, window)
        return self.format.attend(query.transpose(1, 2), stored, scoring, self.rotation, pages=pages).transpose(1, 2)

    def _rotated_keys(self, keys: Tensor) -> Tensor:
        """Keys ``[T, …, P]`` rotated by their slots."""
        if self.rotation is None:
            return keys
        cos, sin = (table[: len(keys), self.rotation.frequency] for table in self.rotation[:2])
        between = (1,) * (keys.dim() - 2)
        return rotated(keys, *(table.unflatten(0, (-1, *between)) for table in (cos, sin)))

    def _value_dim(self) -> int:
        """V."""
        raise NotImplementedError

    def _absorbed(self, query: Tensor) -> Tensor:
        """Queries ``[Q, H, …]`` as the kernel takes them."""
        return query

    def _values(self, mixed: Tensor) -> Tensor:
        """The values ``[Q, H, V]`` of what the kernel returns."""
        return mixed

    def _attend_to_values(self, query: Tensor, values: Tensor, *, scale: float, window: int | None) -> Tensor:
        """Attend to the decoded values ``[T, W]`` of one request's tokens: ``[S, H, V]``."""
        raise NotImplementedError


class CodedLatents(CodedPages):
    """Latents and rotary keys in codes.

    Args:
        code: the code of the layer's latents and rotary keys.
        rotation: of the keys; None where P is 0.
        rank: R.
        rotary: P.

    Attributes:
        decoders: gives the decoders of the layer's latents as they are now; whoever attends sets it.

    Raises:
        ValueError: the code is one of another layer.
    """

    decoders: Callable[[], Decoders]

    def __init__(self, code: TransformCode, rotation: KeyRotation | None, rank: int, rotary: int) -> None:
        super().__init__(code, rotation, latent_shape(rank, rotary))
        self.rank = rank

    def _value_dim(self) -> int:
        return self.decoders().values.shape[1]

    def _absorbed(self, query: Tensor) -> Tensor:
        return absorbed_query(query, self.decoders())

    def _values(self, mixed: Tensor) -> Tensor:
        return decoded_values(mixed, self.decoders())

    def _attend_to_values(self, query: Tensor, values: Tensor, *, scale: float, window: int | None) -> Tensor:
        latents = torch.cat((values[:, : self.rank], self._rotated_keys(values[:, self.rank :])), dim=-1)
        return attend_to_latents(query, latents, self.decoders(), window=window, scale=scale)


class CodedHeads(CodedPages):
    """Keys and values of heads in codes.

    Args:
        code: the code of all heads' keys and values.
        rotation: of the keys; None where they are not rotated.
        heads: K.
        head_dim: D.
        value_dim: V.

    Raises:
        ValueError: the code is one of another layer.
    """

    def __init__(
        self, code: TransformCode, rotation: KeyRotation | None, heads: int, head_dim: int, value_dim: int
    ) -> None:
        super().__init__(code, rotation, heads_shape(heads, head_dim, value_dim))
        self.heads, self.head_dim, self.value_dim = heads, head_dim, value_dim

    def _value_dim(self) -> int:
        return self.value_dim

    def _attend_to_values(self, query: Tensor, values: Tensor, *, scale: float, window: int | None) -> Tensor:
        keys, values = (
            part.unflatten(-1, (self.heads, -1))
            for part in values.split_with_sizes((self.heads * self.head_dim, self.heads * self.value_dim), -1)
        )
        return attend_to_heads(query, self._rotated_keys(keys), values, window=window, scale=scale)
