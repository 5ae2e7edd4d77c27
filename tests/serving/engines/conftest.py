"""A tiny model that engines load, their interpreters, and the command line's fixtures."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from headwise.conversion import export_gguf
from headwise.measure.texts import language_reference
from tests import warm
from tests.byte_level import save_byte_level
from tests.cli.conftest import cli, here, refused
from tests.real_models import tiny_model

__all__ = ["cli", "here", "refused"]

HEAD = 64
"""Channels of a head, which groups and blocks of every engine divide."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama as ``folder`` and as ``model.gguf``, both in float32, and a ``text.txt``."""
    place = tmp_path_factory.mktemp("models")
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 4 * HEAD, "num_hidden_layers": 4}
    model = tiny_model("llama", vocab_size=324, max_position_embeddings=2048, **sizes).float()
    model.save_pretrained(place / "folder")
    save_byte_level(place / "folder", 320, "smollm")
    file = place / "folder/tokenizer.json"
    file.write_text(file.read_text().replace("</s>", "<|endoftext|>"))  # as SmolLM2 calls it
    export_gguf(place / "folder", place / "model.gguf", outtype="f32")
    (place / "text.txt").write_text(language_reference()[:6000])
    return place


@pytest.fixture
def interpreter(tmp_path: Path) -> Callable[[str], Path]:
    """Write a script that stands where the interpreter of an engine's environment is named."""

    def write(script: str) -> Path:
        file = tmp_path.parent / f"{tmp_path.name} interpreter"
        file.write_text(script)
        file.chmod(0o755)
        return file

    return write


def engine_python(module: str, variable: str) -> str:
    """The interpreter of an engine; skips the test where there is none."""
    if python := os.environ.get(variable):
        return python
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed here, and {variable} names no interpreter")
    return sys.executable


def interrupted(words: Sequence[str], told: Path) -> str:
    """What headwise says on stderr when it is interrupted, once an engine's process has told who it is."""
    with warm.start("-m", "headwise", *words) as command:
        while not (told.exists() and told.read_text().strip()):
            assert command.poll() is None
            time.sleep(0.05)
        command.send_signal(signal.SIGINT)
        _, said = command.communicate()
    assert command.returncode == 130
    return said
