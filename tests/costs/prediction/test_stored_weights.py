"""Time and memory of models whose weights are quantised, as the commands and the page count them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwise.costs.formulas import inspect
from headwise.costs.formulas import model as costs
from headwise.costs.prediction import Pass, device, operators, peak_memory, predict, seconds
from headwise.decide.advice import Question, advise_on, candidates
from headwise.decide.report import page_data
from headwise.models.specs import ModelSpec, catalog, read_config, read_spec
from tests.cli.without_torch import answered_without_torch
from tests.costs.prediction.test_curves import measured_gpu

FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


@pytest.fixture
def llama_fp8(tmp_path: Path) -> str:
    """The config of a 70B in FP8."""
    return write(tmp_path, "llama-3-70b", FP8)


def write(place: Path, name: str, settings: Any) -> str:
    file = place / "config.json"
    file.write_text(json.dumps({**catalog()[name]["config"], "quantization_config": settings}))
    return str(file)


def plain(name: str) -> ModelSpec:
    return replace(read_spec(name), stored=None)


def test_a_70b_in_fp8_fits_where_bfloat16_does_not(llama_fp8: str) -> None:
    found, wide = predict(llama_fp8, hardware="h200"), predict("llama-3-70b", hardware="h200")
    assert found.fits
    assert not wide.fits
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    outside = 2 * 128256 * 8192 + 161 * 8192  # the embedding, the head, and the norms
    assert found.memory.weights == 80 * (layer + 7 * 8) + 2 * outside
    assert wide.memory.weights == 2 * (80 * layer + outside)
    assert found.memory.weights / 2**30 == pytest.approx(67.7, abs=0.05)
    assert found.weights == "FP8, the rest bfloat16"
    assert wide.weights == "bfloat16"
    # A step waits for the bytes of weights; a prompt for arithmetic, which stays in bfloat16.
    read = [sum(each.memory_bytes for each in every.decode) for every in (found, wide)]
    assert read[1] - read[0] == pytest.approx(80 * layer, rel=1e-3)
    assert found.decode_seconds == pytest.approx(wide.decode_seconds * read[0] / read[1], rel=0.1)
    assert found.prefill_seconds == pytest.approx(wide.prefill_seconds, rel=0.01)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "deepseek-v3", "smollm2-135m", "minimax-m2"])
def test_a_step_reads_the_active_weights_as_they_are_stored(name: str) -> None:
    model = read_spec(name)
    assert model.body is not None
    parts = costs.weight_bytes(model, active=True)
    read = parts.total - parts.norms - (0 if model.body.tied else parts.embedding)
    work = operators(model, Pass(total=2000, impl="absorbed"))
    assert sum(each.times * each.weight_bytes for each in work) == pytest.approx(read, rel=2e-3)
    many = operators(model, Pass(batch=4096, total=2000, impl="absorbed"))
    whole = costs.weight_bytes(model).total - parts.norms - (0 if model.body.tied else parts.embedding)
    assert sum(each.times * each.weight_bytes for each in many) == pytest.approx(whole, rel=2e-3)
    wide = operators(plain(name), Pass(total=2000, impl="absorbed"))
    assert [(each.name, each.flops, each.weights) for each in work] == [
        (each.name, each.flops, each.weights) for each in wide
    ]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_ranks_share_what_is_stored(ranks: int) -> None:
    shared, latent = read_spec("gpt-oss-20b"), read_spec("deepseek-v3")
    held = peak_memory(shared, Pass(total=100, ranks=ranks)).weights
    assert held == pytest.approx(costs.weight_bytes(shared).total / ranks, rel=1e-3)
    whole = costs.weight_bytes(latent)  # the projections to MLA's latents are on every rank
    held = peak_memory(latent, Pass(total=100, ranks=ranks)).weights
    assert whole.total / ranks <= held <= whole.total / ranks + whole.attention


def test_a_dtype_that_is_asked_for_wins_and_is_said() -> None:
    found = predict("gpt-oss-20b", hardware="h100", dtype="bfloat16")
    assert found.memory.weights == 2 * costs.weights(read_spec("gpt-oss-20b")).total
    assert found.weights == "bfloat16"
    assert found.notes == ("weights count in bfloat16, as asked; they are stored as mxfp4",)
    assert predict("llama-3-8b", hardware="h100", dtype="bfloat16").notes == ()


def test_an_upper_bound_is_called_one(tmp_path: Path) -> None:
    source = write(tmp_path, "llama-3-70b", {"quant_method": "vptq"})
    found = predict(source, hardware="h100")
    assert found.is_bound
    assert found.memory.weights == predict("llama-3-70b", hardware="h100").memory.weights
    assert [*map(str, found.notes)] == [
        "quantization_config: quant_method = 'vptq' is not known",
        "what is not known of the weights counts in the dtype, which is an upper bound",
    ]
    question = Question(hardware=device("h100"), step=Pass(total=100))
    options = {option.target: option for option in advise_on(read_spec(source), question, {}).options}
    assert options["as it is"].refused == options["int8"].refused == "may not fit"
    assert options["mqa"].refused == "does not fit"


def test_on_a_profiled_device_a_byte_is_read_as_fast() -> None:
    """Few tokens wait for bytes, and many for arithmetic."""
    card, model = measured_gpu(), read_spec("gpt-oss-20b")
    for batch, least, most in ((1, 0.27, 0.8), (4096, 1.0, 1.0)):
        step = Pass(batch=batch, total=64)
        times = []
        for each in (model, plain("gpt-oss-20b")):
            work = seconds(operators(each, step), card, step)
            times.append(next(timed.seconds for timed in work if timed.name == "experts' up_proj"))
        assert least <= times[0] / times[1] <= most
    (note,) = predict("gpt-oss-20b", hardware=card).notes
    assert note.endswith("headwise itself computes with bfloat16: ask for --dtype bfloat16")
    assert predict("llama-3-8b", hardware=card).notes == ()


def test_a_conversion_counts_in_the_dtype_and_a_format_does_not() -> None:
    model = read_spec("smollm2-135m")
    tried = {each.target: each.model.stored for each in candidates(model)}
    assert tried["as it is"] == tried["int8"] == model.stored
    assert tried["gqa:1"] is None if "gqa:1" in tried else tried["mqa"] is None
    advice = advise_on(model, Question(hardware=device("laptop"), step=Pass(total=2048)), {})
    assert advice.weights == "GGUF Q4_1, Q8_0, F32"
    assert any(note.startswith("conversions count in the dtype") for note in advice.notes)
    data = page_data(model, Question(hardware=device("laptop"), step=Pass(total=2048)), {}, hardware={}).document
    assert data["stored"] == advice.weights
    assert data["options"][0]["weight_bytes"] == 96_576_768


def test_beside_steps_that_headwise_timed_weights_are_in_the_dtype() -> None:
    """It dequantises a GGUF, so that predictions and points on a page are of the same weights."""
    model = read_spec("smollm2-135m")
    question = Question(hardware=device("laptop"), step=Pass(total=2048, dtype="float32"))
    step = {"target": "as it is", "context": 2048, "seconds": 0.1, "dtype": "float32", "where": "cpu"}
    data = page_data(model, question, {}, steps=[step], hardware={}).document
    assert data["options"][0]["weight_bytes"] == 4 * 134_515_008
    assert data["notes"] == ("weights are in the dtype, as headwise timed steps with them",)


def test_inspect_tells_bytes_and_scheme(llama_fp8: str) -> None:
    found = inspect(llama_fp8)
    assert found.weight_bytes is not None
    assert found.weight_bytes["embedding"] == found.weight_bytes["head"] == 2 * 128256 * 8192
    assert round(found.weight_bytes["total"] / 2**30, 1) == 67.7
    assert (found.weight_format, found.weight_notes) == ("FP8, the rest bfloat16", ())
    whole = inspect("llama-3-8b")
    assert whole.weight_bytes is not None
    assert whole.weight_bytes["total"] == 2 * costs.weights(read_spec("llama-3-8b")).total
    assert whole.weight_format == "bfloat16"


@pytest.mark.parametrize("command", ["predict", "advise", "inspect"])
def test_the_commands_answer_without_torch(command: str) -> None:
    options = [] if command == "inspect" else ["--hardware", "h100"]
    found = answered_without_torch(command, "gpt-oss-20b", *options)
    assert "mxfp4, the rest bfloat16" in (found.get("weights"), found.get("weight_format"))


def test_what_the_commands_print(cli: Any, llama_fp8: str) -> None:
    printed = cli("predict", llama_fp8, "--hardware", "h200").out
    assert "         weights 67.7 GiB, " in printed
    assert "         weights as stored: FP8, the rest bfloat16\n" in printed
    assert "note: weights count in float16, as asked" in cli(
        "advise", llama_fp8, "--hardware", "h200", "--dtype", "float16"
    ).out.replace("\n", " ")
    assert "         67.7 GiB as stored: FP8, the rest bfloat16\n" in cli("inspect", llama_fp8).out


def test_an_upper_bound_is_printed_as_one(cli: Any, tmp_path: Path) -> None:
    source = write(tmp_path, "llama-3-70b", {"quant_method": "vptq"})
    printed = cli("predict", source, "--hardware", "h200").out
    assert "memory   at most " in printed
    assert "and may not fit in" in printed
    assert "decode   at most " in printed
    assert "at most 131.4 GiB as stored: bfloat16" in cli("inspect", source).out
    assert read_config({**catalog()["llama-3-70b"]["config"], "quantization_config": {}}).stored is None
