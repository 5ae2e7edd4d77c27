"""Which programs serve an option, beside what families, the plugin and `headwise engines` say."""

from __future__ import annotations

from pathlib import Path

import pytest

import headwise
from headwise.costs.prediction import SERVING_ENGINES, Pass, device
from headwise.decide.advice import Question, advise
from headwise.models.specs import GGUF_ARCHITECTURES, read_spec
from headwise.serving.engines import engines
from headwise.serving.programs import OWN, UNCHANGED, conversion_format, runs, served_by


def test_every_option_says_what_serves_it() -> None:
    question = Question(hardware=device("h100"), step=Pass(total=4096))
    found = {option.target: option.served_by for option in advise("llama-3-8b", question).options}
    assert found["as it is"] == found["mqa"] == UNCHANGED
    assert found["int8"] == found["mla@0.25"] == "headwise"
    assert (found["vllm:fp8"], found["llama.cpp:q8_0"], found["mlx:4"]) == ("vLLM", "llama.cpp", "MLX-LM")
    assert found["mla:0.5"] == "any, by --format"
    gpt2, llama = read_spec("gpt2"), read_spec("llama-3-8b")
    assert served_by("gqa:4", gpt2) == served_by("mla:0.5", gpt2) == OWN
    assert served_by("mha", llama) == UNCHANGED
    assert served_by("same@0.25", llama) == "headwise"
    assert runs("mla:0.5", gpt2, "transformers")
    assert not any(runs("mla:0.5", gpt2, engine) for engine in SERVING_ENGINES if engine != "transformers")
    assert not any(runs("mla@0.5", llama, engine) for engine in SERVING_ENGINES)


@pytest.mark.parametrize("to", ["mqa", "mla"])
def test_engines_says_the_same_of_a_finished_folder(tiny_llama: Path, tmp_path: Path, to: str) -> None:
    size = {"kv_budget": 0.5} if to == "mla" else {}
    headwise.convert(tiny_llama, tmp_path / "out", to=to, evaluate=False, **size)
    serve = {each.engine: each.serves for each in engines(tmp_path / "out").verdicts}
    said = served_by("mla:0.5" if to == "mla" else "mqa", read_spec(tiny_llama))
    assert serve["transformers"]
    assert serve["vLLM"]
    assert serve["MLX-LM"] is (said == UNCHANGED)


def test_what_is_said_to_be_written_is_served(tiny_llama: Path, tmp_path: Path) -> None:
    """A conversion with the options that an engine is said to need, beside what `headwise engines` says of it."""
    assert read_spec(tiny_llama).model_type in GGUF_ARCHITECTURES
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and then it does so again. " * 60)
    made: dict[str, set[str]] = {}
    for engine, served in SERVING_ENGINES.items():
        options = conversion_format("mla:0.5", read_spec(tiny_llama), engine)
        assert options is not None
        if options not in made and options != "--format gguf":  # which needs a tokenizer that llama.cpp knows
            words = options.split()
            headwise.convert(
                tiny_llama,
                tmp_path / str(len(made)),
                to="mla",
                kv_budget=0.5,
                format="deepseek" if "deepseek" in words else "headwise",
                bias_free="--bias-free" in words,
                calibrate=text,
                calibration_tokens=512,
                evaluate=False,
            )
            verdicts = engines(tmp_path / str(len(made))).verdicts
            made[options] = {each.engine for each in verdicts if each.serves}
        if options != "--format gguf":
            assert served.title in made[options]
