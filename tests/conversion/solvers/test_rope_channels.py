"""Mixing key heads at one frequency commutes with RoPE; the kept channels are the best by their own measure."""

from __future__ import annotations

import cmath

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise.conversion import concentrate, keep_rotation, mean_rotation
from headwise.conversion.solvers.rope_channels import lost_rotation, to_complex, to_real


def random_pairs(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.complex128, generator=torch.Generator().manual_seed(seed))


def random_gram(size: int, seed: int) -> torch.Tensor:
    x = torch.randn(3 * size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x.mT @ x / len(x)


def random_asked(heads: int, frequencies: int, seed: int) -> torch.Tensor:
    return 0.1 + torch.rand(heads, frequencies, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(0, 10**6))
def test_channels_and_their_way_back_give_the_same_scores_at_any_distance(
    K: int, group: int, F: int, seed: int
) -> None:
    E = 7
    queries, keys = random_pairs(K * group, F, E, seed=seed), random_pairs(K, F, E, seed=seed + 1)
    channels = concentrate(queries, keys, random_asked(K * group, F, seed + 5), random_gram(E, seed + 2))
    x, y = (torch.randn(E, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + i)) for i in (3, 4))
    turn = torch.polar(torch.ones(F, dtype=torch.float64), 0.7 * torch.arange(1, F + 1, dtype=torch.float64))
    q, z = queries @ x.to(torch.complex128), keys @ y.to(torch.complex128)
    expected = (q.conj() * z.repeat_interleave(group, 0) * turn).sum(-1).real
    back = channels.back.transpose(0, 1).repeat_interleave(group, 0)
    through = ((q.conj()[:, :, None] * back) * (channels.keys @ y.to(torch.complex128)) * turn[:, None]).sum((1, 2))
    assert torch.allclose(through.real, expected, rtol=1e-9, atol=1e-9)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(0, 10**6))
def test_energy_is_the_channels_own_and_the_queries_is_one(K: int, group: int, F: int, seed: int) -> None:
    E = 9
    queries, keys = random_pairs(K * group, F, E, seed=seed), random_pairs(K, F, E, seed=seed + 1)
    gram = random_gram(E, seed + 2)
    energies = random_asked(K * group, F, seed + 5)
    channels = concentrate(queries, keys, energies, gram)
    key_energy = ((channels.keys @ gram.to(keys.dtype)) * channels.keys.conj()).sum(-1).real
    assert torch.allclose(key_energy, channels.energy, rtol=1e-8, atol=1e-10)
    assert (channels.energy.diff(dim=1) <= 1e-12).all()
    by_key = energies.view(K, group, F).sum(1)
    through = (channels.back.abs().square() * by_key.mT[:, :, None]).sum(1)
    assert torch.allclose(through, torch.ones_like(through), rtol=1e-8)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(0, 10**6))
def test_unmixed_channels_are_the_heads_own_pairs(K: int, group: int, F: int, seed: int) -> None:
    E = 7
    queries, keys = random_pairs(K * group, F, E, seed=seed), random_pairs(K, F, E, seed=seed + 1)
    energies, gram = random_asked(K * group, F, seed + 5), random_gram(E, seed + 2)
    channels = concentrate(queries, keys, energies, gram, mix=False)
    assert torch.allclose(channels.back @ channels.keys, keys.transpose(0, 1), atol=1e-9)
    assert ((channels.back != 0).sum((1, 2)) == K).all()  # each from one head, and to no other
    assert (channels.energy.diff(dim=1) <= 1e-12).all()
    mixed = concentrate(queries, keys, energies, gram)
    assert torch.allclose(mixed.energy.sum(1), channels.energy.sum(1))
    assert (mixed.energy.cumsum(1) >= channels.energy.cumsum(1) - 1e-9).all()


