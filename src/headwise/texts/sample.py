"""Let a model write text, to calibrate and to train on where none is at hand."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from headwise.checkpoints import decode, load_tokenizer, run_identity
from headwise.disk import clearly, refuse_file, replace, sync, write_whole
from headwise.errors import ArgumentError, CheckpointError
from headwise.hf.generate import stop_tokens
from headwise.hf.load import load, open_decoder
from headwise.options import takes_options
from headwise.options.sample import LENGTH, SHORTEST, SampleOptions
from headwise.progress import Progress, silent
from headwise.type_checks import typed

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
        tokens: of them.
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
@typed
@torch.inference_mode()
def sample(model: str | Path, output: str | Path, options: SampleOptions, *, progress: Progress = silent) -> Sample:
    """Let a model write documents into a text file, to calibrate and to train on where no text is at hand.

    For example ``sample("smollm2-135m", "own.txt", tokens=250_000)``; then ``heal(…, text=["text.txt", "own.txt"])``.

    Each document begins where the texts that the model was trained on did: behind ``<|endoftext|>`` where the
    tokenizer has it, or else behind its first token of a text. A killed run is continued by the same call, and writes
    the same.
    Distillation on text that the model wrote is due to Liu et al. (2023, arXiv:2305.17888).

    Args:
        model: a model folder, ``.gguf`` or other source with weights.
        output: the file to write; documents have an empty line between them.
        options: the keywords below as one object, in place of them.
        progress: told of the tokens that are written.

    Raises:
        ArgumentError: an argument is outside its rule, or there is a file at the output.
        SpecError: the model is no text decoder.
        CheckpointError: the model cannot be read, or its tokenizer has no token that begins a text.
        StorageError: the file cannot be written.
    """
    out = Path(output)
    if not (options.overwrite and out.is_file()):
        refuse_file(out)
    checkpoint = open_decoder(model)
    tokenizer = load_tokenizer(checkpoint.path)
    begin = _first_token(tokenizer)
    length = _length(options, checkpoint.spec.max_position_embeddings)
    loaded = load(checkpoint.path, dtype=options.dtype, device=options.device)
    vocabulary = loaded.get_input_embeddings().weight.shape[0]
    if begin >= vocabulary:
        raise ArgumentError("token", begin, f"is outside the model's vocabulary of {vocabulary}")
    part = _Part(out.with_name(f".{out.name}.headwise-partial"), run_identity(checkpoint, **options.identity()))
    while part.tokens < options.tokens:
        progress(WRITING, part.tokens, options.tokens)
        start = time.perf_counter()
        written = _documents(loaded, begin, length, options, number=part.batches)
        documents = [ids for ids in written if len(ids) >= SHORTEST]
        texts = [decode(tokenizer, ids, skip_special_tokens=True).strip() for ids in documents]
        part.add(texts, sum(map(len, documents)), time.perf_counter() - start)
        if part.empty >= PATIENCE:
            rule = f"ends nearly every text within {SHORTEST} tokens: there is nothing to learn from"
            raise CheckpointError("model", str(model), rule)
    progress(WRITING, options.tokens, options.tokens)
    count = part.finish(out)
    return Sample(
        model=str(model), output=str(output), documents=count, tokens=part.tokens, seconds=round(part.seconds, 3)
    )


def _length(options: SampleOptions, positions: int | None) -> int:
    """The most tokens of a document; the token that it begins behind has a position too."""
    length = options.length or min(LENGTH, (positions or LENGTH + 1) - 1)
    if positions is not None and length >= positions:
        raise ArgumentError("length", length, f"must be below {positions}, the model's positions")
    if length < SHORTEST:
        raise ArgumentError("length", length, f"must be at least {SHORTEST}; the model has {positions} positions")
    return length


def _first_token(tokenizer: Any) -> int:
    """The token that a text begins behind."""
    for token in (tokenizer.get_vocab().get(_BETWEEN_TEXTS), tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise CheckpointError("tokenizer", type(tokenizer).__name__, "has no token that begins a text")


def _documents(model: Any, begin: int, length: int, options: SampleOptions, *, number: int) -> Iterator[Tensor]:
    """The tokens of a batch of documents, a function of its number alone."""
    ends = sorted({begin, *stop_tokens(model)})
    first = torch.full((options.batch, 1), begin, device=model.device)
    model.generation_config = GenerationConfig(
        max_new_tokens=length,
        do_sample=True,
        temperature=options.temperature,
        top_k=0,
        top_p=options.top_p,
        eos_token_id=ends,
        pad_token_id=begin,
    )
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(options.seed * 1_000_003 + number)
        rows = model.generate(first, attention_mask=torch.ones_like(first))[:, 1:].cpu()
    for row in rows:
        at = torch.isin(row, torch.tensor(ends)).nonzero()
        yield row[: int(at[0])] if len(at) else row


class _Part:
    """The documents that are written, in a file with a line of JSON for each batch.

    Attributes:
        batches: the number of batches.
        empty: how many of the last ones have no document.
        tokens: of all documents.
        seconds: that they took.

    Args:
        path: of the file; what another run left there is replaced.
        run: the digest of all that decides the documents.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._path, self._run = path, run
        self._texts: list[str] = []
        self.batches, self.empty, self.tokens, self.seconds = 0, 0, 0, 0.0
        for line in self._lines():
            self._texts += line["texts"]
            self._count(line)

    def add(self, texts: list[str], tokens: int, seconds: float) -> None:
        """Add a batch; when this returns, it is on disk."""
        line = {"texts": texts, "tokens": tokens, "seconds": seconds}
        with clearly("output", self._path):
            if self.batches == 0:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self._path, (json.dumps({"run": self._run}) + "\n").encode())
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            sync(self._path)
        self._texts += texts
        self._count(line)

    def finish(self, output: Path) -> int:
        """Write the text file in the place of this one; the number of documents."""
        with clearly("output", output):
            write_whole(self._path, ("\n\n".join(self._texts) + "\n").encode())
            replace(self._path, output)
        return len(self._texts)

    def _count(self, line: dict[str, Any]) -> None:
        self.batches += 1
        self.empty = 0 if line["texts"] else self.empty + 1
        self.tokens += line["tokens"]
        self.seconds += line["seconds"]

    def _lines(self) -> list[dict[str, Any]]:
        """The batches of an earlier run of the same identity, without one that was cut off."""
        try:
            head, *lines = self._path.read_text(encoding="utf-8").split("\n")
            if json.loads(head) != {"run": self._run}:
                return []
        except (OSError, ValueError):
            return []
        whole = [json.loads(line) for line in lines[:-1]]
        if lines and lines[-1]:  # a line without its end
            text = "".join(f"{line}\n" for line in (head, *lines[:-1]))
            with clearly("output", self._path):
                write_whole(self._path, text.encode())
        return whole
