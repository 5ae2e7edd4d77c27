"""Let a model finish a sentence."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from headwise.checkpoints import load_tokenizer, model_path, tokenize
from headwise.errors import ArgumentError, CheckpointError, SpecError
from headwise.hf.load import load, open_decoder
from headwise.hf.optimize import optimize
from headwise.hf.recorded import can_record, decode_recorded


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


def _optimized(model: Any) -> Any:
    """As fast as it can be; a model that cannot be optimised runs as it is."""
    with suppress(SpecError, ArgumentError):
        return optimize(model)
    return model


@torch.inference_mode()
def generate(
    model: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 40,
    dtype: str | None = None,
    device: str | None = None,
) -> Generation:
    """Continue a prompt greedily; on a CUDA GPU a token is a recorded graph, where the model's attention is stock's.

    Args:
        model: a model folder, ``.gguf`` or other source with weights.
        prompt: the beginning; not put through a chat template.
        max_new_tokens: how far to go at most.
        dtype: to run in; as stored when None.
        device: to run on, such as ``cuda``; the CPU when None.

    Raises:
        ArgumentError: the prompt is empty or a number is out of range.
        CheckpointError: the model could not be read.
    """
    if max_new_tokens < 1:
        raise ArgumentError("max_new_tokens", max_new_tokens, "must be at least 1")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ArgumentError("prompt", prompt, "must be UTF-8 text") from None
    path = model_path(model)
    open_decoder(path)  # says what is wrong with a folder better than its tokenizer can
    tokenizer = load_tokenizer(path)
    encoded = tokenize(tokenizer, prompt, return_tensors="pt")
    count = encoded["input_ids"].shape[1]
    if count == 0:
        raise ArgumentError("prompt", prompt, "must hold at least one token")
    loaded = _optimized(load(path, dtype=dtype, device=device))
    positions = getattr(loaded.config, "max_position_embeddings", None)
    if isinstance(positions, int) and count + max_new_tokens > positions:
        rule = f"and the prompt's {count} tokens must be at most {positions} together, the model's positions"
        raise ArgumentError("max_new_tokens", max_new_tokens, rule)
    vocabulary = loaded.get_input_embeddings().weight.shape[0]
    if (largest := int(encoded["input_ids"].max())) >= vocabulary:
        raise ArgumentError("token", largest, f"is outside the model's vocabulary of {vocabulary}")
    stop = loaded.generation_config.eos_token_id
    stops = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if any(type(token) is not int for token in stops):
        raise CheckpointError("eos_token_id", stop, "must be a token's number, or a list of them")
    # Greedy is greedy: of the folder's own settings (beams, penalties, …) only where to stop is kept.
    loaded.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    start = time.perf_counter()
    inputs = {name: encoded[name].to(loaded.device) for name in ("input_ids", "attention_mask")}
    if loaded.device.type == "cuda" and can_record(loaded):
        ids = decode_recorded(loaded, inputs["input_ids"], max_new_tokens, stops)[0]
    else:
        ids = loaded.generate(**inputs)[0]
    return Generation(
        model=str(model),
        prompt=prompt,
        text=tokenizer.decode(ids[count:], skip_special_tokens=True),
        prompt_tokens=count,
        new_tokens=len(ids) - count,
        seconds=time.perf_counter() - start,
    )
