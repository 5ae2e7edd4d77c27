"""Retrieval by a sentence encoder and its reference: the rank of each question's passage among all passages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel

from headwise.base.documents import load_json
from headwise.base.options import RetrievalOptions, takes_options
from headwise.base.progress import Progress, silent
from headwise.base.type_checks import checked_types
from headwise.errors import ArgumentError, CheckpointError
from headwise.measure.evaluation.results import Paired, Rate, compare_rates
from headwise.measure.evaluation.scoring import similar_length_batches
from headwise.measure.texts.sources import read_jsonl
from headwise.models.checkpoints import (
    dtype_name,
    load_tokenizer,
    max_length,
    model_path,
    refuse_other_tokens,
    refuse_other_weights,
    refuse_unsafe,
    tokenize,
)
from headwise.models.specs import LARGEST_CONFIG, read_json
from headwise.runtime.hf import as_device, as_dtype, follow_lengths

_BATCH = 4096
"""Tokens in a batch, padding included."""
_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max"}


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """How the hidden states of a sentence's tokens become its embedding.

    For example ``Pooling(mode="cls", max_length=256)``.

    Attributes:
        mode: the way to join the states: ``mean`` or ``max`` over the tokens, or the first token's state (``cls``).
        normalize: whether embeddings are scaled to length 1.
        max_length: the number of tokens after which a sentence is cut off; the model's positions when None.
    """

    mode: str = "mean"
    normalize: bool = True
    max_length: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoder:
    """A loaded encoder with its tokenizer and pooling.

    Attributes:
        name: the encoder's source, as the user named it.
        model: the transformers model.
        tokenizer: the transformers tokenizer.
        pooling: the way in which hidden states become embeddings.
    """

    name: str
    model: Any
    tokenizer: Any
    pooling: Pooling


@dataclass(frozen=True, kw_only=True)
class RetrievalEvaluation(Paired, compared=("mrr",)):
    """Question → passage retrieval of an encoder, and of its reference on the same questions.

    Attributes:
        model: the encoder, as the user named it.
        against: the reference, as the user named it.
        file: the file of the questions.
        questions: the number of questions.
        passages: the number of different passages.
        recall_at_1: the fraction of questions whose passage is the nearest.
        recall_at_10: the fraction of questions whose passage is among the nearest ten.
        mrr: the mean reciprocal rank of the questions' passages.
        dtype: the dtype of the model's weights.
        device: the device that the model was run on.
        threads: the number of torch's threads.
    """

    model: str
    against: str | None
    file: str
    questions: int
    passages: int
    recall_at_1: Rate
    recall_at_10: Rate
    mrr: float
    dtype: str
    device: str
    threads: int


@takes_options(RetrievalOptions)
@checked_types
def evaluate_retrieval(
    model: str | Path | Encoder,
    options: RetrievalOptions,
    *,
    against: str | Path | Encoder | None = None,
    progress: Progress = silent,
) -> RetrievalEvaluation:
    """Rank the passages of a file for each of its questions, by the inner product of their embeddings.

    For example ``evaluate_retrieval("./minilm-gqa", against="./minilm", file="boolq.jsonl").recall_at_1.rate``.

    Args:
        model: a model folder or other source with weights, or a loaded encoder.
        options: the keywords below as one object, in place of them.
        against: the reference; its tokenizer and pooling are used for a model that is not loaded yet.
        progress: the callback that reports each batch.

    Raises:
        ArgumentError: the file has another form.
        CheckpointError: a model cannot be read, or computes NaN.
    """
    task = Questions.read(options.file, options.limit)
    encoders = {}
    if against is not None:
        encoders["against"] = _open_encoder(against, options)
    encoders["model"] = _open_encoder(model, options, reference=encoders.get("against"))
    ranks = {name: task.ranks(encoder, progress) for name, encoder in encoders.items()}
    encoder = encoders["model"].model
    run: dict[str, Any] = {
        "file": str(options.file),
        "questions": len(task.questions),
        "passages": len(task.passages),
        "dtype": dtype_name(encoder.dtype),
        "device": str(encoder.device),
        "threads": torch.get_num_threads(),
    }
    reference = None
    if "against" in encoders:
        name = encoders["against"].name
        reference = RetrievalEvaluation(model=name, against=None, **rank_scores(ranks["against"]), **run)
    return RetrievalEvaluation(
        model=encoders["model"].name,
        against=None if reference is None else reference.model,
        **rank_scores(ranks["model"], ranks.get("against"), seed=options.seed),
        **run,
        reference=reference,
    )


@dataclass(frozen=True, eq=False)
class Questions:
    """The questions of a file and the passages that answer them.

    Attributes:
        questions: the Q questions, as texts.
        passages: the different passages, as texts.
        answers: the index of each question's passage, ``[Q]``.
    """

    questions: list[str]
    passages: list[str]
    answers: Tensor

    @classmethod
    def read(cls, file: str | Path, limit: int | None = None) -> Questions:
        """Read a file as described at `evaluate_retrieval`.

        Args:
            file: a ``.jsonl`` file.
            limit: the number of questions, from the beginning; all when None.

        Raises:
            ArgumentError: the file has another form.
        """
        rows = read_jsonl(file, name="retrieval", limit=limit)
        for number, row in enumerate(rows, 1):
            if not all(isinstance(row.get(key), str) and row[key].strip() for key in ("question", "passage")):
                raise ArgumentError("retrieval", f"{file}, item {number}", "must have the texts question and passage")
        passages = list(dict.fromkeys(row["passage"] for row in rows))
        places = {passage: place for place, passage in enumerate(passages)}
        answers = torch.tensor([places[row["passage"]] for row in rows])
        return cls([row["question"] for row in rows], passages, answers)

    def ranks(self, encoder: Encoder, progress: Progress = silent) -> Tensor:
        """The rank ``[Q]`` of each question's passage; 1 is the nearest."""
        questions = embed_texts(encoder, self.questions, progress=progress)
        return answer_ranks(questions, embed_texts(encoder, self.passages, progress=progress), self.answers)


