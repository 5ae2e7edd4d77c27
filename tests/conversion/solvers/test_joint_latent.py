"""The joint latent has the least weighted error of all latents of its rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise.conversion.solvers.joint_latent import Part, joint_latent


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gram(size: int, seed: int) -> torch.Tensor:
    x = normal(4 * size, size, seed=seed)
    return x.mT @ x / len(x)


def parts(seed: int, *, shared: bool, heights: tuple[int, int] = (6, 7)) -> list[Part]:
    moments = gram(11, seed + 2)
    other = moments if shared else gram(11, seed + 5)
    return [
        Part(normal(heights[0], 11, seed=seed), gram(heights[0], seed + 1), moments),
        Part(normal(heights[1], 11, seed=seed + 3), gram(heights[1], seed + 4), other),
    ]


def error(some: list[Part], down: torch.Tensor, ups: list[torch.Tensor]) -> float:
    total = 0.0
    for part, up in zip(some, ups, strict=True):
        wrong = part.rows - up @ down
        total += float((part.metric @ wrong @ part.moments * wrong).sum())
    return total


@pytest.mark.parametrize("heights", [(6, 7), (4, 5)], ids=["more rows than inputs", "fewer rows"])
@given(st.integers(1, 8), st.integers(0, 10**6))
def test_the_error_is_what_the_dropped_singular_values_hold(heights: tuple[int, int], rank: int, seed: int) -> None:
    some = parts(seed, shared=True, heights=heights)
    loss = error(some, *joint_latent(some, rank))
    root = torch.linalg.cholesky(some[0].moments)
    weighted = torch.cat([torch.linalg.cholesky(part.metric).mT @ part.rows @ root for part in some])
    best = float(torch.linalg.svdvals(weighted)[rank:].square().sum())
    # A floor of 1e-6 keeps moments and metrics away from singular.
    assert best * (1 - 1e-9) - 1e-9 <= loss <= best * (1 + 1e-4) + 1e-6


@given(st.integers(1, 10), st.integers(0, 10**6))
def test_where_inputs_are_seen_differently_no_other_decoder_is_better(rank: int, seed: int) -> None:
    some = parts(seed, shared=False)
    down, ups = joint_latent(some, rank)
    least = error(some, down, ups)
    for part, up in zip(some, ups, strict=True):
        slope = (part.rows - up @ down) @ part.moments @ down.mT
        # As near as a floor of 1e-6 allows.
        assert slope.norm() <= 1e-5 * (part.rows @ part.moments @ down.mT).norm()
    sizes = [part.moments.diagonal().mean() for part in some]
    mean = sum(part.moments / size for part, size in zip(some, sizes, strict=True))
    alike = [Part(part.rows, part.metric * size, mean) for part, size in zip(some, sizes, strict=True)]
    assert least <= error(some, *joint_latent(alike, rank)) * (1 + 1e-6)


@given(st.integers(2, 10), st.booleans(), st.integers(0, 10**6))
def test_its_first_numbers_are_the_latent_of_fewer(rank: int, shared: bool, seed: int) -> None:
    some = parts(seed, shared=shared)
    down, _ = joint_latent(some, rank)
    fewer, _ = joint_latent(some, rank - 1)
    assert torch.allclose(down[:-1], fewer, rtol=1e-12, atol=1e-12)


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
    moments = down @ some[0].moments @ down.mT
    assert torch.allclose(moments / moments.diagonal().mean(), torch.eye(4, dtype=torch.float64), atol=1e-5)
