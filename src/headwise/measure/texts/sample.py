"""Let a model write text, to calibrate and to train on where none is at hand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from headwise.base.checksums import write_among_others
from headwise.base.disk import refuse_no_file, storage_errors
from headwise.base.jobs import Job, clear_finished, partial_folder, remembered
from headwise.base.options import takes_options
from headwise.base.options.heal import LENGTH, SHORTEST, SampleOptions
from headwise.base.processes import process_count
from headwise.base.progress import Progress, silent
from headwise.base.type_checks import checked_types
from headwise.errors import ArgumentError, CheckpointError
from headwise.measure.texts.windows import first_ids, token_ids
from headwise.models.checkpoints import Checkpoint, decode, load_tokenizer, run_identity
from headwise.runtime.hf import load, open_decoder
from headwise.runtime.hf.generate import checked_logits, stop_tokens

WRITING = "writing"
"""The name of the stage, for progress."""

PATIENCE = 16
"""A model is given up when so many batches in a row have no document that is long enough."""

_BETWEEN_TEXTS = "<|endoftext|>"
"""The token between two texts that a model was trained on, where a tokenizer has it."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a model wrote.

    Attributes:
        model: the model, as the user named it.
        output: the file.
        documents: the number of documents in it.
        tokens: of them, as the tokenizer reads them.
        seconds: of writing, in all runs together, without loading.
    """

    model: str
    output: str
    documents: int
    tokens: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-able values."""
        return asdict(self)


@takes_options(SampleOptions)
@checked_types
@torch.inference_mode()
def sample(model: str | Path, output: str | Path, options: SampleOptions, *, progress: Progress = silent) -> Sample:
    """Let a model write documents into a text file, to calibrate and to train on where no text is at hand.

    For example ``sample("smollm2-135m", "own.txt", tokens=250_000)``; then ``heal(…, text=["text.txt", "own.txt"])``.

    Each document begins where texts begin for the model: behind the token that its tokenizer puts before any text, or
    else behind ``<|endoftext|>``. Documents of fewer than 32 tokens are left out. A killed run is continued by the
    same call, and writes the same. LLM-QAT (Liu et al., 2023, arXiv:2305.17888) distils on such text.

    Args:
        model: a model folder, ``.gguf`` or other source with weights.
        output: the file to write; a document begins behind an empty line, and may have others within.
        options: the keywords below as one object, in place of them.
        progress: told of the tokens that are written.

    Raises:
        ArgumentError: an argument is outside its rule, or the output exists or is being written by another process.
        SpecError: the model is no text decoder.
        CheckpointError: the model cannot be read, its tokenizer has no token that begins a text, or it writes none.
        StorageError: the file cannot be written.
    """
    out = Path(output)
    if process_count() > 1:
        raise ArgumentError("processes", process_count(), "must be one: a text is written by one model")
    checkpoint = open_decoder(model)
    _check_output(out, checkpoint, overwrite=options.overwrite)
    tokenizer = load_tokenizer(checkpoint.path)
    length = _length(options, checkpoint.spec.max_position_embeddings)
    loaded = load(checkpoint.path, dtype=options.dtype, device=options.device)
    writer = _Writer(loaded, tokenizer, length, options)
    with Job(out, run=run_identity(checkpoint, **options.identity())) as job:
        documents, tokens, seconds, empty = list[str](), 0, 0.0, 0

        def write(number: int) -> dict[str, Any]:
            progress(WRITING, tokens, options.tokens)
            start = time.perf_counter()
            texts, written = writer.batch(number)
            return {"texts": texts, "tokens": written, "seconds": time.perf_counter() - start}

        for number in count():
            if tokens >= options.tokens:
                break
            file = job.work / f"batch-{number:06d}.json"
            batch = remembered(file, ("texts", "tokens", "seconds"), partial(write, number))
            documents += batch["texts"]
            tokens += batch["tokens"]
            seconds += batch["seconds"]
            empty = 0 if batch["texts"] else empty + 1
            if empty >= PATIENCE:
                rule = f"ends nearly every text within {SHORTEST} tokens: there is nothing to learn from"
                raise CheckpointError("model", str(model), rule)
        progress(WRITING, options.tokens, options.tokens)
        _check_output(out, checkpoint, overwrite=options.overwrite)  # it took a while
        job.finish()
        with storage_errors("output", out):
            write_among_others(out, ("\n\n".join(documents) + "\n").encode())
    return Sample(
        model=str(model), output=str(output), documents=len(documents), tokens=tokens, seconds=round(seconds, 3)
    )


