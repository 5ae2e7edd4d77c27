from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headwise.base.documents import RECORDS
from headwise.errors import CheckpointError, StorageError
from headwise.models.checkpoints import FolderCheckpoint, TensorInfo, model_identity, open_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tiny_llama_folder: Path, tmp_path: Path) -> Path:
    """The tiny model as transformers itself saves it in pieces."""
    folder = tmp_path / "sharded"
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_folder)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    return folder


def test_tensors_are_those_of_the_file(tiny_llama_folder: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama_folder)
    stored = load_file(tiny_llama_folder / "model.safetensors")
    assert checkpoint.tensors == {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in stored.items()}
    for name, tensor in stored.items():
        assert torch.equal(checkpoint.read(name), tensor)
    assert (checkpoint.dtype, checkpoint.spec.num_layers, checkpoint.family.model_type) == (torch.float32, 2, "llama")


def test_a_file_that_changes_while_it_is_read_is_refused(tiny_llama_folder: Path, tmp_path: Path) -> None:
    """Tensors of two states of a file would be a model that nobody made."""
    folder = tmp_path / "copy"
    shutil.copytree(tiny_llama_folder, folder)
    checkpoint = open_checkpoint(folder)
    checkpoint.read("model.norm.weight")
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-4:] = b"7777"
    file.write_bytes(raw)
    os.utime(file, ns=(0, 0))
    for read in (checkpoint.read, lambda name: checkpoint.read_rows(name, torch.zeros(1, dtype=torch.int64))):
        with pytest.raises(StorageError, match="has changed since it was opened"):
            read("model.embed_tokens.weight")
    with pytest.raises(StorageError, match="has changed since it was opened"):
        model_identity(checkpoint)
    again = open_checkpoint(folder)
    again.read("model.norm.weight")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(StorageError, match=r"tokenizer\.json.* could not be read"):
        again.copy_companions(tmp_path)


def test_shards_are_one_model(sharded: Path, tiny_llama_folder: Path) -> None:
    one, several = FolderCheckpoint(tiny_llama_folder), FolderCheckpoint(sharded)
    assert several.tensors == one.tensors
    for name in one.tensors:
        assert torch.equal(one.read(name), several.read(name))


def test_one_file_comes_before_shards_as_in_transformers(sharded: Path, tiny_llama_folder: Path) -> None:
    stored = load_file(tiny_llama_folder / "model.safetensors")
    save_file({name: t + 1 for name, t in stored.items()}, sharded / "model.safetensors", metadata={"format": "pt"})
    name = "model.norm.weight"
    theirs = AutoModelForCausalLM.from_pretrained(sharded).state_dict()[name]
    assert torch.equal(FolderCheckpoint(sharded).read(name), theirs)
    assert torch.equal(theirs, stored[name] + 1)


def test_a_tensor_in_two_shards_is_the_one_the_index_names(sharded: Path) -> None:
    name = "model.norm.weight"
    named = json.loads((sharded / INDEX).read_text())["weight_map"][name]
    for file in sorted(sharded.glob("model-*.safetensors")):
        if file.name != named:
            save_file(load_file(file) | {name: torch.zeros(7)}, file, metadata={"format": "pt"})
    checkpoint = FolderCheckpoint(sharded)
    assert checkpoint.tensors[name] == TensorInfo((32,), torch.float32)
    assert torch.equal(checkpoint.read(name), torch.ones(32))


def test_the_dtype_most_values_have(tiny_llama: Path, edit_weights: Callable[..., None]) -> None:
    edit_weights(lambda tensors: {k: t if "norm" in k else t.to(torch.bfloat16) for k, t in tensors.items()})
    assert FolderCheckpoint(tiny_llama).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("weight_map", "line"),
    [
        ([], "weight_map = []: must name each tensor's file"),
        ({}, "weight_map = {}: must name each tensor's file"),
        ("x", "weight_map = 'x': must name each tensor's file"),
        (None, "weight_map = None: must name each tensor's file"),
    ],
)
def test_an_index_of_another_form_is_refused(sharded: Path, weight_map: Any, line: str) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError) as error:
        FolderCheckpoint(sharded)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_an_index_that_is_no_json_object(sharded: Path, content: bytes) -> None:
    (sharded / INDEX).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"^file = '.*index.json': (is not valid JSON|must hold a JSON object)"):
        FolderCheckpoint(sharded)


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/etc/passwd", "..", ".", "", "a/b.safetensors", 5, None, [], "\0", "x" * 300]
)
def test_an_index_that_points_elsewhere(sharded: Path, tiny_llama_folder: Path, file: Any) -> None:
    shutil.copy(tiny_llama_folder / "model.safetensors", sharded.parent / "outside.safetensors")
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = file
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"must name files in the folder itself|missing from"):
        FolderCheckpoint(sharded)


