from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A busy machine is slow, not wrong.
settings.register_profile("headwise", deadline=None)
settings.load_profile("headwise")

# Tests are spread over processes, and models this small gain nothing from threads: on a busy machine waiting for each
# other is all that two of them do. Torch reads this when it is imported, here and in every command that a test runs.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton decides when it is imported whether its kernels are run step by step, which is how they are tested where
# there is no GPU; torch's compiler, which other tests use, imports it too.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# A shell ignores interrupts in what it starts in the background, and so would every command that a test interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Toys for `test_adding.py` to lay over a copy of the package.
collect_ignore = ["adding_a_mechanism", "adding_a_method", "adding_a_family"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of few tests first: theirs take longest, and no process should begin a long file as the other ends."""
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (tests[item.path], item.path))


TINY = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}


@pytest.fixture(scope="session")
def tiny_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 20 thousand parameters with a tokenizer of one token a letter; not to be changed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny") / "llama"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder)
    save_letters_tokenizer(folder)
    return folder


def save_letters_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz .,'", start=2)}
    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, **letters}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)


@pytest.fixture
def tiny_llama(tiny_llama_folder: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(tiny_llama_folder, tmp_path / "tiny"))


@pytest.fixture
def edit_config(tiny_llama: Path) -> Callable[..., None]:
    """Change keys of the copy's ``config.json``; ``...`` takes one away."""

    def edit(**changes: Any) -> None:
        path = tiny_llama / "config.json"
        config = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))

    return edit


@pytest.fixture
def edit_weights(tiny_llama: Path) -> Callable[[Callable[[dict[str, Any]], dict[str, Any] | None]], None]:
    """Change the copy's tensors, in place or by returning others."""
    from safetensors.torch import load_file, save_file

    def edit(change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        path = tiny_llama / "model.safetensors"
        tensors = load_file(path)
        changed = change(tensors) or tensors
        save_file({name: t.contiguous() for name, t in changed.items()}, path, metadata={"format": "pt"})

    return edit
