"""Muon moves matrices along semi-orthogonal ones, and leaves everything else to AdamW."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headwise.conversion.healing.optimizer import BETAS, Muon, optimizer_of, semi_orthogonal
from tests.closeness import assert_close
from tests.real_models import tiny_model

SIZES = st.integers(1, 48)


@settings(deadline=None, max_examples=60)
@given(rows=SIZES, columns=SIZES, seed=st.integers(0, 2**32 - 1), scale=st.floats(1e-3, 1e3))
def test_singular_vectors_stay_and_singular_values_become_about_one(
    rows: int, columns: int, seed: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rank = min(rows, columns)
    left, _ = torch.linalg.qr(torch.randn(rows, rank, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(columns, rank, generator=generator, dtype=torch.float64))
    values = torch.rand(rank, generator=generator, dtype=torch.float64) + 0.05
    result = semi_orthogonal(scale * left * values @ right.mT)
    inside = left.mT @ result @ right
    assert_close(result, left @ inside @ right.mT, 1e-9)
    assert_close(inside, torch.diag(inside.diagonal()), 1e-9)
    assert inside.diagonal().min() > 0.65
    assert inside.diagonal().max() < 1.25


def test_a_zero_matrix_stays_zero() -> None:
    assert torch.equal(semi_orthogonal(torch.zeros(3, 5)), torch.zeros(3, 5))


def test_matrices_move_as_by_torchs_muon() -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has Muon from 2.9 on")
    torch.manual_seed(0)
    own, other = (nn.Parameter(torch.zeros(24, 40)) for _ in range(2))
    one = Muon([own], [], rate=1e-2, dtype=torch.bfloat16)
    two = torch.optim.Muon([other], lr=1e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        gradient = torch.randn(24, 40)
        own.grad, other.grad = gradient.clone(), gradient.clone()
        one.step()
        two.step()
    assert_close(own.detach(), other.detach(), 0.1)  # both round to bfloat16


def test_embeddings_and_vectors_move_as_by_adamw_and_matrices_do_not() -> None:
    torch.manual_seed(0)
    one, two = (
        nn.ModuleDict({"embed": nn.Embedding(9, 8), "norm": nn.LayerNorm(8), "out": nn.Linear(8, 8, bias=False)})
        for _ in range(2)
    )
    two.load_state_dict(one.state_dict())
    mixed = optimizer_of(one, dict(one.named_parameters()), "muon", rate=1e-2, dtype=torch.float32)
    plain = torch.optim.AdamW(two.parameters(), lr=1e-2, betas=BETAS, weight_decay=0.0)
    for _ in range(3):
        for own, other in zip(one.parameters(), two.parameters(), strict=True):
            own.grad = torch.randn_like(own)
            other.grad = own.grad.clone()
        mixed.step()
        plain.step()
    moved = {name: parameter.detach() for name, parameter in one.named_parameters()}
    for name, parameter in two.named_parameters():
        if name == "out.weight":
            assert not torch.allclose(moved[name], parameter, atol=1e-3)
        else:
            assert_close(moved[name], parameter.detach(), 1e-6)


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_output_head_moves_as_by_adamw(is_tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=is_tied).float()
    optimizer = optimizer_of(model, dict(model.named_parameters()), "muon", rate=1e-2, dtype=torch.float32)
    by_adamw = {id(p) for group in optimizer.param_groups if not group["is_matrix"] for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert (id(parameter) in by_adamw) == (parameter.ndim == 1 or "embed" in name or "lm_head" in name), name


def test_adamw_alone_moves_everything_as_torchs_does() -> None:
    torch.manual_seed(0)
    one, two = nn.Linear(5, 3), nn.Linear(5, 3)
    two.load_state_dict(one.state_dict())
    optimizers = (
        optimizer_of(one, dict(one.named_parameters()), "adamw", rate=1e-2, dtype=torch.float32),
        torch.optim.AdamW(two.parameters(), lr=1e-2, betas=BETAS, weight_decay=0.0),
    )
    for own, other in zip(one.parameters(), two.parameters(), strict=True):
        own.grad = torch.randn_like(own)
        other.grad = own.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    for own, other in zip(one.parameters(), two.parameters(), strict=True):
        assert_close(own.detach(), other.detach(), 1e-6)


def test_the_matrices_of_experts_move_one_by_one() -> None:
    torch.manual_seed(0)
    together = nn.Parameter(torch.zeros(3, 6, 10))
    alone = [nn.Parameter(torch.zeros(6, 10)) for _ in range(3)]
    gradient = torch.randn(3, 6, 10)
    together.grad = gradient.clone()
    for parameter, part in zip(alone, gradient, strict=True):
        parameter.grad = part.clone()
    Muon([together], [], rate=1e-2, dtype=torch.float32).step()
    Muon(alone, [], rate=1e-2, dtype=torch.float32).step()
    assert_close(together.detach(), torch.stack([parameter.detach() for parameter in alone]), 1e-5)
