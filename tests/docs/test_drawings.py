"""The figures of the documentation are what their code draws, and what they show is so."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from docs.drawings import FOLDER, bits, drawn, mechanisms, mla, rank, roofline, rope, scaling, sharing
from docs.drawings.__main__ import main

from headwise import MultiHeadLatentAttention


def test_the_committed_figures_are_what_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_a_figure_that_differs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("docs.drawings.TOPICS", ("mechanisms",))
    assert main(["--folder", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["--check", "--folder", str(tmp_path)]) == 0
    (tmp_path / "mla.svg").write_text("<svg/>", encoding="utf-8")
    (tmp_path / "gqa.svg").unlink()
    assert main(["--check", "--folder", str(tmp_path)]) == 1
    named = [Path(line.split(" ")[0]).name for line in capsys.readouterr().err.splitlines()]
    assert named == ["gqa.svg", "mla.svg"]


def test_figures_have_no_background_and_no_date() -> None:
    for path in sorted(FOLDER.glob("*.svg")):
        text = path.read_text(encoding="utf-8")
        ElementTree.fromstring(text)
        assert not any(word in text for word in ("#ffffff", "fill: white", "<dc:date>")), path


@pytest.mark.parametrize("width", [4, 32, 256, 1024])
def test_divided_scores_have_one_entropy_and_one_gradient_at_every_width(width: int) -> None:
    divided, plain = (scaling.measure(width, scaled=scaled) for scaled in (True, False))
    # At a variance of 1 the entropy is about ln n − 1/2.
    assert divided.entropy == pytest.approx(math.log(scaling.KEYS) - 0.5, abs=0.06)
    assert divided.gradient == pytest.approx(0.175, abs=0.01)
    assert plain.entropy < divided.entropy - 0.8


def test_the_norm_of_the_gradient_is_that_of_the_derivative() -> None:
    scores = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    derivative = torch.autograd.functional.jacobian(lambda s: s.softmax(-1), scores)
    assert scaling.gradient_norm(scores.softmax(-1)).item() == pytest.approx(derivative.norm().item(), rel=1e-12)


def test_attention_is_on_the_slope_and_a_batch_moves_the_weights_alone() -> None:
    assert [round(place.intensity) for place in roofline.attention_places()] == [1, 4, 71, 242]
    assert [place.intensity for place in roofline.weight_places((1, 16))] == pytest.approx([1, 16])
    hardware = roofline.device(roofline.DEVICE)
    for place in (*roofline.attention_places(), *roofline.weight_places()):
        assert place.attainable == pytest.approx(place.intensity * hardware.bytes_per_second)
    first, *_, last = roofline.reads()
    assert last.weights * last.batch == pytest.approx(first.weights * first.batch)
    assert last.cache == first.cache == 8192 * 131_072  # tokens, and Llama-3-8B's bytes of one


def test_a_merge_is_exact_where_heads_are_copies_in_several_bases() -> None:
    copies, some = sharing.measure(0.0), sharing.measure(0.2)
    assert copies.aligned < 1e-12
    assert copies.mean_in_one_basis < 1e-12
    assert copies.mean > 0.5
    assert 0.1 < some.aligned < some.mean_in_one_basis < some.mean


def test_absorbed_and_expanded_agree_and_cost_as_much_where_they_cross() -> None:
    torch.manual_seed(0)
    sizes = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    layer, states = MultiHeadLatentAttention(64, 4, **sizes).double(), torch.randn(2, 12, 64, dtype=torch.float64)
    outputs = []
    for impl in ("expanded", "absorbed"):
        layer.impl = impl
        outputs.append(layer(states, is_causal=True))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
    most = mla.crossing()
    assert mla.flops("absorbed", most) < mla.flops("expanded", most)
    assert mla.flops("absorbed", most + 1) > mla.flops("expanded", most + 1)


def test_the_lost_rotation_is_that_of_a_geometric_sum() -> None:
    longest, pair = 64, 5
    theta = rope.RotaryEmbedding(rope.ROPE).frequencies[pair]
    mean = np.exp(-1j * theta * np.arange(longest)).mean()
    assert rope.lost(longest)[pair] == pytest.approx(1 - abs(mean) ** 2, abs=1e-12)


def test_the_latent_that_knows_most_errs_least() -> None:
    for errors in map(rank.measure, (8, 64, 112)):
        assert errors.both < errors.inputs < errors.weights < 1


@pytest.mark.parametrize("exponent", [exponent for _, exponent in bits.SPECTRA])
@pytest.mark.parametrize("mean", bits.BUDGETS)
def test_water_filling_spends_the_budget_and_errs_least(exponent: float, mean: int) -> None:
    spectrum, budget = bits.variances(exponent), mean * bits.DIMS
    best = bits.water_filling(spectrum, budget)
    assert sum(best.bits) == pytest.approx(budget)
    assert best.errors == pytest.approx(np.minimum(spectrum, best.level).tolist())
    assert best.errors == pytest.approx([v * 4.0**-b for v, b in zip(spectrum, best.bits, strict=True)])
    assert sum(best.errors) < min(bits.even(spectrum, budget, kept) for kept in bits.KEPT)
    random = np.random.default_rng(0)
    for _ in range(50):
        shares = np.asarray(best.bits) + 0.05 * random.standard_normal(bits.DIMS)
        shares = np.maximum(shares, 0)
        shares *= budget / shares.sum()
        assert float((spectrum * 4.0**-shares).sum()) >= sum(best.errors)


def test_the_diagrams_count_what_is_cached() -> None:
    assert [mechanisms.cached(name) for name in ("mha", "gqa", "mqa", "mla")] == [512, 256, 128, 128]
    assert {"mha.svg", "gqa.svg", "mqa.svg", "mla.svg", "latent-space.svg", "expert-decoded.svg"} < drawn().keys()
