"""Windows that repeat passages from far behind: what they hold, where their tokens stand, and what layers see."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.conversion.calibration.windows import (
    ALIKE,
    PASSAGES,
    plain_windows,
    recall_windows,
    repeating_pieces,
)
from headwise.conversion.plan import Place, read_layer
from headwise.conversion.solvers.rope_channels import mean_rotation
from headwise.conversion.solvers.statistics import statistics_of
from headwise.models.checkpoints import open_checkpoint
from headwise.models.specs import GroupedSpec, ModelSpec, RopeSpec
from headwise.runtime.hf import LayerwiseModel
from tests.real_models import save_tiny

ROPE = RopeSpec(dim=16)
LAYER = GroupedSpec(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, rope=ROPE)


def model(positions: int | None = 4096, layer: GroupedSpec = LAYER) -> ModelSpec:
    return ModelSpec(model_type="llama", hidden_size=64, layers=(layer,), max_position_embeddings=positions)


def ids(count: int, width: int) -> torch.Tensor:
    return torch.arange(count * width).view(count, width)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(2, 200), st.integers(0, 5), st.integers(1, 8000))
def test_a_repeating_window_repeats_its_own_passages_within_the_models_positions(
    count: int, width: int, held: int, positions: int
) -> None:
    text, held = ids(count, width), min(held, count)
    windows = recall_windows(text, held, model(max(positions, width)))
    assert torch.equal(text, ids(count, width))  # the text itself stays
    half, passage = width // 2, width // 2 // PASSAGES
    for index, (own, before) in enumerate(zip(windows.ids, text, strict=True)):
        place = windows.positions[index]
        assert torch.equal(own[:half], before[:half])
        assert bool((place.diff() >= 1).all())
        assert int(place[0]) == 0
        assert int(place[-1]) < max(positions, width)
        repeats = index % 3 == 2 if index < count - held else (index - (count - held)) % 3 == 1
        if not repeats or passage < 2:
            assert torch.equal(own, before)
            assert torch.equal(place, torch.arange(width))
            continue
        repeated = own[half : half + passage * PASSAGES].view(PASSAGES, passage)
        assert sorted(repeated.tolist()) == before[: passage * PASSAGES].view(PASSAGES, passage).tolist()
        gaps = place.diff() - 1
        assert int(gaps.sum()) == int(gaps[half - 1])
        assert (int(gaps.sum()) > 0) == (positions > width)


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 12), st.integers(256, 700))
def test_passages_that_begin_alike_are_told_apart_by_two_tokens(count: int, width: int) -> None:
    text = ids(count, width)
    windows = recall_windows(text, 0, model(), alike=True)
    assert torch.equal(text, ids(count, width))  # the text itself stays
    passages = width // 2 // 32
    for index in range(count):
        own, before = windows.ids[index], text[index]
        if index % 3 != 2:
            assert torch.equal(own, before)
            continue
        said = own[: passages * 32].view(passages, 32)
        repeated = own[width // 2 : width // 2 + passages * 32].view(passages, 32)
        assert sorted(said.tolist()) == sorted(repeated.tolist())
        for start in range(0, passages - ALIKE + 1, ALIKE):
            group = said[start : start + ALIKE]
            assert all(len(group[:, place].unique()) == 1 for place in (0, 1, 2, 3, 6, 7))
            assert all(len(group[:, place].unique()) == ALIKE for place in (4, 5, *range(8, 32)))
        is_own = said == before[: passages * 32].view(passages, 32)
        assert bool(is_own[:, [4, 5, *range(8, 32)]].all())


def test_passages_of_narrow_windows_do_not_begin_alike() -> None:
    text = ids(6, 255)
    assert torch.equal(recall_windows(text, 0, model(), alike=True).ids, recall_windows(text, 0, model()).ids)


def test_pieces_repeat_passages_that_begin_alike() -> None:
    text = torch.arange(2 * 512).view(2, 512)
    pieces = repeating_pieces(text)
    with torch.device("meta"):  # whatever device layers are solved on, random numbers are drawn on the CPU
        assert torch.equal(pieces, repeating_pieces(text))
    for piece, before in zip(pieces, text, strict=True):
        said, repeated = piece[:256].view(16, 16), piece[256:].view(16, 16)
        assert sorted(said.tolist()) == sorted(repeated.tolist())
        assert not torch.equal(said, repeated)
        assert torch.equal(said[:, 8:], before[:256].view(16, 16)[:, 8:])
        assert all(len(said[start : start + ALIKE, :4].unique(dim=0)) == 1 for start in range(0, 16, ALIKE))
    assert repeating_pieces(text[:, :128]).shape == (2, 128)
    assert repeating_pieces(text[:, :127]).shape == (0, 127)


def test_windows_stay_as_they_are_where_nothing_can_be_recalled() -> None:
    text = ids(6, 64)
    encoder = replace(LAYER, is_causal=False)
    assert torch.equal(recall_windows(text, 1, model(layer=encoder)).ids, text)
    without_rope = recall_windows(text, 1, model(layer=replace(LAYER, rope=None)))
    assert not torch.equal(without_rope.ids, text)  # passages are repeated, and follow each other
    assert torch.equal(without_rope.positions, plain_windows(text).positions)
    assert torch.equal(recall_windows(text, 1, model(None)).positions, plain_windows(text).positions)
    first, again = (recall_windows(text, 1, model()) for _ in range(2))
    assert torch.equal(first.ids, again.ids)
    assert torch.equal(first.positions, again.positions)


def test_the_windows_to_train_on_are_the_first_ones() -> None:
    windows = replace(plain_windows(ids(5, 8)), held=2)
    assert (len(windows), windows.width, windows.tokens, windows.train) == (5, 8, 40, 3)
    assert (len(windows[:2]), windows[:2].held) == (2, 0)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 8])
def test_a_layer_is_measured_at_the_positions_it_sees(tmp_path: Path, window: int | None) -> None:
    """A layer's statistics know the distances of a gap, and its tensors give the layer's own output across it."""
    options = {} if window is None else {"sliding_window": window}
    folder = save_tiny(tmp_path / "tiny", "llama" if window is None else "mistral", **options)
    source = LayerwiseModel(open_checkpoint(folder), torch.float32)
    text = torch.randint(3, 97, (3, 32), generator=torch.Generator().manual_seed(0))
    windows = recall_windows(text, 0, replace(source.checkpoint.spec, max_position_embeddings=500))
    layer = read_layer(source.checkpoint, Place(0)).float()
    assert isinstance(layer.spec, GroupedSpec)
    source.begin(windows.ids[:1])
    call, _ = windows.placed(source, 2).trace(0, source.module(0), source.begin(windows.ids[2:]))
    output = layer.output(call.inputs[0], windows.rotation(layer.spec, 2))
    assert torch.allclose(output, call.output[0], atol=2e-5, rtol=1e-4)
    statistics = statistics_of(layer, None, [(2, call.inputs[0])], windows.seen_by(layer.spec))
    gap = int(windows.positions[2, -1]) - 31
    assert gap > 0
    near, far = statistics.distances[:, :32].sum(1), statistics.distances[:, gap:].sum(1)
    if window is None:
        assert bool((near > 0).all() & (far > 0).all())
        assert torch.allclose(near + far, torch.ones(layer.spec.num_heads, dtype=torch.float64))
    else:
        assert statistics.distances.shape[1] == 32
    assert layer.spec.rope is not None
    means = mean_rotation([0.1, 0.01], statistics.distances)
    steps = torch.arange(statistics.distances.shape[1]).double()
    direct = statistics.distances.to(torch.complex128) @ torch.exp(-1j * steps[:, None] * torch.tensor([0.1, 0.01]))
    assert torch.allclose(means, direct)
    lost = 1 - means[:, 1].abs().square()  # of the slower rotation, where it is replaced by its mean
    assert bool((lost > 0.3).all() if window is None else (lost < 0.03).all())
