"""Divide key–value heads into groups, and merge each group into one head.

Merge several key or value heads into one, and measure the loss, for each kind of head dims.

- `LinearHeads`: values, and key dims without rotation. Any linear map can be undone in the output projection or the
  queries, so the best shared head is a truncated SVD.
- `RotaryHeads`: rotated key dims. At each frequency a complex coefficient commutes with the rotation.
- `NormedHeads`: keys with a norm in each head, through which only signs pass; the shared head is an average.

Shapes: K key heads, s query heads of each, H = K·s, D key dims, F rotated pairs, n dims of one head, g heads of a
group, E' inputs. Everything is float64.

Divide key–value heads into equal groups, each to be merged into one head, such that little is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations

import torch
from torch import Tensor

from headwise.conversion.solvers.joint_latent import floored, observed
from headwise.conversion.solvers.rope_channels import concentrate
from headwise.conversion.solvers.statistics import energy, root

_ROUNDS = 4
"""The number of times that shares and signs of normalised heads are solved for in turn."""


@dataclass(frozen=True)
class LinearHeads:
    """Heads that may be mixed freely.

    Attributes:
        rows: the projection of each head, ``[K, n, E']``.
        metric: the cost of an error of each head, ``[K, n, n]``.
        moments: the second moments of the inputs, ``[E', E']``.
    """

    rows: Tensor
    metric: Tensor
    moments: Tensor

    @cached_property
    def full_moments(self) -> Tensor:
        """The moments, regularised so that every input counts."""
        return observed(self.moments)

    @cached_property
    def weighted(self) -> Tensor:
        """The rows scaled by the root of their cost, ``[K, n, E']``; every dim of a head costs something."""
        flat = floored(torch.block_diag(*self.metric))  # type: ignore[no-untyped-call]
        n = self.rows.shape[1]
        metric = torch.stack([flat[start : start + n, start : start + n] for start in range(0, len(flat), n)])
        return root(metric) @ self.rows

    @cached_property
    def gram(self) -> Tensor:
        """The second moments of all heads, scaled by their cost: ``[K, n, K, n]``."""
        flat = self.weighted.flatten(0, 1)  # [K·n, E']
        return (flat @ self.full_moments @ flat.mT).view(*self.weighted.shape[:2], *self.weighted.shape[:2])

    @property
    def width(self) -> int:
        """The number of dims of a head."""
        return self.rows.shape[1]

    @property
    def total(self) -> float:
        """The cost of losing all heads."""
        return float(torch.einsum("knkn->", self.gram))

    def loss(self, group: Group) -> float:
        """The loss of merging a group of heads: the eigenvalues beyond the first n."""
        return _tail_sum(self._gram_of(group), self.rows.shape[1])

    def merge(self, group: Group) -> tuple[Tensor, Tensor]:
        """The shared head ``[n, E']``, and the maps from it to each head ``[g, n, n]``.

        The shared head's dims are uncorrelated and of mean square 1. The eigenproblem is as small as the group,
        however many inputs there are.
        """
        n = self.rows.shape[1]
        energies, vectors = torch.linalg.eigh(self._gram_of(group))  # [g·n], [g·n, g·n]
        energies, vectors = energies[-n:].flip(0), vectors[:, -n:].flip(1)
        is_real = energies > torch.finfo(energies.dtype).eps * energies[0] * len(vectors)
        scale = torch.where(is_real, energies, torch.inf).rsqrt()  # a dim that is rounding alone stays zero
        down = (vectors * scale).mT @ self.weighted[list(group)].flatten(0, 1)  # [n, E']
        up = self.rows[list(group)] @ (self.full_moments @ down.mT)  # [g, n, n]
        return down, up

    def _gram_of(self, group: Group) -> Tensor:
        heads = list(group)
        return self.gram[heads][:, :, heads].flatten(0, 1).flatten(1)  # [g·n, g·n]


@dataclass(frozen=True)
class RotaryHeads:
    """The rotated pairs of key heads, and of their queries, as complex numbers.

    Attributes:
        queries: the pairs of the query heads, ``[K, s, F, E']`` complex.
        keys: the pairs of the key heads, ``[K, F, E']`` complex.
        weight: the cost of a squared error of each query head's scores, ``[K, s]``.
        inputs: the second moments of the queries' inputs, ``[E', E']``.
        key_moments: the second moments of the keys' inputs, ``[E', E']``.
    """

    queries: Tensor
    keys: Tensor
    weight: Tensor
    inputs: Tensor
    key_moments: Tensor

    @cached_property
    def query_energy(self) -> Tensor:
        """The weighted energy of each query head at each frequency: ``[K, s, F]``."""
        return energy(self.queries, self.inputs) * self.weight[:, :, None]

    @cached_property
    def gram(self) -> Tensor:
        """The second moments of all heads at each frequency, scaled by their cost: ``[F, K, K]`` complex."""
        scale = self.query_energy.sum(1).clamp_min(0).sqrt()[:, :, None]  # [K, F, 1]
        weighted = (self.keys * scale).transpose(0, 1)  # [F, K, E']
        # A score takes the real part of a product of any phase: half of the product's square on average.
        return weighted @ self.key_moments.to(weighted.dtype) @ weighted.mH / 2

    @property
    def width(self) -> int:
        """The number of dims of a head."""
        return 2 * self.keys.shape[1]

    @property
    def total(self) -> float:
        """The cost of losing all heads."""
        return float(self.gram.diagonal(dim1=1, dim2=2).real.sum())

    def loss(self, group: Group) -> float:
        """The loss of merging a group of heads: at each frequency, all channels but one."""
        heads = list(group)
        return _tail_sum(self.gram[:, heads][:, :, heads], 1)

    def merge(self, group: Group) -> tuple[Tensor, Tensor]:
        """The shared pairs ``[F, E']``, and each head's coefficients of them ``[g, F]``, both complex."""
        heads = list(group)
        queries, query_energy = self.queries[heads].flatten(0, 1), self.query_energy[heads].flatten(0, 1)
        channels = concentrate(queries, self.keys[heads], query_energy, self.key_moments)
        keys, back = channels.keys[:, 0], channels.back[:, :, 0]  # [F, E'], [F, g]
        # Coefficients of mean square 1, the most important head's one real: equal heads are reproduced exactly.
        weighted = back * self.query_energy[heads].sum(1).mT.clamp_min(0).sqrt()
        leading = back.gather(1, weighted.abs().argmax(1, keepdim=True))[:, 0]  # [F]
        factor = torch.where(leading == 0, torch.ones_like(leading), leading.sgn())
        factor = factor * back.abs().square().mean(1).sqrt()
        return keys * factor[:, None], (back / factor[:, None]).mT


@dataclass(frozen=True)
class NormedHeads:
    """Keys that are normalised head by head.

    The norm follows the projection and its weights are shared by all heads, so queries can undo nothing but signs,
    one for each rotated pair. The shared head is an average of the heads as their norms give them, each norm taken
    for a constant factor; the shared head's own norm corrects its size.

    Attributes:
        rows: the projection of each head, ``[K, D, E']``.
        scale: the weights of the norm, ``[D]``.
        query_energy: the cost of a squared error of each dim, ``[K, D]``.
        units: a number for each dim, ``[D]``; dims with one number change sign together.
        moments: the second moments of the inputs, ``[E', E']``.
    """

    rows: Tensor
    scale: Tensor
    query_energy: Tensor
    units: Tensor
    moments: Tensor

    @cached_property
    def size(self) -> Tensor:
        """The factor that each head's norm divides by, ``[K]``; 1 where its keys are zero."""
        return _or_one(energy(self.rows, self.moments).mean(1)).sqrt()

    @cached_property
    def gram(self) -> Tensor:
        """The second moments of the normalised heads, dim by dim: ``[D, K, K]``."""
        normed = (self.rows / self.size[:, None, None]).transpose(0, 1)  # [D, K, E']
        return normed @ self.moments @ normed.mT

    @cached_property
    def weight(self) -> Tensor:
        """The cost of an error of each normalised dim, ``[K, D]``."""
        return self.query_energy * self.scale.square()

    @property
    def width(self) -> int:
        """The number of dims of a head."""
        return self.rows.shape[1]

    @property
    def total(self) -> float:
        """The cost of losing all heads."""
        return float((self.weight * self.gram.diagonal(dim1=1, dim2=2).mT).sum())

    def loss(self, group: Group) -> float:
        """The loss of merging a group of heads."""
        return self._best(list(group))[0]

    def merge(self, group: Group) -> tuple[Tensor, Tensor]:
        """The shared head ``[D, E']``, and each head's signs ``[g, D]``."""
        heads = list(group)
        _, shares, signs = self._best(heads)
        normed = self.rows[heads] * (signs * (shares / self.size[heads])[:, None])[:, :, None]  # [g, D, E']
        # As large as the heads, so that the norm's epsilon matters as little.
        return normed.sum(0) * self.size[heads].square().mean().sqrt(), signs

    def _best(self, heads: list[int]) -> tuple[float, Tensor, Tensor]:
        """The least loss, each head's share of the average ``[g]`` and its signs ``[g, D]``."""
        gram, weight = self.gram[:, heads][:, :, heads], self.weight[heads]  # [D, g, g], [g, D]
        count = len(heads)
        averages: list[tuple[float, Tensor, Tensor]] = []
        for head in range(count):  # signs that agree with one head's
            signs = self._signs(gram[:, head].mT * weight)
            averages.append(_normed_loss(gram, weight, torch.eye(count, dtype=gram.dtype)[head], signs))
            averages.append(_normed_loss(gram, weight, torch.ones(count, dtype=gram.dtype), signs))
            for _ in range(_ROUNDS):
                signed_gram = _with_signs(gram, signs)
                matrix = torch.einsum("d,dkl->kl", weight.sum(0), signed_gram)  # of the normal equations
                vector = torch.einsum("kd,dkl->l", weight, signed_gram)
                shares = torch.linalg.pinv(matrix, hermitian=True, rtol=1e-10) @ vector
                averages.append(_normed_loss(gram, weight, shares, signs))
                signs = self._signs(torch.einsum("l,ld,dlk->kd", shares, signs, gram) * weight)
        return min(averages, key=lambda average: average[0])

    def _signs(self, similarity: Tensor) -> Tensor:
        """The sign of each unit's sum ``[g, D]``; plus where the sum is 0."""
        units = torch.zeros_like(similarity).index_add_(1, self.units, similarity)
        return torch.where(units[:, self.units] < 0, -1.0, 1.0).to(similarity.dtype)


def _normed_loss(gram: Tensor, weight: Tensor, shares: Tensor, signs: Tensor) -> tuple[float, Tensor, Tensor]:
    """The loss of an average of normalised heads, its shares scaled so that its mean square is 1, and the signs."""
    signed_gram = _with_signs(gram, signs)  # [D, g, g]
    size = torch.einsum("k,dkl,l->", shares, signed_gram, shares) / len(gram)
    shares = shares / _or_one(size).sqrt()
    average = torch.einsum("k,dkl,l->d", shares, signed_gram, shares)  # the average's energy
    product = torch.einsum("dkl,l->kd", signed_gram, shares)  # of each head and the average
    energies = signed_gram.diagonal(dim1=1, dim2=2).mT  # [g, D], of the heads
    return float((weight * (average + energies - 2 * product)).sum().clamp_min(0)), shares, signs


def _or_one(square: Tensor) -> Tensor:
    """The mean square, to divide by; 1 in place of 0."""
    return torch.where(square > torch.finfo(square.dtype).tiny, square, torch.ones_like(square))


def _with_signs(gram: Tensor, signs: Tensor) -> Tensor:
    return gram * signs.mT[:, :, None] * signs.mT[:, None, :]


def _tail_sum(gram: Tensor, count: int) -> float:
    """The sum of all but the ``count`` largest eigenvalues of matrices ``[..., n, n]``."""
    tail = torch.linalg.eigvalsh(gram)[..., : gram.shape[-1] - count]
    return float(tail.clamp_min(0).sum())


Group = tuple[int, ...]

_LEAST_GAIN = 1e-9
"""The least gain that counts, as a share of the loss of all groups: rounding must not change the order of the
heads."""


def group_heads(loss: Callable[[Group], float], heads: int, groups: int) -> list[Group]:
    """Divide heads into equal groups that no exchange of two heads improves.

    The search begins with groups of neighbours, or with the groups whose pairs of heads lose least in sum, which is
    far quicker to compute, where those lose less. It is deterministic, and the result never loses more than
    neighbours.

    Args:
        loss: the function that gives the loss of merging some heads, which it gets in rising order.
        heads: the number of heads.
        groups: the number of groups; divides ``heads``.

    Returns:
        The groups, in the order of their first heads.
    """
    size = heads // groups
    neighbours: list[Group] = [tuple(range(start, start + size)) for start in range(0, heads, size)]
    if groups in (1, heads):
        return neighbours
    cached_loss = cache(loss)

    def total(partition: list[Group]) -> float:
        return sum(cached_loss(group) for group in partition)

    def pairwise(group: Group) -> float:
        return sum(cached_loss(pair) for pair in combinations(group, 2))

    by_pairs = _exchange(pairwise, _grow(pairwise, heads, size))
    threshold = total(neighbours) * (1 - _LEAST_GAIN)
    return sorted(_exchange(cached_loss, by_pairs if total(by_pairs) < threshold else neighbours))


def _grow(loss: Callable[[Group], float], heads: int, size: int) -> list[Group]:
    """Begin each group with the two remaining heads that lose least, and add the cheapest head until it is full."""
    remaining, groups = set(range(heads)), list[Group]()
    while remaining:
        group: Group = min(combinations(sorted(remaining), 2), key=loss)
        while len(group) < size:
            extended = [tuple(sorted((*group, head))) for head in sorted(remaining.difference(group))]
            group = min(extended, key=loss)
        remaining.difference_update(group)
        groups.append(group)
    return groups


def _exchange(loss: Callable[[Group], float], groups: list[Group]) -> list[Group]:
    """Exchange heads between two groups for as long as an exchange lowers the loss."""
    groups = list(groups)
    least_gain = _LEAST_GAIN * sum(loss(group) for group in groups)
    improved = True
    while improved:
        improved = False
        for a, b in combinations(range(len(groups)), 2):
            for first in groups[a]:
                for second in groups[b]:
                    if first not in groups[a] or second not in groups[b]:
                        continue  # already exchanged
                    new_a = tuple(sorted({*groups[a], second} - {first}))
                    new_b = tuple(sorted({*groups[b], first} - {second}))
                    if loss(new_a) + loss(new_b) < loss(groups[a]) + loss(groups[b]) - least_gain:
                        groups[a], groups[b] = new_a, new_b
                        improved = True
    return groups
