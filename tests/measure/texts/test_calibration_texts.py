"""The calibration windows: running text for a decoder, single texts for an encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from headwise.conversion.calibration.candidates import descent_steps
from headwise.conversion.calibration.windows import plain_windows
from headwise.errors import ArgumentError
from headwise.measure.texts import token_ids, wrapping_ids
from headwise.measure.texts.calibration import NARROWEST, CalibrationTexts, check_texts, open_windows
from headwise.models.checkpoints import load_tokenizer, open_checkpoint
from tests.real_models import save_tiny
from tests.tiny_families import save_family

TEXT = "Whatever is worth measuring is worth measuring twice. " * 30


def wrap(folder: Path) -> None:
    """Let the folder's tokenizer put a token before and two behind each text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A <unk> <pad>", special_tokens=[("<s>", 1), ("<unk>", 2), ("<pad>", 0)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", unk_token="<unk>"
    ).save_pretrained(folder)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def shown(folder: Path, text: Path, tokens: int, window: int | None = None) -> torch.Tensor:
    windows, held_out, _ = open_windows(open_checkpoint(folder), CalibrationTexts((text,), tokens, window))
    assert 0 < held_out < len(windows)
    return windows


def test_what_a_tokenizer_puts_around_a_text(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "bert", "bert")
    assert wrapping_ids(load_tokenizer(folder)) == ([], [])
    wrap(folder)
    assert wrapping_ids(load_tokenizer(folder)) == ([1], [2, 0])


def test_an_encoder_is_shown_sentences_of_its_length_with_the_tokens_around_them(tmp_path: Path, text: Path) -> None:
    folder = save_family(tmp_path / "bert", "bert")
    wrap(folder)
    kinds = ("Transformer", "Pooling", "Dense")  # whatever becomes of the states
    (folder / "modules.json").write_text(json.dumps([{"type": f"sentence_transformers.models.{k}"} for k in kinds]))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 24}))
    windows = shown(folder, text, 210)
    assert windows.shape == (10, 24)
    assert windows[:, 0].tolist() == [1] * 10
    assert windows[:, -2:].tolist() == [[2, 0]] * 10
    ids = token_ids(load_tokenizer(folder), TEXT)
    inside = {tuple(row) for row in windows[:, 1:-2].tolist()}
    assert inside == {tuple(ids[at : at + 21]) for at in range(0, 1410, 141)}  # with the end left out


def test_a_single_sentence_is_halved_before_it_is_wrapped(tmp_path: Path, text: Path) -> None:
    folder = save_family(tmp_path / "bert", "bert")
    wrap(folder)
    windows = shown(folder, text, 20)
    assert windows.shape == (2, 13)
    ids = token_ids(load_tokenizer(folder), TEXT)
    assert sorted(windows[:, 1:-2].tolist()) == sorted([ids[:10], ids[10:20]])


def test_a_decoder_is_shown_running_text_behind_what_begins_one(tmp_path: Path, text: Path) -> None:
    folder = save_tiny(tmp_path / "llama")
    wrap(folder)
    windows = shown(folder, text, 512)
    ids = token_ids(load_tokenizer(folder), TEXT)
    assert {tuple(row) for row in windows.tolist()} == {(1, *ids[:255]), (1, *ids[300:555])}


def test_windows_are_as_long_as_they_are_asked_for(tmp_path: Path, text: Path) -> None:
    folder = save_tiny(tmp_path / "llama")
    ids = token_ids(load_tokenizer(folder), TEXT)
    windows = shown(folder, text, 512, window=64)
    assert windows.shape == (8, 64)
    assert {tuple(row) for row in windows.tolist()} <= {tuple(ids[at : at + 64]) for at in range(len(ids))}
    wrap(save_family(tmp_path / "bert", "bert"))
    assert shown(tmp_path / "bert", text, 130, window=16).shape == (10, 16)  # 13 of text, and those around them


def test_windows_fit_in_the_models_positions(tmp_path: Path, text: Path) -> None:
    folder = save_tiny(tmp_path / "llama")
    assert shown(folder, text, 1024, window=256).shape == (4, 256)
    with pytest.raises(ArgumentError, match="calibration_window = 257: must be at most 256"):
        shown(folder, text, 1024, window=257)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"window": 1}, "calibration_window = 1: must be at least 2"),
        ({"tokens": 1}, "calibration_tokens = 1: must be at least 2"),
        ({"calibrate": None, "window": 64}, "calibration_window = 64: goes with"),
        ({"calibrate": (), "tokens": 64}, "calibration_tokens = 64: goes with"),
    ],
)
def test_what_windows_cannot_be(text: Path, given: dict[str, Any], line: str) -> None:
    with pytest.raises(ArgumentError, match=line):
        check_texts(**{"calibrate": text, "tokens": None, "window": None} | given)


def test_texts_are_told_apart_by_all_that_decides_their_windows(text: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.txt"
    copy.write_text(TEXT)
    texts = CalibrationTexts((text,), 512)
    assert texts.identity() == CalibrationTexts((copy,), 512, NARROWEST).identity()
    others = [CalibrationTexts((text,), 511), CalibrationTexts((text,), 512, 64), CalibrationTexts((), 512)]
    assert all(texts.identity() != other.identity() for other in others)
    assert not others[-1]


@pytest.mark.parametrize(
    ("tokens", "window"),
    [(2, 512), (16_384, 512), (20_479, 512), (20_480, 640), (65_535, 1920), (65_536, 2048), (1 << 20, 2048)],
)
def test_more_text_makes_wider_windows(tokens: int, window: int) -> None:
    assert CalibrationTexts(("text",), tokens).widest == window
    assert CalibrationTexts(("text",), tokens, 100).widest == 100


@pytest.mark.parametrize(
    ("shape", "steps"), [((7, 1024), 70), ((7, 128), 49), ((7, 512), 35), ((7, 2048), 140), ((3, 1536), 45)]
)
def test_long_windows_are_descended_on_as_often_as_as_much_text_in_short_ones(
    shape: tuple[int, int], steps: int
) -> None:
    assert descent_steps(plain_windows(torch.zeros(shape, dtype=torch.long))) == steps
