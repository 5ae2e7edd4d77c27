"""One layer of MHA, MQA or GQA → MLA.

Rotary channels are concentrated and the most needed kept as the shared rotary key; the other keys' content and all
values are decoded from one latent. With every rotary channel kept and the latent as wide as all the rest, the layer
computes what it did before. Key dims that never rotated (partial rotary, or no RoPE at all) are plain content.
Everything here is a function of tensors, in float64.

Shapes: H query heads, K key heads, D head dim, D' its rotated dims, V value dim, E hidden, E' = E or E + 1 (a column
for the biases), P rotary dims, R latent rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.attention import RotaryEmbedding
from headwise.conversion.assemble import assemble, projections
from headwise.conversion.rope_channels import Channels, concentrate, keep_rotation, mean_rotation, to_complex, to_real
from headwise.specs import GroupedSpec, LatentSpec, rotated_dims

KEY_BALANCE = 2.0
"""How much all key energy counts beside all value energy in the latent."""

_FLOOR = 1e-6


def convert_to_latent(
    state: Mapping[str, Tensor],
    source: GroupedSpec,
    target: LatentSpec,
    *,
    gram: Tensor | None,
    longest: int,
    kept: Tensor | None = None,
) -> tuple[dict[str, Tensor], list[int]]:
    """The MLA layer's weights, and the model frequency of each of its rotary pairs.

    Args:
        state: the layer's tensors by its own names (``q_proj.weight`` …).
        source: what they are.
        target: what to make; from `headwise.specs.as_latent`.
        gram: ``[E, E]`` or ``[E + 1, E + 1]`` (with a constant 1 as the last input), E[x xᵀ]; None for no
            statistics: all inputs count alike.
        longest: the distance up to which a dropped rotation is averaged.
        kept: ``[F, K]`` bool, the (frequency, channel) pairs that keep their rotation, as many as the target has;
            those that would lose most without it when None.

    Returns:
        Tensors by the MLA layer's names, float64, and the channels for its rotary pairs.
    """
    H, K, D = source.num_heads, source.num_kv_heads, source.head_dim
    w_q, w_k, w_v = projections(state, target)
    moments = torch.eye(w_q.shape[1], dtype=torch.float64) if gram is None else gram[: w_q.shape[1], : w_q.shape[1]]

    heads, key_heads = torch.unflatten(w_q, 0, (H, D)), torch.unflatten(w_k, 0, (K, D))
    turned = rotated_dims(source)
    plain = key_heads[:, turned:].flatten(0, 1)
    pairs: list[int] = []
    q_rope, k_rope, content = heads[:, :0], w_k[:0], plain
    content_up = torch.eye(len(plain), dtype=torch.float64)
    if source.rope is not None:
        interleaved = source.rope.interleaved
        rotary = RotaryEmbedding(source.rope)
        rotation = mean_rotation(rotary.frequencies, longest)
        queries = to_complex(heads[:, :turned].flatten(0, 1), H, interleaved=interleaved)
        keys = to_complex(key_heads[:, :turned].flatten(0, 1), K, interleaved=interleaved)
        channels = concentrate(queries, keys, moments)
        if kept is None:
            kept = keep_rotation(channels.energy, rotation, target.qk_rope_head_dim // 2)
        # cos and sin come scaled (YaRN); a channel that is not rotated must be scaled by hand, on both sides.
        rotation = rotation * rotary.attention_scaling**2
        q_rope, pairs = _rotary_queries(queries, channels, kept, K), torch.nonzero(kept)[:, 0].tolist()
        k_rope = to_real(channels.keys[kept])
        unrotated, unrotated_up = _unrotated_keys(channels, kept, rotation, interleaved=interleaved)
        content = torch.cat((unrotated, plain))
        content_up = _beside(unrotated_up, len(plain), K)
    down, key_up, value_up = joint_latent(
        content, w_v, _output_weight(state["o_proj.weight"], source), moments, target.kv_lora_rank
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


def joint_latent(
    keys: Tensor, values: Tensor, output_weight: Tensor, gram: Tensor, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The rank-R map of the inputs from which keys and values are best decoded.

    Of ``L [W_k; W_v] Σ^{1/2}``, the left weights L standing for what an error does to scores and to the output,
    the first R left singular vectors U: ``down = Uᵀ L W`` and ``up = L⁻¹ U``, with no root or inverse of Σ.

    Args:
        keys: ``[m, E']``, already in units of the queries.
        values: ``[K·V, E']``.
        output_weight: ``[K, V, V]``, positive definite: the root of what the output projection makes of a value.
        gram: ``[E', E']``.
        rank: R.

    Returns:
        down ``[R, E']``, up for the keys ``[m, R]`` and for the values ``[K·V, R]``.
    """
    m = keys.shape[0]
    K, V, _ = output_weight.shape
    weighted_values = (output_weight @ values.view(K, V, -1)).flatten(0, 1)
    key_scale = KEY_BALANCE / _norm(keys, gram) if m else 1.0
    value_scale = 1.0 / _norm(weighted_values, gram)
    stacked = torch.cat((keys * key_scale, weighted_values * value_scale))
    _, vectors = torch.linalg.eigh(stacked @ gram @ stacked.mT)
    basis = vectors.flip(-1)[:, :rank]
    down, up = basis.mT @ stacked, basis
    if up.shape[1] < rank:
        down = torch.nn.functional.pad(down, (0, 0, 0, rank - down.shape[0]))
        up = torch.nn.functional.pad(up, (0, rank - up.shape[1]))
    value_up = torch.linalg.solve(output_weight, up[m:].view(K, V, -1) / value_scale)
    return down, up[:m] / key_scale, value_up.flatten(0, 1)