def test_identical_heads_need_one_channel() -> None:
    one = random_pairs(1, 4, 6, seed=0)
    eye = torch.eye(6, dtype=torch.float64)
    channels = concentrate(random_pairs(6, 4, 6, seed=1), one.expand(3, -1, -1), random_asked(6, 4, 2), eye)
    assert (channels.energy[:, 1:] < 1e-12 * channels.energy[:, :1]).all()


def test_a_head_nobody_asks_is_ranked_last_and_not_lost() -> None:
    queries, keys = random_pairs(4, 3, 5, seed=0), random_pairs(2, 3, 5, seed=1)
    energies = random_asked(4, 3, 2)
    energies[2:] = 0
    channels = concentrate(queries, keys, energies, torch.eye(5, dtype=torch.float64))
    assert channels.energy.isfinite().all()
    assert (channels.energy[:, 1] < 1e-12 * channels.energy[:, 0]).all()
    restored = channels.back @ channels.keys
    assert torch.allclose(restored.transpose(0, 1), keys, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_are_the_rows_rope_rotates_together(interleaved: bool) -> None:
    weight = torch.arange(2 * 6 * 3, dtype=torch.float64).view(12, 3)
    pairs = to_complex(weight, 2, interleaved=interleaved)
    first = weight[7 if interleaved else 9]
    assert torch.equal(pairs[1, 0], torch.complex(weight[6], first))
    if not interleaved:
        assert torch.equal(to_real(pairs).flatten(0, 1), weight)


def test_the_mean_rotation_is_over_each_heads_distances() -> None:
    frequencies = (1.0, 0.1, 1e-6)
    distances = torch.rand(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    distances /= distances.sum(-1, keepdim=True)
    rotation = mean_rotation(frequencies, distances)
    for head in range(2):
        for at, theta in enumerate(frequencies):
            want = sum(float(distances[head, d]) * cmath.exp(-1j * theta * d) for d in range(50))
            assert abs(complex(rotation[head, at]) - want) < 1e-12
    assert (rotation[:, 2] - 1).abs().max() < 1e-4


def test_the_predicted_loss_without_rotation_is_the_loss_of_scores() -> None:
    """The loss of random queries and keys, summed over the probabilities of the distances."""
    K, group, F, E, T = 2, 2, 3, 6, 9
    queries, keys = random_pairs(K * group, F, E, seed=0), random_pairs(K, F, E, seed=1)
    distances = torch.rand(K * group, T, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    distances /= distances.sum(-1, keepdim=True)
    frequencies = (0.9, 0.3, 0.05)
    energies = queries.abs().square().sum(-1)  # E|q|² of white inputs
    channels = concentrate(queries, keys, energies, torch.eye(E, dtype=torch.float64))
    lost = lost_rotation(channels, energies, mean_rotation(frequencies, distances))
    for f in range(F):
        for channel in range(K):
            want = 0.0
            for head in range(K * group):
                way = float(channels.back[f, head // group, channel].abs().square())
                turns = [cmath.exp(-1j * frequencies[f] * d) for d in range(T)]
                mean = sum(float(distances[head, d]) * turns[d] for d in range(T))
                variance = sum(float(distances[head, d]) * abs(turns[d] - mean) ** 2 for d in range(T))
                want += float(energies[head, f]) * way * float(channels.energy[f, channel]) * variance
            assert abs(float(lost[f, channel]) - want) < 1e-9 * max(want, 1.0)


@given(st.integers(1, 12), st.integers(0, 10**6))
def test_the_kept_pairs_are_those_that_lose_most(pairs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    energy, lost = torch.rand(2, 4, 3, dtype=torch.float64, generator=generator)
    chosen = keep_rotation(energy, lost, pairs)
    assert int(chosen.sum()) == pairs
    if pairs < 12:
        assert lost[chosen].min() >= lost[~chosen].max() * (1 - 1e-9)


def test_pairs_without_any_loss_are_still_as_many_as_asked() -> None:
    assert int(keep_rotation(torch.zeros(4, 3).double(), torch.zeros(4, 3).double(), 5).sum()) == 5
