"""Cost of layers without softmax attention, whose state has a constant size that does not grow with the context.

FLOPs are those of the projections. The scan or delta rule, the causal convolution and elementwise work are left out,
as their counts depend on the kernel (chunk length, parallel or sequential form), not on the layer.
"""

from __future__ import annotations

from dataclasses import replace

from headwise.costs.formulas.stages import Linear, Size, Stage, Vector
from headwise.errors import ArgumentError
from headwise.models.specs.recurrent import RecurrentSpec

IMPLS = ("projections",)


def stages(spec: RecurrentSpec, impl: str, new_tokens: int) -> tuple[Stage, ...]:
    """The work of one layer, in order."""
    if spec.form == "none":
        return ()
    E, H, D = Size(spec.hidden_size, "E"), Size(spec.num_heads, "H"), Size(spec.head_dim, "D")
    N, R = Size(spec.state_size, "M"), Size(spec.dt_rank, "Δ")
    width, channels = H * D, convolved_channels(spec)
    inputs, inner = {
        "mamba": (
            2 * width,
            (
                Linear("x_proj", width, R + 2 * N, reads="inner"),
                Vector("norms of dt, B, C", R + 2 * N),
                Linear("dt_proj", R, width, True, reads="inner"),
                Vector("A_log, D", width * N + width),
            ),
        ),
        "mamba2": (width + channels + H, (Vector("A_log, D, dt_bias", 3 * H), Vector("norm", width))),
        "gated_delta_net": (width + channels + 2 * H, (Vector("A_log, dt_bias", 2 * H), Vector("norm", D))),
        "kimi_delta": (
            channels + H + 2 * D,
            (
                Linear("f_b_proj", D, width, reads="inner"),
                Linear("g_b_proj", D, width, reads="inner"),
                Vector("A_log, dt_bias", H + width),
                Vector("o_norm", D),
            ),
        ),
        "short_conv": (3 * width, ()),
    }[spec.form]
    return (
        Linear("in_proj", E, inputs, "in_proj" in spec.bias),
        Vector("conv1d", channels * (spec.conv_kernel + ("conv1d" in spec.bias))),
        *inner,
        Linear("out_proj", width, E, "out_proj" in spec.bias, reads="inner"),
    )


def cache_values(spec: RecurrentSpec) -> Size:
    """0: one more token changes the state and does not enlarge it."""
    return Size(0)


def state_values(spec: RecurrentSpec) -> int:
    """Values kept for a sequence of any length: the recurrent state, and the past inputs of the convolution.

    Transformers' caches hold one past input for each tap of the convolution, and so it is counted.
    """
    return spec.num_heads * spec.head_dim * spec.state_size + convolved_channels(spec) * spec.conv_kernel


def shard(spec: RecurrentSpec, ranks: int) -> RecurrentSpec:
    """The part of a layer on one of several ranks: its share of the heads, and at least one group."""
    groups = spec.num_groups or ranks
    if spec.num_heads % ranks or max(groups, ranks) % min(groups, ranks):
        rule = f"must divide the {spec.num_heads} heads, and divide or be a multiple of the {spec.num_groups} groups"
        raise ArgumentError("ranks", ranks, rule)
    return replace(spec, num_heads=spec.num_heads // ranks, num_groups=-(-spec.num_groups // ranks))


def convolved_channels(spec: RecurrentSpec) -> int:
    """Channels of the causal convolution: values, and the groups' B and C or keys and queries."""
    return spec.num_heads * spec.head_dim + 2 * spec.num_groups * spec.state_size
