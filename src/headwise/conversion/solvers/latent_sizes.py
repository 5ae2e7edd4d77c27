"""One layer's MLA solutions at several sizes: one latent is solved, and narrower ones are cut from it.

Shapes: E hidden, R latent rank, P rotary dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from headwise.conversion.solvers.assemble import is_biased, with_bias
from headwise.conversion.solvers.latent import LatentOptions, convert_to_latent, find_rotary
from headwise.conversion.solvers.layer import Layer
from headwise.conversion.solvers.metrics import centred
from headwise.conversion.solvers.statistics import Statistics
from headwise.models.specs import GroupedSpec, LatentSpec, as_latent


def solve_sizes(
    source: Layer,
    sizes: Sequence[tuple[int, int]],
    statistics: Statistics,
    sensitivity: Tensor | None = None,
    options: LatentOptions | None = None,
) -> Iterator[tuple[tuple[int, int], Layer]]:
    """Solve a layer at some sizes, one at a time, as each solution may be large.

    At each rotary width the largest latent below the exact one is solved, and narrower ones are cut from it.

    Args:
        source: the layer, float32.
        sizes: R and P of each solution.
        statistics: the statistics of the layer's inputs.
        sensitivity: ``[E, E]``, the cost of an error of its output.
        options: see `convert_to_latent`.

    Returns:
        Each size with its solution, float64, from the widest rotary key and latent down.
    """
    spec = source.spec
    assert isinstance(spec, GroupedSpec)
    options = options or LatentOptions()
    rotary = find_rotary(source.state, spec, as_latent(spec, *sizes[0]), statistics, mix=options.mix)
    options = replace(options, rotary=rotary)
    ordered_sizes = sorted(sizes, key=lambda size: (size[1], size[0]), reverse=True)
    for _, width_sizes in groupby(ordered_sizes, key=lambda size: size[1]):
        widest = None  # freed before the next one is solved
        for size in width_sizes:
            target = as_latent(spec, *size)
            if widest is None:
                solution = convert_to_latent(
                    source.state, spec, target, statistics=statistics, sensitivity=sensitivity, options=options
                )
                widest = Layer(target, *solution)
                del solution
            yield size, narrowed(widest, target, statistics)
            if target.kv_lora_rank >= _exact_rank(spec, target):
                widest = None  # an exact latent's channels are in no order to cut by


def narrowed(layer: Layer, target: LatentSpec, statistics: Statistics) -> Layer:
    """Cut an MLA layer to the first channels of its latent, with the best decoders from them.

    Args:
        layer: the layer, float64, whose latent channels are in order.
        target: the layer's spec with a smaller rank.
        statistics: the statistics of its inputs.
    """
    spec, state = layer.spec, layer.state
    assert isinstance(spec, LatentSpec)
    R, r, N = spec.kv_lora_rank, target.kv_lora_rank, spec.qk_nope_head_dim
    if r == R:
        return layer
    biased = is_biased(spec)
    down = with_bias(state, "kv_a_proj_with_mqa", biased)[:R]  # [R, E']
    keys = centred(statistics.keys) if biased else statistics.keys
    decoders = torch.unflatten(state["kv_b_proj.weight"], 0, (spec.num_heads, -1))  # [H, N + V, R]
    narrow_decoders = []
    for rows, moments in ((decoders[:, :N], keys), (decoders[:, N:], statistics.inputs)):
        covariance = down @ moments[: down.shape[1], : down.shape[1]] @ down.mT  # [R, R]
        # The dropped channels, as far as the remaining ones predict them.
        prediction = covariance[r:, :r] @ torch.linalg.pinv(covariance[:r, :r], hermitian=True)
        narrow_decoders.append(rows[..., :r] + rows[..., r:] @ prediction)
    channels = [*range(r), *range(R, len(state["kv_a_proj_with_mqa.weight"]))]
    narrow = {name: state[name][channels] for name in state if name.startswith("kv_a_proj_with_mqa.")}
    decoder = torch.cat(narrow_decoders, dim=1).flatten(0, 1)  # [H (N + V), r]
    return Layer(target, {**state, **narrow, "kv_b_proj.weight": decoder}, layer.channels)


def _exact_rank(source: GroupedSpec, target: LatentSpec) -> int:
    """The rank of a latent that loses nothing but the dropped rotation."""
    values = source.num_kv_heads * (source.head_dim + source.value_dim) - target.qk_rope_head_dim
    return min(values, source.hidden_size + ("kv_a_proj_with_mqa" in target.bias))
