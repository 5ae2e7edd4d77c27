"""Rival caches on a toy: lossless where nothing is left out, counted to the byte, each step as its paper has it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.rivals import __main__ as rivals
from benchmarks.rivals import care, elitekv, kvquant, palu, svd_llm, transmla
from benchmarks.rivals.calibration import collect
from benchmarks.rivals.hadamard import hadamard
from benchmarks.rivals.simulation import BF16, Design, Rotary, Study, mean_nll, simulated
from transformers.models.llama.modeling_llama import rotate_half

from tests.closeness import assert_close
from tests.real_models import save_tiny, tiny_model

TEXT = "Whatever is worth measuring is worth measuring twice, side by side; and saying how. "
METHODS = {"palu": palu, "care": care, "svd-llm-v2": svd_llm, "elitekv": elitekv, "kvquant": kvquant}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Study]:
    model = tiny_model().float()
    palu.BLOCK = 4  # of the toy's 24 dims
    windows = torch.randint(3, 97, (5, 40), generator=torch.Generator().manual_seed(1))
    statistics = collect(model, windows[:4])
    yield Study(model, statistics, windows[:4], windows[4:], tmp_path_factory.mktemp("work"))
    palu.BLOCK = 32


@torch.inference_mode()
def logits(study: Study, layers: Sequence[Any] | None = None) -> torch.Tensor:
    if layers is None:
        return torch.as_tensor(study.model(study.valid, use_cache=False).logits)
    with simulated(study.model, layers):
        return logits(study)


def error(study: Study, design: Design) -> float:
    return float((logits(study, design.layers) - logits(study)).norm() / logits(study).norm())


# --- whole caches ---


@pytest.mark.parametrize("method", ["palu", "care", "svd-llm-v2", "elitekv"])
def test_with_all_ranks_nothing_is_lost(study: Study, method: str) -> None:
    designs = METHODS[method].designs(study, 1.0)
    assert min(error(study, design) for design in designs) < 1e-4
    assert all(design.token_bytes == study.full for design in designs)


def test_transmla_with_every_channel_rotated_loses_nothing(study: Study) -> None:
    assert_close(logits(study, transmla._layers(study, study.width, 1, rank=study.width)), logits(study), 1e-4)


@pytest.mark.parametrize("method", ["care", "svd-llm-v2", "elitekv", "kvquant", "transmla"])
def test_fewer_bytes_lose_more(study: Study, method: str) -> None:
    designs = {**METHODS, "transmla": transmla}[method].designs
    near, far = (min(error(study, one) for one in designs(study, fraction)) for fraction in (0.6, 0.3))
    assert near < far


def test_palu_loses_more_with_fewer_bits_or_ranks(study: Study) -> None:
    by_bits = [error(study, palu._design(study, [[24]] * 4, bits)) for bits in (16, 4, 3, 2)]
    by_rank = [error(study, palu._design(study, [[rank]] * 4, 16)) for rank in (24, 16, 8)]
    assert by_bits == sorted(by_bits)
    assert by_rank == sorted(by_rank)


def test_the_model_has_its_own_attention_again(study: Study) -> None:
    before = logits(study)
    logits(study, palu.designs(study, 0.5)[0].layers)
    assert torch.equal(logits(study), before)
    assert mean_nll(study.model, study.valid) == pytest.approx(
        mean_nll(study.model, study.valid, coarse=True), rel=0.1
    )


def test_bytes_are_those_of_what_is_kept(study: Study) -> None:
    layers, width = study.layers, study.width
    assert study.full == 2 * layers * width * BF16
    for design in palu.designs(study, 0.25):
        ranks = [part.groups[0].rank for layer in design.layers for part in (layer.keys, layer.values)]
        bits = design.settings["bits"]
        assert design.token_bytes == (2 * sum(ranks) if bits == 16 else sum(bits * rank / 8 + 3 for rank in ranks))
    design = elitekv.designs(study, 0.25)[0]
    layer = design.layers[0]
    assert design.token_bytes == layers * BF16 * (len(layer.latent) + 2 * int(layer.rotated.sum()))
    dense = kvquant.expected_bytes(192, 4, sparse=False)
    assert dense == 192 + 4
    assert kvquant.expected_bytes(192, 4, sparse=True, key_outliers=3) == dense + 3 * (3 + 2) + 1


# --- Palu ---


@pytest.mark.parametrize("order", [1, 2, 8, 12, 20, 24, 32, 96, 160, 192])
def test_hadamard_matrices(order: int) -> None:
    matrix = hadamard(order)
    assert_close(matrix @ matrix.mT, torch.eye(order, dtype=torch.float64), 1e-12)
    assert_close(matrix.abs(), torch.full_like(matrix, order**-0.5), 1e-12)


def test_no_hadamard_matrix_of_other_orders() -> None:
    with pytest.raises(ValueError, match="order 36"):
        hadamard(36)


def test_latents_are_rounded_to_their_own_range() -> None:
    latent = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    for bits in (2, 3, 4):
        step = (latent.amax(1) - latent.amin(1)) / (2**bits - 1)
        rounded = palu.quantised(latent, bits=bits)
        # Half a step for the code, half for the zero point.
        assert bool(((rounded - latent).abs().amax(1) <= 1.01 * step).all())
        assert all(len(row.unique()) <= 2**bits for row in rounded)


def test_ranks_follow_the_scores_in_blocks() -> None:
    ranks = palu.allocated([[1.0], [3.0], [2.0], [100.0]], 300, 192)
    assert ranks[3] == [192]
    assert all(rank % palu.BLOCK == 0 and rank > 0 for (rank,) in ranks)


# --- CARE and SVD-LLM ---


def spectra(count: int, width: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [1e4 * (torch.rand(width, generator=generator).sort(descending=True).values ** at) for at in range(count)]


def test_ranks_have_the_mean_that_is_asked_for() -> None:
    of_layers = spectra(6, 24)
    care_ranks, svd_ranks = care.allocated(of_layers, 8), svd_llm.allocated(of_layers, 48)
    assert sum(care_ranks) == sum(svd_ranks) == 48
    assert min(care_ranks) >= 4
    assert max(care_ranks) <= 16
    assert len(set(care_ranks)) > 1


def test_svd_llm_removes_less_where_the_loss_is_larger() -> None:
    loud, quiet = torch.full((24,), 1e6), torch.full((24,), 1e2)
    ranks = svd_llm.allocated([loud, quiet, loud, quiet], 48)
    assert ranks[0] == ranks[2] > ranks[1] == ranks[3]


def test_care_gives_rank_where_energy_is_left() -> None:
    flat, steep = torch.ones(24), torch.tensor(0.3) ** torch.arange(24)
    assert care.allocated([flat, steep, flat, steep], 6)[1] > care.allocated([flat, flat, flat, flat], 6)[1]


# --- EliteKV ---


def test_frequencies_are_chosen_one_by_one_by_the_difference_of_scores() -> None:
    generator = torch.Generator().manual_seed(3)
    queries, keys = (torch.randn(2, heads, 24, 8, generator=generator) for heads in (4, 2))
    angles = torch.arange(24)[:, None] * 10.0 ** -torch.arange(4)
    rotary = Rotary(*(torch.cat((table, table), -1)[None] for table in (angles.cos(), angles.sin())))
    order = elitekv.elite_order(queries, keys, rotary, rounds=3)
    rows = torch.arange(23, 0, -1)
    causal = rows[:, None] >= torch.arange(24)

    def scores(head: int, kept: Sequence[int]) -> torch.Tensor:
        mask = torch.zeros(4, dtype=torch.bool)
        mask[list(kept)] = True
        cos, sin = (
            torch.where(mask.repeat(2), table, other) for table, other in zip(rotary, (1.0, 0.0), strict=True)
        )
        q, k = queries[:, 2 * head : 2 * head + 2], keys[:, head, None]
        q, k = (x * cos[0] + rotate_half(x) * sin[0] for x in (q, k))
        return torch.as_tensor((q[:, :, rows] @ k.mT) * causal)

    for head in range(2):
        kept: list[int] = []
        for _ in range(3):
            whole = scores(head, range(4))
            left = [at for at in range(4) if at not in kept]
            kept.append(min(left, key=lambda at: float((scores(head, [*kept, at]) - whole).abs().sum())))
        assert order[head].tolist() == kept


# --- KVQuant ---


def test_levels_are_the_weighted_centres_of_what_is_rounded_to_them() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(20_000, generator=generator).div(4).clamp(-1, 1)
    weights = torch.rand(20_000, generator=generator)
    levels = kvquant.weighted_levels(states, weights, 8)
    place = torch.bucketize(states, (levels[1:] + levels[:-1]) / 2)
    for at, level in enumerate(levels):
        mine = place == at
        assert float((states[mine] * weights[mine]).sum() / weights[mine].sum()) == pytest.approx(
            float(level), abs=0.02
        )
    even = torch.linspace(-1, 1, 17)[1::2]
    spent, uniform = (
        float((weights * (of[torch.bucketize(states, (of[1:] + of[:-1]) / 2)] - states) ** 2).sum())
        for of in (levels, even)
    )
    assert spent < uniform


def test_q_norm_restores_mean_and_deviation() -> None:
    states = torch.randn(5000, generator=torch.Generator().manual_seed(0)).div(3).clamp(-1, 1) ** 3
    levels = kvquant.weighted_levels(states, torch.ones(5000), 4)
    place = torch.bucketize(states, (levels[1:] + levels[:-1]) / 2)
    rounded = kvquant.normalised(levels, states)[place]
    assert float(rounded.mean()) == pytest.approx(float(states.mean()), abs=1e-4)
    assert float(rounded.std()) == pytest.approx(float(states.std()), rel=1e-3)


def test_outliers_are_kept_and_counted(study: Study) -> None:
    layer = kvquant._layer(study.statistics, 0, 3, sparse=True)
    generator = torch.Generator().manual_seed(0)
    middle, span = (layer.upper + layer.lower) / 2, (layer.upper - layer.lower) / 2
    keys = middle + span * (2 * torch.rand(30, study.width, generator=generator) - 1)
    keys[7, 3], keys[9, 5] = layer.upper[3] + 9, layer.lower[5] - 9
    read = layer.keys(keys)
    assert (layer.key_outliers, layer.tokens) == (2, 30)
    kept = read == keys.half().float()
    assert bool(kept[7, 3])
    assert bool(kept[9, 5])
    values = torch.randn(30, study.width, generator=generator)
    values[4, 2] = 50.0
    assert float(layer.values(values)[4, 2]) == 50.0
    dense = kvquant._layer(study.statistics, 0, 3, sparse=False)
    assert float((dense.values(values)[4] - values[4]).norm()) > float((layer.values(values)[4] - values[4]).norm())


# --- the command ---


def test_the_command_keeps_rows_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks/rivals/__main__.py"])
    save_tiny(tmp_path / "source", num_hidden_layers=1)
    for place, name in enumerate(("wikitext-2.train", "wikitext-2.valid", "wikitext-2.test", "brown", "austen")):
        (tmp_path / f"{name}.txt").write_text((TEXT[place:] + TEXT[:place]) * 40)
    result = tmp_path / "rivals.json"
    options = ["--source", str(tmp_path / "source"), "--cache", str(tmp_path), "--work", str(tmp_path / "work")]
    options += ["--json", str(result), "--window", "64", "--windows", "1", "--tokens", "256"]
    rivals.main(["care", "kvquant", *options, "--bytes", "0.5", "0.05"])
    rows = json.loads(result.read_text())["rows"]
    assert list(rows) == ["original", "care/0.5", "kvquant/0.5", "care/0.05"]
    assert "kvquant/0.05: the method has no cache of so few bytes" in capsys.readouterr().out
    assert rows["care/0.5"]["fraction"] == pytest.approx(0.5, abs=0.03)
    assert set(rows["care/0.5"]["texts"]) == {"wikitext-2.test", "brown", "austen"}
    assert rows["care/0.5"]["run"]["command"] == "python -m benchmarks.rivals"
    rivals.main(["care", *options, "--bytes", "0.5"])
    assert capsys.readouterr().out == ""


def test_unknown_methods_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        rivals.main(["kivi"])
    assert "METHOD 'kivi': must be one of kvquant" in capsys.readouterr().err


def test_models_with_biases_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "source", "qwen2")
    texts = ("wikitext-2.train", "wikitext-2.valid", "wikitext-2.test", "brown", "austen")
    for name in texts:
        (tmp_path / f"{name}.txt").write_text(TEXT * 40)
    options = [
        "--source",
        str(tmp_path / "source"),
        "--cache",
        str(tmp_path),
        "--json",
        str(tmp_path / "rivals.json"),
    ]
    with pytest.raises(SystemExit, match="must be a llama model without attention biases"):
        rivals.main(options)
