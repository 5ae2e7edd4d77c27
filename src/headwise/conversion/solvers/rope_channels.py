"""Concentrate rotary energy across key heads, and choose the channels that keep their rotation.

A half-pair of a key head is a complex number ``z_f``; RoPE multiplies it by ``e^{iθ_f·pos}``. At one frequency any
invertible complex K×K matrix across the K key heads commutes with that, so the heads can be mixed until the first
few channels hold most of what the queries ask for, and undone in the queries: exact, before anything is dropped.

Shapes: H query heads, K key heads, F = D/2 frequencies, E inputs (hidden, and one more for the biases), P kept
real dims. Matrices are float64; complex ones are complex128.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.conversion.solvers.joint_latent import NOTHING
from headwise.specs import GroupedSpec, rotated_dims

_FLOOR = 1e-9


@dataclass(frozen=True)
class Channels:
    """Key channels ``y = M z`` a frequency, most asked-for first.

    Attributes:
        keys: ``[F, K, E]`` complex: the rows that give each channel from the input.
        back: ``[F, K, K]`` complex: ``z = back y``; goes into the queries conjugated.
        energy: ``[F, K]`` mean square of each channel, in units of the queries' own, falling along K.
    """

    keys: Tensor
    back: Tensor
    energy: Tensor


def to_complex(weight: Tensor, heads: int, *, interleaved: bool) -> Tensor:
    """``[heads·D, E]`` real rows → ``[heads, F, E]`` complex, one a rotated pair."""
    rows = torch.unflatten(weight, 0, (heads, -1))
    if interleaved:
        return torch.complex(rows[:, 0::2], rows[:, 1::2])
    first, second = rows.chunk(2, dim=1)
    return torch.complex(first, second)


def rotated_pairs(rows: Tensor, source: GroupedSpec) -> Tensor:
    """What rotates of a layer's queries or keys ``[heads·D, E]``, as `to_complex` has it."""
    assert source.rope is not None
    by_head = torch.unflatten(rows, 0, (-1, source.head_dim))
    turned = by_head[:, : rotated_dims(source)].flatten(0, 1)
    return to_complex(turned, len(by_head), interleaved=source.rope.interleaved)


def to_real(pairs: Tensor) -> Tensor:
    """``[..., F, E]`` complex → ``[..., 2F, E]`` real, the real parts first (half-split)."""
    return torch.cat((pairs.real, pairs.imag), dim=-2)


def as_rotated(pairs: Tensor, *, interleaved: bool) -> Tensor:
    """``[..., F, E]`` complex → ``[..., 2F, E]`` real, in the layer's own order: the inverse of `to_complex`."""
    if not interleaved:
        return to_real(pairs)
    return torch.stack((pairs.real, pairs.imag), dim=-2).flatten(-3, -2)


def concentrate(queries: Tensor, keys: Tensor, asked: Tensor, gram: Tensor, *, mix: bool = True) -> Channels:
    """Mix the key heads at each frequency so that energy lands in the first channels, weighted by who asks.

    With ``S = E[z zᴴ]`` and D the root of the summed query energy of each key head's group, V are the
    eigenvectors of ``D S D``; then ``y = Vᴴ D z`` and ``z = D⁻¹ V y``. The queries' energy on every channel is 1.

    Args:
        queries: how many heads ask of each key head is their number over the keys'; ``[H, F, E]`` complex.
        keys: ``[K, F, E]`` complex.
        asked: ``[H, F]``, each query head's energy at each frequency, times what it counts.
        gram: ``[E, E]``, the inputs' second moments E[x xᵀ]; the identity when nothing is known of them.
        mix: False for the heads' own pairs as channels, only ordered and scaled.
    """
    F, K = keys.shape[1], keys.shape[0]
    by_frequency = keys.transpose(0, 1)
    seen = torch.complex(by_frequency.real @ gram, by_frequency.imag @ gram)
    moments = seen @ by_frequency.mH
    del seen
    by_key = asked.view(K, len(queries) // K, F).sum(1).clamp_min(0).sqrt().transpose(0, 1)
    # A head nobody asks must stay invertible: what it holds is then ranked last, not lost. Where none is asked, all
    # are alike.
    most = float(by_key.max())
    by_key = by_key.clamp_min(_FLOOR * most) if most > NOTHING else torch.ones_like(by_key)
    scale = by_key.to(keys.dtype)
    weighed = scale[:, :, None] * moments * scale[:, None, :]
    if not mix:
        weighed = torch.diag_embed(weighed.diagonal(dim1=-2, dim2=-1))
    energy, vectors = torch.linalg.eigh(weighed)
    energy, vectors = energy.flip(-1).clamp_min(0), vectors.flip(-1)
    forward = vectors.mH * scale[:, None, :]
    return Channels(keys=forward @ by_frequency, back=vectors / scale[:, :, None], energy=energy)


def mean_rotation(frequencies: Sequence[float], distances: Tensor) -> Tensor:
    """``c_f = E[e^{−iθ_f Δ}]`` over each head's distances Δ, complex ``[H, F]``.

    What a channel's rotation is on average; |c| is near 1 for slow channels, which lose little without it.

    Args:
        frequencies: F angles θ a token.
        distances: ``[H, T]``, the share of each distance 0 … T − 1.
    """
    behind = torch.arange(distances.shape[1], dtype=torch.float64)
    angles = behind[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    return torch.complex(distances @ angles.cos(), -(distances @ angles.sin()))


def lost_rotation(channels: Channels, asked: Tensor, rotation: Tensor) -> Tensor:
    """What the scores lose where a channel's rotation gives way to its mean: ``[F, K]``, in units of ``asked``.

    Args:
        channels: of `concentrate`.
        asked: ``[H, F]``, as it was given.
        rotation: ``[H, F]``, of `mean_rotation`.
    """
    unsteady = asked * (1 - rotation.abs().square()).clamp_min(0)
    K = channels.energy.shape[1]
    by_key = unsteady.view(K, len(asked) // K, -1).sum(1)
    return channels.energy * torch.einsum("kf,fkc->fc", by_key, channels.back.abs().square())


def keep_rotation(energy: Tensor, lost: Tensor, pairs: int) -> Tensor:
    """Which (frequency, channel) pairs keep their rotation: bool ``[F, K]`` with ``pairs`` True.

    Those that would lose most without, ties by energy, then by order.
    """
    # The floor ranks pairs of no loss at all by energy, so that the choice is always of `pairs` of them.
    score = (lost + torch.finfo(lost.dtype).eps * energy).flatten()
    kept = torch.zeros(score.shape, dtype=torch.bool)
    kept[score.argsort(descending=True, stable=True)[:pairs]] = True
    return kept.view(energy.shape)
