"""Concentrate rotary energy across key heads, and choose the channels that keep their rotation.

A rotated pair of a key head is a complex number ``z_f``; RoPE multiplies it by ``e^{iθ_f·pos}``. At one frequency any
invertible complex K×K matrix across the K key heads commutes with that, so the heads can be mixed until the first
few channels hold most of the energy that counts in the scores, and unmixed in the queries: exact, until channels are
dropped.

Shapes: H query heads, K key heads, F = D/2 frequencies, E inputs (hidden, and one more for the biases), T distances.
Matrices are float64; complex ones are complex128.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.conversion.solvers.joint_latent import NOTHING
from headwise.models.specs import GroupedSpec, rotated_dims

_FLOOR = 1e-9
"""The least root of a key head's query energy, as a share of the largest one."""


@dataclass(frozen=True)
class Channels:
    """Key channels ``y = M z`` at each frequency, in falling order of energy.

    Attributes:
        keys: the projection from the inputs to each channel, ``[F, K, E]`` complex.
        back: the map in ``z = back y``, ``[F, K, K]`` complex; its conjugate goes into the queries.
        energy: the mean square of each channel, weighted by its queries' energy, ``[F, K]``; falling along K.
    """

    keys: Tensor
    back: Tensor
    energy: Tensor


def to_complex(weight: Tensor, heads: int, *, interleaved: bool) -> Tensor:
    """Rotated pairs as complex numbers: ``[heads·D, E]`` real rows → ``[heads, F, E]`` complex."""
    rows = torch.unflatten(weight, 0, (heads, -1))  # [heads, D, E]
    if interleaved:
        return torch.complex(rows[:, 0::2], rows[:, 1::2])
    first, second = rows.chunk(2, dim=1)
    return torch.complex(first, second)


def rotated_pairs(rows: Tensor, source: GroupedSpec) -> Tensor:
    """The rotated pairs of a layer's queries or keys ``[heads·D, E]``: ``[heads, F, E]`` complex."""
    assert source.rope is not None
    heads = torch.unflatten(rows, 0, (-1, source.head_dim))  # [heads, D, E]
    rotary = heads[:, : rotated_dims(source)].flatten(0, 1)
    return to_complex(rotary, len(heads), interleaved=source.rope.interleaved)


def to_real(pairs: Tensor) -> Tensor:
    """Complex pairs ``[..., F, E]`` as real rows ``[..., 2F, E]``, the real parts first (half-split)."""
    return torch.cat((pairs.real, pairs.imag), dim=-2)


def as_rotated(pairs: Tensor, *, interleaved: bool) -> Tensor:
    """Complex pairs ``[..., F, E]`` as real rows ``[..., 2F, E]`` in the layer's order: inverts `to_complex`."""
    if not interleaved:
        return to_real(pairs)
    return torch.stack((pairs.real, pairs.imag), dim=-2).flatten(-3, -2)