def _check_output(out: Path, checkpoint: Checkpoint, *, overwrite: bool) -> None:
    """Refuse an output at which something is that may not be replaced."""
    if out.name in ("", ".."):
        raise ArgumentError("output", str(out), "must be the path of a file")
    refuse_no_file("output", out)
    if out.exists() and not overwrite:
        clear_finished(partial_folder(out))
        raise ArgumentError("output", str(out), "exists; say --overwrite to replace it")
    source = checkpoint.path.resolve()
    if out.resolve() == source or (source.is_dir() and out.resolve().is_relative_to(source)):
        raise ArgumentError("output", str(out), "must not be in the model; write it elsewhere")


def _length(options: SampleOptions, positions: int | None) -> int:
    """The most tokens of a document; the token that it begins behind has a position too."""
    length = options.length or min(LENGTH, (positions or LENGTH + 1) - 1)
    if positions is not None and length >= positions:
        raise ArgumentError("length", length, f"must be below {positions}, the model's positions")
    if length < SHORTEST:
        raise ArgumentError("length", length, f"must be at least {SHORTEST}; the model has {positions} positions")
    return length


class _Writer:
    """A model that writes documents, a batch of them at once.

    Args:
        model: a transformers model.
        tokenizer: of it.
        length: the most tokens of a document.
        options: how tokens are drawn.

    Raises:
        CheckpointError: the tokenizer has no token that begins a text.
    """

    def __init__(self, model: Any, tokenizer: Any, length: int, options: SampleOptions) -> None:
        self._model, self._tokenizer, self._options = model, tokenizer, options
        vocabulary = model.get_input_embeddings().weight.shape[0]
        known = (
            *first_ids(tokenizer),
            tokenizer.get_vocab().get(_BETWEEN_TEXTS),
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
        )
        begins = [token for token in known if token is not None and token < vocabulary]
        if not begins:
            rule = f"has no token within the vocabulary of {vocabulary} that begins a text"
            raise CheckpointError("tokenizer", type(tokenizer).__name__, rule)
        self._begin = begins[0]
        ends = {self._begin, tokenizer.eos_token_id, tokenizer.get_vocab().get(_BETWEEN_TEXTS), *stop_tokens(model)}
        self._ends = sorted(token for token in ends if token is not None)
        model.generation_config = GenerationConfig(
            max_new_tokens=length,
            do_sample=True,
            temperature=float(options.temperature),
            top_k=0,
            top_p=float(options.top_p),
            eos_token_id=self._ends,
            pad_token_id=self._begin,
        )

    def batch(self, number: int) -> tuple[list[str], int]:
        """The documents of a batch and their tokens, a function of its number alone."""
        model, ends = self._model, torch.tensor(self._ends)
        first = torch.full((self._options.batch, 1), self._begin, device=model.device)
        with _drawing(model.device, self._options.seed * 1_000_003 + number):
            rows = model.generate(
                first, attention_mask=torch.ones_like(first), logits_processor=checked_logits(model)
            )
        texts, count = [], 0
        for row in rows[:, 1:].cpu():
            at = torch.isin(row, ends).nonzero()
            ids = row[: int(at[0])] if len(at) else row
            # A document that was cut off may end within a character.
            text = decode(self._tokenizer, ids, skip_special_tokens=True).rstrip("\ufffd").strip()
            tokens = len(token_ids(self._tokenizer, text)) if text else 0
            if tokens >= SHORTEST:
                texts.append(text)
                count += tokens
        return texts, count


@contextmanager
def _drawing(device: torch.device, seed: int) -> Iterator[None]:
    """A block whose random numbers follow from a seed; the caller's own go on after it as if there were none."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(seed % 2**63)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed % 2**63)
        yield
