"""The sizes that a layer is tried at, and its solutions at them.

Shapes: E hidden, R latent rank, P rotary dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from headwise.conversion.methods import Evidence
from headwise.conversion.solvers.assemble import is_biased, with_bias
from headwise.conversion.solvers.latent import LatentOptions, convert_to_latent
from headwise.conversion.solvers.layer import Layer
from headwise.conversion.solvers.metrics import KEY_WEIGHT, centred
from headwise.conversion.solvers.statistics import Statistics
from headwise.specs import GroupedSpec, LatentSpec, as_latent, rotary_width


def sizes_to_try(source: GroupedSpec, even: LatentSpec) -> list[tuple[int, int]]:
    """R and P of a layer's trials, the even size first: 1/2 to 3/2 of R, 1/2 to 2 times P."""
    R, P = even.kv_lora_rank, even.qk_rope_head_dim
    whole = source.num_kv_heads * (source.head_dim + source.value_dim)
    widest = min(2 * P, rotary_width(source), whole - R)
    rotary = {P} if P == 0 else {max(P // 4 * 2, 2), P, max(widest // 2 * 2, P)}
    ranks = {max(R // 2, 1), R, max(min(R + R // 2, whole - max(rotary)), R)}
    every = sorted((r, p) for r in ranks for p in rotary)
    return [(R, P), *(size for size in every if size != (R, P))]


def solutions(
    source: Layer,
    sizes: Sequence[tuple[int, int]],
    evidence: Evidence,
    *,
    key_weight: float = KEY_WEIGHT,
    mix: bool = True,
) -> Iterator[tuple[tuple[int, int], Layer]]:
    """A layer at some sizes, in float32, one after the other, as each may be large.

    Of each rotary width the largest that is no copy of the layer is solved, and narrower ones are cut from it.

    Args:
        source: the layer, float32.
        sizes: R and P of each solution.
        evidence: statistics and sensitivity.
        key_weight: see `LatentOptions`.
        mix: see `LatentOptions`.
    """
    spec, statistics = source.spec, evidence.statistics
    assert isinstance(spec, GroupedSpec)
    assert statistics is not None
    options = LatentOptions(key_weight=key_weight, mix=mix)
    in_order = sorted(sizes, key=lambda size: (size[1], size[0]), reverse=True)
    for _, of_one_width in groupby(in_order, key=lambda size: size[1]):
        widest = None  # before the next one needs the room
        for size in of_one_width:
            target = as_latent(spec, *size)
            if widest is None:
                solved = convert_to_latent(
                    source.state,
                    spec,
                    target,
                    statistics=statistics,
                    sensitivity=evidence.sensitivity,
                    options=options,
                )
                widest = Layer(target, *solved)
                del solved
            yield size, narrowed(widest, target, statistics).float()
            if target.kv_lora_rank >= _exact_rank(spec, target):  # its latents have no order to cut them by
                widest = None


def narrowed(layer: Layer, target: LatentSpec, statistics: Statistics) -> Layer:
    """An MLA layer cut to the first numbers of its latent, with the decoders that make the best of them.

    Args:
        layer: float64, the best latent of each rank first.
        target: the same with a smaller rank.
        statistics: of its inputs.
    """
    spec, state = layer.spec, layer.state
    assert isinstance(spec, LatentSpec)
    R, r, N = spec.kv_lora_rank, target.kv_lora_rank, spec.qk_nope_head_dim
    if r == R:
        return layer
    biased = is_biased(spec)
    down = with_bias(state, "kv_a_proj_with_mqa", biased)[:R]
    keys = centred(statistics.keys) if biased else statistics.keys
    decoders = torch.unflatten(state["kv_b_proj.weight"], 0, (spec.num_heads, -1))
    cut = []
    for rows, moments in ((decoders[:, :N], keys), (decoders[:, N:], statistics.inputs)):
        seen = down @ moments[: down.shape[1], : down.shape[1]] @ down.mT
        # What the numbers left out are, by those kept.
        rest = torch.linalg.lstsq(seen[:r, :r], seen[:r, r:], driver="gelsd").solution.mT
        cut.append(rows[..., :r] + rows[..., r:] @ rest)
    kept = [*range(r), *range(R, len(state["kv_a_proj_with_mqa.weight"]))]
    narrow = {name: state[name][kept] for name in state if name.startswith("kv_a_proj_with_mqa.")}
    decoder = torch.cat(cut, dim=1).flatten(0, 1)
    return Layer(target, {**state, **narrow, "kv_b_proj.weight": decoder}, layer.channels)


def _exact_rank(source: GroupedSpec, target: LatentSpec) -> int:
    """The rank from which on only the dropped rotation is lost."""
    values = source.num_kv_heads * (source.head_dim + source.value_dim) - target.qk_rope_head_dim
    return min(values, source.hidden_size + ("kv_a_proj_with_mqa" in target.bias))