def rank_scores(ranks: Tensor, reference: Tensor | None = None, *, seed: int = 0) -> dict[str, Any]:
    """Recall and mean reciprocal rank, as fields of `RetrievalEvaluation`.

    Args:
        ranks: the rank of each question's passage, ``[Q]``; 1 is the nearest.
        reference: the reference's ranks for the same questions, ``[Q]``; None without a reference.
        seed: the seed of the bootstrap intervals.
    """
    recall = {
        f"recall_at_{count}": compare_rates(
            (ranks <= count).tolist(), None if reference is None else (reference <= count).tolist(), seed=seed
        )
        for count in (1, 10)
    }
    return {**recall, "mrr": float((1 / ranks).mean())}


@torch.inference_mode()
def embed_texts(encoder: Encoder, texts: Sequence[str], *, progress: Progress = silent) -> Tensor:
    """Embed texts.

    For example ``embed_texts(load_encoder("./minilm"), ["a question", "a passage"])``.

    Args:
        encoder: the model with its tokenizer and pooling.
        texts: sentences or passages; each is cut off at the encoder's length.
        progress: the callback that reports each batch.

    Returns:
        Embeddings ``[texts, E]``, in float32 on the CPU.

    Raises:
        CheckpointError: the model computes NaN or infinite values.
    """
    model, tokenizer, pooling = encoder.model, encoder.tokenizer, encoder.pooling
    positions = getattr(model.config, "max_position_embeddings", None)
    length = pooling.max_length or positions
    options = {"truncation": True, "max_length": length} if length else {}
    rows: list[list[int]] = tokenize(tokenizer, list(texts), **options)["input_ids"]
    embeddings: dict[int, Tensor] = {}
    done = 0
    for batch in similar_length_batches(model, list(map(len, rows)), tokens=_BATCH):
        progress("embedding", done, len(rows))
        ids = torch.full((len(batch), len(rows[batch[0]])), tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for place, index in enumerate(batch):
            ids[place, : len(rows[index])] = torch.tensor(rows[index])
            mask[place, : len(rows[index])] = 1
        mask = mask.to(model.device)
        states = model(input_ids=ids.to(model.device), attention_mask=mask).last_hidden_state
        pooled = pool_states(states, mask, pooling).float().cpu()
        if not bool(pooled.isfinite().all()):
            raise CheckpointError("model", encoder.name, "computes NaN or infinite embeddings")
        embeddings |= dict(zip(batch, pooled, strict=True))
        done += len(batch)
    progress("embedding", done, len(rows))
    return torch.stack([embeddings[index] for index in range(len(rows))])


def pool_states(states: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Pool the hidden states of sentences to embeddings ``[B, E]``.

    Args:
        states: hidden states of the last layer, ``[B, T, E]``.
        mask: 1 for a sentence's tokens and 0 for padding, ``[B, T]``.
        pooling: the mode, and whether to normalise.
    """
    is_token = mask[..., None].bool()  # [B, T, 1]
    if pooling.mode == "cls":
        pooled = states[:, 0]
    elif pooling.mode == "max":
        pooled = states.masked_fill(~is_token, -torch.inf).amax(1)
    else:
        pooled = states.masked_fill(~is_token, 0).sum(1) / is_token.sum(1)
    return torch.nn.functional.normalize(pooled, dim=-1) if pooling.normalize else pooled


def answer_ranks(questions: Tensor, passages: Tensor, answers: Tensor) -> Tensor:
    """The rank ``[Q]`` of each question's passage by inner product; 1 is the nearest, and a tie counts against it.

    Args:
        questions: embeddings of the questions, ``[Q, E]``.
        passages: embeddings of the passages, ``[P, E]``.
        answers: the index of each question's passage, ``[Q]``.
    """
    scores = questions @ passages.T
    return (scores >= scores.gather(1, answers[:, None])).sum(1)


def load_encoder(
    source: str | Path, *, dtype: str | None = None, device: str | None = None, reference: Encoder | None = None
) -> Encoder:
    """Load an encoder as sentence-transformers does.

    For example ``load_encoder("./minilm", dtype="float32")``.

    Args:
        source: a model folder.
        dtype: the dtype of the weights; the stored dtype when None.
        device: the device to run on; the CPU when None.
        reference: an encoder whose tokenizer and pooling to use in place of the folder's.

    Raises:
        ArgumentError: there is no such source, dtype or device, or its tokens are not those of ``reference``.
        CheckpointError: files are missing or damaged, or the pooling is not supported.
    """
    torch_dtype, torch_device = None if dtype is None else as_dtype(dtype), as_device(device)
    path = model_path(source)
    if reference is not None:
        refuse_other_tokens(path, model_path(reference.name), name="against", source=reference.name)
    model = _encoder_model(path, torch_dtype).to(torch_device)
    return Encoder(
        name=str(source),
        model=model,
        tokenizer=load_tokenizer(path) if reference is None else reference.tokenizer,
        pooling=read_pooling(path) if reference is None else reference.pooling,
    )


def _encoder_model(path: Path, dtype: torch.dtype | None) -> Any:
    refuse_unsafe(read_json(path / "config.json"), path)
    refuse_other_weights(path)
    try:
        model, report = AutoModel.from_pretrained(
            path,
            dtype=dtype or "auto",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises many kinds
        reason = shorten(str(error), 300, placeholder=" …")
        raise CheckpointError("folder", str(path), f"could not be loaded: {reason}") from None
    for name in sorted(report["missing_keys"]):
        if not name.startswith("pooler."):  # embeddings do not use BERT's pooler
            raise CheckpointError("tensor", name, f"is missing from {path}")
    follow_lengths(model)
    return model.eval()


def read_pooling(folder: Path) -> Pooling:
    """Read a folder's pooling from sentence-transformers' files; without them, the normalised mean.

    For example ``read_pooling(Path("./minilm")).mode``.

    Args:
        folder: a model folder.

    Raises:
        CheckpointError: the files are damaged, or name an unknown module or mode.
    """
    if not (folder / "modules.json").is_file():
        return Pooling()
    modules = _read_json(folder / "modules.json", list)
    kinds = {str(module.get("type", "")).rpartition(".")[2]: str(module.get("path", "")) for module in modules}
    if unknown := sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"}):
        raise CheckpointError("modules.json", unknown[0], "must be Transformer, Pooling or Normalize")
    config = _read_json(folder / kinds.get("Pooling", "") / "config.json", dict) if "Pooling" in kinds else {}
    modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if "Pooling" in kinds and (len(modes) != 1 or modes[0] not in _POOLINGS):
        raise CheckpointError("pooling_mode", ", ".join(modes), f"must be one of {', '.join(_POOLINGS)}")
    return Pooling(
        mode=_POOLINGS[modes[0]] if modes else "mean", normalize="Normalize" in kinds, max_length=max_length(folder)
    )


def _read_json(path: Path, kind: type) -> Any:
    try:
        value = load_json(path, LARGEST_CONFIG)
    except (OSError, ValueError):
        value = None
    if not isinstance(value, kind):
        raise CheckpointError(path.name, str(path), "is missing or damaged")
    return value


def _open_encoder(
    source: str | Path | Encoder, options: RetrievalOptions, reference: Encoder | None = None
) -> Encoder:
    if isinstance(source, Encoder):
        return source
    return load_encoder(source, dtype=options.dtype, device=options.device, reference=reference)
