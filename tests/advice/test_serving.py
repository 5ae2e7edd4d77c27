"""Which programs serve an option, beside what families, the plugin and `headwise engines` say."""

from __future__ import annotations

from pathlib import Path

import pytest

import headwise
from headwise.advice import Question, advise
from headwise.advice.serving import OWN, PLUGIN_FAMILIES, UNCHANGED, WITHOUT_KV_HEADS, served_by
from headwise.checkpoints.family import family_names, family_of
from headwise.engines import engines
from headwise.prediction import Pass, device


def test_families_without_key_value_heads_are_those_of_the_converter() -> None:
    found = {name for name in family_names() if not family_of(name).stock_kv_heads}
    assert set(WITHOUT_KV_HEADS) == found


def test_every_option_says_what_serves_it() -> None:
    question = Question(hardware=device("h100"), step=Pass(total=4096))
    found = {option.target: option.served_by for option in advise("llama-3-8b", question).options}
    assert found["as it is"] == found["mqa"] == UNCHANGED
    assert found["int8"] == found["mla@0.25"] == "headwise"
    assert found["mla:0.5"] == f"{OWN}, vLLM with headwise's plugin"
    assert served_by("gqa:4", "gpt2") == served_by("mla:0.5", "gpt2") == OWN
    assert served_by("mha", "llama") == UNCHANGED
    assert served_by("same@0.25", "llama") == "headwise"


@pytest.mark.parametrize("to", ["mqa", "mla"])
def test_engines_says_the_same_of_a_finished_folder(tiny_llama: Path, tmp_path: Path, to: str) -> None:
    size = {"kv_budget": 0.5} if to == "mla" else {}
    headwise.convert(tiny_llama, tmp_path / "out", to=to, evaluate=False, **size)
    serve = {each.engine: each.serves for each in engines(tmp_path / "out").verdicts}
    said = served_by("mla:0.5" if to == "mla" else "mqa", "llama")
    assert "llama" in PLUGIN_FAMILIES
    assert serve["transformers"]
    assert serve["vLLM"]
    assert serve["MLX-LM"] is (said == UNCHANGED)
