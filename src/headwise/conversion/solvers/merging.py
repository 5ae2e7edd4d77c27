"""Several key or value heads as one: what that loses, and how it is done, for each kind of head dims.

- `LinearHeads`: values, and key dims that never rotated. Any linear map can be undone in the output projection or
  the queries, so the best shared head is a truncated SVD.
- `RotaryHeads`: rotated key dims. At each frequency a complex number commutes with the rotation.
- `NormedHeads`: keys with a norm of each head. It leaves signs, and the choice of an average.

Shapes: K key heads, s query heads to each, H = K·s, D key dims, F rotated pairs, n dims of one head, g heads of a
group, E' inputs. Everything is float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headwise.conversion.solvers.head_groups import Group
from headwise.conversion.solvers.joint_latent import floored, observed
from headwise.conversion.solvers.metrics import energy
from headwise.conversion.solvers.rope_channels import concentrate
from headwise.conversion.solvers.statistics import root

_ROUNDS = 4


@dataclass(frozen=True)
class LinearHeads:
    """Heads that may be mixed freely.

    Attributes:
        rows: ``[K, n, E']``, what makes them.
        metric: ``[K, n, n]``, what an error of each costs.
        moments: ``[E', E']`` of the inputs.
    """

    rows: Tensor
    metric: Tensor
    moments: Tensor

    @cached_property
    def seen(self) -> Tensor:
        """The moments, blind to none of the inputs."""
        return observed(self.moments)

    @cached_property
    def weighted(self) -> Tensor:
        """The rows in units of what they cost, ``[K, n, E']``; no dim of a head costs nothing."""
        flat = floored(torch.block_diag(*self.metric))  # type: ignore[no-untyped-call]
        n = self.rows.shape[1]
        metric = torch.stack([flat[at : at + n, at : at + n] for at in range(0, len(flat), n)])
        return root(metric) @ self.rows

    @cached_property
    def gram(self) -> Tensor:
        """Second moments of all heads, in units of what they cost: ``[K, n, K, n]``."""
        flat = self.weighted.flatten(0, 1)
        return (flat @ self.seen @ flat.mT).view(*self.weighted.shape[:2], *self.weighted.shape[:2])

    @property
    def width(self) -> int:
        """Dims of a head."""
        return self.rows.shape[1]

    @property
    def total(self) -> float:
        """What losing all heads would cost."""
        return float(torch.einsum("knkn->", self.gram))

    def lost(self, group: Group) -> float:
        """What merging some heads costs: the eigenvalues beyond the first n."""
        return _beyond(self._gram_of(group), self.rows.shape[1])

    def merge(self, group: Group) -> tuple[Tensor, Tensor]:
        """The shared head ``[n, E']`` and each head from it ``[g, n, n]``.

        The shared head's dims are uncorrelated and of mean square 1. What the group's principal components are found
        in is as small as the group: the inputs may be many.
        """
        n = self.rows.shape[1]
        energies, vectors = torch.linalg.eigh(self._gram_of(group))
        energies, vectors = energies[-n:].flip(0), vectors[:, -n:].flip(1)
        real = energies > torch.finfo(energies.dtype).eps * energies[0] * len(vectors)
        scale = torch.where(real, energies, torch.inf).rsqrt()  # a dim of rounding alone is left empty
        down = (vectors * scale).mT @ self.weighted[list(group)].flatten(0, 1)
        up = self.rows[list(group)] @ (self.seen @ down.mT)
        return down, up

    def _gram_of(self, group: Group) -> Tensor:
        heads = list(group)
        return self.gram[heads][:, :, heads].flatten(0, 1).flatten(1)


@dataclass(frozen=True)
class RotaryHeads:
    """The rotated pairs of key heads as complex numbers, and of the queries that ask for them.

    Attributes:
        queries: ``[K, s, F, E']`` complex.
        keys: ``[K, F, E']`` complex.
        weight: ``[K, s]``, what a squared error of each query head's scores costs.
        inputs: ``[E', E']``, moments of what queries are made of.
        keyed: ``[E', E']``, and keys.
    """

    queries: Tensor
    keys: Tensor
    weight: Tensor
    inputs: Tensor
    keyed: Tensor

    @cached_property
    def asked(self) -> Tensor:
        """``[K, s, F]``: the queries' energy, times what it counts."""
        return energy(self.queries, self.inputs) * self.weight[:, :, None]

    @cached_property
    def gram(self) -> Tensor:
        """Second moments of all heads at each frequency, in units of what they cost: ``[F, K, K]`` complex."""
        weighted = (self.keys * self.asked.sum(1).clamp_min(0).sqrt()[:, :, None]).transpose(0, 1)
        # A score takes the real part of a product whose phase may be anything: half of its square.
        return weighted @ self.keyed.to(weighted.dtype) @ weighted.mH / 2

    @property
    def width(self) -> int:
        """Dims of a head."""
        return 2 * self.keys.shape[1]

    @property
    def total(self) -> float:
        """What losing all heads would cost."""
        return float(self.gram.diagonal(dim1=1, dim2=2).real.sum())

    def lost(self, group: Group) -> float:
        """What merging some heads costs: at each frequency, all but one channel."""
        heads = list(group)
        return _beyond(self.gram[:, heads][:, :, heads], 1)

    def merge(self, group: Group) -> tuple[Tensor, Tensor]:
        """The shared pairs ``[F, E']``, and the number that makes each head's from them ``[g, F]``, both complex."""
        heads = list(group)
        queries, asked = self.queries[heads].flatten(0, 1), self.asked[heads].flatten(0, 1)
        channels = concentrate(queries, self.keys[heads], asked, self.keyed)
        keys, back = channels.keys[:, 0], channels.back[:, :, 0]
        # Numbers of mean square 1, that of the most important head real: heads that are equal give back themselves.
        weighted = back * self.asked[heads].sum(1).mT.clamp_min(0).sqrt()
        leading = back.gather(1, weighted.abs().argmax(1, keepdim=True))[:, 0]
        turn = torch.where(leading == 0, torch.ones_like(leading), leading.sgn())
        turn = turn * back.abs().square().mean(1).sqrt()
        return keys * turn[:, None], (back / turn[:, None]).mT


@dataclass(frozen=True)
class NormedHeads:
    """Keys that are normalised head by head.

    The norm follows the projection and its weights are shared, so queries can undo nothing but signs, one a rotated
    pair. The shared head is then an average of the heads as they come out of their norms, which are taken for
    constants; the norm puts its size right.

    Attributes:
        rows: ``[K, D, E']``.
        scale: ``[D]``, the norm's weights.
        asked: ``[K, D]``, what a squared error of each dim costs.
        units: ``[D]``, dims of the same number change sign together.
        moments: ``[E', E']`` of the inputs.
    """

    rows: Tensor
    scale: Tensor
    asked: Tensor
    units: Tensor
    moments: Tensor

    @cached_property
    def size(self) -> Tensor:
        """What each head is divided by, ``[K]``; 1 where its keys are nothing."""
        return _or_one(energy(self.rows, self.moments).mean(1)).sqrt()

    @cached_property
    def gram(self) -> Tensor:
        """Second moments of the normalised heads, dim by dim: ``[D, K, K]``."""
        normed = (self.rows / self.size[:, None, None]).transpose(0, 1)
        return normed @ self.moments @ normed.mT

    @cached_property
    def weight(self) -> Tensor:
        """``[K, D]``, what an error of each normalised dim costs."""
        return self.asked * self.scale.square()

    @property
    def width(self) -> int:
        """Dims of a head."""
        return self.rows.shape[1]

    @property
    def total(self) -> float:
        """What losing all heads would cost."""
        return float((self.weight * self.gram.diagonal(dim1=1, dim2=2).mT).sum())

    def lost(self, group: Group) -> float:
        """What merging some heads costs."""
        return self._best(list(group))[0]

    def merge(self, group: Group) -> tuple[Tensor, Tensor]:
        """The shared head ``[D, E']``, and the signs that make each head from it ``[g, D]``."""
        heads = list(group)
        _, shares, signs = self._best(heads)
        normed = self.rows[heads] * (signs * (shares / self.size[heads])[:, None])[:, :, None]
        # As large as the heads were: a norm's epsilon is then as small beside it.
        return normed.sum(0) * self.size[heads].square().mean().sqrt(), signs

    def _best(self, heads: list[int]) -> tuple[float, Tensor, Tensor]:
        """The least loss found, the share of each head ``[g]`` and its signs ``[g, D]``."""
        gram, weight = self.gram[:, heads][:, :, heads], self.weight[heads]
        count = len(heads)
        found: list[tuple[float, Tensor, Tensor]] = []
        for like in range(count):
            signs = self._signs(gram[:, like].mT * weight)
            found.append(_normed_loss(gram, weight, torch.eye(count, dtype=gram.dtype)[like], signs))
            found.append(_normed_loss(gram, weight, torch.ones(count, dtype=gram.dtype), signs))
            for _ in range(_ROUNDS):
                turned = _turned(gram, signs)
                needed = torch.einsum("d,dkl->kl", weight.sum(0), turned)
                wanted = torch.einsum("kd,dkl->l", weight, turned)
                shares = torch.linalg.pinv(needed, hermitian=True, rtol=1e-10) @ wanted
                found.append(_normed_loss(gram, weight, shares, signs))
                signs = self._signs(torch.einsum("l,ld,dlk->kd", shares, signs, gram) * weight)
        return min(found, key=lambda one: one[0])

    def _signs(self, similarity: Tensor) -> Tensor:
        """The sign of each unit's sum ``[g, D]``; plus where there is nothing to tell it by."""
        units = torch.zeros_like(similarity).index_add_(1, self.units, similarity)
        return torch.where(units[:, self.units] < 0, -1.0, 1.0).to(similarity.dtype)


def _normed_loss(gram: Tensor, weight: Tensor, shares: Tensor, signs: Tensor) -> tuple[float, Tensor, Tensor]:
    """What an average of normalised heads loses, and its shares, scaled so that it is of mean square 1."""
    turned = _turned(gram, signs)
    size = torch.einsum("k,dkl,l->", shares, turned, shares) / len(gram)
    shares = shares / _or_one(size).sqrt()
    made = torch.einsum("k,dkl,l->d", shares, turned, shares)
    both = torch.einsum("dkl,l->kd", turned, shares)
    own = turned.diagonal(dim1=1, dim2=2).mT
    return float((weight * (made + own - 2 * both)).sum().clamp_min(0)), shares, signs


def _or_one(square: Tensor) -> Tensor:
    """A mean square to divide by: 1 where it is nothing."""
    return torch.where(square > torch.finfo(square.dtype).tiny, square, torch.ones_like(square))


def _turned(gram: Tensor, signs: Tensor) -> Tensor:
    return gram * signs.mT[:, :, None] * signs.mT[:, None, :]


def _beyond(gram: Tensor, rank: int) -> float:
    """The sum of all but the largest eigenvalues of matrices ``[..., n, n]``."""
    rest = torch.linalg.eigvalsh(gram)[..., : gram.shape[-1] - rank]
    return float(rest.clamp_min(0).sum())
