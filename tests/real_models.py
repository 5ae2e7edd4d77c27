"""Tiny random models for the tests, as folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def tiny_model(model_type: str = "llama", *, seed: int = 0, **overrides: Any) -> Any:
    """A random model small enough to run in milliseconds, in float64; biases and norms are random too."""
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "vocab_size": 97,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    config = CONFIG_MAPPING[model_type](**{**sizes, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
            else:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
    return model


def save_tiny(folder: Path, model_type: str = "llama", **overrides: Any) -> Path:
    """Such a model as a folder, with a tokenizer of single characters."""
    model = tiny_model(model_type, **overrides)
    model.save_pretrained(folder)
    save_character_tokenizer(folder, model.config.vocab_size)
    return folder


def save_character_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer whose tokens are printable characters."""
    vocab = {"<pad>": 0, "<s>": 1, "<unk>": 2}
    vocab |= {chr(29 + index): index for index in range(3, min(vocab_size, 98))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", unk_token="<unk>"
    ).save_pretrained(folder)


def exchange_tokens(folder: Path) -> Path:
    """The folder, with the numbers of ``a`` and ``b`` exchanged in its tokenizer."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokens = tokenizer["model"]["vocab"]
    tokens["a"], tokens["b"] = tokens["b"], tokens["a"]
    file.write_text(json.dumps(tokenizer))
    return folder