def _rotary_queries(queries: Tensor, channels: Channels, kept: Tensor, K: int) -> Tensor:
    """``q̃ = conj(back) q`` for the kept channels: ``[H, P, E']``."""
    H = queries.shape[0]
    frequency, channel = torch.nonzero(kept, as_tuple=True)
    back = channels.back[frequency, :, channel].conj().mT.repeat_interleave(H // K, dim=0)
    return to_real(back[:, :, None] * queries[:, frequency])


def _unrotated_keys(
    channels: Channels, kept: Tensor, rotation: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """The channels that lose their rotation, and the way from them back to each head's key.

    Returns:
        ``[m, E']`` real rows ``|c_f| y``, and ``[K·D, m]`` that makes ``Σ_c back c_f y`` of them in head dims.
    """
    frequency, channel = torch.nonzero(~kept, as_tuple=True)
    size = rotation[frequency].abs()
    rows = to_real(channels.keys[frequency, channel] * size[:, None])
    phase = rotation[frequency] / size.clamp_min(torch.finfo(size.dtype).tiny)
    coefficients = channels.back[frequency, :, channel] * phase[:, None]
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


def _output_weight(w_o: Tensor, source: GroupedSpec) -> Tensor:
    """``(Σ_heads W_oᵀ W_o)^{1/2}`` of each value head, ``[K, V, V]``, kept away from singular."""
    K, V = source.num_kv_heads, source.value_dim
    heads = w_o.double().view(w_o.shape[0], K, source.group_size, V)
    square = torch.einsum("ekgv,ekgw->kvw", heads, heads)
    values, vectors = torch.linalg.eigh(square)
    root = values.clamp_min(0).sqrt()
    root = root.clamp_min(_FLOOR * max(float(root.max()), torch.finfo(root.dtype).tiny))
    out: Tensor = (vectors * root[:, None, :]) @ vectors.mT
    return out


def _norm(rows: Tensor, gram: Tensor) -> float:
    energy = float(((rows @ gram) * rows).sum())
    return math.sqrt(max(energy, torch.finfo(torch.float64).tiny))
