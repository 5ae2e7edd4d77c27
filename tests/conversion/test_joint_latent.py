"""The latent is the best of its rank, by the weighted error it is chosen for."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.conversion.joint_latent import Part, joint_latent


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gram(size: int, seed: int) -> torch.Tensor:
    x = normal(4 * size, size, seed=seed)
    return x.mT @ x / len(x)


def parts(seed: int, *, shared: bool) -> list[Part]:
    moments = gram(11, seed + 2)
    other = moments if shared else gram(11, seed + 5)
    return [
        Part(normal(6, 11, seed=seed), gram(6, seed + 1), moments),
        Part(normal(7, 11, seed=seed + 3), gram(7, seed + 4), other),
    ]


def error(some: list[Part], down: torch.Tensor, ups: list[torch.Tensor]) -> float:
    total = 0.0
    for part, up in zip(some, ups, strict=True):
        wrong = part.rows - up @ down
        total += float((part.metric @ wrong @ part.moments * wrong).sum())
    return total


@given(st.integers(1, 10), st.integers(0, 10**6))
def test_the_error_is_what_the_dropped_singular_values_hold(rank: int, seed: int) -> None:
    some = parts(seed, shared=True)
    found = error(some, *joint_latent(some, rank))
    root = torch.linalg.cholesky(some[0].moments)
    weighted = torch.cat([torch.linalg.cholesky(part.metric).mT @ part.rows @ root for part in some])
    best = float(torch.linalg.svdvals(weighted)[rank:].square().sum())
    # A floor of 1e-6 keeps moments and metrics away from singular.
    assert best * (1 - 1e-9) - 1e-9 <= found <= best * (1 + 1e-4) + 1e-6


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 10), st.integers(0, 10**6))
def test_where_inputs_are_seen_differently_no_small_change_is_better(rank: int, seed: int) -> None:
    some = parts(seed, shared=False)
    down, ups = joint_latent(some, rank, rounds=60)
    least = error(some, down, ups)
    begun = error(some, *joint_latent(some, rank, rounds=0))
    assert least <= begun * (1 + 1e-6) + 1e-9
    leaves = [down.clone().requires_grad_(), *(up.clone().requires_grad_() for up in ups)]
    total = torch.zeros((), dtype=torch.float64)
    for part, up in zip(some, leaves[1:], strict=True):
        wrong = part.rows - up @ leaves[0]
        total = total + (part.metric @ wrong @ part.moments * wrong).sum()
    total.backward()
    for leaf in leaves:
        assert leaf.grad is not None
        step = leaf.detach() - 1e-3 * leaf.grad / leaf.grad.norm().clamp_min(1e-12) * leaf.detach().norm()
        moved = [step if other is leaf else other.detach() for other in leaves]
        assert error(some, moved[0], moved[1:]) >= least * (1 - 1e-3) - 1e-9


def test_a_latent_wider_than_needed_is_padded_and_exact() -> None:
    for rank in (11, 13, 20):
        some = parts(0, shared=False)
        down, ups = joint_latent(some, rank)
        assert down.shape == (rank, 11)
        for part, up in zip(some, ups, strict=True):
            assert torch.allclose(up @ down, part.rows, atol=1e-12)


def test_a_rank_of_all_rows_gives_them_back_as_they_are() -> None:
    some = [
        Part(normal(3, 11, seed=0), gram(3, 1), gram(11, 2)),
        Part(normal(4, 11, seed=3), gram(4, 4), gram(11, 5)),
    ]
    down, ups = joint_latent(some, 7)
    assert torch.equal(torch.cat(ups) @ down, torch.cat([part.rows for part in some]))


def test_latents_are_of_one_size_and_uncorrelated() -> None:
    some = parts(3, shared=True)
    down, _ = joint_latent(some, 4)
    seen = down @ some[0].moments @ down.mT
    assert torch.allclose(seen / seen.diagonal().mean(), torch.eye(4, dtype=torch.float64), atol=1e-5)
