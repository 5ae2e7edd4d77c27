"""Candidates to compare with a layer: other mechanisms, at several sizes or at the nearest one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from headwise.costs.formulas import layer
from headwise.models.specs.base import AttentionSpec, RopeSpec
from headwise.models.specs.expert_latent import ExpertLatentSpec
from headwise.models.specs.grouped import GroupedSpec
from headwise.models.specs.latent import LatentSpec
from headwise.models.specs.latent_space import LatentSpaceSpec
from headwise.models.specs.target_sizes import as_grouped, as_latent, split_budget

Match = Literal["cache", "parameters"]
MATCHES: tuple[Match, ...] = ("cache", "parameters")
"""The costs by which `matched` chooses a size."""

_WIDEST = 2**16
"""The largest size that `matched` tries."""


def ladder(source: AttentionSpec) -> list[AttentionSpec]:
    """Every mechanism at several sizes in the place of a layer, with the layer itself.

    For example ``[spec.label for spec in ladder(layer_spec("llama-3-8b"))]``.

    The list begins with the mechanisms that a layer can be converted to, from the largest cache down: MHA, ever fewer
    key–value heads (each time about half) down to MQA, and MLA at the source's whole cache, a half and a quarter of
    it, of which the rotary key takes about a quarter. Mechanisms for new designs follow: latent-space and
    expert-latent attention at the same three budgets, and one head of the same width as all heads.
    """
    if isinstance(source, GroupedSpec):
        rotary = source.rope is not None
        designs = _designs(source, layer.cache_values(source), rotary=rotary)
        return list(dict.fromkeys([*_grouped_ladder(source), *_latent_ladder(source), *designs]))
    if isinstance(source, LatentSpec):
        dense = _dense(source)
        return [*_grouped_ladder(dense), source, *_designs(dense, layer.cache_values(source), rotary=True)]
    return [source]


def matched(source: AttentionSpec, match: Match) -> list[AttentionSpec]:
    """Every mechanism at the one size whose cache (or parameters) is nearest the layer's; the layer comes first.

    For example ``matched(layer_spec("llama-3-8b"), "cache")[1].label`` is ``"MHA 32/32 × 32"``.

    The number of heads stays, and a head's width (MHA, GQA, MQA, one head) or the latent's changes. A mechanism whose
    smallest size already costs more is left out.
    """
    if not isinstance(source, GroupedSpec | LatentSpec):
        return [source]
    cost: Callable[[AttentionSpec], int] = layer.cache_values if match == "cache" else layer.parameters
    goal = cost(source)
    candidates = [_nearest(make, cost, goal) for make in _families(source)]
    others = (spec for spec in candidates if spec is not None and spec.mechanism != source.mechanism)
    return [source, *others]


def _families(source: GroupedSpec | LatentSpec) -> list[Callable[[int], AttentionSpec | None]]:
    """A function for each mechanism that makes a layer of a given size, or None where the size is impossible."""
    dense = source if isinstance(source, GroupedSpec) else _dense(source)
    E, H, D = dense.hidden_size, dense.num_heads, dense.head_dim
    rotary = dense.rope is not None or isinstance(source, LatentSpec)
    step = 2 if rotary else 1  # rotation works on pairs
    between = _kv_heads(dense)

    def grouped(num_kv_heads: int) -> Callable[[int], AttentionSpec | None]:
        return lambda size: _widened(dense, num_kv_heads, size * step)

    def latent(size: int) -> LatentSpec:
        bias = ("o_proj",) if "o_proj" in dense.bias else ()
        return LatentSpec(
            hidden_size=E,
            num_heads=H,
            kv_lora_rank=size,
            qk_nope_head_dim=D,
            qk_rope_head_dim=max(2, D // 4 * 2),
            v_head_dim=dense.value_dim,
            latent_norm=False,
            bias=bias,
        )

    def latent_space(size: int) -> LatentSpaceSpec | None:
        width = size * step
        return None if width > D else LatentSpaceSpec(hidden_size=E, num_heads=H, latent_dim=H * width, head_dim=D)

    def expert_latent(size: int) -> ExpertLatentSpec:
        return _experts(dense, between or 1, size, rotary=rotary)

    def single(size: int) -> AttentionSpec | None:
        return GroupedSpec(hidden_size=E, num_heads=1, num_kv_heads=1, head_dim=size * step)

    middle = [grouped(between)] if between else []
    return [grouped(H), *middle, grouped(1), latent, latent_space, expert_latent, single]


def _nearest(
    make: Callable[[int], AttentionSpec | None], cost: Callable[[AttentionSpec], int], goal: int
) -> AttentionSpec | None:
    """The layer whose cost is nearest the goal, found by bisection: a larger size never costs less."""

    def costs(size: int) -> int | None:
        spec = make(size)
        return None if spec is None else cost(spec)

    smallest = costs(1)
    if smallest is None or smallest > goal:
        return None
    low, high = 1, _WIDEST
    while low < high:  # the first size that costs at least the goal, or is impossible
        middle = (low + high) // 2
        value = costs(middle)
        low, high = (low, middle) if value is None or value >= goal else (middle + 1, high)
    around = {size: value for size in (low - 1, low) if size >= 1 and (value := costs(size)) is not None}
    return make(min(around, key=lambda size: abs(around[size] - goal)))


def _widened(dense: GroupedSpec, num_kv_heads: int, width: int) -> GroupedSpec:
    """The layer with heads of another width, of which the same share is rotated."""
    rope = dense.rope
    if rope is not None:
        rope = replace(rope, dim=max(2, rope.dim * width // dense.head_dim // 2 * 2))
    return replace(dense, num_kv_heads=num_kv_heads, head_dim=width, v_head_dim=None, rope=rope)


def _kv_heads(dense: GroupedSpec) -> int | None:
    """The number of key–value heads of a GQA layer: the source's, or about a quarter of the heads."""
    if 1 < dense.num_kv_heads < dense.num_heads:
        return dense.num_kv_heads
    between = [d for d in range(2, dense.num_heads) if dense.num_heads % d == 0]
    return min(between, key=lambda d: abs(d - dense.num_heads / 4), default=None)


