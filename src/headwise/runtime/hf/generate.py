"""Continue a prompt with a model; on a GPU through a CUDA graph.

Greedy decoding through a graph takes one launch a token instead of one for every kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StaticCache

from headwise.base.type_checks import checked_types
from headwise.errors import ArgumentError, CheckpointError, SpecError
from headwise.models.checkpoints import decode, load_tokenizer, model_path, tokenize
from headwise.runtime.attention.rope import rotaries_by_length
from headwise.runtime.hf.attention import HostedAttention
from headwise.runtime.hf.load import check_logits, load, open_decoder
from headwise.runtime.hf.optimize import optimize

_WARM_UP = 3
"""Calls before one is recorded: they compile kernels and allocate memory."""


class Recorded:
    """A function that a GPU records as a CUDA graph and replays; on a CPU it is called.

    The tensors that it reads and writes must stay at their addresses, and it must not depend on their values.

    Args:
        step: the function, without arguments.
        device: the device that the function computes on.
    """

    def __init__(self, step: Callable[[], object], device: torch.device) -> None:
        self.step, self.device = step, device
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Run the function once."""
        self._calls += 1
        if self.device.type != "cuda":
            self.step()
        elif self._calls <= _WARM_UP:
            side, current = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                self.step()
            current.wait_stream(side)
        else:
            if self._graph is None:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.device(self.device), torch.cuda.graph(self._graph):  # records without running
                    self.step()
            self._graph.replay()


def can_record(model: Any) -> bool:
    """Whether a decoding step of a model can be recorded: transformers says so, and no step waits for the GPU.

    Converted layers wait for it, to read the length of the cache, and so do frequencies that depend on the length.

    Args:
        model: a transformers model.
    """
    if not model._can_compile_fullgraph or rotaries_by_length(model):
        return False
    return not any(isinstance(module, HostedAttention) for module in model.modules())


@torch.inference_mode()
def decode_recorded(model: Any, ids: Tensor, max_new_tokens: int, stop: Collection[int] = ()) -> Tensor:
    """Continue a prompt greedily with a static cache, one recorded step for each token.

    Args:
        model: a decoder whose attention supports static caches.
        ids: ``[1, S]``, the prompt.
        max_new_tokens: the most tokens to add.
        stop: tokens after which to stop.

    Returns:
        ``[1, S + new]``, the prompt and the new tokens.

    Raises:
        CheckpointError: the model computes NaN or infinite logits.
    """
    count = ids.shape[1]
    sequence = torch.cat((ids, ids.new_zeros(1, max_new_tokens)), dim=1)  # [1, S + max_new_tokens]
    cache = StaticCache(config=model.config, max_cache_len=count + max_new_tokens)
    best = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].max(-1, keepdim=True)  # [1, 1] each

    def step() -> None:
        new = model(best.indices, past_key_values=cache).logits[:, -1].max(-1, keepdim=True)
        best.values.copy_(new.values)
        best.indices.copy_(new.indices)

    next_token = Recorded(step, ids.device)
    for at in range(count, count + max_new_tokens):
        check_logits(best.values, model)  # here, because nothing that is recorded may wait for the GPU
        sequence[:, at : at + 1] = best.indices
        if int(best.indices) in stop:
            return sequence[:, : at + 1]
        if at + 1 < count + max_new_tokens:
            next_token()
    return sequence


