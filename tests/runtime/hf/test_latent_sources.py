"""Models that are MLA already are inspected, run and evaluated, and not converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import headwise
from headwise.measure.timing import cache_nbytes
from tests.real_models import save_character_tokenizer, tiny_model
from tests.toy_configs import TOYS


@pytest.fixture(params=["deepseek_v2", "deepseek_v3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    toy = {key: value for key, value in TOYS[request.param].items() if key != "model_type"}
    model = tiny_model(request.param, **{**toy, "num_hidden_layers": 3})
    model.to(torch.float32).save_pretrained(tmp_path / "source")
    save_character_tokenizer(tmp_path / "source", 100)
    return tmp_path / "source"


def test_it_is_read_and_costed(folder: Path) -> None:
    inspection = headwise.inspect(folder, dtype="float32")
    assert inspection.mechanism == "mla"
    assert (inspection.kv_lora_rank, inspection.qk_rope_head_dim) == (16, 4)
    assert inspection.kv_bytes_per_token == 3 * (16 + 4) * 4
    assert inspection.weights is not None
    parameters = sum(p.numel() for p in headwise.load(folder).parameters())
    balance = 0 if "v2" in json.loads((folder / "config.json").read_text())["model_type"] else 2 * 6
    assert inspection.weights["total"] == parameters + balance


def test_it_is_served(folder: Path) -> None:
    assert headwise.generate(folder, "a b", max_new_tokens=5).new_tokens == 5
    model = headwise.load(folder)
    ids = torch.randint(3, 97, (2, 15))
    with torch.inference_mode():
        for served in (model, headwise.optimize(model)):
            cache = served(ids, use_cache=True).past_key_values
            assert cache_nbytes(cache) / ids.numel() == 3 * (16 + 4) * 4


def test_it_is_evaluated(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    evaluation = headwise.evaluate(folder, against=folder, text=text, window=64, windows=2, context=16)
    assert evaluation.perplexity_ratio == 1
    assert evaluation.cache_bytes_per_token == 3 * (16 + 4) * 4


@pytest.mark.parametrize("to", ["mha", "mqa", "gqa:2", "mla"])
def test_it_is_not_converted(folder: Path, tmp_path: Path, to: str) -> None:
    options = {"kv_budget": 0.5} if to == "mla" else {}
    with pytest.raises(headwise.SpecError, match=r"MLA 16 \+ 4.*converting from MLA is not supported"):
        headwise.convert(folder, tmp_path / "out", to=to, **options)
    assert not (tmp_path / "out").exists()
