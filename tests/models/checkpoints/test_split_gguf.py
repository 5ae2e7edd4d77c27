"""GGUF models in several files: transformers reads none of them, so the whole file says what is right."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import headwise
from headwise.conversion import export_gguf
from headwise.errors import ArgumentError, CheckpointError
from headwise.models.checkpoints import load_tokenizer, model_identity, open_checkpoint, run_identity
from headwise.models.specs import read_gguf_header, read_spec
from headwise.serving.engines import engines
from headwise.study.bench.engines import write_in_float32
from tests.byte_level import save_byte_level
from tests.models.checkpoints.split_gguf import split
from tests.models.checkpoints.tiny_gguf import write_tiny_gguf
from tests.real_models import save_tiny

IDS = torch.arange(2, 20)[None]


@pytest.fixture
def whole(tiny_llama_folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(tiny_llama_folder, path, "Q8_0")
    return path


@pytest.fixture
def parts(whole: Path, tmp_path: Path) -> list[Path]:
    """Three files; the head is in the last one."""
    return split(whole, tmp_path / "parts", 8)


@torch.no_grad()
def logits(source: Path) -> torch.Tensor:
    result: torch.Tensor = headwise.load(source, dtype="float32")(IDS).logits
    return result


@pytest.mark.parametrize("first_is_empty", [False, True])
@pytest.mark.parametrize("named", ["first", "last", "folder"])
def test_all_parts_are_read(named: str, first_is_empty: bool, whole: Path, tmp_path: Path) -> None:
    files = split(whole, tmp_path / "parts", 8, first_is_empty=first_is_empty)
    assert len(files) == 3 + first_is_empty
    source = {"first": files[0], "last": files[-1], "folder": files[0].parent}[named]
    assert read_spec(source) == read_spec(whole)
    checkpoint = open_checkpoint(source)
    assert (checkpoint.path, checkpoint.files) == (files[0], tuple(files))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert torch.equal(logits(source), logits(whole))


def test_what_is_made_of_the_parts(parts: list[Path], whole: Path, tmp_path: Path) -> None:
    headwise.convert(parts[0], tmp_path / "mha", to="mha", evaluate=False)
    torch.testing.assert_close(logits(tmp_path / "mha"), logits(whole))
    for name, source in (("whole", whole), ("parts", parts[1])):
        export_gguf(source, tmp_path / f"{name}-again.gguf", outtype="f32")
    assert (tmp_path / "parts-again.gguf").read_bytes() == (tmp_path / "whole-again.gguf").read_bytes()
    write_in_float32(parts[0], tmp_path / "wide.gguf")
    assert torch.equal(logits(tmp_path / "wide.gguf"), logits(whole))
    with pytest.raises(ArgumentError, match="must not be the source"):
        export_gguf(parts[0], parts[2], overwrite=True)


@pytest.mark.parametrize("first_is_empty", [False, True])
def test_the_tokenizer_is_in_the_first_part(first_is_empty: bool, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "folder", vocab_size=400)
    save_byte_level(folder, 400)
    export_gguf(folder, tmp_path / "tiny.gguf")
    files = split(tmp_path / "tiny.gguf", tmp_path / "parts", 8, first_is_empty=first_is_empty)
    text = "It was a bright cold day in April."
    assert load_tokenizer(files[-1])(text)["input_ids"] == load_tokenizer(folder)(text)["input_ids"]
    headwise.convert(files[-1], tmp_path / "mha", to="mha", evaluate=False)
    assert load_tokenizer(tmp_path / "mha")(text)["input_ids"] == load_tokenizer(folder)(text)["input_ids"]


def test_every_part_tells_one_model_from_another(parts: list[Path]) -> None:
    before = [run_identity(open_checkpoint(parts[0])), model_identity(open_checkpoint(parts[0]))]
    content = bytearray(parts[2].read_bytes())
    content[-3] ^= 1
    parts[2].write_bytes(content)
    after = [run_identity(open_checkpoint(parts[0])), model_identity(open_checkpoint(parts[0]))]
    assert all(old != new for old, new in zip(before, after, strict=True))


def test_engines_that_take_one_file(parts: list[Path], whole: Path) -> None:
    served = {
        file: {verdict.engine for verdict in engines(file).verdicts if verdict.serves} for file in (parts[0], whole)
    }
    assert served == {whole: {"transformers", "llama.cpp", "Ollama", "SGLang"}, parts[0]: {"llama.cpp"}}


@pytest.mark.parametrize("count", [0, 1])
def test_one_part_is_a_whole_model(count: int, whole: Path, tmp_path: Path) -> None:
    """As ``gguf-split --merge`` leaves it, and as a split into one does."""
    (file,) = split(whole, tmp_path / "parts", 100, count=count)
    assert read_gguf_header(file).metadata["split.count"] == count
    assert torch.equal(logits(file), logits(whole))


def edited(path: Path, key: str, value: int) -> Path:
    """The file with another number in its metadata."""
    field = gguf.GGUFReader(path, "r+").fields[key]
    field.parts[field.data[0]][:] = np.asarray(value, dtype=field.parts[field.data[0]].dtype)
    return path


@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("is_named_by_folder", [True, False])
def test_a_missing_part_is_named(missing: int, is_named_by_folder: bool, parts: list[Path]) -> None:
    parts[missing].unlink()
    source = parts[0].parent if is_named_by_folder else parts[1 if missing == 0 else 0]
    for read in (read_spec, open_checkpoint):
        with pytest.raises(
            CheckpointError, match=rf"^file = '{parts[missing].name}': is missing from {parts[0].parent}"
        ):
            read(source)


def other_name(parts: list[Path]) -> Path:
    return parts[0].rename(parts[0].with_name("one.gguf"))


def other_count(parts: list[Path]) -> Path:
    return edited(parts[0], "split.count", 4)


def other_order(parts: list[Path]) -> Path:
    kept = parts[1].rename(parts[1].with_name("kept"))
    parts[2].rename(parts[1])
    kept.rename(parts[2])
    return parts[0]


def other_model(parts: list[Path]) -> Path:
    edited(parts[1], "split.tensors.count", 30)
    return parts[0]


def twice(parts: list[Path]) -> Path:
    edited(Path(shutil.copy(parts[0], parts[1])), "split.no", 1)
    return parts[0]


def too_few(parts: list[Path]) -> Path:
    for part in parts:
        edited(part, "split.tensors.count", 30)
    return parts[0]


def cut(parts: list[Path]) -> Path:
    parts[2].write_bytes(parts[2].read_bytes()[:-40])
    return parts[0]


def no_gguf(parts: list[Path]) -> Path:
    parts[2].write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    return parts[0]


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (other_name, r"^file = '.*one.gguf': is a part of a model in 3 files, .*must end in -00001-of-00003.gguf$"),
        (other_count, r"^file = '.*-00001-of-00003.gguf': is a part of a model in 4 files"),
        (other_order, r"^split.no = 2: must be 1 in part 2 of 3: tiny-00002-of-00003.gguf is none of this model$"),
        (other_model, r"^split.tensors.count = 30: must be 21 in part 2 of 3: tiny-00002-of-00003.gguf is none"),
        (twice, r"^GGUF tensor = '.*': is in tiny-00002-of-00003.gguf and in a part before it$"),
        (too_few, r"^split.tensors.count = 30: must be the number of tensors of all parts, which have 21$"),
        (cut, r"^file = '.*-00003-of-00003.gguf': ends before tensor .*: it is cut short$"),
        (no_gguf, r"^.*-00003-of-00003.gguf = 'not GGUF': the file must begin with the bytes GGUF$"),
    ],
)
def test_parts_that_are_none_of_one_model(spoil: Callable[[list[Path]], Path], line: str, parts: list[Path]) -> None:
    source = spoil(parts)
    with pytest.raises(CheckpointError, match=line):
        open_checkpoint(source)


def test_two_models_in_a_folder_are_none(parts: list[Path], whole: Path) -> None:
    shutil.copy(whole, parts[0].parent / "a.gguf")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(parts[0].parent)
    assert open_checkpoint(parts[0]).files == tuple(parts)
