"""What is lost when key–value heads that are alike, but not in the same basis, are merged."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from docs.drawings.plots import BLUE, GREEN, ORANGE, as_svg, figure, rounded, styled
from torch import Tensor

from headwise import GroupedSpec, RopeSpec
from headwise.conversion.methods.mean import mean_heads
from headwise.conversion.solvers.aligned import align
from headwise.runtime.attention import AttentionLayer, build

SPEC = GroupedSpec(hidden_size=64, num_heads=8, num_kv_heads=8, head_dim=16, rope=RopeSpec(dim=16))
KEPT = 2
"""Key–value heads after the merge."""
OWN = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
"""The share of a head's energy that the others of its group do not have."""
TOKENS, TEXTS = 48, 4


@dataclass(frozen=True)
class Merge:
    """Relative errors of a layer's output, ``‖error‖ / ‖output‖``, after its heads were merged.

    Attributes:
        own: the share of a head's energy that is its own.
        mean: of mean pooling.
        mean_in_one_basis: of mean pooling where all heads of a group were in one basis to begin with.
        aligned: of headwise's merge.
    """

    own: float
    mean: float
    mean_in_one_basis: float
    aligned: float


def source(own: float, *, one_basis: bool, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of a layer whose heads, in groups of neighbours, are one in several bases, and partly their own.

    Keys of a head are multiplied by a complex number for each rotated pair, which commutes with the rotation; values
    by an orthogonal matrix. The same numbers undo both in queries and in the output projection.
    """
    random = np.random.default_rng(seed)
    H, D, E = SPEC.num_heads, SPEC.head_dim, SPEC.hidden_size
    group = H // KEPT

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(random.standard_normal(shape)) / E**0.5

    def heads() -> Tensor:
        shared = normal(KEPT, D, E).repeat_interleave(group, dim=0)
        return (1 - own) ** 0.5 * shared + own**0.5 * normal(H, D, E)

    query, key, value, output = normal(H, D, E), heads(), heads(), normal(H, D, E)
    turns = torch.from_numpy(random.uniform(0, 2 * np.pi, (H, D // 2)))
    bases = torch.linalg.qr(torch.from_numpy(random.standard_normal((H, D, D)))).Q
    if not one_basis:
        query, key = _turned(query, turns), _turned(key, turns)
        value, output = bases @ value, bases @ output
    return {
        "q_proj.weight": query.flatten(0, 1),
        "k_proj.weight": key.flatten(0, 1),
        "v_proj.weight": value.flatten(0, 1),
        "o_proj.weight": output.permute(2, 0, 1).flatten(1),
    }


def _turned(rows: Tensor, turns: Tensor) -> Tensor:
    """Heads ``[H, D, E]`` whose pair f is turned by an angle ``[H, D/2]``; dims f and f + D/2 are a pair."""
    first, second = rows.chunk(2, dim=1)
    cos, sin = turns.cos()[..., None], turns.sin()[..., None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=1)


def merged(state: dict[str, Tensor], method: str) -> dict[str, Tensor]:
    """The layer's tensors with `KEPT` key–value heads, by mean pooling (``mean``) or aligned (``aligned``)."""
    solve = mean_heads if method == "mean" else align
    return solve(state, SPEC, replace(SPEC, num_kv_heads=KEPT))


def error(state: dict[str, Tensor], fewer: dict[str, Tensor]) -> float:
    """``‖difference‖ / ‖output‖`` of a layer and its merge on random inputs."""
    random = np.random.default_rng(1)
    inputs = torch.from_numpy(random.standard_normal((TEXTS, TOKENS, SPEC.hidden_size)))
    with torch.inference_mode():
        wanted = _layer(state, SPEC.num_kv_heads)(inputs, is_causal=True)
        found = _layer(fewer, KEPT)(inputs, is_causal=True)
    return float((wanted - found).norm() / wanted.norm())


def _layer(state: dict[str, Tensor], kv_heads: int) -> AttentionLayer:
    layer = build(replace(SPEC, num_kv_heads=kv_heads)).double()
    layer.load_state_dict(state)
    return layer.eval()


def measure(own: float) -> Merge:
    """Errors of the merges at one share."""
    layer, plain = source(own, one_basis=False), source(own, one_basis=True)
    return Merge(
        own,
        error(layer, merged(layer, "mean")),
        error(plain, merged(plain, "mean")),
        error(layer, merged(layer, "aligned")),
    )


def draw() -> dict[str, str]:
    """The errors by share."""
    points = [measure(own) for own in OWN]
    with styled():
        made, (axes,) = figure(3.3)
        for name, colour, style, label in (
            ("mean", ORANGE, "D-", "mean pooling, any bases"),
            ("mean_in_one_basis", GREEN, "s--", "mean pooling, one basis"),
            ("aligned", BLUE, "o-", "aligned, any bases"),
        ):
            axes.plot(OWN, rounded(getattr(point, name) for point in points), style, color=colour, label=label)
        axes.set_xlabel("share of each head that is its own")
        axes.set_ylabel("error of the output, relative")
        axes.set_ylim(0, None)
        axes.legend(loc="lower right")
        return {"merging.svg": as_svg(made)}
