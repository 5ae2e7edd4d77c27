"""Decoders trained from scratch: as many parameters each, kept losses, and intervals over seeds."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwise import cost
from headwise.errors import ArgumentError
from headwise.study.audit import training
from headwise.study.audit.audit import Effort, with_effort
from headwise.study.audit.decoder import Decoder, Sizes, mechanisms, width_for
from headwise.study.audit.training import FromScratch, Trained, half_interval, spec_decoder, train, trained_decoders

SMALL = Sizes(hidden_size=32, num_heads=4, num_layers=2, intermediate_size=64)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog, and then it does so again. " * 700)
    return path


@pytest.mark.parametrize("name", mechanisms(SMALL))
def test_all_decoders_have_as_many_parameters_and_see_no_later_token(name: str) -> None:
    decoder, mha = spec_decoder(name, SMALL, 0), spec_decoder("MHA", SMALL, 0)
    count, wanted = (sum(parameter.numel() for parameter in one.parameters()) for one in (decoder, mha))
    assert abs(count - wanted) <= SMALL.num_layers * 3 * SMALL.hidden_size
    ids = torch.randint(256, (2, 12))
    positions = torch.arange(12).expand(2, -1)
    logits = decoder(ids, position_ids=positions).logits
    assert logits.shape == (2, 12, 256)
    later = ids.clone()
    later[:, 8:] = 0
    torch.testing.assert_close(decoder(later, position_ids=positions).logits[:, :8], logits[:, :8])
    # Positions matter: the same tokens further on are not the same.
    moved = decoder(ids.flip(1), position_ids=positions).logits.flip(1)
    assert not torch.allclose(moved, logits, atol=1e-6)


def test_a_seed_is_a_decoder() -> None:
    one, same, other = (spec_decoder("MQA", SMALL, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_training_lowers_the_loss_and_is_kept(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "WINDOW", 32)
    file, options = tmp_path / "trained.json", {"text": text, "tokens": 32 * 16 * 60, "seeds": 2, "sizes": SMALL}
    report = train(file, names=["MHA"], **options)
    (row,) = report.rows
    assert len(row.losses) == 2
    assert all(loss < 0.8 * math.log(256) for loss in row.losses)
    assert row.parameters == sum(parameter.numel() for parameter in spec_decoder("MHA", SMALL, 0).parameters())
    assert row.cache_values == cost.cache_values(mechanisms(SMALL)["MHA"])
    calls = []
    monkeypatch.setattr(training, "train_one", lambda *_, **__: calls.append(1) or (2.0, 1.0))
    again = train(file, names=["MHA", "MQA"], **options)  # goes on with what is missing
    assert again.row("MHA") == row
    assert len(calls) == 2
    assert set(json.loads(file.read_text())["rows"]) == {"MHA", "MQA"}
    with with_effort(Effort(trained=file)):  # what the checks of an audit read
        assert trained_decoders() == replace(again, rows=trained_decoders().rows)
        assert trained_decoders().row("MQA").losses == (2.0, 2.0)
    with pytest.raises(ArgumentError, match="another run"):
        train(file, names=["MHA"], **{**options, "tokens": 1})


def test_a_mechanism_is_compared_with_mha_seed_by_seed() -> None:
    def row(name: str, *losses: float) -> Trained:
        return Trained(mechanism=name, parameters=1, cache_values=1, losses=losses, seconds=1.0)

    report = FromScratch(
        tokens=1,
        text="t",
        rows=(row("MHA", 1.0, 2.0, 3.0), row("MQA", 1.1, 2.1, 3.1), row("latent-128", 0.9, 2.0, 3.1)),
    )
    mean, half = report.beside_mha("MQA")
    assert mean == pytest.approx(0.1)
    assert half == pytest.approx(0, abs=1e-9)  # seeds differ by 1, and the differences not at all
    assert report.percent_kept("MQA") == pytest.approx(100 * math.exp(-0.1))
    assert report.row("latent").mechanism == "latent-128"
    assert half_interval([0.0, 2.0]) == pytest.approx(12.706)
    assert half_interval([1.0]) == math.inf


@pytest.mark.parametrize(
    ("options", "named"),
    [({"names": ["MHB"]}, "mechanism"), ({"seeds": 1}, "seeds"), ({"text": "nowhere.txt"}, "text")],
)
def test_bad_input_is_refused_before_any_work(options: dict[str, object], named: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=named):
        train(tmp_path / "trained.json", sizes=SMALL, **options)  # type: ignore[arg-type]
    assert not (tmp_path / "trained.json").exists()


def test_a_file_of_something_else_is_refused(tmp_path: Path, text: Path) -> None:
    file = tmp_path / "trained.json"
    file.write_text("[]")
    with pytest.raises(ArgumentError, match="audit --train"):
        train(file, sizes=SMALL, text=text)
    assert file.read_text() == "[]"


def test_feed_forward_networks_get_what_attention_saves() -> None:
    specs = mechanisms(SMALL)
    assert width_for(specs["MHA"], SMALL) == SMALL.intermediate_size
    assert width_for(specs["MQA"], SMALL) > SMALL.intermediate_size
    assert isinstance(Decoder(specs["MQA"], SMALL, 70), torch.nn.Module)
