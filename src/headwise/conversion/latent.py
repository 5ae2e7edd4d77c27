"""One layer of MHA, MQA or GQA → MLA.

Rotary channels are concentrated and the most needed kept as the shared rotary key; the other keys' content and all
values are decoded from one latent. With every rotary channel kept and the latent as wide as all the rest, the layer
computes what it did before. Key dims that never rotated (partial rotary, or no RoPE at all) are plain content.
Everything here is a function of tensors, in float64.

Shapes: H query heads, K key heads, D head dim, D' its rotated dims, F = D'/2, V value dim, E hidden, E' = E or E + 1
(a column for the biases), P rotary dims, R latent rank, m content rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.attention import RotaryEmbedding
from headwise.conversion.assemble import assemble, projections
from headwise.conversion.joint_latent import ROUNDS, Part, joint_latent
from headwise.conversion.metrics import (
    KEY_BALANCE,
    KEY_WEIGHT,
    centred,
    cost,
    energy,
    query_spread,
    value_metric,
)
from headwise.conversion.rope_channels import (
    Channels,
    as_rotated,
    concentrate,
    keep_rotation,
    lost_rotation,
    mean_rotation,
    to_complex,
    to_real,
)
from headwise.conversion.statistics import Statistics
from headwise.specs import GroupedSpec, LatentSpec, rotated_dims


def convert_to_latent(
    state: Mapping[str, Tensor],
    source: GroupedSpec,
    target: LatentSpec,
    *,
    statistics: Statistics | None,
    sensitivity: Tensor | None = None,
    longest: int = 2048,
    key_weight: float = KEY_WEIGHT,
    kept: Tensor | None = None,
    rounds: int = ROUNDS,
) -> tuple[dict[str, Tensor], list[int]]:
    """The MLA layer's weights, and the model frequency of each of its rotary pairs.

    Args:
        state: the layer's tensors by its own names (``q_proj.weight`` …).
        source: what they are.
        target: what to make; from `headwise.specs.as_latent`.
        statistics: means over a text; None for none: all inputs count alike, near tokens are attended to more.
        sensitivity: ``[E, E]``, what an error of the output costs; the same in every direction when None.
        longest: without statistics, the distance up to which a dropped rotation is averaged.
        key_weight: with statistics, how much an error of the keys counts.
        kept: bool ``[F, K]``, the channels that keep their rotation; the most needed when None.
        rounds: see `joint_latent`; without any, a latent's first numbers are the best latent of fewer.

    Returns:
        Tensors by the MLA layer's names, float64, and the channels for its rotary pairs.
    """
    H, K, D = source.num_heads, source.num_kv_heads, source.head_dim
    w_q, w_k, w_v = projections(state, target)
    known = statistics or Statistics.nothing(source.hidden_size, H, longest)
    inputs, keyed = (gram[: w_q.shape[1], : w_q.shape[1]] for gram in (known.inputs, known.keys))

    heads, key_heads = torch.unflatten(w_q, 0, (H, D)), torch.unflatten(w_k, 0, (K, D))
    turned = rotated_dims(source)
    plain = key_heads[:, turned:].flatten(0, 1)
    pairs: list[int] = []
    q_rope, k_rope, content = heads[:, :0], w_k[:0], plain
    content_up = torch.eye(len(plain), dtype=torch.float64)
    if source.rope is not None:
        interleaved = source.rope.interleaved
        queries, channels, rotation, lost = rotary_channels(w_q, w_k, source, known)
        if kept is None:
            kept = keep_rotation(channels.energy, lost, target.qk_rope_head_dim // 2)
        q_rope, pairs = _rotary_queries(queries, channels, kept, K), torch.nonzero(kept)[:, 0].tolist()
        k_rope = to_real(channels.keys[kept])
        unrotated, unrotated_up = _unrotated_keys(channels, kept, interleaved=interleaved)
        content = torch.cat((unrotated, plain))
        content_up = _beside(unrotated_up, len(plain), K)
        # cos and sin come scaled (YaRN); a channel that is not rotated must be scaled by hand, on both sides.
        still = queries * (rotation.conj() * RotaryEmbedding(source.rope).attention_scaling ** 2)[:, :, None]
        heads = torch.cat((as_rotated(still, interleaved=interleaved), heads[:, turned:]), dim=1)
        del queries, channels, unrotated, unrotated_up, still  # each as large as a layer's projection
    del w_q, w_k, key_heads, plain

    key_metric = _key_metric(heads, inputs, content_up.view(K, D, -1), known.head_weight, source)
    by_head = value_metric(state["o_proj.weight"], sensitivity, source)
    values = Part(w_v, torch.block_diag(*by_head), inputs)  # type: ignore[no-untyped-call]
    if statistics is None:
        wanted = KEY_BALANCE * cost(values)
        key_weight = wanted / max(cost(Part(content, key_metric, keyed)), torch.finfo(torch.float64).tiny)
    elif keyed.shape[0] == known.keys.shape[0]:
        keyed = centred(keyed)
    down, (key_up, value_up) = joint_latent(
        [Part(content, key_metric * key_weight, keyed), values], target.kv_lora_rank, rounds=rounds
    )
    out = assemble(
        state,
        source,
        target,
        q_nope=heads.flatten(0, 1),
        q_rope=q_rope,
        k_rope=k_rope,
        down=down,
        key_up=content_up @ key_up,
        value_up=value_up,
    )
    return out, pairs


class Rotary(NamedTuple):
    """What there is of rotation in a layer.

    Attributes:
        queries: ``[H, F, E']`` complex.
        channels: of its keys.
        rotation: ``[H, F]`` complex, the mean over the distances that are attended to.
        lost: ``[F, K]``, what of each channel's energy the scores lose without its rotation.
    """

    queries: Tensor
    channels: Channels
    rotation: Tensor
    lost: Tensor


def rotary_channels(w_q: Tensor, w_k: Tensor, source: GroupedSpec, known: Statistics) -> Rotary:
    """The channels of a layer's keys that rotate, and what their rotation is worth.

    Args:
        w_q: ``[H·D, E']``, see `projections`.
        w_k: ``[K·D, E']``.
        source: the layer; it has a rotation.
        known: means over a text, or `Statistics.nothing`.
    """
    assert source.rope is not None
    inputs, keyed = (gram[: w_q.shape[1], : w_q.shape[1]] for gram in (known.inputs, known.keys))
    queries, keys = (
        to_complex(
            torch.unflatten(rows, 0, (heads, -1))[:, : rotated_dims(source)].flatten(0, 1),
            heads,
            interleaved=source.rope.interleaved,
        )
        for rows, heads in ((w_q, source.num_heads), (w_k, source.num_kv_heads))
    )
    rotation = mean_rotation(RotaryEmbedding(source.rope).frequencies, known.distances)
    asked = energy(queries, inputs) * known.head_weight[:, None]
    channels = concentrate(queries, keys, asked, keyed)
    return Rotary(queries, channels, rotation, lost_rotation(channels, asked, rotation))


def _key_metric(queries: Tensor, moments: Tensor, up: Tensor, weight: Tensor, source: GroupedSpec) -> Tensor:
    """What an error of the content costs through the scores: ``Σ_h w_h E[q̃ q̃ᵀ]``, ``[m, m]``, q̃ the query of it.

    Args:
        queries: ``[H, D, E']``.
        moments: ``[E', E']``.
        up: ``[K, D, m]``, each key head's content.
        weight: ``[H]``.
        source: the layer.
    """
    ways = up.mT.repeat_interleave(source.group_size, 0) @ query_spread(queries, moments, weight, source)
    flat = ways.transpose(0, 1).flatten(1)
    return flat @ flat.mT


def _rotary_queries(queries: Tensor, channels: Channels, kept: Tensor, K: int) -> Tensor:
    """``q̃ = conj(back) q`` for the kept channels: ``[H, P, E']``."""
    H = queries.shape[0]
    frequency, channel = torch.nonzero(kept, as_tuple=True)
    back = channels.back[frequency, :, channel].conj().mT.repeat_interleave(H // K, dim=0)
    return to_real(back[:, :, None] * queries[:, frequency])


def _unrotated_keys(channels: Channels, kept: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The channels that lose their rotation, and the way from them back to each head's key.

    Returns:
        ``[m, E']`` real rows, and ``[K·D', m]`` that makes ``Σ back y`` of them in head dims.
    """
    frequency, channel = torch.nonzero(~kept, as_tuple=True)
    rows = to_real(channels.keys[frequency, channel])
    coefficients = channels.back[frequency, :, channel]
    count, K = coefficients.shape
    F = kept.shape[0]
    up = torch.zeros(K, 2, F, 2, count, dtype=torch.float64)
    index = torch.arange(count)
    up[:, 0, frequency, 0, index] = coefficients.real.mT
    up[:, 0, frequency, 1, index] = -coefficients.imag.mT
    up[:, 1, frequency, 0, index] = coefficients.imag.mT
    up[:, 1, frequency, 1, index] = coefficients.real.mT
    if interleaved:
        up = up.transpose(1, 2)
    return rows, up.reshape(K * 2 * F, 2 * count)


def _beside(unrotated_up: Tensor, plain: int, K: int) -> Tensor:
    """The way from unrotated channels and plain dims back to each head's key: ``[K·D, m + plain]``.

    Args:
        unrotated_up: ``[K·D', m]``.
        plain: how many dims of all heads never rotated, which pass as they are.
        K: key heads.
    """
    m = unrotated_up.shape[1]
    rotated = torch.nn.functional.pad(torch.unflatten(unrotated_up, 0, (K, -1)), (0, plain))
    own = torch.nn.functional.pad(torch.eye(plain, dtype=torch.float64), (m, 0)).view(K, plain // K, m + plain)
    return torch.cat((rotated, own), dim=1).flatten(0, 1)
