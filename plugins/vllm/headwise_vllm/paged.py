"""Attention to latents that lie in the blocks of a paged cache; torch alone.

Shapes: Q new tokens of all requests, S of one, T its tokens in the cache, H heads, R latent rank, N content dims,
P rotary dims, V value dim, W = R + P.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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

    @property
    def new(self) -> int:
        """S, its new tokens."""
        return self.end - self.begin


@dataclass
class Batch:
    """The new tokens of some requests, and the pages that each one's tokens are in.

    What only the device knows, the lengths, is read on the host where requests have differing numbers of new tokens,
    and nowhere else: a CUDA graph may hold a step in which each has as many.

    Attributes:
        starts: ``[n + 1]``, on the host, where each request's new tokens begin in the batch, and their end.
        lengths: int32 ``[n]``, T of each request; 0 for one that pads the batch.
        block_table: int32 ``[n, most pages]``, the pages of each request in their order; behind its end anything.
        slots: ``[Q]``, where new tokens are stored: the number of a page times its tokens, plus the place in it;
            below 0 for tokens that pad the batch.
    """

    starts: Tensor
    lengths: Tensor
    block_table: Tensor
    slots: Tensor

    @cached_property
    def new(self) -> int:
        """S, where all requests have as many new tokens; 0 where they differ."""
        counts = self.starts.diff()
        return int(counts[0]) if len(counts) and bool((counts == counts[0]).all()) else 0

    @cached_property
    def requests(self) -> list[Request]:
        """Each request."""
        bounds = zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), self.lengths.tolist(), strict=True)
        return [Request(*bound) for bound in bounds]

    @cached_property
    def are_first(self) -> Tensor:
        """Which of the new tokens are the first of their requests, bool ``[Q]``."""
        if S := self.new:
            return (self.lengths[:, None] - S + torch.arange(S, device=self.lengths.device) == 0).flatten()
        ahead = self.starts[1:].repeat_interleave(self.starts.diff()) - torch.arange(int(self.starts[-1]))
        counts = self.starts.diff().to(self.lengths.device)
        return self.lengths.repeat_interleave(counts, output_size=len(ahead)) == ahead.to(self.lengths.device)

    def groups(self, most: int) -> dict[int, list[int]]:
        """The numbers of the requests that have up to so many new tokens, by how many they have."""
        groups: dict[int, list[int]] = {}
        for at, request in enumerate(self.requests):
            if 0 < request.new <= most:
                groups.setdefault(request.new, []).append(at)
        return groups


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

QUERIES = 512
"""Queries that share one mask."""

TOGETHER = 2**22
"""The most values of latents of several requests that are copied to be attended to at once."""

LEAST = 256
"""The fewest tokens of a part that one thread attends to."""


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
    together = _one_token_each(requests, cache.shape[-1], window)
    if together:
        rows = torch.tensor([requests[at].begin for at in together], device=query.device)
        lengths = torch.tensor([requests[at].length for at in together], device=query.device)
        tables = block_table[torch.tensor(together, device=block_table.device)]
        out[rows] = _next_tokens(query[rows], cache, tables, lengths, decoders, scale=scale)
    for at, (table, request) in enumerate(zip(block_table, requests, strict=False)):
        if not request.new or at in together:
            continue
        blocks = table[: -(-request.length // cache.shape[2])].long()
        latents = cache[blocks, 0].flatten(0, 1)[: request.length].to(query.dtype)  # [T, W]
        new = query[request.begin : request.end]
        out[request.begin : request.end] = attend_to_latents(new, latents, decoders, window=window, scale=scale)
    return out


def _one_token_each(requests: list[Request], width: int, window: int | None) -> list[int]:
    """The requests of one new token, where they are several, short and about as long: attended to at once."""
    found = [at for at, request in enumerate(requests) if request.new == 1]
    lengths = [requests[at].length for at in found]
    if len(found) < 2 or (window is not None and max(lengths) > window):
        return []
    padded = max(lengths) * len(lengths)
    return found if padded <= 2 * sum(lengths) and padded * width <= TOGETHER else []


def _next_tokens(
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    decoders: Decoders,
    *,
    scale: float,
) -> Tensor:
    """Attend to the latents of several requests, each with one new token, absorbed.

    Args:
        query: ``[n, H, N + P]``.
        cache: as for `attend`.
        tables: ``[n, most blocks]``.
        lengths: ``[n]``, T of each.
        decoders: of the layer.
        scale: multiplies the scores.

    Returns:
        ``[n, H, V]``.
    """
    R = decoders.keys.shape[2]
    longest = int(lengths.max())
    blocks = tables[:, : -(-longest // cache.shape[2])].long()
    latents = cache[blocks, 0].flatten(1, 2)[:, :longest].to(query.dtype)  # [n, T, W]
    token = torch.arange(longest, device=query.device)
    hidden = token >= lengths[:, None]
    latents.masked_fill_(hidden[..., None], 0)  # a request's last block may hold anything behind its end
    whole = absorbed_query(query, decoders)[:, None]  # [n, 1, H, W]
    seen, states = ~hidden[:, None, None], latents[:, None]
    mixed = F.scaled_dot_product_attention(whole, states, states, attn_mask=seen, scale=scale)[:, 0, :, :R]
    return decoded_values(mixed, decoders)


def absorbed_query(query: Tensor, decoders: Decoders) -> Tensor:
    """Queries ``[S, H, N + P]`` as queries of latents, ``[S, H, W]``."""
    N = decoders.keys.shape[1]
    return torch.cat((torch.einsum("shn,hnr->shr", query[..., :N], decoders.keys), query[..., N:]), dim=-1)


def decoded_values(mixed: Tensor, decoders: Decoders) -> Tensor:
    """The values ``[S, H, V]`` of mixed latents ``[S, H, R]``."""
    out = torch.einsum("shr,hvr->shv", mixed, decoders.values)
    return out if decoders.value_bias is None else out + decoders.value_bias


def attend_to_latents(
    query: Tensor, latents: Tensor, decoders: Decoders, *, window: int | None, scale: float
) -> Tensor:
    """Attend to the latents of one request, absorbed or with keys and values decoded, whichever needs fewer FLOPs.

    Args:
        query: ``[S, H, N + P]``, of the last S tokens.
        latents: ``[T, W]``.
        decoders: of the layer.
        window: the latest tokens that a query attends to; None for all.
        scale: multiplies the scores.

    Returns:
        ``[S, H, V]``.
    """
    S = len(query)
    if window is not None:  # what the first query does not see, no later one does
        latents = latents[-(window + S - 1) :]
        window = None if len(latents) <= window else window
    T = len(latents)
    N, R, V = decoders.keys.shape[1], decoders.keys.shape[2], decoders.values.shape[1]
    P = latents.shape[1] - R
    absorbed = S * T * (2 * R + P) + S * R * (N + V)
    expanded = S * T * (N + P + V) + T * R * (N + V)
    return (_absorbed if absorbed <= expanded else _expanded)(query, latents, decoders, window, scale)


def _absorbed(query: Tensor, latents: Tensor, decoders: Decoders, window: int | None, scale: float) -> Tensor:
    """Keys are latents, and so are values, of which the first R columns are decoded.

    A bias of keys adds the same to all scores of a query, which the softmax cancels. All heads have the same keys, so
    they are further queries of one head: torch's fused kernel then reads the latents once, with scores in float32.
    """
    S, T, (H, _, R) = len(query), len(latents), decoders.keys.shape
    whole = absorbed_query(query, decoders)
    size = max(1, WORKSPACE // (H * T))
    parts = []
    for at in range(0, S, size):
        rows = whole[at : at + size]
        seen = _visible(range(T - S + at, T - S + at + len(rows)), range(T), window, query.device)
        seen = None if seen is None else seen.repeat_interleave(H, dim=0)
        parts.append(_mixed_latents(rows.flatten(0, 1), latents, seen, scale)[:, :R].unflatten(0, (-1, H)))
    return decoded_values(torch.cat(parts), decoders)


def _mixed_latents(rows: Tensor, latents: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """Latents ``[T, W]`` weighed by the scores of ``rows`` ``[n, W]``, of which each sees all or those of a mask."""
    parts = min(torch.get_num_threads(), len(latents) // LEAST) if seen is None and rows.device.type == "cpu" else 1
    if parts < 2:
        one_head = latents[None, None]
        return F.scaled_dot_product_attention(rows[None, None], one_head, one_head, attn_mask=seen, scale=scale)[0, 0]
    # torch divides heads and rows among threads, not tokens: parts of the tokens are given as a batch.
    length = len(latents) // parts
    pieces = [latents[: parts * length].view(parts, 1, length, -1)]
    if parts * length < len(latents):
        pieces.append(latents[None, None, parts * length :])
    mixed, weight = [], []
    for piece in pieces:
        query = rows.expand(len(piece), 1, -1, -1)
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, piece, piece, scale=scale)
        mixed.append(out[:, 0].float())  # [parts, n, W]
        weight.append(logsumexp.view(len(piece), -1))  # [parts, n]
    shares = torch.cat(weight).softmax(0)[..., None]
    return (shares * torch.cat(mixed)).sum(0).to(rows.dtype)


def _expanded(query: Tensor, latents: Tensor, decoders: Decoders, window: int | None, scale: float) -> Tensor:
    """Every head's keys and values are decoded from the latents, a few heads at a time."""
    H = len(decoders.keys)
    values_of_head = 2 * len(latents) * max(query.shape[-1], decoders.values.shape[1])
    heads = max(1, WORKSPACE // values_of_head)
    parts = [
        _expanded_heads(query[:, at : at + heads], latents, decoders.of(at, at + heads), window, scale)
        for at in range(0, H, heads)
    ]
    return torch.cat(parts, dim=1)


def _expanded_heads(query: Tensor, latents: Tensor, decoders: Decoders, window: int | None, scale: float) -> Tensor:
    H, _, R = decoders.keys.shape
    keys = torch.einsum("tr,hnr->htn", latents[:, :R], decoders.keys)
    if decoders.key_bias is not None:
        keys = keys + decoders.key_bias[:, None]
    values = torch.einsum("tr,hvr->htv", latents[:, :R], decoders.values)
    if decoders.value_bias is not None:
        values = values + decoders.value_bias[:, None]
    keys = torch.cat((keys, latents[None, :, R:].expand(H, -1, -1)), dim=-1)
    return _causal(query, keys, values, window, scale)


def attend_to_heads(query: Tensor, keys: Tensor, values: Tensor, *, window: int | None, scale: float) -> Tensor:
    """Attend to the keys and values of one request, a few key–value heads at a time.

    Args:
        query: ``[S, H, D]``, of the last S tokens.
        keys: ``[T, K, D]``, rotated.
        values: ``[T, K, V]``.
        window: the latest tokens that a query attends to; None for all.
        scale: multiplies the scores.

    Returns:
        ``[S, H, V]``.
    """
    T, K, D = keys.shape
    group = query.shape[1] // K  # query heads of a key–value head
    heads = max(1, WORKSPACE // (2 * T * group * max(D, values.shape[2])))
    parts = []
    for at in range(0, K, heads):
        own = (x[:, at : at + heads].transpose(0, 1).repeat_interleave(group, 0) for x in (keys, values))
        parts.append(_causal(query[:, at * group : (at + heads) * group], *own, window, scale))
    return torch.cat(parts, dim=1)


def _causal(query: Tensor, keys: Tensor, values: Tensor, window: int | None, scale: float) -> Tensor:
    """Attend with queries ``[S, H, D]`` to keys ``[H, T, D]`` and values ``[H, T, V]``: ``[S, H, V]``."""
    S, T, V = len(query), keys.shape[1], values.shape[2]
    # torch's fused kernel for CPUs takes keys and values of one width.
    width = max(keys.shape[-1], V)
    query, keys, values = (
        F.pad(x, (0, width - x.shape[-1]))[None] for x in (query.transpose(0, 1), keys, values)
    )  # [1, H, S or T, width]
    if S == T and window is None:
        out = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)
        return out[0, ..., :V].transpose(0, 1)
    parts = []
    for at in range(0, S, QUERIES):  # keys that no query of a part sees are left out
        rows = range(T - S + at, T - S + min(at + QUERIES, S))
        tokens = range(0 if window is None else max(0, rows.start - window + 1), rows.stop)
        seen = _visible(rows, tokens, window, query.device)
        states = (query[:, :, at : at + QUERIES], *(x[:, :, tokens.start : tokens.stop] for x in (keys, values)))
        parts.append(F.scaled_dot_product_attention(*states, attn_mask=seen, scale=scale))
    return torch.cat(parts, dim=2)[0, ..., :V].transpose(0, 1)


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + P/2)`` of the last dim of ``[…, P]``, by cos and sin ``[…, P/2]`` in float32."""
    first, second = states.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(states.dtype)


def _visible(queries: range, tokens: range, window: int | None, device: torch.device) -> Tensor | None:
    """Which of some tokens each of some queries sees; None where they see all."""
    if len(queries) == 1 and tokens.stop <= queries.stop and (window is None or len(tokens) <= window):
        return None
    query = torch.arange(queries.start, queries.stop, device=device)[:, None]
    key = torch.arange(tokens.start, tokens.stop, device=device)
    seen = key <= query
    return seen if window is None else seen & (key > query - window)
