"""Other people's conversions, written anew from their papers: what `convert_to_latent` is measured against.

MHA2MLA and TransMLA are one scheme. The rotated pairs of all key heads, complex numbers z, become channels
``y = M z`` with M real and orthogonal (so ``z = Mᵀ y``); some channels stay rotated and are the shared rotary key,
and the others lose their rotation and share a latent with the values, found by PCA. The methods differ in M, in
which channels stay, and in what the PCA looks at. Everything is a function of tensors, in float64.

Shapes: H query heads, G of them to each of K key heads, D head dim, F = D/2 frequencies, C = K·F channels, V value
dim, E hidden, E' = E or E + 1 (a column for the biases), P rotary dims, R latent rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.attention import RotaryEmbedding
from headwise.conversion.solvers.assemble import assemble, projections
from headwise.conversion.solvers.joint_latent import NOTHING
from headwise.conversion.solvers.rope_channels import rotated_pairs, to_real
from headwise.conversion.solvers.statistics import Statistics
from headwise.errors import ArgumentError
from headwise.specs import GroupedSpec, LatentSpec, ModelSpec, rotated_dims

PUBLISHED = "mha2mla, transmla or transmla:F, F frequencies to a fold"
"""What `convert_as_published` understands, in words."""


def is_published(method: str | None) -> bool:
    """Whether a method's name is one of those that `convert_as_published` knows."""
    return method is not None and re.fullmatch(r"mha2mla|transmla(:[0-9]{1,4})?", method) is not None


