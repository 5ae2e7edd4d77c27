"""The change of one layer: a shift of the keys' bias, factors fitted on samples that matter, and the best of several.

Keys of some models have a large constant part in rotary pairs that hardly turn. A constant that all keys share
changes no attention: the softmax sees differences of scores alone. In a slow pair it makes a slope by distance, which
a faster pair can make with far smaller numbers. So what a shift of the bias does to attention is a quadratic form of
it, the variance of the change of scores under the weights of attention; what rounding does falls with the size of the
keys. Their sum is minimised, together with the factors of the pairs. The change is not exact: how far it is off is
measured.

Queries and keys are drawn as often as the errors of their products matter to what the attention gives. A query whose
weights are spread over many keys hardly feels that one of them is off, and a key that nobody attends to may be
rounded anyhow. The error of a score moves the output by the weight times how far the key's value is from the output,
so that is how much a pair of a query and a key counts.

Of several changes the one is kept whose attention is least off through the rounding itself. What scores lose on
average does not tell everything of keys with a large constant part: their rounding is the same for most tokens, and
how much it hides of the rest is a matter of where the constant lies between two codes.

Shapes: N drawn samples, C changes, B windows, W tokens of a window, S queries of a window, T keys, H query heads, K
key–value heads, D head dim, G groups of channels, V value dim, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headwise.base.threads import torch_threads
from headwise.conversion.preparation.change import (
    OFFSETS,
    Change,
    Problem,
    by_head,
    fit,
    losses_after,
    where_it_helps,
)
from headwise.conversion.preparation.samples import Projected
from headwise.conversion.preparation.stored import Room, within
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
    problem = Problem(queries, projected.turning(chosen)(keys[:, None])[:, 0], layer, formats)
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


_DRAWN = 4096
_EVERY = 4
"""One query in so many is drawn from."""


def drawn(projected: Projected, state: Mapping[str, Tensor], shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draw rotated queries ``[K, N, D]`` of all heads that share a key–value head together, and keys ``[K, N, D]``.

    Args:
        projected: the layer's queries, keys and values before RoPE.
        state: the tensors of its attention under headwise's names.
        shift: the numbers that are added to the keys before they are rotated, ``[K, D]``.
    """
    layer, positions = projected.layer, projected.positions
    W, generator = len(positions), torch.Generator().manual_seed(0)
    asked = torch.arange(W // 16, W, _EVERY)
    queries = torch.unflatten(projected.rotated("q", positions)[:, :, asked], 0, (layer.num_kv_heads, -1))
    keys = projected.rotated("k", positions, shift)
    by_head = torch.unflatten(output_weight(state, layer), -1, (layer.num_heads, -1))
    metric = torch.unflatten(torch.einsum("ehv,ehw->hvw", by_head, by_head), 0, queries.shape[:2])
    apart = asked[:, None] - torch.arange(W)
    hidden = apart < 0
    if layer.sliding_window is not None:
        hidden |= apart >= layer.sliding_window
    samples = []
    for head, of_head in enumerate(queries):
        asking, seen = torch.zeros(of_head.shape[:-1]), torch.zeros(keys.shape[1], W)
        for group, of_group in enumerate(of_head):
            for window, rows in enumerate(of_group):  # [S, D]
                own = projected.values[head, window]
                weights = (rows @ keys[head, window].T * projected.scale).masked_fill(hidden, -torch.inf).softmax(-1)
                shares = weights.square() * _distances(own, weights @ own, metric[head, group])
                asking[group, window] = shares.sum(-1)
                seen[window] += (shares * rows.square().sum(-1, keepdim=True)).sum(0)
        samples.append(
            [
                states[torch.multinomial(shares.flatten() + 1e-30, _DRAWN, True, generator=generator)]
                for states, shares in ((of_head.flatten(0, 2), asking), (keys[head].flatten(0, 1), seen))
            ]
        )
    drawn_queries, drawn_keys = (torch.stack(side) for side in zip(*samples, strict=True))
    return drawn_queries, drawn_keys


def _distances(values: Tensor, outputs: Tensor, metric: Tensor) -> Tensor:
    """The squared lengths ``[S, W]`` of all differences of values ``[W, V]`` and outputs ``[S, V]`` in a metric."""
    of_values, of_outputs = values @ metric, outputs @ metric
    ends = (of_values * values).sum(-1), (of_outputs * outputs).sum(-1, keepdim=True)
    return (ends[0] - 2 * outputs @ of_values.T + ends[1]).clamp_min(0.0)


QUERIES = 64
"""The number of queries of each window whose output is compared, evenly spread."""


class Output:
    """The output of a layer's attention, and the errors that changes cause in it.

    Args:
        projected: the layer's queries, keys and values before they are rotated.
        state: the tensors of its attention under headwise's names.

    Attributes:
        size: the mean square of the output of each key–value head's query heads, ``[K]``.
    """

    def __init__(self, projected: Projected, state: Mapping[str, Tensor]) -> None:
        self._projected, K = projected, projected.layer.num_kv_heads
        W = len(projected.positions)
        places = torch.linspace(W // 8, W - 1, min(QUERIES, W)).long()
        queries = projected.rotated("q", projected.positions)[:, :, places]
        self._queries = torch.unflatten(queries, 0, (K, -1))  # [K, H/K, B, S, D]
        self._keys = projected.rotated("k", projected.positions)
        self._visible = torch.arange(W) <= places[:, None]
        weight = output_weight(state, projected.layer)
        self._weight = torch.unflatten(weight, -1, (K, -1)).permute(1, 2, 0)  # [K, V·H/K, E]
        self._exact = self._attended(self._queries, self._keys)
        self.size = self._exact.square().mean((1, 2))

    def error(self, change: Change, code: EngineFormat | None = None) -> Tensor:
        """The mean square error of the output of each key–value head's query heads, ``[K]``.

        Args:
            change: the change of the layer.
            code: the format of the cache; None for a full cache.
        """
        layer, keys, queries = self._projected.layer, self._keys, self._queries
        if change.shift is not None:
            keys = self._projected.rotated("k", self._projected.positions, change.shift)
        keys = change.applied(keys.flatten(1, 2), layer, "k").view_as(keys)
        queries = change.applied(queries.flatten(1, 3), layer, "q").view_as(queries)
        if code is not None:
            keys = code.keys.as_read(code.keys.stored(code.keys.turned(keys)), layer.head_dim)
            queries = code.keys.rounded_queries(code.keys.turned(queries))
        return (self._attended(queries, keys) - self._exact).square().mean((1, 2))

    def _attended(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The output ``[K, B·S, E]`` of queries ``[K, H/K, B, S, D]`` and keys ``[K, B, W, D]``."""
        scores = torch.einsum("kgbsd,kbtd->kgbst", queries, keys) * self._projected.scale
        weights = scores.masked_fill(~self._visible, -torch.inf).softmax(-1)
        out = torch.einsum("kgbst,kbtv->kbsgv", weights, self._projected.values).flatten(-2)  # [K, B, S, V·H/K]
        return out.flatten(1, 2) @ self._weight


def best_of(changes: Sequence[Change], output: Output, layer: GroupedSpec, formats: Sequence[EngineFormat]) -> Change:
    """The change that, for each key–value head, has the least error of the output of its query heads.

    Args:
        changes: the changes to choose from; heads with a norm of their own weights get one of them together.
        output: the output of the layer's attention.
        layer: the layer's spec.
        formats: the formats of the cache; of several, the product of the errors is compared.
    """
    errors = torch.stack([_errors(change, output, formats) for change in changes])  # [C, K]
    return by_head(changes, errors, layer)


def _errors(change: Change, output: Output, formats: Sequence[EngineFormat]) -> Tensor:
    """The logarithm of the product of the errors with each format, ``[K]``."""
    errors = torch.stack([output.error(change, code) for code in formats])
    # A format that has no code for a number makes NaN of it: nothing is worse.
    return (errors + 1e-30).log().nan_to_num(torch.inf, torch.inf).sum(0)


def output_weight(state: Mapping[str, Tensor], layer: GroupedSpec) -> Tensor:
    """The output projection ``[E, H·V]``; the identity where there is none.

    Args:
        state: the tensors of the attention under headwise's names.
        layer: the layer's spec.
    """
    if (weight := state.get("o_proj.weight")) is not None:
        return weight.float()
    return torch.eye(layer.num_heads * layer.value_dim)


Samples = tuple[Tensor, Tensor]
"""Queries ``[K, N, D]`` and keys ``[K, T, D]``."""

_STARTS = 24
"""The number of starts of the search on a text."""


def best_change(
    projected: Projected,
    state: Mapping[str, Tensor],
    formats: Sequence[EngineFormat],
    room: Room,
    *,
    shifts: bool,
    longest: int,
    on_text: bool,
) -> tuple[Change, dict[str, float], float]:
    """Find the change under which the layer's attention loses least.

    Args:
        projected: the layer's queries, keys and values before RoPE.
        state: the tensors of its attention under headwise's names.
        formats: the formats of its cache; without any, nothing is changed.
        room: the exponents that the layer's stored weights can take.
        shifts: whether the bias of keys may be shifted, which is not exact.
        longest: the number of tokens of the longest text.
        on_text: whether the projected inputs are those of a text, so that attention's weights mean something.

    Returns:
        The change; for each format, by its spelling, the ratio of what scores lose after the change to what they lost
        before; and the error of the attention's output with a full cache over the output's size (root mean squares),
        0 without a shift.
    """
    layer, starts = projected.layer, _STARTS if on_text else len(OFFSETS)
    tried = [Change.none(layer)]
    if not formats:
        return tried[0], {}, 0.0
    with torch_threads(1):  # thousands of small operations, which are too short to be divided
        moved = None
        if shifts and why_no_shift(layer) is None:
            moved = shift(projected, formats, longest=longest)
        # Fitted on the samples that matter, but chosen below by the attention's own output.
        samples = drawn(projected, state, moved) if on_text else _samples(projected, moved)
        wanted = fit(*samples, layer, formats, turns=room.turns, grain=room.grain, starts=starts)
        fitted = where_it_helps(within(wanted, layer, room), *samples, layer, formats)
        tried.append(replace(fitted, shift=moved))
        output = Output(projected, state)
        change = best_of(tried, output, layer, formats)
        before, after = _samples(projected), _samples(projected, change.shift)
        losses = {str(code): _loss(before, after, change, layer, code) for code in formats}
        if change.shift is None:
            return change, losses, 0.0
        return change, losses, float((output.error(change).sum() / output.size.sum()).sqrt())


def _loss(before: Samples, after: Samples, change: Change, layer: GroupedSpec, code: EngineFormat) -> float:
    """The ratio of what scores lose after a change to what they lost before: the geometric mean over heads."""
    gain = losses_after(Change.none(layer), *before, layer, [code]) - losses_after(change, *after, layer, [code])
    return float(gain.mean().neg().exp())


def _samples(projected: Projected, shift: Tensor | None = None) -> Samples:
    """Rotated queries ``[K, N, D]``, those of heads that share a key head together, and keys ``[K, T, D]``."""
    queries = projected.rotated("q", projected.positions)
    keys = projected.rotated("k", projected.positions, shift)
    return queries.reshape(len(keys), -1, keys.shape[-1]), keys.flatten(1, 2)
