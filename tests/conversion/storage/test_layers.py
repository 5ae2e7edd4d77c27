"""A saved layer is loaded unchanged, or not at all."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
import torch

from headwise.conversion.storage import LayerFiles
from headwise.errors import CheckpointError

ABOUT = {"spec": {"kind": "latent", "rope": None}, "channels": [3, 0, 7], "error": 0.1 + 0.2, "chosen": "refit é"}


def layer() -> dict[str, torch.Tensor]:
    return {
        "q_proj.weight": torch.randn(6, 4, dtype=torch.float64),
        "o_proj.weight": torch.randn(4, 6).mT,
        "o_proj.bias": torch.randn(4, dtype=torch.bfloat16),
    }


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    first, second = layer(), layer()
    results = LayerFiles(tmp_path / "work" / "layers")
    assert results.load(0) is None
    results.save(0, first, ABOUT)
    results.save(11, second, {})
    results.save(0, second, ABOUT)
    results.save(0, first, ABOUT)
    again = LayerFiles(tmp_path / "work" / "layers")
    for index, tensors, about in ((0, first, ABOUT), (11, second, {})):
        loaded = again.load(index)
        assert loaded is not None
        assert loaded[1] == about
        assert loaded[0].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert loaded[0][name].dtype == tensor.dtype
            assert torch.equal(loaded[0][name], tensor)
    assert again.load(1) is None
    assert len(list(results.folder.iterdir())) == 2


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    both = torch.randn(4, 4)
    results = LayerFiles(tmp_path)
    results.save(0, {"whole": both, "rows": both[1:3], "again": both}, {})
    loaded = results.load(0)
    assert loaded is not None
    assert torch.equal(loaded[0]["rows"], both[1:3])
    assert torch.equal(loaded[0]["again"], loaded[0]["whole"])


def test_any_damaged_byte_is_noticed(tmp_path: Path) -> None:
    results = LayerFiles(tmp_path)
    tensors = {"a": torch.randn(3, 2), "b": torch.randn(2)}
    results.save(3, tensors, ABOUT)
    file = next(tmp_path.iterdir())
    whole = file.read_bytes()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        loaded = results.load(3)
        # A changed byte of the header's spelling may leave its content as it is.
        if loaded is not None:
            assert loaded[1] == ABOUT, at
            assert loaded[0].keys() == tensors.keys(), at
            assert all(torch.equal(loaded[0][name], tensors[name]) for name in tensors), at
    for length in range(0, len(whole), 7):
        file.write_bytes(whole[:length])
        assert results.load(3) is None
    file.write_bytes(whole)
    assert results.load(3) is not None


def test_a_layer_that_could_not_be_saved_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = LayerFiles(tmp_path)
    results.save(0, {"a": torch.zeros(2)}, {})

    def full(source: Path, destination: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CheckpointError) as error:
        results.save(0, {"a": torch.ones(2)}, {})
    assert str(error.value) == f"results = '{tmp_path}': could not be written: No space left on device"
    loaded = results.load(0)
    assert loaded is not None
    assert torch.equal(loaded[0]["a"], torch.zeros(2))


def test_a_full_disk(tmp_path: Path) -> None:
    results = LayerFiles(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(CheckpointError, match="could not be written: File too large"):
            results.save(0, {"a": torch.zeros(100, 100)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert results.load(0) is None


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"^results = '.*file/inside': could not be written: Not a directory"):
        LayerFiles(tmp_path / "file" / "inside").save(0, {"x": torch.zeros(1)}, {})
