"""Attention to tokens in headwise's codes, in the pages of a paged cache; torch and headwise's codes and kernels.

Keys are coded before they are rotated, and rotated by their slots when they are read. A kernel of headwise's attends
to few new tokens of several requests at once, from codes; for many, a request's codes are decoded first. New tokens
too are attended to as their codes are decoded, so that a token's result depends neither on how a prompt is cut nor on
what is cached already.

Shapes: Q new tokens of all requests, n requests, S new tokens and T all tokens of each, H query heads, K key–value
heads, D head dim, V value dim, R latent rank, P rotary dims, W values of a token, F frequencies of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.runtime.kernels.mask import Scoring
from headwise.runtime.kernels.native.abi import TURN
from headwise.runtime.kernels.pages import Pages
from headwise.runtime.kernels.sdpa import FEW_TOKENS
from headwise.runtime.quantization import SINKS, TransformCode
from headwise.runtime.quantization.codec import Stored
from headwise.runtime.quantization.groups import is_on_gpu
from headwise.runtime.quantization.transform_code import (
    KeyRotation,
    TrellisFormat,
    heads_shape,
    latent_shape,
    replace_first_tokens,
)
from headwise_vllm.paged import (
    Decoders,
    Request,
    absorbed_query,
    attend_to_heads,
    attend_to_latents,
    decoded_values,
    rotated,
)
from headwise_vllm.pages import gather_codes, gather_wide, row_bytes, write_codes, write_wide

DECODED = 1024
"""Tokens that are decoded at a time, which takes some 30 bytes a value."""


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
        ValueError: the code is one of another layer.
    """

    def __init__(
        self,
        code: TransformCode,
        rotation: KeyRotation | None,
        shape: tuple[tuple[int, ...], tuple[int, ...]],
    ) -> None:
        if (code.sections, code.parts) != shape:
            raise ValueError(f"kv_cache.safetensors: sections = {code.sections}: must be {shape[0]}")
        self.code, self.rotation, self.format = code, rotation, TrellisFormat(code)

    def row_bytes(self, tokens: int) -> int:
        """Bytes of a token's row in pages of so many tokens."""
        return row_bytes(self.code.token_bytes, 2 * SINKS * self.code.width, tokens)

    def store(self, cache: Tensor, states: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Code and write new tokens.

        Args:
            cache: uint8 ``[blocks, 1, N, row_bytes(N)]``.
            states: ``[Q, W]``, keys not rotated.
            slots: ``[Q]``, the number of a page times N, plus the place in it; below 0 for none.
            positions: ``[Q]``, of the tokens in their sequences.
        """
        kept = slots >= 0
        states, slots, positions = states[kept], slots[kept].long(), positions[kept].long()
        write_codes(cache, self.code.encode(states), slots)
        first = positions < SINKS
        if bool(first.any()):
            write_wide(cache, states[first], slots[first], positions[first], self.code.token_bytes)

    def attend_to_codes(
        self,
        query: Tensor,
        cache: Tensor,
        block_table: Tensor,
        length: Sequence[int],
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Attend to codes of several requests as they lie in their pages, by a kernel.

        Args:
            query: ``[n, S, H, …]``, of the last S tokens of each request, rotated; of latents, absorbed.
            cache: uint8 ``[blocks, 1, N, row_bytes(N)]``.
            block_table: ``[n, most blocks]``.
            length: T of each request.
            scale: multiplies the scores.
            window: the latest tokens that a query attends to; None for all.

        Returns:
            Mixed latents or values, ``[n, S, H, R or V]``.
        """
        S, longest = query.shape[1], max(length)
        lengths = torch.tensor(length, dtype=torch.int32, device=query.device)
        if is_on_gpu(query):
            scoring = Scoring(None, True, scale, window)
        else:
            last = lengths[:, None, None, None] - S + torch.arange(S)[:, None]  # that a query sees, [n, 1, S, 1]
            token = torch.arange(longest)
            mask = token <= last
            if window is not None:
                mask = mask & (token > last - window)
            scoring = Scoring(mask, False, scale)
        codes = cache[..., : self.code.token_bytes]
        stored = Stored((codes, codes[..., :0], *self._wide(cache, block_table)), (self.code.width, 0), query.dtype)
        pages = Pages(block_table.int(), lengths, longest)
        return self.format.attend(query.transpose(1, 2), stored, scoring, self.rotation, pages=pages).transpose(1, 2)

    def decoded(self, cache: Tensor, block_table: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """The values of one request's tokens, ``[T, W]``, keys not rotated.

        Args:
            cache: uint8 ``[blocks, 1, N, row_bytes(N)]``.
            block_table: ``[most blocks]``.
            length: T.
            dtype: of the result.
        """
        codes = gather_codes(cache, block_table[None], length, self.code.token_bytes)
        wide, first = self._wide(cache, block_table[None])
        values = torch.empty(1, 1, length, self.code.width, dtype=dtype, device=codes.device)
        for at in range(0, length, DECODED):
            values[:, :, at : at + DECODED] = self.code.decode(codes[:, :, at : at + DECODED], dtype)
        return replace_first_tokens(values, wide.to(dtype), first, 0)[0, 0]

    def in_groups(self, requests: Sequence[Request], query: Tensor, cache: Tensor) -> list[list[int]]:
        """Requests that a kernel attends to, those of as many new tokens together: few of them.

        Args:
            requests: of the batch.
            query: of the batch.
            cache: uint8 ``[blocks, 1, N, row_bytes(N)]``.
        """
        if not self.format.can_attend_to(query[None, :1], (cache,) * 4, None, needs_grad=False):
            return []
        groups: dict[int, list[int]] = {}
        for at, request in enumerate(requests):
            if 0 < request.new <= FEW_TOKENS:
                groups.setdefault(request.new, []).append(at)
        return [*groups.values()]

    def _wide(self, cache: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """The values of some requests' first tokens, bfloat16 ``[n, SINKS, W]``, and their slots, 0."""
        wide = gather_wide(cache, block_table, SINKS, self.code.token_bytes, self.code.width)
        return wide, torch.zeros(len(wide), dtype=torch.int64, device=wide.device)

    def _rotated_keys(self, keys: Tensor) -> Tensor:
        """Keys ``[T, …, P]`` rotated by their slots."""
        if self.rotation is None:
            return keys
        cos, sin = (table[: len(keys), self.rotation.frequency] for table in self.rotation[:2])
        between = (1,) * (keys.dim() - 2)
        return rotated(keys, *(table.unflatten(0, (-1, *between)) for table in (cos, sin)))


class CodedLatents(CodedPages):
    """Latents and rotary keys in codes.

    Args:
        code: the code of the layer's latents and rotary keys.
        rotation: of the keys; None where P is 0.
        rank: R.
        rotary: P.

    Raises:
        ValueError: the code is one of another layer.
    """

    def __init__(self, code: TransformCode, rotation: KeyRotation | None, rank: int, rotary: int) -> None:
        super().__init__(code, rotation, latent_shape(rank, rotary))
        self.rank = rank

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        block_table: Tensor,
        requests: Sequence[Request],
        decoders: Decoders,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Attend to the latents of each request, causally; see `headwise_vllm.paged.attend`."""
        out = query.new_zeros(len(query), *decoders.values.shape[:2])
        groups = self.in_groups(requests, query, cache)
        for group in groups:
            rows, lengths = rows_of(requests, group, query.device), [requests[at].length for at in group]
            absorbed = absorbed_query(query[rows].flatten(0, 1), decoders).unflatten(0, rows.shape)
            mixed = self.attend_to_codes(absorbed, cache, block_table[group], lengths, scale=scale, window=window)
            out[rows] = decoded_values(mixed.flatten(0, 1), decoders).unflatten(0, rows.shape)
        for at in others(requests, groups):
            begin, end = requests[at].begin, requests[at].end
            values = self.decoded(cache, block_table[at], requests[at].length, query.dtype)
            latents = torch.cat((values[:, : self.rank], self._rotated_keys(values[:, self.rank :])), dim=-1)
            out[begin:end] = attend_to_latents(query[begin:end], latents, decoders, window=window, scale=scale)
        return out


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

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        block_table: Tensor,
        requests: Sequence[Request],
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Attend to the keys and values of each request, causally; see `headwise_vllm.paged.attend`.

        Args:
            query: ``[Q, H, D]``, rotated.
            cache: uint8 ``[blocks, 1, N, row_bytes(N)]``; it holds the new tokens.
            block_table: ``[requests, most blocks]``, the blocks of each request in their order.
            requests: of the batch.
            scale: multiplies the scores.
            window: the latest tokens that are attended to; None for all.

        Returns:
            ``[Q, H, V]``.
        """
        out = query.new_zeros(*query.shape[:2], self.value_dim)
        groups = self.in_groups(requests, query, cache)
        for group in groups:
            rows, lengths = rows_of(requests, group, query.device), [requests[at].length for at in group]
            out[rows] = self.attend_to_codes(
                query[rows], cache, block_table[group], lengths, scale=scale, window=window
            )
        for at in others(requests, groups):
            begin, end = requests[at].begin, requests[at].end
            values = self.decoded(cache, block_table[at], requests[at].length, query.dtype)
            keys, values = (
                part.unflatten(-1, (self.heads, -1))
                for part in values.split_with_sizes((self.heads * self.head_dim, self.heads * self.value_dim), -1)
            )
            out[begin:end] = attend_to_heads(
                query[begin:end], self._rotated_keys(keys), values, window=window, scale=scale
            )
        return out


def rows_of(requests: Sequence[Request], group: list[int], device: torch.device) -> Tensor:
    """The new tokens of a group of requests, which have as many, by their numbers in the batch, ``[n, S]``."""
    begin = torch.tensor([requests[at].begin for at in group], device=device)
    return begin[:, None] + torch.arange(requests[group[0]].new, device=device)


def others(requests: Sequence[Request], groups: list[list[int]]) -> list[int]:
    """Requests with new tokens that are in no group."""
    taken = {at for group in groups for at in group}
    return [at for at, request in enumerate(requests) if request.new and at not in taken]
