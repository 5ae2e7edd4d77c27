"""Models whose tokenizer begins every text with a BOS token are calibrated, trained and judged on windows that do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tokenizers.processors import TemplateProcessing

import headwise
from headwise.base.options import HealOptions
from headwise.conversion.calibration.windows import recall_windows, repeating_pieces
from headwise.conversion.healing.windows import open_windows as open_healing_windows
from headwise.errors import CheckpointError
from headwise.measure.evaluation.beside_source import choose_evaluation_set
from headwise.measure.texts.calibration import CalibrationTexts, open_windows
from headwise.measure.texts.windows import first_ids, put_begin_before, token_windows
from headwise.models.checkpoints import load_tokenizer, open_checkpoint
from tests.tiny_families import save_family

BOS, SOP = 1, 2
TEXT = "".join(f"{index:04d} the quick brown fox jumps over the lazy dog. " for index in range(80))


def begin_with(folder: Path, *tokens: str) -> Path:
    """Make a folder's tokenizer put tokens before every text, as those of Llama, Mistral and Gemma do."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in tokens]
    template = " ".join([*tokens, "$A"])
    tokenizer._tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return begin_with(save_family(tmp_path / "source", "llama"), "<s>")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def test_all_tokens_before_a_text_are_found(source: Path, tmp_path: Path) -> None:
    assert first_ids(load_tokenizer(source)) == [BOS]
    assert first_ids(load_tokenizer(save_family(tmp_path / "none", "llama"))) == []
    # ChatGLM's begins with two, of which none is its BOS token.
    assert first_ids(load_tokenizer(begin_with(source, "<unk>", "<s>"))) == [SOP, BOS]


def test_perplexity_is_that_of_windows_behind_bos(source: Path, text: Path) -> None:
    result = headwise.evaluate(source, text=text, window=32, windows=3)
    ids = transformers.AutoTokenizer.from_pretrained(source)(TEXT, add_special_tokens=False)["input_ids"]
    windows = torch.tensor([[BOS, *ids[31 * i : 31 * i + 31]] for i in range(3)])
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        logits = model(windows).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).exp()
    assert result.perplexity == pytest.approx(float(expected), rel=1e-5)
    assert (result.begin, result.window, result.tokens) == (("<s>",), 32, 93)
    assert json.loads(json.dumps(result.to_dict()))["begin"] == ["<s>"]


def test_calibration_windows_begin_with_bos_and_repeat_text_alone(source: Path, text: Path) -> None:
    checkpoint = open_checkpoint(source)
    ids, held, begin = open_windows(checkpoint, CalibrationTexts((text,), tokens=1024, window=64))
    assert ids.shape[1] == 64
    assert begin == 1
    assert bool((ids[:, 0] == BOS).all())
    assert not bool((ids[:, 1:] == BOS).any())
    windows = recall_windows(ids, held, checkpoint.spec, begin=begin)
    assert bool(windows.repeats.any())
    assert not bool((windows.ids[:, 1:] == BOS).any())
    pieces = repeating_pieces(put_begin_before(torch.arange(3, 152).repeat(2, 1), [BOS]), begin)
    assert bool((pieces[:, 0] == BOS).all())
    assert not bool((pieces[:, 1:] == BOS).any())


def test_what_ends_a_conversion_begins_with_bos(source: Path, text: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source)
    for options in ({"named": (text,)}, {"calibrate": CalibrationTexts((text,), 512)}, {}):
        (_, windows), *_ = choose_evaluation_set(checkpoint, **options)  # type: ignore[arg-type]
        assert windows.shape[1] == 64  # the model's positions
        assert bool((windows[:, 0] == BOS).all())
        assert not bool((windows[:, 1:] == BOS).any())
    options: dict[str, Any] = {"to": "mla", "kv_budget": 0.5, "calibration_tokens": 512, "without": ("refine",)}
    done = headwise.convert(source, tmp_path / "out", calibrate=text, **options)
    assert done.evaluation is not None
    assert done.evaluation.begin == ("<s>",)
    assert "windows begin with `<s>`, as the tokenizer begins every text" in done.notes
    assert "windows begin with" in (tmp_path / "out" / "README.md").read_text()


def test_healing_windows_begin_with_bos(source: Path, text: Path) -> None:
    checkpoint = open_checkpoint(source)
    options = HealOptions(teacher=source, text=text, window=32, tokens=512)
    windows = open_healing_windows(checkpoint, options, checkpoint.spec)
    assert windows.width == 32
    assert windows.train.begin == 1
    for ids in (windows.train.ids, windows.held_out):
        assert bool((ids[:, 0] == BOS).all())
        assert not bool((ids[:, 1:] == BOS).any())


def test_statistics_of_other_windows_are_not_used(source: Path, text: Path, tmp_path: Path) -> None:
    statistics = tmp_path / "statistics"
    headwise.calibrate(source, statistics, calibrate=text, calibration_tokens=512)
    options: dict[str, Any] = {"to": "mla", "kv_budget": 0.5, "statistics": statistics, "evaluate": False}
    headwise.convert(source, tmp_path / "out", **options)
    about = json.loads((statistics / "statistics.json").read_text())
    assert about["begin"] == [BOS]
    del about["begin"]  # as before windows began so
    (statistics / "statistics.json").write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match=r"begin with tokens \[\], and the tokenizer begins a text with \[1\]"):
        headwise.convert(source, tmp_path / "out", **options, overwrite=True)


def test_a_frontier_is_of_windows_behind_bos(source: Path, text: Path, tmp_path: Path) -> None:
    evaluation = tmp_path / "exam.txt"
    evaluation.write_text(TEXT[::-1])
    result = headwise.frontier(
        source, calibrate=text, evaluate=evaluation, output=tmp_path / "frontier", targets=["int8"], windows=1
    )
    assert "windows begin with `<s>`, as the tokenizer begins every text" in result.notes


def test_a_window_has_room_for_more_than_bos(source: Path, text: Path) -> None:
    with pytest.raises(headwise.HeadwiseError, match="window = 2: must be at least 3"):
        token_windows(load_tokenizer(source), TEXT, window=2)
