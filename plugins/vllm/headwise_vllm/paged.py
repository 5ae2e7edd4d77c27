"""Attention to latents that lie in the blocks of a paged cache; torch alone.

Shapes: Q new tokens of all requests, S of one, T its tokens in the cache, H heads, R latent rank, N content dims,
P rotary dims, V value dim, W = R + P.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Request:
    """One request of a batch.

    Attributes:
        begin: of its new tokens in the batch.
        end: the same, exclusive.
        length: T, its tokens in the cache, the new ones included.
    """

    begin: int
    end: int
    length: int


@dataclass(frozen=True)
class Decoders:
    """The decoders of a layer's latent.

    Attributes:
        keys: ``[H, N, R]``.
        values: ``[H, V, R]``.
        key_bias: ``[H, N]`` or None.
        value_bias: ``[H, V]`` or None.
    """

    keys: Tensor
    values: Tensor
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None

    def of(self, begin: int, end: int) -> Decoders:
        """Those of some heads."""
        rows = (self.keys, self.values, self.key_bias, self.value_bias)
        return Decoders(*(None if part is None else part[begin:end] for part in rows))  # type: ignore[arg-type]


WORKSPACE = 2**26
"""Values of keys and values that are decoded at once, and of a mask; more heads or queries go part after part."""


def store(cache: Tensor, latents: Tensor, slots: Tensor) -> None:
    """Write new tokens.

    Args:
        cache: ``[blocks, 1, tokens of a block, W]``.
        latents: ``[Q, W]``.
        slots: ``[Q]``, the number of a block times its tokens, plus the place in it; below 0 for none.
    """
    size, kept = cache.shape[2], slots >= 0
    slots = slots[kept]
    cache[slots // size, 0, slots % size] = latents[kept].to(cache.dtype)


def attend(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    requests: list[Request],
    decoders: Decoders,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend to the latents of each request, causally.

    Args:
        query: ``[Q, H, N + P]``, rotated.
        cache: ``[blocks, 1, tokens of a block, W]``; it holds the new tokens.
        block_table: ``[requests, most blocks]``, the blocks of each request in their order.
        requests: of the batch.
        decoders: of the layer.
        scale: multiplies the scores.
        window: the latest tokens that are attended to; None for all.

    Returns:
        ``[Q, H, V]``; rows of no request are 0.
    """
    H, V, _ = decoders.values.shape
    out = query.new_zeros(len(query), H, V)
    for table, request in zip(block_table, requests, strict=False):
        if request.begin == request.end:
            continue
        blocks = table[: -(-request.length // cache.shape[2])].long()
        latents = cache[blocks, 0].flatten(0, 1)[: request.length].to(query.dtype)  # [T, W]
        new = query[request.begin : request.end]
        seen = _visible(len(new), request.length, window, query.device)
        out[request.begin : request.end] = attend_to_latents(new, latents, decoders, seen, scale=scale)
    return out


def attend_to_latents(
    query: Tensor, latents: Tensor, decoders: Decoders, visible: Tensor | None, *, scale: float
) -> Tensor:
    """Attend to the latents of one request, absorbed or with keys and values decoded, whichever needs fewer FLOPs.

    Args:
        query: ``[S, H, N + P]``.
        latents: ``[T, W]``.
        decoders: of the layer.
        visible: ``[S, T]``, the tokens that each query sees; None for all.
        scale: multiplies the scores.

    Returns:
        ``[S, H, V]``.
    """
    S, T = len(query), len(latents)
    N, R, V = decoders.keys.shape[1], decoders.keys.shape[2], decoders.values.shape[1]
    P = latents.shape[1] - R
    absorbed = S * T * (2 * R + P) + S * R * (N + V)
    expanded = S * T * (N + P + V) + T * R * (N + V)
    return (_absorbed if absorbed <= expanded else _expanded)(query, latents, decoders, visible, scale)


def _absorbed(query: Tensor, latents: Tensor, decoders: Decoders, visible: Tensor | None, scale: float) -> Tensor:
    """Keys are latents, and so are values, of which the first R columns are decoded.

    A bias of keys adds the same to all scores of a query, which the softmax cancels. All heads have the same keys, so
    they are further queries of one head: torch's fused kernel then reads the latents once, with scores in float32.
    """
    S, (H, N, R) = len(query), decoders.keys.shape
    content = torch.einsum("shn,hnr->shr", query[..., :N], decoders.keys)
    whole = torch.cat((content, query[..., N:]), dim=-1)  # [S, H, W]
    one_head, size = latents[None, None], max(1, WORKSPACE // (H * len(latents)))
    parts = []
    for at in range(0, S, size):
        rows = whole[at : at + size].flatten(0, 1)[None, None]
        seen = None if visible is None else visible[at : at + size].repeat_interleave(H, dim=0)
        mixed = F.scaled_dot_product_attention(rows, one_head, one_head, attn_mask=seen, scale=scale)
        parts.append(mixed[0, 0, :, :R].unflatten(0, (-1, H)))
    out = torch.einsum("shr,hvr->shv", torch.cat(parts), decoders.values)
    return out if decoders.value_bias is None else out + decoders.value_bias


def _expanded(query: Tensor, latents: Tensor, decoders: Decoders, visible: Tensor | None, scale: float) -> Tensor:
    """Every head's keys and values are decoded from the latents, a few heads at a time."""
    H = len(decoders.keys)
    values_of_head = len(latents) * (query.shape[-1] + decoders.values.shape[1])
    heads = max(1, WORKSPACE // values_of_head)
    parts = [
        _expanded_heads(query[:, at : at + heads], latents, decoders.of(at, at + heads), visible, scale)
        for at in range(0, H, heads)
    ]
    return torch.cat(parts, dim=1)


def _expanded_heads(
    query: Tensor, latents: Tensor, decoders: Decoders, visible: Tensor | None, scale: float
) -> Tensor:
    H, _, R = decoders.keys.shape
    keys = torch.einsum("tr,hnr->htn", latents[:, :R], decoders.keys)
    if decoders.key_bias is not None:
        keys = keys + decoders.key_bias[:, None]
    values = torch.einsum("tr,hvr->htv", latents[:, :R], decoders.values)
    if decoders.value_bias is not None:
        values = values + decoders.value_bias[:, None]
    keys = torch.cat((keys, latents[None, :, R:].expand(H, -1, -1)), dim=-1)
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], attn_mask=visible, scale=scale
    )
    return out[0].transpose(0, 1)


def _visible(S: int, T: int, window: int | None, device: torch.device) -> Tensor | None:
    """The tokens ``[S, T]`` that the last S of T tokens see; None where they see all."""
    if S == 1 and (window is None or window >= T):
        return None
    queries = torch.arange(T - S, T, device=device)[:, None]
    keys = torch.arange(T, device=device)
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)
