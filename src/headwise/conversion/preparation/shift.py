"""A constant added to the bias of keys, which attention hardly sees, and the rounding of a cache sees much.

Keys of some models have a large constant part in rotary pairs that hardly turn. A constant that all keys share
changes no attention: the softmax sees differences of scores alone. In a slow pair it makes a slope by distance, which
a faster pair can make with far smaller numbers. So what a shift of the bias does to attention is a quadratic form of
it, the variance of the change of scores under the weights of attention; what rounding does falls with the size of the
keys. Their sum is minimised, together with the factors of the pairs. The change is not exact: how far it is off is
measured.

Shapes: B windows, W tokens of a window, S queries of a window, H query heads, K key–value heads, D head dim, G groups
of channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.conversion.preparation.fit import Problem
from headwise.conversion.preparation.samples import Projected
from headwise.models.specs import GroupedSpec
from headwise.runtime.quantization.formats import EngineFormat

STEPS = 300
CAREFUL = 4.0
"""The weight of an error that the shift makes, beside one that rounding makes: it is the same for all
tokens, so that it adds up where random ones do not, and it is there with a full cache as well."""

_QUERIES = 48
"""The number of queries of a head that attention's weights are computed for, over all windows."""

_RATE = 0.05
_FLOOR = 0.3
"""The bias of a pair, in keys' own units, below which steps of the descent do not become smaller."""


def why_no_shift(layer: GroupedSpec) -> str | None:
    """Why the bias of a layer's keys cannot be shifted in this way; None where it can be."""
    if "k_proj" not in layer.bias:
        return "its keys have no bias"
    if layer.qk_norm:
        return "a norm stands between its keys' bias and the cache"
    if layer.sinks or layer.softcap is not None:
        return "a constant of all its keys' scores is not lost in its softmax"
    return None


def shift(projected: Projected, formats: Sequence[EngineFormat], *, longest: int) -> Tensor:
    """Find what to add to the bias of a layer's keys, ``[K, D]``.

    Args:
        projected: the layer's queries and keys before they are rotated; `why_no_shift` must have no objection to the
            layer.
        formats: the formats of the cache; of several, the product of what they lose is minimised.
        longest: the number of tokens of the longest text.
    """
    layer, metric = projected.layer, seen_by_attention(projected, longest)
    K, D = layer.num_kv_heads, layer.head_dim
    queries = projected.rotated("q", projected.positions).reshape(K, -1, D)
    keys = projected.keys.flatten(1, 2)
    # The bias turns with a key's position, and rounding has to bear it at all of them.
    chosen = torch.randint(longest, (keys.shape[1],), generator=torch.Generator().manual_seed(0))
    problem = Problem(queries, projected.turned(keys[:, None], chosen)[:, 0], layer, formats)
    chosen = chosen[:: problem.stride]
    turn = projected.turning(chosen)
    units = [_noise(code, D) * projected.scale**2 for code in formats]
    assert projected.bias is not None
    bias = projected.bias.view(K, -1)
    size = problem.by_group(bias.square()).sqrt().clamp_min(_FLOOR)
    logarithms, parts = problem.descended().clone().requires_grad_(), torch.zeros(K, D, requires_grad=True)
    unit = problem.wide(size)

    def cost() -> Tensor:
        """The logarithm of the error of scores, ``[K]``."""
        moved = parts * unit
        turned = turn(moved[:, None, None].expand(-1, 1, len(chosen), -1))[:, 0]
        moments, seen, _ = problem.scaled(logarithms.exp2(), problem.keys + turned)
        made = CAREFUL * torch.einsum("kd,kde,ke->k", moved, metric, moved)
        losses = problem.each(moments, seen)
        return torch.stack([(loss * one + made).log() for loss, one in zip(losses, units, strict=True)]).sum(0)

    least, best = cost().detach(), torch.zeros(K, D)
    optimizer = torch.optim.Adam([logarithms, parts], lr=_RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    with torch.enable_grad():
        for _ in range(STEPS):
            now = cost()
            improved = now.detach() < least
            least = torch.where(improved, now.detach(), least)
            best = torch.where(improved[:, None], (parts * unit).detach(), best)
            optimizer.zero_grad()
            now.sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return best


def seen_by_attention(projected: Projected, longest: int) -> Tensor:
    """The quadratic form of what a constant added to keys does to scores, ``[K, D, D]``: their mean variance.

    The variance is over keys under the weights of attention, so that what all keys share is not seen. Positions are
    stretched as well, up to the longest text, because slopes by distance grow with it.

    Args:
        projected: the queries and keys before they are rotated.
        longest: the number of tokens of the longest text.
    """
    layer = projected.layer
    K, D = layer.num_kv_heads, layer.head_dim
    B, W = projected.keys.shape[1:3]
    asked = torch.linspace(W // 16, W - 1, max(1, _QUERIES // B)).long()
    total, count = torch.zeros(K, D, D), 0
    for positions in _stretched(projected.positions, layer, longest):
        keys = projected.rotated("k", positions)
        queries = projected.rotated("q", positions)[:, :, asked]
        turn_back = projected.turning(positions, backwards=True)
        apart = positions[asked][:, None] - positions
        hidden = apart < 0
        if layer.sliding_window is not None:
            hidden |= apart >= layer.sliding_window
        for head in range(K):
            for window in range(B):
                of_head = torch.unflatten(queries, 0, (K, -1))[head, :, window]  # [H/K, S, D]
                scores = of_head @ keys[head, window].T * projected.scale
                weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).flatten(0, 1)  # [H/K · S, W]
                # A constant c of a key at position t adds q · R(t)c to its score, which is R(t)ᵀq · c.
                rows = of_head.flatten(0, 1)[:, None, None].expand(-1, 1, W, -1)
                back = turn_back(rows)[:, 0]  # [H/K · S, W, D]
                mean = (weights[..., None] * back).sum(1, keepdim=True)
                spread = ((back - mean) * weights[..., None].sqrt()).flatten(0, 1)
                total[head] += spread.T @ spread
        count += B * queries.shape[0] // K * len(asked)
    return total / count * projected.scale**2


def _stretched(positions: Tensor, layer: GroupedSpec, longest: int) -> list[Tensor]:
    """The positions themselves, and stretched half-way and all the way to the longest text or the layer's window."""
    reach = longest if layer.sliding_window is None else min(longest, layer.sliding_window)
    most = max(1.0, reach / (int(positions.max()) + 1))
    return [(positions * most**part).long() for part in dict.fromkeys((0.0, 0.5, 1.0) if most > 1 else (0.0,))]


def _noise(code: EngineFormat, width: int) -> float:
    """The mean square of a score's error over a format's `Problem` loss, as it is for normal numbers."""
    keys = torch.randn(1024, width, generator=torch.Generator().manual_seed(0))
    turned = code.keys.turned(keys)
    error = code.keys.as_read(code.keys.stored(turned), width) - turned
    ones = torch.full((width // code.keys.block(width),), float(code.keys.block(width)))
    return float(error.square().sum(-1).mean() / code.keys.loss(turned, ones))