def refuse_published(method: str, source: ModelSpec) -> None:
    """Refuse a published method on a model that its paper has no step for.

    Raises:
        ArgumentError: a layer does not rotate all of its heads' dims, or the fold does not divide their frequencies.
    """
    for layer in (*source.layers, *source.cross_layers):
        assert isinstance(layer, GroupedSpec)
        if rotated_dims(layer) != layer.head_dim:
            raise ArgumentError("method", method, "needs rotary embeddings on all of a head's dims")
        _refuse_fold(_freqfold(method), layer.head_dim // 2)


def convert_as_published(
    method: str,
    state: Mapping[str, Tensor],
    source: GroupedSpec,
    target: LatentSpec,
    *,
    statistics: Statistics | None,
) -> tuple[dict[str, Tensor], list[int]]:
    """`mha2mla` or `transmla`, by its name.

    Args:
        method: ``mha2mla``, ``transmla``, or ``transmla:F`` with F frequencies to a fold.
        state: the layer's tensors by its own names.
        source: what they are.
        target: what to make.
        statistics: of the source's own activations; None for none (``transmla`` then holds all inputs to be alike).

    Returns:
        As `convert_to_latent`.
    """
    if method == "mha2mla":
        return mha2mla(state, source, target, moments=None if statistics is None else statistics.inputs)
    known = statistics or Statistics.nothing(source.hidden_size, source.num_heads, 1)
    return transmla(state, source, target, moments=known.inputs, freqfold=_freqfold(method))


def _freqfold(method: str) -> int:
    return int(method.partition(":")[2] or 1)


def _refuse_fold(freqfold: int, frequencies: int) -> None:
    if freqfold < 1 or frequencies % freqfold:
        raise ArgumentError("freqfold", freqfold, f"must divide the {frequencies} frequencies of a head")


@dataclass(frozen=True)
class Mix:
    """Channels ``y = M z`` of all key heads' rotated pairs.

    Attributes:
        matrix: ``[C, K, F]``, M, real; orthogonal as ``[C, K·F]``.
        kept: ``[C]``, whether a channel stays rotated.
        frequency: ``[C]``, the model's frequency that it then turns at.
    """

    matrix: Tensor
    kept: Tensor
    frequency: Tensor


def mha2mla(
    state: Mapping[str, Tensor],
    source: GroupedSpec,
    target: LatentSpec,
    *,
    moments: Tensor | None = None,
) -> tuple[dict[str, Tensor], list[int]]:
    """MHA2MLA (Ji et al. 2025, arXiv:2502.14837) with its joint SVD, before any training.

    Each key head keeps the rotation of its pairs with the largest ``‖q‖·‖k‖`` (the best of the paper's rankings), the
    same number for every head (where P does not divide by 2·K, the last go to the heads that rank them highest). The
    rest and the values get the truncated SVD of their stacked weights.

    Args:
        state: the layer's tensors by its own names (``q_proj.weight`` …).
        source: what they are.
        target: what to make; from `headwise.specs.as_latent`.
        moments: ``[E, E]`` or ``[E + 1, E + 1]``, E[x xᵀ]: norms are then those of queries and keys on real text,
            as the paper takes them; those of the weights when None. The SVD looks at weights in any case.

    Returns:
        As `convert_to_latent`: tensors by the MLA layer's names, and the frequency of each rotary pair.
    """
    w_q, w_k, _ = projections(state, target)
    K, F, pairs = source.num_kv_heads, source.head_dim // 2, target.qk_rope_head_dim // 2
    gram = _gram(moments, w_k)
    queries, keys = (_norms(rows, source, gram) for rows in (w_q, w_k))
    score = keys * queries.view(K, -1, F).sum(1)
    matrix = torch.eye(K * F, dtype=torch.float64).view(K * F, K, F)
    mix = Mix(matrix, share_out(score, pairs).flatten(), torch.arange(F).repeat(K))
    return _convert(state, source, target, mix, torch.eye(w_k.shape[1], dtype=torch.float64), balance=False)


def transmla(
    state: Mapping[str, Tensor],
    source: GroupedSpec,
    target: LatentSpec,
    *,
    moments: Tensor,
    freqfold: int = 1,
) -> tuple[dict[str, Tensor], list[int]]:
    """TransMLA (Meng et al. 2025, arXiv:2502.07864): RoRoPE, FreqFold, balanced PCA of keys and values.

    Args:
        state: the layer's tensors by its own names.
        source: what they are.
        target: what to make; from `headwise.specs.as_latent`.
        moments: ``[E, E]`` or ``[E + 1, E + 1]``, E[x xᵀ]: keys and values are linear in x, so their PCA on real
            text follows from it.
        freqfold: how many neighbouring frequencies are treated as one. Their authors take the best of several by
            perplexity.

    Returns:
        As `convert_to_latent`: tensors by the MLA layer's names, and the frequency of each rotary pair.

    Raises:
        ArgumentError: ``freqfold`` does not divide a head's frequencies.
    """
    _, w_k, _ = projections(state, target)
    gram = _gram(moments, w_k)
    mix = rotate_rope(rotated_pairs(w_k, source), gram, target.qk_rope_head_dim // 2, freqfold=freqfold)
    return _convert(state, source, target, mix, gram, balance=True)


def first_head(state: Mapping[str, Tensor], source: GroupedSpec, target: GroupedSpec) -> dict[str, Tensor]:
    """Fewer key–value heads: of those that come to share one, the first stays.

    The GQA paper's second choice (Ainslie et al. 2023, figure 4), behind mean pooling and before a random head.

    Args:
        state: the layer's tensors by its own names.
        source: what they are.
        target: the same layer with a divisor of the key–value heads.
    """
    step = source.num_kv_heads // target.num_kv_heads
    out = dict(state)
    for name, tensor in state.items():
        if name.partition(".")[0] in ("k_proj", "v_proj"):
            out[name] = torch.unflatten(tensor, 0, (source.num_kv_heads, -1))[::step].flatten(0, 1)
    return out


def rotate_rope(keys: Tensor, gram: Tensor, pairs: int, *, freqfold: int = 1) -> Mix:
    """RoRoPE with FreqFold: per fold of frequencies, PCA across heads of real and imaginary parts alike.

    One real orthogonal matrix for both parts commutes with a rotation of all of them by one angle. With
    ``freqfold`` 1 the angle is one and scores do not change; a fold of more holds its frequencies to be one, and
    concentrates better. Every fold keeps as many of its principal components as every other (what does not
    divide goes where the next component is largest); the n of a fold turn at n of its frequencies, evenly spaced
    from the highest.

    Args:
        keys: ``[K, F, E']`` complex.
        gram: ``[E', E']``.
        pairs: P/2, channels that stay rotated.
        freqfold: frequencies to a fold.

    Raises:
        ArgumentError: ``freqfold`` does not divide F.
    """
    K, F, _ = keys.shape
    _refuse_fold(freqfold, F)
    folds, width = F // freqfold, K * freqfold
    z = keys.view(K, folds, freqfold, -1).transpose(0, 1).flatten(1, 2)
    # E[Re z Re zᵀ + Im z Im zᵀ]: both parts are samples of one distribution.
    covariance = (z @ gram.to(z.dtype) @ z.mH).real
    energy, vectors = torch.linalg.eigh(covariance)
    energy, components = energy.flip(-1), vectors.mT.flip(1)
    kept = share_out(energy, pairs)

    fold = torch.arange(folds)
    matrix = torch.zeros(folds, width, K, folds, freqfold, dtype=torch.float64)
    matrix[fold, :, :, fold] = components.reshape(folds, width, K, freqfold)
    place = torch.arange(width) * freqfold // kept.sum(1, keepdim=True).clamp_min(1)
    frequency = fold[:, None] * freqfold + place.clamp_max(freqfold - 1)
    return Mix(matrix.view(K * F, K, F), kept.flatten(), frequency.flatten())


def share_out(score: Tensor, count: int) -> Tensor:
    """The ``count`` best, the same number from each row, and what does not divide to rows whose next is best.

    Returns:
        bool, as ``score``.
    """
    rank = score.argsort(dim=1, descending=True, stable=True).argsort(1).flatten()
    order = score.flatten().argsort(descending=True, stable=True)
    order = order[rank[order].argsort(stable=True)]
    kept = torch.zeros(rank.shape, dtype=torch.bool)
    kept[order[:count]] = True
    return kept.view(score.shape)


def principal(rows: Tensor, gram: Tensor, rank: int) -> Tensor:
    """The R directions of ``rows x`` that hold most of it: orthonormal columns ``[n, R]``.

    With the identity as the Gram matrix, the left singular vectors of the rows themselves.
    """
    _, vectors = torch.linalg.eigh(rows @ gram @ rows.mT)
    basis: Tensor = vectors.flip(-1)[:, :rank]
    return basis


def _convert(
    state: Mapping[str, Tensor],
    source: GroupedSpec,
    target: LatentSpec,
    mix: Mix,
    gram: Tensor,
    *,
    balance: bool,
) -> tuple[dict[str, Tensor], list[int]]:
    """The layer, once its channels are chosen: drop rotations, find the latent of the rest and the values."""
    assert source.rope is not None
    K, F = source.num_kv_heads, source.head_dim // 2
    w_q, w_k, w_v = projections(state, target)
    matrix = mix.matrix.to(torch.complex128)
    channels = torch.einsum("ckf,kfe->ce", matrix, rotated_pairs(w_k, source))
    queries = rotated_pairs(w_q, source).view(K, source.group_size, F, -1)
    q_rope = torch.einsum("ckf,kgfe->kgce", matrix[mix.kept], queries).flatten(0, 1)

    rest = to_real(channels[~mix.kept])
    smaller = _norm(rest, gram) / _norm(w_v, gram) if balance and len(rest) else 1.0
    stacked = torch.cat((rest / smaller, w_v))
    basis = principal(stacked, gram, target.kv_lora_rank)
    back = _back_to_heads(mix, interleaved=source.rope.interleaved)
    # cos and sin come scaled (YaRN); a channel that is not rotated must be scaled by hand, on both sides.
    scale = RotaryEmbedding(source.rope).attention_scaling ** 2
    tensors = assemble(
        state,
        source,
        target,
        q_nope=w_q,
        q_rope=to_real(q_rope),
        k_rope=to_real(channels[mix.kept]),
        down=basis.mT @ stacked,
        key_up=back @ basis[: len(rest)] * (smaller * scale),
        value_up=basis[len(rest) :],
    )
    return tensors, mix.frequency[mix.kept].tolist()


def _back_to_heads(mix: Mix, *, interleaved: bool) -> Tensor:
    """``Mᵀ`` for the channels without rotation, on real and imaginary parts: ``[K·D, 2·(C − P/2)]``."""
    rest = mix.matrix[~mix.kept].permute(1, 2, 0)
    K, F, count = rest.shape
    back = torch.zeros(K, 2, F, 2, count, dtype=torch.float64)
    back[:, 0, :, 0] = rest
    back[:, 1, :, 1] = rest
    if interleaved:
        back = back.transpose(1, 2)
    return back.reshape(K * 2 * F, 2 * count)


def _norms(weight: Tensor, source: GroupedSpec, gram: Tensor) -> Tensor:
    """The root mean square of each pair, ``[heads, F]``."""
    pairs = rotated_pairs(weight, source)
    return ((pairs @ gram.to(pairs.dtype)) * pairs.conj()).sum(-1).real.clamp_min(0).sqrt()


def _gram(moments: Tensor | None, weight: Tensor) -> Tensor:
    size = weight.shape[1]
    return torch.eye(size, dtype=torch.float64) if moments is None else moments[:size, :size].double()


def _norm(rows: Tensor, gram: Tensor) -> float:
    """The root mean square length of ``rows x``, or 1: the paper's mean length, as far as a Gram matrix tells."""
    energy = float(((rows @ gram) * rows).sum())
    return math.sqrt(energy) if energy > NOTHING else 1.0
