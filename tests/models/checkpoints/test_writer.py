from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import headwise
from headwise.errors import ArgumentError, CheckpointError, StorageError
from headwise.models.checkpoints import FolderCheckpoint, FolderWriter, TensorInfo, check_output

INFO = {name: TensorInfo((4, 2), torch.float32) for name in ("a", "b", "c")}  # 32 bytes each


def fill(writer: FolderWriter, value: float = 0.0) -> None:
    for name in INFO:
        writer.add(name, torch.full((4, 2), value))
    writer.write_json("config.json", {"value": value})


@pytest.mark.parametrize("shard_bytes", [1, 20_000, 50_000, 2**31])
def test_round_trip_in_pieces(tiny_llama_folder: Path, tmp_path: Path, shard_bytes: int) -> None:
    source = FolderCheckpoint(tiny_llama_folder)
    out = tmp_path / "out"
    with FolderWriter(out, source.tensors, shard_bytes=shard_bytes) as writer:
        for name in source.tensors:
            writer.add(name, source.read(name))
        writer.write_json("config.json", source.config)
        writer.add_companions(source)
    written = FolderCheckpoint(out)
    assert written.tensors == source.tensors
    for name in source.tensors:
        assert torch.equal(written.read(name), source.read(name))
    files = sorted(path.name for path in out.glob("*.safetensors"))
    if shard_bytes == 2**31:
        assert files == ["model.safetensors"]
    else:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == files
        assert len(files) == (21 if shard_bytes == 1 else len(files)) > 1
    model = AutoModelForCausalLM.from_pretrained(out)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, source.read(name))


@pytest.mark.parametrize(("value", "kind"), [(torch.inf, "infinite values"), (torch.nan, "NaN")])
def test_what_is_no_number_is_never_written(tmp_path: Path, value: float, kind: str) -> None:
    """Such as a sum or a trained weight that does not fit in the folder's dtype."""

    def write() -> None:
        with FolderWriter(tmp_path / "out", INFO) as writer:
            writer.add("a", torch.zeros(4, 2))
            writer.add("b", torch.zeros(4, 2).index_fill(0, torch.tensor([3]), value))

    with pytest.raises(CheckpointError, match=f"^tensor = 'b': came out with {kind} in float32, and is not written"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_shards_are_closed_before_they_grow_too_large(tmp_path: Path) -> None:
    with FolderWriter(tmp_path / "out", INFO, shard_bytes=64) as writer:
        fill(writer)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }


@pytest.mark.parametrize("before", [False, True])
def test_an_index_says_that_other_files_are_no_weights(tmp_path: Path, before: bool) -> None:
    with FolderWriter(tmp_path / "out", INFO) as writer:
        if before:
            writer.write_bytes("kv_cache.safetensors", b"")
        fill(writer)
        if not before:
            assert not (writer.folder / "model.safetensors.index.json").exists()
            writer.write_bytes("kv_cache.safetensors", b"")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(INFO, "model.safetensors")


def test_a_conversion_of_shards(tiny_llama_folder: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(tiny_llama_folder).save_pretrained(sharded, max_shard_size="20KB")
    for source, out in ((tiny_llama_folder, "one"), (sharded, "several")):
        headwise.convert(source, tmp_path / out, to="mla", kv_budget=0.5, evaluate=False)
    one, several = FolderCheckpoint(tmp_path / "one"), FolderCheckpoint(tmp_path / "several")
    for name in one.tensors:
        assert torch.equal(one.read(name), several.read(name))


def test_nothing_is_seen_before_everything_is_there(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with FolderWriter(out, INFO) as writer:
        assert not out.exists()
        fill(writer)
        assert not out.exists()
    assert sorted(path.name for path in out.iterdir()) == ["SHA256SUMS", "config.json", "model.safetensors"]
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (ValueError(), ValueError),
        (OSError(errno.ENOSPC, "No space left on device"), StorageError),
    ],
)
def test_a_failure_leaves_no_trace(tmp_path: Path, error: BaseException, told: type[BaseException]) -> None:
    def fail_half_way() -> None:
        with FolderWriter(tmp_path / "new" / "deeper" / "out", INFO) as writer:
            writer.add("a", torch.zeros(4, 2))
            raise error

    with pytest.raises(told):
        fail_half_way()
    assert list(tmp_path.iterdir()) == []


