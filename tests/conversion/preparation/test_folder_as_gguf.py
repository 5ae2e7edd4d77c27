"""A folder is prepared as one GGUF file: that of the prepared folder, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import headwise
from headwise.conversion import export_gguf
from headwise.errors import HeadwiseError
from headwise.models.checkpoints import open_checkpoint
from tests.byte_level import save_byte_level
from tests.conversion.preparation.test_exact import make

CACHE = "llama.cpp:q4_0"

pytestmark = pytest.mark.usefixtures("short_search")


def stored(folder: Path, name: str, dtype: torch.dtype) -> Path:
    """A model with uneven keys and a tokenizer that GGUF has a place for."""
    make(folder, name, 64, vocab_size=324, **({"sliding_window": None} if name == "mistral" else {}))
    save_byte_level(folder, 320)
    file = folder / "model.safetensors"
    save_file({tensor: values.to(dtype) for tensor, values in load_file(file).items()}, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", torch.bfloat16), ("qwen2", torch.float16), ("qwen3", torch.float32), ("mistral", torch.bfloat16)],
)
def test_it_is_the_export_of_the_prepared_folder(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = stored(tmp_path / "source", name, dtype)
    made = headwise.prepare(source, tmp_path / "out.gguf", cache=CACHE)
    assert made.output == str(tmp_path / "out.gguf")
    assert made.proof.products <= (2.0**-10 if dtype == torch.float16 else 1e-12)
    headwise.prepare(source, tmp_path / "folder", cache=CACHE)
    export_gguf(tmp_path / "folder", tmp_path / "exported.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "exported.gguf").read_bytes()
    ids = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        before, after = (headwise.load(path, dtype="float32")(ids).logits for path in (source, tmp_path / "out.gguf"))
    assert (before - after).abs().max() < (1e-2 if dtype == torch.float16 else 1e-4) * before.abs().max()
    assert open_checkpoint(source).read("model.embed_tokens.weight").dtype == dtype


def test_what_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError

    source = stored(tmp_path / "source", "llama", torch.float32)
    monkeypatch.setattr("headwise.conversion.preparation.one_layer.fit", never)
    taken = tmp_path / "taken.gguf"
    taken.write_text("old")
    cases: dict[str, tuple[Path, str, str]] = {
        "exists; say --overwrite": (source, "taken.gguf", CACHE),
        "loads no .gguf: write a folder": (source, "out.gguf", "mlx:4"),
        "No such file or directory": (source, "nowhere/out.gguf", CACHE),
        "gemma3": (make(tmp_path / "gemma", "gemma3_text", 64), "out.gguf", CACHE),
    }
    for words, (folder, output, cache) in cases.items():
        with pytest.raises(HeadwiseError, match=words):
            headwise.prepare(folder, tmp_path / output, cache=cache)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "gemma", "taken.gguf"}
    assert taken.read_text() == "old"


def test_it_replaces_a_file_that_it_is_told_to(cli: Callable[..., object], tmp_path: Path) -> None:
    source = stored(tmp_path / "source", "llama", torch.float32)
    (tmp_path / "out.gguf").write_text("old")
    cli("prepare", source, tmp_path / "out.gguf", "--for", CACHE, "--overwrite")
    assert open_checkpoint(tmp_path / "out.gguf").tensors.keys() == open_checkpoint(source).tensors.keys()
