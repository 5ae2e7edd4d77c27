"""The latent is the best of its rank, by the weighted error it is chosen for."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise.conversion import joint_latent
from headwise.conversion.latent import KEY_BALANCE


def problem(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    x, roots = normal(40, 11), normal(2, 3, 3)
    return normal(6, 11), normal(6, 11), roots @ roots.mT + 0.1 * torch.eye(3), x.mT @ x / 40


def weighted_error(parts: tuple[torch.Tensor, ...], rank: int) -> tuple[float, torch.Tensor]:
    """The error of a rank-R decoding, and the singular values of what is decoded, both in the solver's units."""
    keys, values, weight, gram = parts
    down, key_up, value_up = joint_latent(keys, values, weight, gram, rank)
    root = torch.linalg.cholesky(gram)

    def weigh(v: torch.Tensor) -> torch.Tensor:
        return (weight @ v.view(2, 3, -1)).flatten(0, 1)

    key_scale = KEY_BALANCE / (keys @ root).norm()
    value_scale = 1 / (weigh(values) @ root).norm()
    exact = torch.cat((keys * key_scale, weigh(values) * value_scale)) @ root
    made = torch.cat((key_up @ down * key_scale, weigh(value_up @ down) * value_scale)) @ root
    return float((exact - made).square().sum()), torch.linalg.svdvals(exact)


@given(st.integers(1, 12), st.integers(0, 10**6))
def test_the_error_is_what_the_dropped_singular_values_hold(rank: int, seed: int) -> None:
    error, singular = weighted_error(problem(seed), rank)
    assert abs(error - float(singular[rank:].square().sum())) < 1e-9


def test_a_latent_wider_than_needed_is_padded_and_exact() -> None:
    keys, values, weight, gram = problem(0)
    down, key_up, value_up = joint_latent(keys, values, weight, gram, 20)
    assert down.shape == (20, 11)
    assert torch.allclose(key_up @ down, keys)
    assert torch.allclose(value_up @ down, values)


def test_without_keys_the_latent_is_the_values() -> None:
    _, values, weight, gram = problem(1)
    down, key_up, value_up = joint_latent(torch.zeros(0, 11, dtype=torch.float64), values, weight, gram, 6)
    assert key_up.shape == (0, 6)
    assert torch.allclose(value_up @ down, values)
