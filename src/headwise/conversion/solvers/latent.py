"""One layer of MHA, MQA or GQA converted to MLA: at one size, at several, and its tensors.

The rotary energy of the key heads is concentrated in few channels. The channels that lose most without rotation keep
it and become the shared rotary key; the content of the others, and all values, are decoded from one latent. With
every rotary channel kept and the latent as wide as all the rest, the layer computes what the source computes. Key
dims without rotation (partial rotary, or no RoPE at all) are plain content. Without RoPE the layer has no rotary key,
and a latent of E holds keys and values of all heads without loss: half of an MHA's cache.

Of several sizes one latent is solved, and narrower ones are cut from it. Everything here is a function of tensors, in
float64. At E = 4096 a matrix of E² takes 134 MB, so metrics stay blocks, one a key head, and of several sizes one is
in memory at a time.

Shapes: H query heads, K key heads, D head dim, D' its rotated dims, F = D'/2, V value dim, E hidden, E' = E or E + 1
(a column for the biases), P rotary dims, R latent rank, m content rows, n plain dims of all heads, C channels without
rotation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.conversion.solvers.joint_latent import NOTHING, Part, joint_latent, whole_latent
from headwise.conversion.solvers.layer import Layer, LayerTarget, grouped_spec, latent_spec
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
from headwise.conversion.solvers.statistics import (
    KEY_BALANCE,
    Statistics,
    centred,
    cost_without,
    energy,
    key_metric,
    value_metric,
)
from headwise.errors import SpecError
from headwise.models.specs import GroupedSpec, LatentSpec, as_latent, rotated_dims
from headwise.runtime.attention import RotaryEmbedding


class LatentParts(NamedTuple):
    """A solution for one MLA layer.

    Attributes:
        q_nope: each head's query of the keys' content, ``[H·D, E']``.
        q_rope: each head's query of the shared rotary key, ``[H, P, E']``.
        k_rope: the shared rotary key, ``[P, E']``.
        down: the projection to the latent, ``[R, E']``.
        key_up: the decoder of each key head's content, ``[K·D, R]``.
        value_up: the decoder of each value head, ``[K·V, R]``.
    """

    q_nope: Tensor
    q_rope: Tensor
    k_rope: Tensor
    down: Tensor
    key_up: Tensor
    value_up: Tensor


def projections(state: Mapping[str, Tensor], target: LatentSpec) -> tuple[Tensor, Tensor, Tensor]:
    """The query, key and value projections ``[rows, E']``; biases are a last column, for a constant input of 1."""
    q, k, v = (with_bias(state, name, is_biased(target)) for name in ("q_proj", "k_proj", "v_proj"))
    return q, k, v


def assemble(
    state: Mapping[str, Tensor], source: GroupedSpec, target: LatentSpec, parts: LatentParts
) -> dict[str, Tensor]:
    """The tensors of an MLA layer by its own names, float64.

    Args:
        state: the source layer's tensors, for its output projection.
        source: the source layer's spec.
        target: the MLA layer's spec.
        parts: the solution.
    """
    H, K, D = source.num_heads, source.num_kv_heads, source.head_dim
    queries, decoders = [parts.q_rope], [parts.value_up.view(K, source.value_dim, -1)]  # [H, P, E'], [K, V, R]
    if nope := target.qk_nope_head_dim:  # rotated dims come first; they are no content where all keep their rotation
        queries.insert(0, torch.unflatten(parts.q_nope, 0, (H, D))[:, D - nope :])  # [H, nope, E']
        decoders.insert(0, parts.key_up.view(K, D, -1)[:, D - nope :])  # [K, nope, R]
    # The new heads are wider, so their softmax scale is smaller; the queries make up for it.
    rescale = (target.qk_head_dim / D) ** 0.5 * (
        1.0 if source.softmax_scale is None else source.softmax_scale * D**0.5
    )
    biased = is_biased(target)
    out = {
        **split_bias("q_proj", torch.cat(queries, dim=1).flatten(0, 1) * rescale, biased),
        **split_bias("kv_a_proj_with_mqa", torch.cat((parts.down, parts.k_rope)), biased),
        "kv_b_proj.weight": torch.cat(decoders, dim=1).repeat_interleave(H // K, dim=0).flatten(0, 1),
        "o_proj.weight": state["o_proj.weight"].double(),
    }
    if "o_proj.bias" in state:
        out["o_proj.bias"] = state["o_proj.bias"].double()
    return out


def is_biased(target: LatentSpec) -> bool:
    """Whether an MLA layer's queries and latent have biases."""
    return "kv_a_proj_with_mqa" in target.bias


def with_bias(state: Mapping[str, Tensor], name: str, biased: bool) -> Tensor:
    """A projection ``[rows, E']``, float64; if ``biased``, its last column is its bias or 0, for an input of 1."""
    weight = state[f"{name}.weight"].double()
    if not biased:
        return weight
    bias = state.get(f"{name}.bias")
    column = torch.zeros(weight.shape[0], 1, dtype=torch.float64) if bias is None else bias.double()[:, None]
    return torch.cat((weight, column), dim=1)


def split_bias(name: str, weight: Tensor, biased: bool) -> dict[str, Tensor]:
    """A projection's weight and bias by name: the inverse of `with_bias`."""
    if not biased:
        return {f"{name}.weight": weight}
    return {f"{name}.weight": weight[:, :-1], f"{name}.bias": weight[:, -1]}


def convert_to_latent(
    state: Mapping[str, Tensor],
    source: GroupedSpec,
    target: LayerTarget,
    *,
    statistics: Statistics | None,
    sensitivity: Tensor | None = None,
    rotary: Rotary | None = None,
) -> tuple[dict[str, Tensor], list[int]]:
    """Convert one layer's attention to MLA.

    For example ``convert_to_latent(state, source, LayerTarget(as_latent(source, 96, 32)), statistics=None)`` converts
    a layer by its weights alone.

    Args:
        state: the layer's tensors by its own names (``q_proj.weight`` …).
        source: the layer's spec.
        target: the MLA layer's spec, from `headwise.models.specs.as_latent`, and settings.
        statistics: the means over a text; when None, all inputs count equally and near tokens are attended to more.
        sensitivity: the cost of an error of the output, ``[E, E]``; the same in every direction when None.
        rotary: the rotary part that `find_rotary` returned, where several sizes are solved.

    Returns:
        The MLA layer's tensors by its own names, float64, and the model frequency of each of its P/2 rotary pairs.

    Raises:
        SpecError: the layer has norms of queries and keys.
    """
    if source.qk_norm is not None:
        raise SpecError(
            "qk_norm", source.qk_norm, "is solved by headwise.convert, which sees the layer behind its norms"
        )
    spec = latent_spec(target.spec)
    means = statistics or Statistics.nothing(source.hidden_size, source.num_heads, target.longest)
    state = _without_idle_biases(state, source)
    keys, content = _divide_keys(state, source, target, means, rotary)
    w_v = with_bias(state, "v_proj", is_biased(spec))  # [K·V, E']
    if spec.kv_lora_rank >= exact_rank(source, spec):
        down, (key_up, value_up) = whole_latent([content, w_v], spec.kv_lora_rank)
    else:
        inputs, key_moments = (gram[: w_v.shape[1], : w_v.shape[1]] for gram in (means.inputs, means.keys))
        if is_biased(spec):  # softmax ignores a bias that all keys share
            key_moments = centred(key_moments)
        # Queries are computed a second time at the end: until then their memory is needed.
        metric = key_metric(_unrotated_queries(state, source, spec, keys), inputs, means.head_weight, source)
        values = Part(w_v, value_metric(state["o_proj.weight"], sensitivity, source), inputs)
        key_weight = target.key_weight
        if statistics is None:
            # The costs of keys and values have a common unit on a text alone: here their ratio is fixed.
            key_cost = max(cost_without(Part(content, metric, key_moments)), NOTHING)
            key_weight = KEY_BALANCE * cost_without(values) / key_cost
        parts = [Part(content, metric * key_weight, key_moments), values]
        down, (key_up, value_up) = joint_latent(parts, spec.kv_lora_rank)
        del values, parts
    del content, w_v
    solution = LatentParts(
        q_nope=_unrotated_queries(state, source, spec, keys).flatten(0, 1),
        q_rope=_rotary_queries(state, source, spec, keys),
        k_rope=keys.rotary,
        down=down,
        key_up=key_up if keys.back_to_heads is None else keys.back_to_heads @ key_up,
        value_up=value_up,
    )
    out = assemble(state, source, spec, solution)
    return out, torch.nonzero(keys.kept)[:, 0].tolist()


def _without_idle_biases(state: Mapping[str, Tensor], source: GroupedSpec) -> Mapping[str, Tensor]:
    """A layer's tensors without the biases that no latent has to hold; see `_needs_constant`.

    Attention weights sum to 1, so that a bias of the values is one of the output. Without RoPE a bias of the keys
    changes all scores of a query alike, which softmax ignores.
    """
    out = dict(state)
    if source.rope is None:
        out.pop("k_proj.bias", None)
    if "o_proj.bias" in state and (bias := out.pop("v_proj.bias", None)) is not None:
        values = bias.double().view(source.num_kv_heads, -1).repeat_interleave(source.group_size, 0).flatten()
        out["o_proj.bias"] = state["o_proj.bias"].double() + state["o_proj.weight"].double() @ values
    return out


def _needs_constant(source: GroupedSpec) -> bool:
    """Whether a latent that loses nothing holds a constant, for a bias of rotated keys or of values."""
    return ("k_proj" in source.bias and source.rope is not None) or (
        "v_proj" in source.bias and "o_proj" not in source.bias
    )


class Rotary(NamedTuple):
    """The rotary part of a layer's queries and keys.

    Attributes:
        queries: the rotated pairs of the query heads, ``[H, F, E']`` complex.
        channels: the channels of the layer's keys.
        rotation: the mean rotation over the distances that are attended to, ``[H, F]`` complex.
        lost: the energy of each channel that the scores lose without its rotation, ``[F, K]``.
    """

    queries: Tensor
    channels: Channels
    rotation: Tensor
    lost: Tensor


def rotary_channels(w_q: Tensor, w_k: Tensor, source: GroupedSpec, means: Statistics, *, mix: bool = True) -> Rotary:
    """Find the rotary channels of a layer's keys, and the loss of dropping each one's rotation.

    Args:
        w_q: the query projection, ``[H·D, E']``; see `projections`.
        w_k: the key projection, ``[K·D, E']``.
        source: the layer's spec; it has RoPE.
        means: the statistics of a text, or `Statistics.nothing`.
        mix: whether heads are mixed; see `concentrate`.
    """
    assert source.rope is not None
    inputs, key_moments = (gram[: w_q.shape[1], : w_q.shape[1]] for gram in (means.inputs, means.keys))
    queries, keys = rotated_pairs(w_q, source), rotated_pairs(w_k, source)  # [H, F, E'], [K, F, E']
    rotation = mean_rotation(RotaryEmbedding(source.rope).frequencies, means.distances)  # [H, F]
    query_energy = energy(queries, inputs) * means.head_weight[:, None]  # [H, F]
    channels = concentrate(queries, keys, query_energy, key_moments, mix=mix)
    return Rotary(queries, channels, rotation, lost_rotation(channels, query_energy, rotation))


def find_rotary(
    state: Mapping[str, Tensor], source: GroupedSpec, target: LatentSpec, means: Statistics, *, mix: bool = True
) -> Rotary | None:
    """The rotary channels of a layer, which all its MLA targets share; None without RoPE. See `rotary_channels`."""
    if source.rope is None:
        return None
    w_q, w_k = (with_bias(state, name, is_biased(target)) for name in ("q_proj", "k_proj"))
    rotary = rotary_channels(w_q, w_k, source, means, mix=mix)
    return rotary._replace(queries=torch.empty(0))  # large, and used no more


class _Keys(NamedTuple):
    """A layer's keys, divided into the shared rotary key and content.

    Attributes:
        kept: the channels that keep their rotation, bool ``[F, K]``.
        back: the map from channels back to the heads' pairs, ``[F, K, K]`` complex; see `Channels`.
        rotation: the mean rotation, ``[H, F]`` complex; see `Rotary`.
        rotary: the shared rotary key, ``[P, E']``.
        back_to_heads: the map from content rows to each head's key, ``[K·D, m]``; None where content rows are keys.
    """

    kept: Tensor
    back: Tensor
    rotation: Tensor
    rotary: Tensor
    back_to_heads: Tensor | None


def _divide_keys(
    state: Mapping[str, Tensor], source: GroupedSpec, target: LayerTarget, means: Statistics, rotary: Rotary | None
) -> tuple[_Keys, Tensor]:
    """Choose the channels that keep their rotation, and divide a layer's keys into those channels and content.

    Content is the rest of each head's key, ``[K·D, E']``. Where all of it fits in the latent, content is the m rows
    that these are linear in, with the map back to the heads.
    """
    spec = latent_spec(target.spec)
    K, D, P = source.num_kv_heads, source.head_dim, spec.qk_rope_head_dim
    w_q, w_k = (with_bias(state, name, is_biased(spec)) for name in ("q_proj", "k_proj"))
    if source.rope is None:
        no_channels, empty = torch.zeros(0, K, dtype=torch.bool), torch.zeros(0, K, K, dtype=torch.complex128)
        return _Keys(no_channels, empty, empty[:, 0].mT, w_k[:0], None), w_k
    rotary = rotary or rotary_channels(w_q, w_k, source, means, mix=target.mixes_heads)
    _, channels, rotation, loss = rotary
    mask = target.rotary_channels
    if mask is None:
        mask = keep_rotation(channels.energy, loss, P // 2)  # [F, K]
    rotary_key, interleaved = to_real(channels.keys[mask]), source.rope.interleaved  # [P, E']
    plain = torch.unflatten(w_k, 0, (K, D))[:, rotated_dims(source) :]  # [K, n/K, E']
    if spec.kv_lora_rank >= K * (D + source.value_dim) - P:
        rows, up = _unrotated_keys(channels, mask, interleaved=interleaved)  # [2C, E'], [K·D', 2C]
        content = torch.cat((rows, plain.flatten(0, 1)))  # [m, E'], m = 2C + n
        back_to_heads = _join_plain(up, plain.shape[0] * plain.shape[1], K)  # [K·D, m]
        return _Keys(mask, channels.back, rotation, rotary_key, back_to_heads), content
    unrotated = ((channels.back * ~mask[:, None]) @ channels.keys).transpose(0, 1)  # [K, F, E']
    content = torch.cat((as_rotated(unrotated, interleaved=interleaved), plain), dim=1).flatten(0, 1)  # [K·D, E']
    return _Keys(mask, channels.back, rotation, rotary_key, None), content


def _unrotated_queries(state: Mapping[str, Tensor], source: GroupedSpec, target: LatentSpec, keys: _Keys) -> Tensor:
    """Each head's query of the content, rotated by the mean rotation that its keys lost: ``[H, D, E']``."""
    w_q = with_bias(state, "q_proj", is_biased(target))
    heads = torch.unflatten(w_q, 0, (source.num_heads, source.head_dim))  # [H, D, E']
    if source.rope is None:
        return heads
    # YaRN scales cos and sin, of queries and of keys; channels without rotation must be scaled here.
    mean = keys.rotation.conj() * RotaryEmbedding(source.rope).attention_scaling ** 2
    unrotated = rotated_pairs(w_q, source) * mean[:, :, None]  # [H, F, E']
    return torch.cat(
        (as_rotated(unrotated, interleaved=source.rope.interleaved), heads[:, rotated_dims(source) :]), dim=1
    )


def _rotary_queries(state: Mapping[str, Tensor], source: GroupedSpec, target: LatentSpec, keys: _Keys) -> Tensor:
    """The queries of the shared rotary key, ``q̃ = conj(back) q`` for its channels: ``[H, P, E']``."""
    w_q = with_bias(state, "q_proj", is_biased(target))
    if source.rope is None:
        return torch.unflatten(w_q, 0, (source.num_heads, -1))[:, :0]
    frequency, channel = torch.nonzero(keys.kept, as_tuple=True)
    back = keys.back[frequency, :, channel].conj().mT.repeat_interleave(source.group_size, dim=0)  # [H, P/2]
    return to_real(back[:, :, None] * rotated_pairs(w_q, source)[:, frequency])


def _unrotated_keys(channels: Channels, mask: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The channels that lose their rotation, and the map from them back to each head's key.

    Returns:
        The channels as real rows ``[2C, E']``, and the map ``[K·D', 2C]`` that sums ``back y`` in head dims.
    """
    frequency, channel = torch.nonzero(~mask, as_tuple=True)
    rows = to_real(channels.keys[frequency, channel])  # [2C, E']
    coefficients = channels.back[frequency, :, channel]  # [C, K]
    count, K = coefficients.shape
    F = mask.shape[0]
    up = torch.zeros(K, 2, F, 2, count, dtype=torch.float64)  # real and imaginary parts of heads, and of channels
    index = torch.arange(count)
    up[:, 0, frequency, 0, index] = coefficients.real.mT
    up[:, 0, frequency, 1, index] = -coefficients.imag.mT
    up[:, 1, frequency, 0, index] = coefficients.imag.mT
    up[:, 1, frequency, 1, index] = coefficients.real.mT
    if interleaved:
        up = up.transpose(1, 2)
    return rows, up.reshape(K * 2 * F, 2 * count)


def _join_plain(unrotated_up: Tensor, plain: int, K: int) -> Tensor:
    """The map from channels without rotation and plain dims back to each head's key: ``[K·D, 2C + n]``.

    Args:
        unrotated_up: the map from channels without rotation to each head's key, ``[K·D', 2C]``.
        plain: the number n of dims of all heads that never rotated; the map copies them.
        K: the number of key heads.
    """
    columns = unrotated_up.shape[1]
    unrotated = torch.nn.functional.pad(torch.unflatten(unrotated_up, 0, (K, -1)), (0, plain))  # [K, D', 2C + n]
    identity = torch.nn.functional.pad(torch.eye(plain, dtype=torch.float64), (columns, 0))  # [n, 2C + n]
    copies = identity.view(K, plain // K, columns + plain)
    return torch.cat((unrotated, copies), dim=1).flatten(0, 1)


def solve_sizes(
    source: Layer,
    sizes: Sequence[tuple[int, int]],
    target: LayerTarget,
    statistics: Statistics,
    sensitivity: Tensor | None = None,
) -> Iterator[tuple[tuple[int, int], Layer]]:
    """Solve a layer at some sizes, one at a time, as each solution may be large.

    At each rotary width the largest latent below the exact one is solved, and narrower ones are cut from it.

    Args:
        source: the layer, float32.
        sizes: the rank R and the rotary width P of each solution.
        target: the settings of every solution; its spec is of another size.
        statistics: the statistics of the layer's inputs.
        sensitivity: the cost of an error of the layer's output, ``[E, E]``; the same in every direction when None.

    Returns:
        Each size with its solution, float64, from the widest rotary key and latent down.
    """
    own = grouped_spec(source.spec)
    rotary = find_rotary(source.state, own, as_latent(own, *sizes[0]), statistics, mix=target.mixes_heads)
    ordered_sizes = sorted(sizes, key=lambda size: (size[1], size[0]), reverse=True)
    for _, width_sizes in groupby(ordered_sizes, key=lambda size: size[1]):
        widest = None  # freed before the next one is solved
        for size in width_sizes:
            spec = as_latent(own, *size)
            if widest is None:
                own_target = replace(target, spec=spec)
                solution = convert_to_latent(
                    source.state, own, own_target, statistics=statistics, sensitivity=sensitivity, rotary=rotary
                )
                widest = Layer(spec, *solution)
                del solution
            yield size, narrowed(widest, spec, statistics)
            if spec.kv_lora_rank >= exact_rank(own, spec):
                widest = None  # an exact latent's channels are in no order to cut by


def narrowed(layer: Layer, target: LatentSpec, statistics: Statistics) -> Layer:
    """Cut an MLA layer to the first channels of its latent, with the best decoders from them.

    Args:
        layer: the layer, float64, whose latent channels are in order.
        target: the layer's spec with a smaller rank.
        statistics: the statistics of the layer's inputs.
    """
    spec, state = latent_spec(layer.spec), layer.state
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


def exact_rank(source: GroupedSpec, target: LatentSpec) -> int:
    """The rank of a latent that loses nothing but the dropped rotation.

    For example ``exact_rank(source, as_latent(source, 96, 32))``.
    """
    values = source.num_kv_heads * (source.head_dim + source.value_dim) - target.qk_rope_head_dim
    if source.qk_norm is not None:  # behind a norm they are no linear map of the inputs
        return values
    return min(values, source.hidden_size + _needs_constant(source))
