"""One layer of MHA, MQA or GQA → MLA.

Rotary channels are concentrated and the most needed kept as the shared rotary key; the other keys' content and all
values are decoded from one latent. With every rotary channel kept and the latent as wide as all the rest, the layer
computes what it did before. Key dims that never rotated (partial rotary, or no RoPE at all) are plain content.
Everything here is a function of tensors, in float64.

Shapes: H query heads, K key heads, D head dim, D' its rotated dims, F = D'/2, V value dim, E hidden, E' = E or E + 1
(a column for the biases), P rotary dims, R latent rank, m content rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.attention import RotaryEmbedding
from headwise.conversion.solvers.assemble import LatentParts, assemble, is_biased, with_bias
from headwise.conversion.solvers.joint_latent import NOTHING, Part, joint_latent, whole_latent
from headwise.conversion.solvers.metrics import (
    KEY_BALANCE,
    KEY_WEIGHT,
    centred,
    cost_without,
    energy,
    key_metric,
    value_metric,
)
from headwise.conversion.solvers.rope_channels import (
    Channels,
    as_rotated,
    concentrate,
    keep_rotation,
    lost_rotation,
    mean_rotation,
    rotated_pairs,
    to_real,
)
from headwise.conversion.solvers.statistics import Statistics
from headwise.specs import GroupedSpec, LatentSpec, rotated_dims


@dataclass(frozen=True)
class LatentOptions:
    """What may be decided about an MLA layer beside its sizes.

    Attributes:
        longest: without statistics, the distance up to which a dropped rotation is averaged, in tokens.
        key_weight: with statistics, the cost of an error of the keys relative to one of the values.
        kept: bool ``[F, K]``, the channels that keep their rotation; those that are needed most when None.
        mix: whether rotation is concentrated by mixing heads; otherwise each channel is one head's own.
    """

    longest: int = 2048
    key_weight: float = KEY_WEIGHT
    kept: Tensor | None = None
    mix: bool = True


def convert_to_latent(
    state: Mapping[str, Tensor],
    source: GroupedSpec,
    target: LatentSpec,
    *,
    statistics: Statistics | None,
    sensitivity: Tensor | None = None,
    options: LatentOptions | None = None,
    **fields: Any,
) -> tuple[dict[str, Tensor], list[int]]:
    """The MLA layer's weights, and the model frequency of each of its rotary pairs.

    Args:
        state: the layer's tensors by its own names (``q_proj.weight`` …).
        source: what they are.
        target: what to make; from `headwise.specs.as_latent`.
        statistics: means over a text; None for none: all inputs count alike, near tokens are attended to more.
        sensitivity: ``[E, E]``, the cost of an error of the output; the same in every direction when None.
        options: what else may be decided; see `LatentOptions`.
        fields: those of `LatentOptions` by themselves, as an older spelling; deprecated.

    Returns:
        Tensors by the MLA layer's names, float64, and the channels for its rotary pairs.
    """
    if fields:
        warnings.warn("convert_to_latent takes options=LatentOptions(…)", DeprecationWarning, stacklevel=2)
    options = options or LatentOptions(**fields)
    known = statistics or Statistics.nothing(source.hidden_size, source.num_heads, options.longest)
    keys, content = _divided(state, source, target, known, options)
    w_v = with_bias(state, "v_proj", is_biased(target))
    if keys.back_to_heads is not None or target.kv_lora_rank >= w_v.shape[1]:
        down, (key_up, value_up) = whole_latent([content, w_v], target.kv_lora_rank)
    else:
        inputs, keyed = (gram[: w_v.shape[1], : w_v.shape[1]] for gram in (known.inputs, known.keys))
        if is_biased(target):  # a bias that all keys have is not seen by softmax
            keyed = centred(keyed)
        # Queries are made of the weights once more at the end: until then the room is needed.
        asked = key_metric(_unrotated_queries(state, source, target, keys), inputs, known.head_weight, source)
        values = Part(w_v, value_metric(state["o_proj.weight"], sensitivity, source), inputs)
        key_weight = options.key_weight
        if statistics is None:
            most = max(cost_without(Part(content, asked, keyed)), NOTHING)
            key_weight = KEY_BALANCE * cost_without(values) / most
        parts = [Part(content, asked * key_weight, keyed), values]
        down, (key_up, value_up) = joint_latent(parts, target.kv_lora_rank)
        del values, parts
    del content, w_v
    solution = LatentParts(
        q_nope=_unrotated_queries(state, source, target, keys).flatten(0, 1),
        q_rope=_rotary_queries(state, source, target, keys),
        k_rope=keys.rotary,
        down=down,
        key_up=key_up if keys.back_to_heads is None else keys.back_to_heads @ key_up,
        value_up=value_up,
    )
    out = assemble(state, source, target, solution)
    return out, torch.nonzero(keys.kept)[:, 0].tolist()


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


def rotary_channels(w_q: Tensor, w_k: Tensor, source: GroupedSpec, known: Statistics, *, mix: bool = True) -> Rotary:
    """The channels of a layer's keys that rotate, and what their rotation is worth.

    Args:
        w_q: ``[H·D, E']``, see `projections`.
        w_k: ``[K·D, E']``.
        source: the layer; it has a rotation.
        known: means over a text, or `Statistics.nothing`.
        mix: see `concentrate`.
    """
    assert source.rope is not None
    inputs, keyed = (gram[: w_q.shape[1], : w_q.shape[1]] for gram in (known.inputs, known.keys))
    queries, keys = rotated_pairs(w_q, source), rotated_pairs(w_k, source)
    rotation = mean_rotation(RotaryEmbedding(source.rope).frequencies, known.distances)
    asked = energy(queries, inputs) * known.head_weight[:, None]
    channels = concentrate(queries, keys, asked, keyed, mix=mix)
    return Rotary(queries, channels, rotation, lost_rotation(channels, asked, rotation))


class _Keys(NamedTuple):
    """What becomes of a layer's keys.

    Attributes:
        kept: bool ``[F, K]``, the channels that keep their rotation.
        back: ``[F, K, K]`` complex, see `Channels`.
        rotation: see `Rotary`.
        rotary: ``[P, E']``, the shared rotary key.
        back_to_heads: ``[K·D, m]``, see `_divided`.
    """

    kept: Tensor
    back: Tensor
    rotation: Tensor
    rotary: Tensor
    back_to_heads: Tensor | None


def _divided(
    state: Mapping[str, Tensor],
    source: GroupedSpec,
    target: LatentSpec,
    known: Statistics,
    options: LatentOptions,
) -> tuple[_Keys, Tensor]:
    """Choose the channels that keep their rotation, and part a layer's keys into them and the rest.

    The rest is what is left of each head's key, ``[K·D, E']``. Where all of it has a place in the latent, it is the m
    rows that these are made of, and there is a way back from them.
    """
    K, D, P = source.num_kv_heads, source.head_dim, target.qk_rope_head_dim
    w_q, w_k = (with_bias(state, name, is_biased(target)) for name in ("q_proj", "k_proj"))
    if source.rope is None:
        none, nothing = torch.zeros(0, K, dtype=torch.bool), torch.zeros(0, K, K, dtype=torch.complex128)
        return _Keys(none, nothing, nothing[:, 0].mT, w_k[:0], None), w_k
    _, channels, rotation, lost = rotary_channels(w_q, w_k, source, known, mix=options.mix)
    kept = options.kept
    if kept is None:
        kept = keep_rotation(channels.energy, lost, P // 2)
    rotary, interleaved = to_real(channels.keys[kept]), source.rope.interleaved
    plain = torch.unflatten(w_k, 0, (K, D))[:, rotated_dims(source) :]
    if target.kv_lora_rank >= K * (D + source.value_dim) - P:
        rows, up = _unrotated_keys(channels, kept, interleaved=interleaved)
        content, way = torch.cat((rows, plain.flatten(0, 1))), _beside(up, plain.shape[0] * plain.shape[1], K)
        return _Keys(kept, channels.back, rotation, rotary, way), content
    still = ((channels.back * ~kept[:, None]) @ channels.keys).transpose(0, 1)
    content = torch.cat((as_rotated(still, interleaved=interleaved), plain), dim=1).flatten(0, 1)
    return _Keys(kept, channels.back, rotation, rotary, None), content


def _unrotated_queries(state: Mapping[str, Tensor], source: GroupedSpec, target: LatentSpec, keys: _Keys) -> Tensor:
    """A head's query for the content, turned as its keys were on average: ``[H, D, E']``."""
    w_q = with_bias(state, "q_proj", is_biased(target))
    heads = torch.unflatten(w_q, 0, (source.num_heads, source.head_dim))
    if source.rope is None:
        return heads
    # cos and sin come scaled (YaRN); a channel that is not rotated must be scaled by hand, on both sides.
    mean = keys.rotation.conj() * RotaryEmbedding(source.rope).attention_scaling ** 2
    still = rotated_pairs(w_q, source) * mean[:, :, None]
    return torch.cat(
        (as_rotated(still, interleaved=source.rope.interleaved), heads[:, rotated_dims(source) :]), dim=1
    )


def _rotary_queries(state: Mapping[str, Tensor], source: GroupedSpec, target: LatentSpec, keys: _Keys) -> Tensor:
    """``q̃ = conj(back) q`` for the kept channels: ``[H, P, E']``."""
    w_q = with_bias(state, "q_proj", is_biased(target))
    if source.rope is None:
        return torch.unflatten(w_q, 0, (source.num_heads, -1))[:, :0]
    frequency, channel = torch.nonzero(keys.kept, as_tuple=True)
    back = keys.back[frequency, :, channel].conj().mT.repeat_interleave(source.group_size, dim=0)
    return to_real(back[:, :, None] * rotated_pairs(w_q, source)[:, frequency])


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