_LARGEST_ID = 2**63 - 1
"""The largest value of an int64 tensor."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A continuation of a prompt.

    Attributes:
        model: the model, as the user named it.
        prompt: the prompt.
        text: the text after the prompt, without special tokens.
        prompt_tokens: the number of tokens in the prompt.
        new_tokens: the number of tokens after it.
        seconds: the time of generation, without loading.
    """

    model: str
    prompt: str
    text: str
    prompt_tokens: int
    new_tokens: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-able values."""
        return asdict(self)


def _optimized(model: Any) -> Any:
    """The model after `optimize`, or unchanged if it cannot be optimised."""
    with suppress(SpecError, ArgumentError):
        return optimize(model)
    return model


@checked_types
@torch.inference_mode()
def generate(
    model: str | Path, prompt: str, *, max_new_tokens: int = 40, dtype: str | None = None, device: str | None = None
) -> Generation:
    """Continue a prompt greedily.

    On a CUDA GPU a model that is not converted decodes through a CUDA graph (`headwise.runtime.hf.generate`). For
    example ``generate("smollm2-135m", "The capital of France is", max_new_tokens=10).text``.

    Args:
        model: a model folder, ``.gguf`` or other source with weights.
        prompt: the text to continue; no chat template is applied.
        max_new_tokens: the most tokens to add.
        dtype: the dtype of the weights and the arithmetic; the stored dtype when None.
        device: the device to run on, such as ``cuda``; the CPU when None.

    Raises:
        ArgumentError: the prompt is empty or a number is out of range.
        SpecError: the model is no text decoder.
        CheckpointError: the model cannot be read, or computes NaN or infinite logits.
    """
    if max_new_tokens < 1:
        raise ArgumentError("max_new_tokens", max_new_tokens, "must be at least 1")
    path = model_path(model)
    open_decoder(path)  # before the tokenizer, whose errors say less about what is wrong with a folder
    tokenizer = load_tokenizer(path)
    inputs = _prompt_inputs(tokenizer, prompt)
    count = inputs["input_ids"].shape[1]
    loaded = _optimized(load(path, dtype=dtype, device=device))
    positions = getattr(loaded.config, "max_position_embeddings", None)
    if isinstance(positions, int) and count + max_new_tokens > positions:
        rule = f"and the prompt's {count} tokens must be at most {positions} together, the model's positions"
        raise ArgumentError("max_new_tokens", max_new_tokens, rule)
    vocabulary = loaded.get_input_embeddings().weight.shape[0]
    if (largest := int(inputs["input_ids"].max())) >= vocabulary:
        raise ArgumentError("token", largest, f"is outside the model's vocabulary of {vocabulary}")
    stops = stop_tokens(loaded)
    # Of the folder's generation settings (beams, penalties, …) only the stop tokens apply to greedy decoding.
    loaded.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=stops or None,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    start = time.perf_counter()
    inputs = {name: tensor.to(loaded.device) for name, tensor in inputs.items()}
    if loaded.device.type == "cuda" and can_record(loaded):
        ids = decode_recorded(loaded, inputs["input_ids"], max_new_tokens, stops)[0]
    else:
        ids = loaded.generate(**inputs, logits_processor=checked_logits(loaded))[0]
    return Generation(
        model=str(model),
        prompt=prompt,
        text=decode(tokenizer, ids[count:], skip_special_tokens=True),
        prompt_tokens=count,
        new_tokens=len(ids) - count,
        seconds=time.perf_counter() - start,
    )


def checked_logits(model: Any) -> LogitsProcessorList:
    """What refuses NaN and infinite logits in transformers' ``generate``, as its ``logits_processor``.

    Args:
        model: the model that generates; see `check_logits`.
    """

    def check(input_ids: Tensor, scores: Tensor) -> Tensor:
        check_logits(scores, model)
        return scores

    return LogitsProcessorList([check])


def _prompt_inputs(tokenizer: Any, prompt: str) -> dict[str, Tensor]:
    """The token ids of a prompt and their attention mask, each ``[1, S]``.

    Raises:
        ArgumentError: the prompt is empty, or is not valid Unicode.
        CheckpointError: the tokenizer fails.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ArgumentError("prompt", prompt, "must be UTF-8 text") from None
    encoded = tokenize(tokenizer, prompt, return_tensors="pt")
    ids: Tensor = encoded["input_ids"][:1]
    if not ids.numel():
        raise ArgumentError("prompt", prompt, "must hold at least one token")
    # tokenizer_config.json can make the tokenizer return no mask.
    mask = encoded["attention_mask"][:1] if "attention_mask" in encoded else torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": mask}


def stop_tokens(model: Any) -> list[int]:
    """The end-of-text tokens in a model's generation settings.

    Raises:
        CheckpointError: ``eos_token_id`` holds anything but token ids.
    """
    stop = model.generation_config.eos_token_id
    stops = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if any(type(token) is not int or not 0 <= token <= _LARGEST_ID for token in stops):
        raise CheckpointError("eos_token_id", stop, "must be a token's number, or a list of them")
    return stops