def test_a_failure_keeps_parents_that_were_there(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with pytest.raises(KeyboardInterrupt), FolderWriter(tmp_path / "new" / "deeper" / "out", INFO):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [tmp_path / "new"]
    assert list((tmp_path / "new").iterdir()) == []


def test_overwriting(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for value in (1.0, 2.0):
        with FolderWriter(out, INFO, overwrite=True) as writer:
            fill(writer, value)
            if value == 2.0:
                assert torch.equal(FolderCheckpoint(out).read("a"), torch.ones(4, 2))
        assert torch.equal(FolderCheckpoint(out).read("a"), torch.full((4, 2), value))
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")])
@pytest.mark.parametrize("at", [0, 1])
def test_a_failure_between_the_two_moves_brings_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, at: int
) -> None:
    out = tmp_path / "out"
    with FolderWriter(out, INFO) as writer:
        fill(writer, 1.0)
    replace, moves = os.replace, iter(range(3))

    def failing(source: Path, destination: Path) -> None:
        if next(moves) == at:
            raise failure
        replace(source, destination)

    writer = FolderWriter(out, INFO, overwrite=True)
    writer.__enter__()
    fill(writer, 2.0)
    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(CheckpointError if isinstance(failure, OSError) else KeyboardInterrupt):
        writer.__exit__(None, None, None)
    assert list(tmp_path.iterdir()) == [out]
    assert torch.equal(FolderCheckpoint(out).read("a"), torch.ones(4, 2))


def test_leftovers_of_a_killed_run_are_cleared(tmp_path: Path) -> None:
    out = tmp_path / "out"
    partial, replaced = tmp_path / ".out.headwise-partial", tmp_path / ".out.headwise-replaced"
    for folder in (partial, replaced):
        folder.mkdir()
        (folder / "stale").write_text("x")
    with FolderWriter(out, INFO) as writer:
        assert not (partial / "stale").exists()
        fill(writer)
    # A run that was killed between its two moves left the old folder under this name: its only copy.
    assert (replaced / "stale").exists()
    with FolderWriter(out, INFO, overwrite=True) as writer:
        fill(writer)
    assert list(tmp_path.iterdir()) == [out]


def test_an_empty_folder_is_no_old_model(tmp_path: Path) -> None:
    out, replaced = tmp_path / "out", tmp_path / ".out.headwise-replaced"
    out.mkdir()
    with FolderWriter(out, INFO) as writer:
        fill(writer)
    assert list(tmp_path.iterdir()) == [out]
    # Nor does one take the place of the old model that a killed run has left.
    shutil.rmtree(out)
    for folder in (out, replaced):
        folder.mkdir()
    (replaced / "stale").write_text("x")
    with FolderWriter(out, INFO) as writer:
        fill(writer)
    assert (replaced / "stale").exists()


def test_text_that_utf8_cannot_write(tmp_path: Path) -> None:
    with FolderWriter(tmp_path / "out", INFO) as writer:
        fill(writer)
        writer.write_json("config.json", {"half a pair": "\ud800", "a whole one": "😀"})
    read = json.loads((tmp_path / "out" / "config.json").read_text())
    assert read == {"half a pair": "\ud800", "a whole one": "😀"}


def test_destinations_that_are_taken(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty", overwrite=False)
    check_output(tmp_path / "nowhere" / "yet", overwrite=False)
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("file", "dangling"):
        with pytest.raises(ArgumentError, match=r"is a file or a link; it must be a folder or not exist"):
            check_output(tmp_path / name, overwrite=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(ArgumentError, match=r"exists and is not empty; say --overwrite"):
        check_output(tmp_path / "full", overwrite=False)
    with pytest.raises(ArgumentError, match=r"is not a model folder, so --overwrite will not replace it"):
        check_output(tmp_path / "full", overwrite=True)
    for name in ("", ".", "..", "/", "a/.."):
        with pytest.raises(ArgumentError, match=r"must name a folder"):
            check_output(Path(name), overwrite=True)
    with pytest.raises(ArgumentError, match=r"must have no null byte"):
        check_output(Path("a\0b"), overwrite=True)


# --- companion files that are links --------------------------------------------------------------------------


@pytest.fixture
def linked(tiny_llama: Path, tmp_path: Path) -> Path:
    """A model folder whose companions are all kinds of links and files."""
    (tmp_path / "private.json").write_text('{"secret": 1}')
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "modules.json").write_text('{"secret": 2}')
    (tiny_llama / "within").mkdir()
    (tiny_llama / "within" / "file.json").write_text('{"within": 1}')
    for name, target in {
        "outside.json": "../private.json",
        "absolute.txt": str(tmp_path / "private.json"),
        "twice.json": "outside.json",
        "dangling.json": "nowhere",
        "loop.json": "loop.json",
        "folder.json": "within",
        "device.json": "/dev/null",
        "inside.json": "within/file.json",
        "roundabout.json": f"../{tiny_llama.name}/within/file.json",
    }.items():
        (tiny_llama / name).symlink_to(target)
    os.mkfifo(tiny_llama / "pipe.model")
    return tiny_llama


OUTSIDE = ("absolute.txt", "dangling.json", "device.json", "folder.json", "loop.json", "outside.json", "pipe.model")


def test_links_out_of_the_folder_are_not_followed(linked: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = headwise.convert(linked, out, to="mla", kv_budget=0.5, evaluate=False)
    copied = {path.name for path in out.iterdir()}
    assert not copied & {*OUTSIDE, "twice.json"}
    assert (out / "inside.json").read_text() == (out / "roundabout.json").read_text() == '{"within": 1}'
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert all("secret" not in path.read_text() for path in out.glob("*.json"))
    (note,) = (note for note in done.notes if note.startswith("not copied"))
    assert note.endswith(": " + ", ".join(map(repr, sorted((*OUTSIDE, "twice.json")))))


def test_a_stock_folder_names_what_was_left_out(linked: Path, tmp_path: Path) -> None:
    done = headwise.convert(linked, tmp_path / "out", to="mla", kv_budget=0.5, format="deepseek", evaluate=False)
    assert not (tmp_path / "out" / "outside.json").exists()
    (note,) = (note for note in done.notes if note.startswith("not copied"))
    assert "'outside.json'" in note


def test_a_module_folder_that_is_a_link_is_not_followed(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "config.json").write_text('{"secret": 1}')
    (tiny_llama / "1_Pooling").symlink_to("../private")
    (tiny_llama / "2_Normalize").mkdir()
    modules = [{"path": name} for name in ("", "1_Pooling", "2_Normalize")]
    (tiny_llama / "modules.json").write_text(json.dumps(modules))
    checkpoint = FolderCheckpoint(tiny_llama)
    (tmp_path / "out").mkdir()
    checkpoint.copy_companions(tmp_path / "out")
    assert list((tmp_path / "out" / "1_Pooling").iterdir()) == []
    assert (tmp_path / "out" / "2_Normalize").is_dir()
    assert checkpoint.left_out == ("1_Pooling/config.json",)


def test_files_of_the_hub_cache_are_copied(tiny_llama_folder: Path, tmp_path: Path) -> None:
    """There a file is a link to a blob beside the snapshots; one to another model's blob is not this model's."""
    model, other = tmp_path / "hub" / "models--owner--name", tmp_path / "hub" / "models--other--private"
    snapshot = model / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    for folder in (model, other):
        (folder / "blobs").mkdir(parents=True)
    (other / "blobs" / "secret").write_text('{"secret": 1}')
    for number, file in enumerate(tiny_llama_folder.iterdir()):
        shutil.copy(file, model / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (snapshot / "other.json").symlink_to("../../../models--other--private/blobs/secret")
    (snapshot / "above.json").symlink_to("../../secret.json")
    (model / "secret.json").write_text('{"secret": 2}')
    checkpoint = FolderCheckpoint(snapshot)
    with FolderWriter(tmp_path / "out", checkpoint.tensors) as writer:
        for name in checkpoint.tensors:
            writer.add(name, checkpoint.read(name))
        writer.write_json("config.json", checkpoint.config)
        writer.add_companions(checkpoint)
    companions = {file.name for file in tiny_llama_folder.iterdir()}
    assert {file.name for file in (tmp_path / "out").iterdir()} == {*companions, "SHA256SUMS"}
    assert checkpoint.left_out == ("above.json", "other.json")


def test_an_announced_plan_replaces_the_earlier_one(tmp_path: Path) -> None:
    """Names, shapes and their order; only the announced tensors are missing, and only they are in the folder."""
    real = {name: TensorInfo((2, 3), torch.bfloat16) for name in ("c", "a", "new")}
    with FolderWriter(tmp_path / "out", INFO, provisional=True) as writer:
        writer.announce(real)
        assert writer.missing == ["c", "a", "new"]
        for name in real:
            writer.add(name, torch.full((2, 3), 1.5, dtype=torch.bfloat16))
        writer.write_json("config.json", {"model_type": "llama"})
    written = load_file(tmp_path / "out/model.safetensors")
    assert {name: (tuple(x.shape), x.dtype) for name, x in written.items()} == {
        name: (info.shape, info.dtype) for name, info in real.items()
    }