def concentrate(queries: Tensor, keys: Tensor, asked: Tensor, gram: Tensor, *, mix: bool = True) -> Channels:
    """Mix the key heads at each frequency so that the first channels hold most of the energy that queries weight.

    With ``S = E[z zᴴ]`` and D the root of the summed query energy of each key head's group, V are the
    eigenvectors of ``D S D``; then ``y = Vᴴ D z`` and ``z = D⁻¹ V y``. The queries' energy on every channel is 1.

    For example ``concentrate(queries, keys, torch.ones(9, 32).double(), torch.eye(576).double())`` mixes the key
    heads of nine query heads by their weights alone.

    Args:
        queries: the rotated pairs of the query heads, ``[H, F, E]`` complex; only their number is used, H/K heads for
            each key head.
        keys: the rotated pairs of the key heads, ``[K, F, E]`` complex.
        asked: the energy of each query head at each frequency, times its weight, ``[H, F]``.
        gram: the second moments E[x xᵀ] of the inputs, ``[E, E]``; the identity without statistics.
        mix: whether heads are mixed; otherwise the heads' own pairs are the channels, ordered and scaled.
    """
    F, K = keys.shape[1], keys.shape[0]
    by_frequency = keys.transpose(0, 1)  # [F, K, E]
    product = torch.complex(by_frequency.real @ gram, by_frequency.imag @ gram)
    moments = product @ by_frequency.mH  # [F, K, K]
    del product
    by_key = asked.view(K, len(queries) // K, F).sum(1).clamp_min(0).sqrt().transpose(0, 1)  # [F, K]
    # A head without query energy must stay invertible: its content then comes last and is not lost. If no head has
    # any, all count equally.
    largest = float(by_key.max())
    by_key = by_key.clamp_min(_FLOOR * largest) if largest > NOTHING else torch.ones_like(by_key)
    scale = by_key.to(keys.dtype)
    weighted = scale[:, :, None] * moments * scale[:, None, :]  # [F, K, K]
    if not mix:
        weighted = torch.diag_embed(weighted.diagonal(dim1=-2, dim2=-1))
    energy, vectors = torch.linalg.eigh(weighted)  # [F, K], [F, K, K]
    energy, vectors = energy.flip(-1).clamp_min(0), vectors.flip(-1)
    forward = vectors.mH * scale[:, None, :]  # M, [F, K, K]
    return Channels(keys=forward @ by_frequency, back=vectors / scale[:, :, None], energy=energy)


def mean_rotation(frequencies: Sequence[float], distances: Tensor) -> Tensor:
    """The mean rotation ``c_f = E[e^{−iθ_f Δ}]`` of each frequency over each head's distances Δ, complex ``[H, F]``.

    |c| is near 1 at low frequencies, where little is lost without rotation. For example
    ``mean_rotation([1.0, 0.1], torch.tensor([[0.5, 0.5]]).double())`` is the mean over distances 0 and 1.

    Args:
        frequencies: the F angles θ, in radians a token.
        distances: the share of each distance 0 … T − 1, float64 ``[H, T]``; a distance of no share costs nothing.
    """
    steps = torch.nonzero(distances.any(0))[:, 0]  # few, where windows have gaps
    distances, steps = distances[:, steps], steps.double()
    angles = steps[:, None] * torch.tensor(frequencies, dtype=torch.float64)  # [T or fewer, F]
    return torch.complex(distances @ angles.cos(), -(distances @ angles.sin()))


def lost_rotation(channels: Channels, query_energy: Tensor, rotation: Tensor) -> Tensor:
    """The loss of the scores if a channel's rotation is replaced by its mean: ``[F, K]``, in units of query energy.

    Args:
        channels: the channels that `concentrate` returned.
        query_energy: the energy of each query head at each frequency, ``[H, F]``, as `concentrate` got it.
        rotation: the mean rotation ``[H, F]`` that `mean_rotation` returned.
    """
    variance = query_energy * (1 - rotation.abs().square()).clamp_min(0)  # [H, F], of the rotation
    K = channels.energy.shape[1]
    by_key = variance.view(K, len(query_energy) // K, -1).sum(1)  # [K, F]
    return channels.energy * torch.einsum("kf,fkc->fc", by_key, channels.back.abs().square())


def keep_comb(energy: Tensor, lost: Tensor, pairs: int) -> Tensor:
    """Choose channels whose frequencies are a comb, every s-th one from the first on, as plain RoPE has them.

    Of all combs it is the one whose channels, the strongest of each frequency, lose most without their rotation.

    For example ``keep_comb(channels.energy, lost, 16)`` keeps every frequency of the first 16, or every second of 32.

    Args:
        energy: the energy of each channel, ``[F, K]``.
        lost: the loss of each channel without its rotation, ``[F, K]``, in the same units.
        pairs: the number of channels to choose, at most F.

    Returns:
        Whether each channel is chosen, bool ``[F, K]``: True for ``pairs`` channels.
    """
    frequencies = len(energy)
    steps = range(1, (frequencies - 1) // max(pairs - 1, 1) + 1) if pairs > 1 else range(1, 2)
    score = lost[:, 0] + torch.finfo(lost.dtype).eps * energy[:, 0]
    best = max(steps, key=lambda step: float(score[: (pairs - 1) * step + 1 : step].sum()))
    mask = torch.zeros(energy.shape, dtype=torch.bool)
    mask[: (pairs - 1) * best + 1 : best, 0] = True
    return mask


def keep_rotation(energy: Tensor, lost: Tensor, pairs: int) -> Tensor:
    """Choose the channels that keep their rotation: those that lose most without it, ties by energy, then by order.

    For example ``keep_rotation(channels.energy, lost, 16)`` chooses 16 rotary pairs, a rotary key of 32 channels.

    Args:
        energy: the energy of each channel, ``[F, K]``.
        lost: the loss of each channel without its rotation, ``[F, K]``, in the same units.
        pairs: the number of channels to choose.

    Returns:
        Whether each channel is chosen, bool ``[F, K]``: True for ``pairs`` channels.
    """
    # A little energy is added so that channels without any loss are ordered by it.
    score = (lost + torch.finfo(lost.dtype).eps * energy).flatten()
    mask = torch.zeros(score.shape, dtype=torch.bool)
    mask[score.argsort(descending=True, stable=True)[:pairs]] = True
    return mask.view(energy.shape)