def test_a_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"^shard = '{shard.name}': is named in {INDEX} but missing"):
        FolderCheckpoint(sharded)


def test_a_cut_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=rf"^file = '.*{shard.name}': is not a whole safetensors file"):
        FolderCheckpoint(sharded)


def test_a_file_cut_after_it_was_opened(tiny_llama: Path) -> None:
    checkpoint = FolderCheckpoint(tiny_llama)
    file = tiny_llama / "model.safetensors"
    os.truncate(file, 4000)
    last = max(checkpoint.tensors)
    with pytest.raises(CheckpointError, match=rf"^tensor = '{last}': could not be read"):
        checkpoint.read(last)


def test_one_bad_number_in_a_large_tensor_is_found(tiny_llama: Path, edit_weights: Callable[..., None]) -> None:
    """It is looked for a piece at a time."""

    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        large = torch.zeros(3, 1_000_000)
        large[2, 777_777] = float("inf")
        return tensors | {"large": large}

    edit_weights(spoil)
    with pytest.raises(CheckpointError, match=r"^tensor = 'large': holds infinite values"):
        FolderCheckpoint(tiny_llama).read("large")


def test_a_config_with_a_byte_order_mark_is_refused_as_by_transformers(tiny_llama: Path) -> None:
    (tiny_llama / "config.json").write_text((tiny_llama / "config.json").read_text(), encoding="utf-8-sig")
    with pytest.raises(OSError, match="not a valid JSON file"):
        AutoModelForCausalLM.from_pretrained(tiny_llama)
    with pytest.raises(CheckpointError, match=r"config.json': is not valid JSON: Unexpected UTF-8 BOM"):
        FolderCheckpoint(tiny_llama)


def test_a_tensor_nobody_has(tiny_llama_folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^tensor = 'nonsense': is missing from"):
        FolderCheckpoint(tiny_llama_folder).read("nonsense")


def test_companions_come_along(tiny_llama: Path, tmp_path: Path) -> None:
    (tiny_llama / "chat_template.jinja").write_text("hello")
    (tiny_llama / "README.md").write_text("about another model")
    (tiny_llama / "gone.json").symlink_to("nowhere")
    (tiny_llama / "folder.json").mkdir()
    destination = tmp_path / "out"
    destination.mkdir()
    FolderCheckpoint(tiny_llama).copy_companions(destination)
    assert sorted(path.name for path in destination.iterdir()) == [
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_sentence_encoders_pooling_comes_along(tiny_llama: Path, tmp_path: Path) -> None:
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {"path": ".."}, {"path": "a/b"}, {}, 3]
    (tiny_llama / "modules.json").write_text(json.dumps(modules))
    for name in ("1_Pooling", "2_Dense", "unnamed"):
        (tiny_llama / name).mkdir()
        (tiny_llama / name / "config.json").write_text(json.dumps({"of": name}))
    (tiny_llama / "2_Dense/model.safetensors").write_bytes(b"weights")
    (tiny_llama / "2_Dense/pytorch_model.bin").write_bytes(b"a pickle")
    out = tmp_path / "out"
    out.mkdir()
    open_checkpoint(tiny_llama).copy_companions(out)
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.parent != out)
    assert files == ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    assert not (out / "config.json").exists()


def test_what_was_measured_of_a_model_is_not_copied(tiny_llama: Path, tmp_path: Path) -> None:
    for name in RECORDS:
        (tiny_llama / name).write_text("{}")
    open_checkpoint(tiny_llama).copy_companions(tmp_path)
    assert not {path.name for path in tmp_path.iterdir()} & {*RECORDS}


@pytest.mark.parametrize("content", ["", "[", "{}", "[[]]", '[{"path": 3}]'])
def test_an_unusable_modules_file_is_copied(tiny_llama: Path, tmp_path: Path, content: str) -> None:
    (tiny_llama / "modules.json").write_text(content)
    open_checkpoint(tiny_llama).copy_companions(tmp_path)
    assert (tmp_path / "modules.json").read_text() == content


def test_a_file_that_may_not_be_read_is_no_damaged_one(
    tiny_llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("headwise.models.checkpoints.folder.safe_open", refuse)
    with pytest.raises(StorageError, match=r"^file = '.*model.safetensors': could not be read: Permission denied$"):
        FolderCheckpoint(tiny_llama_folder)
