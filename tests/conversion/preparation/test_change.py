"""A change of queries and keys leaves their products, whatever its factors and quarter turns are."""

from __future__ import annotations

import pytest
import torch

from headwise.conversion.preparation.change import (
    OFFSETS,
    Change,
    changed,
    channels,
    fit,
    losses_after,
    num_pairs,
    powers,
)
from headwise.conversion.preparation.prepare import read_formats
from headwise.conversion.preparation.samples import projected
from headwise.models.specs import GroupedSpec, RopeSpec
from headwise.runtime.kernels.native.calls import can_encode

E, H, K, D = 32, 4, 2, 16


def spec(rotated: int, *, interleaved: bool = False) -> GroupedSpec:
    rope = RopeSpec(dim=rotated, theta=1e4, interleaved=interleaved) if rotated else None
    return GroupedSpec(hidden_size=E, num_heads=H, num_kv_heads=K, head_dim=D, rope=rope, bias=("q_proj", "k_proj"))


def random_change(layer: GroupedSpec, generator: torch.Generator) -> Change:
    size = K, len(channels(layer))
    turns = torch.randint(4, size, generator=generator)
    turns[:, num_pairs(layer) :] = turns[:, num_pairs(layer) :] // 2 * 2
    return Change(torch.randint(-12, 13, size, generator=generator) / 4.0, turns)


@pytest.mark.parametrize(("rotated", "interleaved"), [(16, False), (16, True), (8, False), (8, True), (0, False)])
@pytest.mark.parametrize("seed", range(3))
def test_products_stay(rotated: int, interleaved: bool, seed: int) -> None:
    """Of weights that are changed, and of queries and keys that are changed after RoPE, which are the same."""
    generator = torch.Generator().manual_seed(seed)
    layer = spec(rotated, interleaved=interleaved)
    change = random_change(layer, generator)
    state = {
        f"{side}_proj.{part}": torch.randn(*shape, generator=generator, dtype=torch.float64)
        for side, heads in (("q", H), ("k", K), ("v", K))
        for part, shape in (("weight", (heads * D, E)), ("bias", (heads * D,)))
    }
    inputs = torch.randn(1, 9, E, generator=generator, dtype=torch.float64)
    positions = torch.arange(9) * 5
    before, after = (projected(each, layer, inputs, positions) for each in (state, changed(state, change, layer)))
    old, new = ([each.rotated(side, positions)[:, 0] for side in "qk"] for each in (before, after))
    for number, side in enumerate("qk"):
        grouped = [torch.unflatten(states[number], 0, (K, -1)).flatten(1, 2) for states in (old, new)]
        assert (change.applied(grouped[0], layer, side) - grouped[1]).abs().max() < 1e-12
        assert (grouped[0] - grouped[1]).abs().max() > 0.1
    products = [queries @ keys.repeat_interleave(H // K, 0).mT for queries, keys in (old, new)]
    assert (products[0] - products[1]).abs().max() < 1e-11


def test_whole_powers_are_exact() -> None:
    whole = torch.arange(-64, 65).double()
    assert powers(whole).tolist() == [2.0**exponent for exponent in range(-64, 65)]
    assert (powers(whole / 4) ** 4 / powers(whole) - 1).abs().max() < 1e-14


def test_more_factors_and_more_starts_lose_less() -> None:
    """Keys with a constant part that is large in a few pairs, as those of Qwen2.5 have it."""
    generator = torch.Generator().manual_seed(3)
    layer = GroupedSpec(hidden_size=E, num_heads=1, num_kv_heads=1, head_dim=64, rope=RopeSpec(dim=64, theta=1e4))
    formats = read_formats("llama.cpp:q4_0")
    gains = []
    for _ in range(2):
        sizes = 2.0 ** torch.randint(-2, 4, (2, 64), generator=generator)
        keys, queries = (torch.randn(1, 512, 64, generator=generator) * size for size in sizes)
        keys += 30.0 * torch.randn(64, generator=generator) * (torch.rand(64, generator=generator) < 0.1)
        every = [
            losses_after(fit(queries, keys, layer, formats, **how), queries, keys, layer, formats)
            for how in ({}, {"grain": 4}, {"grain": 4, "starts": len(OFFSETS) + 4})
        ]
        gains.append(torch.cat(every))
    powers_of_two, finer, more_starts = torch.stack(gains).mean(0).tolist()
    assert more_starts < finer < powers_of_two


@pytest.mark.skipif(not can_encode(), reason="the kernels are not compiled here")
@pytest.mark.parametrize("cache", ["llama.cpp:q4_0", "mlx:4"])
def test_the_kernel_finds_what_is_found_without_it(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = GroupedSpec(hidden_size=E, num_heads=4, num_kv_heads=2, head_dim=64, rope=RopeSpec(dim=32, theta=1e4))
    sizes = 2.0 ** torch.randint(-2, 4, (2, 64), generator=generator)
    queries, keys = (torch.randn(2, 100, 64, generator=generator) * size for size in sizes)
    samples = queries, keys, layer, read_formats(cache)
    by_kernel = losses_after(fit(*samples, grain=4, starts=5), *samples)
    monkeypatch.setattr("headwise.conversion.preparation.change.can_encode", lambda: False)
    assert (by_kernel < losses_after(Change.none(layer), *samples) - 0.5).all()
    # A rounding may decide between two moves that are as good.
    assert (by_kernel - losses_after(fit(*samples, grain=4, starts=5), *samples)).abs().max() < 0.01