def _dense(source: LatentSpec) -> GroupedSpec:
    """The multi-head attention with the heads of an MLA layer."""
    return GroupedSpec(
        hidden_size=source.hidden_size,
        num_heads=source.num_heads,
        num_kv_heads=source.num_heads,
        head_dim=source.qk_nope_head_dim or source.qk_rope_head_dim,
        v_head_dim=source.v_head_dim,
    )


def _grouped_ladder(source: GroupedSpec) -> list[AttentionSpec]:
    counts = {1, source.num_kv_heads, source.num_heads}
    divisors = [d for d in range(1, source.num_heads) if source.num_heads % d == 0]
    count = source.num_heads
    while count > 1:
        count = max(d for d in divisors if d <= max(count // 2, 1))
        counts.add(count)
    reachable = [n for n in counts if max(n, source.num_kv_heads) % min(n, source.num_kv_heads) == 0]
    return [as_grouped(source, count) for count in sorted(reachable, reverse=True)]


def _latent_ladder(source: GroupedSpec) -> list[AttentionSpec]:
    if source.num_kv_heads * source.head_dim < 2:  # too few dims for a rotary pair
        return []
    values = source.num_kv_heads * (source.head_dim + source.value_dim)
    budgets = [values, values // 2, values // 4]
    sizes = [
        split_budget(source, budget) for budget in budgets if budget >= 3
    ]  # at least a latent channel and a rotary pair
    return [as_latent(source, rank, rope_dim) for rank, rope_dim in sizes]


def _designs(dense: GroupedSpec, values: int, *, rotary: bool) -> list[AttentionSpec]:
    """Latent-space and expert-latent attention that cache ``values``, half or a quarter; and one wide head."""
    E, H, D = dense.hidden_size, dense.num_heads, dense.head_dim
    K = _kv_heads(dense) or 1
    widths = dict.fromkeys(min(D, max(1, values // part // (2 * H))) for part in (1, 2, 4))
    latents = dict.fromkeys(max(1, values // part // (2 * K)) for part in (1, 2, 4))
    return [
        *(LatentSpaceSpec(hidden_size=E, num_heads=H, latent_dim=H * width, head_dim=D) for width in widths),
        *(_experts(dense, K, width, rotary=rotary) for width in latents),
        GroupedSpec(hidden_size=E, num_heads=1, num_kv_heads=1, head_dim=H * D),
    ]


def _experts(dense: GroupedSpec, latent_kv_heads: int, kv_dim: int, *, rotary: bool) -> ExpertLatentSpec:
    """Expert-latent attention with RoPE on an eighth of a head: rotated keys are decoded at every step."""
    D = dense.head_dim
    theta = 10000.0 if dense.rope is None else dense.rope.theta
    rope = RopeSpec(dim=max(2, D // 16 * 2), theta=theta) if rotary and D > 1 else None
    return ExpertLatentSpec(
        hidden_size=dense.hidden_size,
        num_heads=dense.num_heads,
        head_dim=D,
        latent_kv_heads=latent_kv_heads,
        kv_dim=kv_dim,
        rope=rope,
    )
