"""Convert a layer to MLA as MHA2MLA and TransMLA do: orthogonal rotary channels, and a latent by PCA of the rest.

The rotated pairs of all key heads, complex numbers z, become channels ``y = M z`` with M real and orthogonal (so
``z = Mᵀ y``). Some channels stay rotated and are the shared rotary key; the others lose their rotation and share a
latent with the values. The methods differ in M, in which channels stay rotated, and in the moments of the PCA.
Everything is a function of tensors, in float64.

Shapes: H query heads, G of them for each of K key heads, D head dim, F = D/2 frequencies, C = K·F channels, V value
dim, E hidden, E' = E or E + 1 (a column for the biases), P rotary dims, R latent rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.conversion.solvers.joint_latent import NOTHING
from headwise.conversion.solvers.latent import LatentParts, assemble, projections
from headwise.conversion.solvers.layer import grouped_layers
from headwise.conversion.solvers.rope_channels import rotated_pairs, to_real
from headwise.errors import ArgumentError
from headwise.models.specs import GroupedSpec, LatentSpec, ModelSpec, rotated_dims
from headwise.runtime.attention import RotaryEmbedding


@dataclass(frozen=True)
class OrthogonalChannels:
    """Channels ``y = M z`` of all key heads' rotated pairs.

    Attributes:
        matrix: the real matrix M, ``[C, K, F]``; orthogonal as ``[C, K·F]``.
        kept: whether each channel stays rotated, bool ``[C]``.
        frequency: the model frequency that each channel rotates at if it stays rotated, ``[C]``.
    """

    matrix: Tensor
    kept: Tensor
    frequency: Tensor


def refuse_partial_rotation(source: ModelSpec, method: str) -> None:
    """Refuse a model with a layer that does not rotate all of its heads' dims.

    Args:
        source: the spec of the model.
        method: the method that cannot convert such a layer, for the message.

    Raises:
        ArgumentError: a layer has dims without rotation.
    """
    if any(rotated_dims(layer) != layer.head_dim for layer in grouped_layers(source)):
        raise ArgumentError("method", method, "needs rotary embeddings on all of a head's dims")


def share_out(score: Tensor, count: int) -> Tensor:
    """Select the ``count`` best scores, equally many from each row; a remainder goes to the best next scores.

    Args:
        score: the scores, ``[rows, columns]``.
        count: the number of scores to select.

    Returns:
        Whether each score is selected, bool in the shape of ``score``.
    """
    place = score.argsort(dim=1, descending=True, stable=True).argsort(1).flatten()  # each score's place in its row
    order = score.flatten().argsort(descending=True, stable=True)
    order = order[place[order].argsort(stable=True)]
    mask = torch.zeros(place.shape, dtype=torch.bool)
    mask[order[:count]] = True
    return mask.view(score.shape)


def principal(rows: Tensor, gram: Tensor, rank: int) -> Tensor:
    """The first R principal components of ``rows x``: orthonormal columns ``[n, R]``.

    If the Gram matrix is the identity, they are the left singular vectors of the rows.
    """
    _, vectors = torch.linalg.eigh(rows @ gram @ rows.mT)
    basis: Tensor = vectors.flip(-1)[:, :rank]
    return basis


def latent_layer(
    state: Mapping[str, Tensor],
    source: GroupedSpec,
    target: LatentSpec,
    channels: OrthogonalChannels,
    gram: Tensor,
    *,
    balance: bool,
) -> tuple[dict[str, Tensor], list[int]]:
    """Convert a layer to MLA with given rotary channels.

    Args:
        state: the source layer's tensors by its own names.
        source: the source layer's spec.
        target: the MLA layer's spec.
        channels: the channels of the keys, and which of them stay rotated.
        gram: the second moments of the inputs that the PCA is of, ``[E', E']``.
        balance: whether keys and values are scaled to one magnitude of their channels before the PCA.

    Returns:
        The tensors by the MLA layer's names, and the model frequency of each rotary pair.
    """
    assert source.rope is not None
    K, F = source.num_kv_heads, source.head_dim // 2
    w_q, w_k, w_v = projections(state, target)
    matrix, kept = channels.matrix.to(torch.complex128), channels.kept
    keys = torch.einsum("ckf,kfe->ce", matrix, rotated_pairs(w_k, source))  # [C, E']
    queries = rotated_pairs(w_q, source).view(K, source.group_size, F, -1)  # [K, G, F, E']
    q_rope = torch.einsum("ckf,kgfe->kgce", matrix[kept], queries).flatten(0, 1)  # [H, P/2, E']

    rest = to_real(keys[~kept])  # [2C - P, E']
    key_scale = _magnitude(rest, gram) / _magnitude(w_v, gram) if balance and len(rest) else 1.0
    stacked = torch.cat((rest / key_scale, w_v))  # [2C - P + K V, E']
    basis = principal(stacked, gram, target.kv_lora_rank)  # [2C - P + K V, R]
    back = _back_to_heads(channels, interleaved=source.rope.interleaved)  # [K D, 2C - P]
    # YaRN scales cos and sin, of queries and of keys; channels without rotation must be scaled here.
    scale = RotaryEmbedding(source.rope).attention_scaling ** 2
    parts = LatentParts(
        q_nope=w_q,
        q_rope=to_real(q_rope),
        k_rope=to_real(keys[kept]),
        down=basis.mT @ stacked,
        key_up=back @ basis[: len(rest)] * (key_scale * scale),
        value_up=basis[len(rest) :],
    )
    return assemble(state, source, target, parts), channels.frequency[kept].tolist()


def _back_to_heads(channels: OrthogonalChannels, *, interleaved: bool) -> Tensor:
    """``Mᵀ`` of the channels without rotation, for real and imaginary parts: ``[K·D, 2·(C − P/2)]``."""
    rest = channels.matrix[~channels.kept].permute(1, 2, 0)  # [K, F, C - P/2]
    K, F, count = rest.shape
    back = torch.zeros(K, 2, F, 2, count, dtype=torch.float64)
    back[:, 0, :, 0] = rest
    back[:, 1, :, 1] = rest
    if interleaved:
        back = back.transpose(1, 2)
    return back.reshape(K * 2 * F, 2 * count)


def input_gram(moments: Tensor | None, weight: Tensor) -> Tensor:
    """``E[x xᵀ]`` as wide as a projection's inputs, ``[E', E']`` float64; the identity when None."""
    size = weight.shape[1]
    return torch.eye(size, dtype=torch.float64) if moments is None else moments[:size, :size].double()


def _magnitude(rows: Tensor, gram: Tensor) -> float:
    """The mean over channels of the root mean square of ``rows x``, as TransMLA's code has it; 1 if it is 0.

    The paper's mean length would count keys, whose many channels are mostly small after RoRoPE, as larger.
    """
    energies = ((rows @ gram) * rows).sum(-1)
    return float(energies.sqrt().mean()) if float(energies.sum()) > NOTHING else 1.0
