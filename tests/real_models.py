"""Real weights for the tests: SmolLM2-135M as a folder, glassllm mapped to one, and tiny random models."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
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


def glassllm_package() -> Path:
    """The folder of the glassllm package."""
    package = importlib.util.find_spec("glassllm")
    assert package is not None
    assert package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0])


def glassllm_weights() -> dict[str, np.ndarray]:
    """The arrays of the glassllm package's English model."""
    with np.load(glassllm_package() / "weights/en.npz") as arrays:
        return {name: arrays[name] for name in arrays.files}


def save_glassllm(folder: Path) -> Path:
    """glassllm (0.85 M parameters, interleaved RoPE, tied embeddings) as a llama folder in float32."""
    arrays = glassllm_weights()
    sizes = json.loads(str(arrays["__config__"]))
    heads = {"W_Q": sizes["n_heads"], "W_K": sizes["n_kv_heads"]}

    def linear(name: str) -> torch.Tensor:
        weight = torch.from_numpy(arrays[name].astype(np.float32)).T
        if (count := heads.get(name.rpartition(".")[2])) is not None:
            # Neighbouring pairs to halves, as llama's rotary embedding has them.
            weight = torch.unflatten(weight, 0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)
        return weight.contiguous()

    def vector(name: str) -> torch.Tensor:
        return torch.from_numpy(arrays[name].astype(np.float32))

    state = {"model.embed_tokens.weight": vector("E"), "model.norm.weight": vector("norm_f.gamma")}
    for layer in range(sizes["n_layers"]):
        here, there = f"blocks.{layer}", f"model.layers.{layer}"
        state[f"{there}.input_layernorm.weight"] = vector(f"{here}.norm1.gamma")
        state[f"{there}.post_attention_layernorm.weight"] = vector(f"{here}.norm2.gamma")
        for own, stock in (("Q", "q"), ("K", "k"), ("V", "v"), ("O", "o")):
            state[f"{there}.self_attn.{stock}_proj.weight"] = linear(f"{here}.attn.W_{own}")
        for own, stock in (("W1", "gate"), ("W3", "up"), ("W2", "down")):
            state[f"{there}.mlp.{stock}_proj.weight"] = linear(f"{here}.ffn.{own}")
    config = {
        "model_type": "llama",
        "hidden_size": sizes["d_model"],
        "intermediate_size": arrays["blocks.0.ffn.W1"].shape[1],
        "num_hidden_layers": sizes["n_layers"],
        "num_attention_heads": sizes["n_heads"],
        "num_key_value_heads": sizes["n_kv_heads"],
        "vocab_size": sizes["vocab_size"],
        "max_position_embeddings": sizes["max_len"],
        "rms_norm_eps": sizes["eps"],
        "rope_theta": sizes["rope_base"],
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
