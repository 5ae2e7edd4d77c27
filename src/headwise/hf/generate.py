"""Let a model finish a sentence."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from headwise.checkpoints import load_tokenizer, model_path
from headwise.errors import ArgumentError
from headwise.hf.load import load


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A continuation: ``text`` is what was added to ``prompt``."""

    model: str
    prompt: str
    text: str
    prompt_tokens: int
    new_tokens: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values."""
        return asdict(self)


@torch.inference_mode()
def generate(model: str | Path, prompt: str, *, max_new_tokens: int = 40, dtype: str | None = None) -> Generation:
    """Continue a prompt greedily.

    Args:
        model: a model folder, ``.gguf`` or other source with weights.
        prompt: the beginning; not put through a chat template.
        max_new_tokens: how far to go at most.
        dtype: to run in; as stored when None.

    Raises:
        ArgumentError: the prompt is empty or a number is out of range.
        CheckpointError: the model could not be read.
    """
    if max_new_tokens < 1:
        raise ArgumentError("max_new_tokens", max_new_tokens, "must be at least 1")
    path = model_path(model)
    tokenizer = load_tokenizer(path)
    encoded = tokenizer(prompt, return_tensors="pt")
    count = encoded["input_ids"].shape[1]
    if count == 0:
        raise ArgumentError("prompt", prompt, "must hold at least one token")
    loaded = load(path, dtype=dtype)
    start = time.perf_counter()
    ids = loaded.generate(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )[0]
    return Generation(
        model=str(model),
        prompt=prompt,
        text=tokenizer.decode(ids[count:], skip_special_tokens=True),
        prompt_tokens=count,
        new_tokens=len(ids) - count,
        seconds=time.perf_counter() - start,
    )
