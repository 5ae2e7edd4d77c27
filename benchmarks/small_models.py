"""Small models of real text, as folders: `benchmarks.glassllm`, and some that are trained here.

    python -m benchmarks.small_models glassllm build/glassllm
    python -m benchmarks.small_models qwen2 build/qwen2

``qwen2`` has what makes the caches of the Qwen2 family hard to quantise: seven query heads for each key–value head,
and in some channels of the keys a bias far larger than what the input adds to it. ``llama`` has eight query heads for
each key–value head, and ``qwen3`` is ``llama`` with norms of queries and keys. ``gemma3`` has four query heads for
each key–value head, wide heads, such norms and windows; ``gpt2`` a key–value head for every query head, biases
everywhere and no RoPE; ``mha`` is a llama with a key–value head for every query head.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.kept import say
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks import data, glassllm
from headwise.measure.texts import read_text

VOCABULARY = 4096

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}

LARGE_BIASES, SIZE_OF_BIASES = 4, 30.0
"""The number of channels of each key head whose bias starts large, and its standard deviation. In Qwen2.5-7B the norm
of the key biases is about 605 in the first layer and 921 in the last, and that of all layers has a median of about 22
(a comment in ggml-org/llama.cpp#21385)."""

WINDOW, BATCH = 512, 8
WARM_UP, FASTEST = 50, 2e-3


def qwen2() -> PreTrainedModel:
    """A qwen2 of 14 query heads and 2 key–value heads, whose keys have a few large biases."""
    sizes = {"hidden_size": 224, "intermediate_size": 512, "head_dim": 32}
    config = Qwen2Config(**COMMON, **ROPE, **sizes, num_attention_heads=14, num_key_value_heads=2)
    model, width = Qwen2ForCausalLM(config), sizes["head_dim"]
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias.view(-1, width)
            # The slowest pairs, in the last places of both halves of a head: they turn least between two tokens.
            slow = [width // 2 - 1 - k for k in range(LARGE_BIASES // 2)] + [
                width - 1 - k for k in range(LARGE_BIASES // 2)
            ]
            bias[:, slow] = torch.randn(len(bias), len(slow)) * SIZE_OF_BIASES
    return model


def llama() -> PreTrainedModel:
    """A llama of 16 query heads and 2 key–value heads."""
    sizes = {"hidden_size": 256, "intermediate_size": 640, "head_dim": 32}
    return LlamaForCausalLM(LlamaConfig(**COMMON, **ROPE, **sizes, num_attention_heads=16, num_key_value_heads=2))


def mha() -> PreTrainedModel:
    """A llama of 8 query heads and as many key–value heads."""
    sizes = {"hidden_size": 256, "intermediate_size": 640, "head_dim": 32}
    return LlamaForCausalLM(LlamaConfig(**COMMON, **ROPE, **sizes, num_attention_heads=8, num_key_value_heads=8))


def qwen3() -> PreTrainedModel:
    """A qwen3 of the sizes of `llama`."""
    sizes = {"hidden_size": 256, "intermediate_size": 640, "head_dim": 32}
    return Qwen3ForCausalLM(Qwen3Config(**COMMON, **ROPE, **sizes, num_attention_heads=16, num_key_value_heads=2))


def gemma3() -> PreTrainedModel:
    """A gemma3_text of 8 query heads and 2 key–value heads, 48 wide; every other layer has a window."""
    sizes = {"hidden_size": 256, "intermediate_size": 640, "head_dim": 48, "query_pre_attn_scalar": 48}
    kinds = ["sliding_attention", "full_attention"] * (COMMON["num_hidden_layers"] // 2)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    return Gemma3ForCausalLM(Gemma3TextConfig(**COMMON, **sizes, **heads, sliding_window=128, layer_types=kinds))


def gpt2() -> PreTrainedModel:
    """A gpt2 of 8 heads: MHA with biases, and learned positions."""
    return GPT2LMHeadModel(GPT2Config(**COMMON, hidden_size=256, num_attention_heads=8))


def train(
    build: Callable[[], PreTrainedModel], folder: Path, cache: Path, *, steps: int = 400, seed: int = 0
) -> Path:
    """Train a model on WikiText-2 train.

    Args:
        build: makes the model.
        folder: the folder to write.
        cache: where the texts are.
        steps: of `BATCH` windows each.
        seed: of the first weights and the order of the windows.
    """
    text = read_text(data.wikitext("train", cache))
    tokenizer = _byte_tokenizer(text, VOCABULARY)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    torch.manual_seed(seed)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=FASTEST, betas=(0.9, 0.95), weight_decay=0.05)
    order = torch.cat([torch.randperm(len(windows)) for _ in range(-(-steps * BATCH // len(windows)))])
    for step in range(steps):
        rate = min((step + 1) / WARM_UP, 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = FASTEST * rate
        batch = windows[order[step * BATCH : (step + 1) * BATCH]]
        logits = model(batch, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            say(f"{step + 1} of {steps} steps, {loss.item():.3f} nats a token")
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _byte_tokenizer(text: str, size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>")


def _glassllm(folder: Path, cache: Path) -> Path:
    glassllm.save_weights(folder)
    return glassllm.save_tokenizer(folder)


MODELS: dict[str, Callable[[Path, Path], Path]] = {
    "glassllm": _glassllm,
    **{build.__name__: partial(train, build) for build in (qwen2, llama, mha, qwen3, gemma3, gpt2)},
}
"""By name; each takes the folder to write and the cache of `benchmarks.data`."""


def made(name: str, folder: Path, cache: Path) -> Path:
    """The folder of one of `MODELS`, which is made there if it is not there yet."""
    if not (folder / "config.json").exists():
        MODELS[name](folder, cache)
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    options = parser.parse_args(arguments)
    say(MODELS[options.model](options.folder, options.cache))


if __name__ == "__main__":
    main()
