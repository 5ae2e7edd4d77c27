"""One long context on several ranks: each holds some of its tokens, and every rank's part of the attention is joined.

A rank attends to its own tokens, and returns the mixed values with the logarithm of the sum of their exponentiated
scores; the softmax over all tokens is a mean of the ranks' outputs, weighed by these sums (split-KV, as
FlashDecoding does among the parts of one GPU).

Shapes: B batch, S new tokens, T tokens of this rank, H query heads, K cached heads.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.models.specs import ExpertLatentSpec
from headwise.runtime.attention import AttentionCache
from headwise.runtime.attention.base import AttentionLayer, CacheLike, Call, Weighed
from headwise.runtime.attention.rope import Rotation
from headwise.runtime.kernels import as_bool_mask
from headwise.runtime.parallel.heads import Group, all_reduced

Layer = TypeVar("Layer", bound=AttentionLayer)


class ContextShare:
    """The tokens of a context that this rank holds, as a layer's cache (`headwise.runtime.attention.base.CacheLike`).

    Tokens are dealt out in blocks, so that ranks hold equally many, and any token's rank is known without asking.

    Args:
        held: the cache of this rank's tokens.
        group: the ranks.
        block: tokens in each block.
    """

    def __init__(self, held: AttentionCache, group: Group = None, *, block: int = 64) -> None:
        if block < 1:
            raise ArgumentError("block", block, "must be at least 1")
        self.held, self.group, self._block = held, group, block
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._length = 0
        self._positions = torch.empty(0, dtype=torch.int64)

    @property
    def length(self) -> int:
        """The number of tokens that all ranks hold together."""
        return self._length

    @property
    def positions(self) -> Tensor:
        """The place in the context of each token that this rank holds, int64 ``[T]``."""
        return self._positions

    def update(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Append new tokens ``[B, heads, S, width]``, of which each rank keeps its own; what this rank holds."""
        length = self._length + new[0].shape[2]
        # The first rank has most. All ranks refuse together: one that went on would wait for the others.
        rounds, rest = divmod(length, self._block * self._ranks)
        if (most := rounds * self._block + min(rest, self._block)) > self.held.max_length:
            rule = f"must be at most {self.held.max_length}, the max_length of each rank's cache"
            raise ArgumentError("tokens of a rank", most, rule)
        places = torch.arange(self._length, length)
        mine = (places // self._block) % self._ranks == self._rank
        self._length = length
        self._positions = torch.cat((self._positions, places[mine]))
        if not bool(mine.any()):
            return self.views()
        rows = mine.nonzero()[:, 0].to(new[0].device)
        return self.held.update(*(tensor.index_select(2, rows) for tensor in new))

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's cache."""
        return self.held.nbytes

    def reset(self) -> None:
        """Forget all tokens."""
        self.held.reset()
        self._length, self._positions = 0, self._positions[:0]

    def views(self) -> tuple[Tensor, ...]:
        """What this rank holds, ``[B, heads, T, width]`` for each cached tensor."""
        return tuple(self.held.views())


def share_context(layer: Layer) -> Layer:
    """Let a layer attend to contexts whose tokens ranks share, in place; every rank has to call it.

    The layer is then called with a `ContextShare` as its cache, with the same tokens on all its ranks, and returns
    the same output on all. Its weights are not shared, or are those of a rank of `share_heads` over another group. It
    is meant for generation: nothing is differentiated. For example ``share_context(layer)``, and then
    ``layer(states, is_causal=True, cache=ContextShare(layer.new_cache(1, 65_536)))``.

    Args:
        layer: the layer.

    Raises:
        ArgumentError: the layer's scores are sums over experts, it has a sliding window, which is short anyway, or
            its cache is in codes.
    """
    spec = layer.spec
    if isinstance(spec, ExpertLatentSpec) and spec.rope is not None:
        raise ArgumentError("rope", spec.rope, "must be None: these scores are sums over experts of rotated keys")
    if spec.sliding_window is not None:
        raise ArgumentError("sliding_window", spec.sliding_window, "must be None: a window is held by one rank")
    if getattr(layer, "code", None) is not None:
        raise ArgumentError("code", "given", "must be None: codes are of all tokens together")
    share = _Share(layer)
    layer._refuse = share.refuse  # type: ignore[method-assign]
    layer._remember = share.remember  # type: ignore[method-assign]
    layer._kernel = share.kernel  # type: ignore[method-assign]
    if hasattr(layer, "impl"):
        setattr(layer, "impl", "absorbed")  # noqa: B010  # what is cached is what attention reads, token by token
    return layer


class _Share:
    """What a layer does in `share_context`, beside what it did before."""

    def __init__(self, layer: AttentionLayer) -> None:
        self._refused, self._remembered, self._attended = layer._refuse, layer._remember, layer._kernel
        self._as_mask = layer._as_mask
        self._cache: ContextShare | None = None
        self._mask: Tensor | None = None

    def refuse(
        self, call: Call, position_ids: Tensor | None, position_embeddings: Rotation | None, cache: CacheLike | None
    ) -> None:
        """See `AttentionLayer._refuse`; whether the context is shared is seen here.

        Raises:
            ArgumentError: the context is shared, and weights are asked for, or the call is not causal.
        """
        self._refused(call, position_ids, position_embeddings, cache)
        self._cache, self._mask = cache if isinstance(cache, ContextShare) else None, call.attention_mask
        for name, given, needed in (
            ("return_weights", call.return_weights, False),
            ("is_causal", call.is_causal, True),
        ):
            if self._cache is not None and given is not needed:
                raise ArgumentError(name, given, f"must be {needed}: ranks share the context")

    def remember(
        self, states: Tensor, source: Tensor | None, rotation: Rotation | None, cache: object
    ) -> tuple[Tensor, ...]:
        """See `AttentionLayer._remember`; a mask of another shape is refused before anything is cached."""
        if self._cache is not None and self._mask is not None:
            self._as_mask(self._mask, states, self._cache.length + states.shape[1])
        return self._remembered(states, source, rotation, cache)  # type: ignore[arg-type]

    def kernel(self, query: Tensor, key: Tensor, value: Tensor, call: Call, scale: float | None) -> Weighed:
        """See `AttentionLayer._kernel`."""
        cache = self._cache
        if cache is None:
            return self._attended(query, key, value, call, scale)
        S, places = query.shape[2], cache.positions.to(query.device)
        visible = places <= torch.arange(call.total - S, call.total, device=query.device)[:, None]  # [S, T]
        if call.attention_mask is not None:
            B, H = query.shape[:2]
            visible = visible & as_bool_mask(call.attention_mask, (B, H, S, call.total))[..., places]
        mixed, total = _attend_part(query, key, value, visible, scale)
        return _joined(mixed, total, cache.group).to(query.dtype), None


def _attend_part(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attend to some of the tokens.

    Args:
        query: ``[B, H, S, D]``.
        key: ``[B, K, T, D]``; T may be 0.
        value: ``[B, K, T, V]``.
        visible: bool ``[S, T]``, or with batch and heads before these.
        scale: multiplies the scores; ``1/sqrt(D)`` when None.

    Returns:
        The mixed values ``[B, H, S, V]`` and the logarithm of the sum of exponentiated scores ``[B, H, S, 1]``, at
        least in float32; 0 and −infinity where nothing is visible.
    """
    B, H, S, D = query.shape
    K, T = key.shape[1:3]
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(wide).reshape(B, K, H // K * S, D) * (D**-0.5 if scale is None else scale)
    scores = (grouped @ key.to(wide).mT).view(B, H, S, T).masked_fill(~visible, -torch.inf)
    total = torch.logsumexp(scores, -1, keepdim=True)  # [B, H, S, 1]
    weights = torch.exp(scores - total.clamp_min(torch.finfo(wide).min))
    mixed = (weights.reshape(B, K, H // K * S, T) @ value.to(wide)).view(B, H, S, -1)
    return mixed, total


def _joined(mixed: Tensor, total: Tensor, group: Group = None) -> Tensor:
    """The attention over all ranks' tokens, ``[B, H, S, V]``, from what `_attend_part` returned on each."""
    largest = all_reduced(total, group, dist.ReduceOp.MAX)
    weight = torch.exp(total - largest.clamp_min(torch.finfo(total.dtype).min))
    joined = all_reduced(torch.cat((mixed * weight, weight), dim=-1), group)
    return joined[..., :-1] / joined[..., -1:].clamp_min(torch.finfo(total.dtype).tiny)
