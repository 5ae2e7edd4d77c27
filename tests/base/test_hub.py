from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

import headwise.models.specs
from headwise.base.hub import fetch_hub
from headwise.errors import ArgumentError, CheckpointError


def test_the_old_import_still_works() -> None:
    assert headwise.models.specs.fetch_hub is fetch_hub


@pytest.mark.parametrize(
    "name", ["hf://", "hf://owner", "hf://owner/", "hf:///name", "hf://a/b/c", "hf://a/b/c@main"]
)
def test_a_hub_name_is_owner_and_name(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^source = '{name}': a hub model is written hf://owner/name or"):
        fetch_hub(name, config_only=True)


@pytest.mark.parametrize(("suffix", "revision"), [("", None), ("@v1", "v1")])
def test_weights_are_fetched_without_code_and_without_subfolders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, revision: str | None
) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def download(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert fetch_hub(f"hf://owner/name{suffix}") == tmp_path
    assert fetch_hub(f"hf://owner/name{suffix}", config_only=True) == tmp_path
    wanted = ["*.json", "model*.safetensors", "*.model", "*.txt", "*.jinja"]
    patterns = {"allow_patterns": wanted, "ignore_patterns": ["*/*"]}
    assert calls == [
        (("owner/name",), {**patterns, "revision": revision}),
        (("owner/name", "config.json"), {"revision": revision}),
    ]


def test_a_download_that_fails_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    message = r"^source = 'hf://owner/name': could not be fetched: ConnectionError: no route$"
    with pytest.raises(CheckpointError, match=message):
        fetch_hub("hf://owner/name")


def test_nothing_but_a_hub_name_loads_the_hub_client(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8})
    )
    script = """
import sys
import headwise, headwise.base.hub
from headwise.cli.main import main
sys.argv = ["headwise", "inspect", sys.argv[1], "--json"]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
heavy = {"torch", "transformers", "huggingface_hub"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
