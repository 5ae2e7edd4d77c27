"""Load tokenizers of folders and GGUF files through transformers, without running code from a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any

from headwise.base.disk import storage_errors
from headwise.base.documents import load_json
from headwise.errors import ArgumentError, CheckpointError, HeadwiseError
from headwise.models.checkpoints.unsafe import refuse_tokenizer_class
from headwise.models.specs import LARGEST_CONFIG, gguf_config, read_gguf_header
from headwise.models.specs.gguf_header import GgufHeader

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def load_tokenizer(path: Path) -> Any:
    """Load the tokenizer of a model folder or a ``.gguf`` file.

    For example ``load_tokenizer(Path("./model"))``.

    Args:
        path: the folder or file.

    Raises:
        CheckpointError: the path has no tokenizer, or transformers cannot read it.
    """
    if path.is_file():
        return load_gguf_tokenizer(path)
    if not any((path / name).is_file() for name in _FILES):
        raise CheckpointError("tokenizer", str(path), f"is missing: the folder has none of {', '.join(_FILES)}")
    from transformers import AutoTokenizer

    refuse_tokenizer_class(path)
    with refused_tokenizer(path, "could not be loaded"):
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def tokenize(tokenizer: Any, text: str | list[str], **options: Any) -> Any:
    """Tokenize one or several texts.

    For example ``tokenize(tokenizer, "Once upon a time", return_tensors="pt")["input_ids"]``.

    Args:
        tokenizer: transformers'.
        text: one text, or a list.
        options: the options of the tokenizer's own call.

    Raises:
        CheckpointError: the tokenizer can be loaded but not used, such as one whose unknown token is not in its
            vocabulary.
    """
    with refused_tokenizer(tokenizer.name_or_path, "could not read the text"):
        return tokenizer(text, verbose=False, **options)


def decode(tokenizer: Any, ids: Any, **options: Any) -> str:
    """Turn token ids into text.

    For example ``decode(tokenizer, [504, 3575])``.

    Args:
        tokenizer: transformers'.
        ids: ``[S]``, a tensor or a list.
        options: the options of the tokenizer's own ``decode``.

    Raises:
        CheckpointError: the tokenizer can be loaded but not used.
    """
    with refused_tokenizer(tokenizer.name_or_path, "could not write the text"):
        return str(tokenizer.decode(ids, **options))


def chat_text(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """Write messages as one text by the tokenizer's chat template, up to where the answer begins.

    For example ``chat_text(tokenizer, [{"role": "user", "content": "Who are you?"}])``. transformers runs a template
    in a sandbox, in which it reaches neither files nor Python's modules.

    Args:
        tokenizer: transformers'.
        messages: the role and the content of each.

    Raises:
        CheckpointError: the template is damaged, or asks for what the sandbox does not give.
    """
    with refused_tokenizer(tokenizer.name_or_path, "could not write a chat by its template"):
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def load_gguf_tokenizer(path: Path) -> Any:
    """Load the tokenizer of a ``.gguf`` file; the last one is kept, as reading one takes seconds.

    Args:
        path: the file.

    Returns:
        A copy, which the caller may change.

    Raises:
        CheckpointError: transformers cannot read it.
        StorageError: the file cannot be read.
    """
    with storage_errors("file", path, "read"):
        stat = path.stat()
    with refused_tokenizer(path, "could not be loaded"):
        return deepcopy(_read_gguf_tokenizer(path, stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=1)
def _read_gguf_tokenizer(path: Path, *_changed: int) -> Any:
    header = read_gguf_header(path)
    loader = _gguf_tokenizer_class(header)
    with TemporaryDirectory() as alone:  # transformers would take a tokenizer.json that lies beside the file
        (Path(alone) / path.name).symlink_to(header.files[0].absolute())
        tokenizer = loader.from_pretrained(alone, gguf_file=path.name, local_files_only=True, trust_remote_code=False)
    tokenizer.name_or_path = str(path)
    return tokenizer


def _gguf_tokenizer_class(header: GgufHeader) -> Any:
    """The class that transformers has for the tokenizer of a file.

    `AutoTokenizer` would choose it by the config, and make a string of every entry of the vocabulary to read that:
    tens of seconds for a large one. It cannot read that of a deepseek2 file.
    """
    from transformers import CONFIG_MAPPING, TOKENIZER_MAPPING, AutoTokenizer, PreTrainedTokenizerFast

    if header.architecture == "deepseek2":
        return PreTrainedTokenizerFast
    try:
        config = CONFIG_MAPPING[gguf_config(header)["model_type"]]
    except (HeadwiseError, KeyError):
        return AutoTokenizer
    return TOKENIZER_MAPPING.get(config, PreTrainedTokenizerFast)


def refuse_other_tokens(own: Path, other: Path, *, name: str, source: str) -> None:
    """Refuse a model that numbers tokens otherwise than another, whose tokens it would be given.

    Tokens that only one of both has, such as names of reserved numbers, do not count. A model without a tokenizer is
    taken to have the other's. For example
    ``refuse_other_tokens(model, teacher, name="teacher", source=str(teacher))``.

    Args:
        own: a model's folder or ``.gguf`` file.
        other: the other's.
        name: the argument that names the other, such as ``against``.
        source: the value of that option.

    Raises:
        ArgumentError: a token has two numbers.
    """
    try:
        ours, theirs = (load_tokenizer(path).get_vocab() for path in (own, other))
    except CheckpointError:
        return
    differing = [token for token, number in ours.items() if theirs.get(token, number) != number]
    if differing:
        token = min(differing, key=ours.__getitem__)
        rule = f"has {theirs[token]} as the token {token!r}, which is {ours[token]} in the model"
        raise ArgumentError(name, source, rule)


@contextmanager
def refused_tokenizer(path: Path | str, failure: str) -> Iterator[None]:
    """Turn any error of a tokenizer into a `CheckpointError`.

    Args:
        path: the path of the tokenizer.
        failure: what the error means, such as ``could not be loaded``.

    Raises:
        CheckpointError: reading the tokenizer raised any error.
    """
    try:
        yield
    except (HeadwiseError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of many kinds; a panic of tokenizers' Rust code is no Exception
        reason = shorten(str(error), 300, placeholder=" …") or type(error).__name__
        raise CheckpointError("tokenizer", str(path), f"{failure}: {reason}") from None


def max_length(folder: Path) -> int | None:
    """The number of tokens of a sentence that sentence-transformers reads; None where the folder does not say.

    For example ``max_length(Path("./minilm"))``.

    Args:
        folder: the folder of a sentence encoder.

    Raises:
        CheckpointError: ``sentence_bert_config.json`` is damaged.
    """
    file = folder / "sentence_bert_config.json"
    if not file.is_file() or not (folder / "modules.json").is_file():  # sentence-transformers reads both or neither
        return None
    try:
        length = load_json(file, LARGEST_CONFIG)["max_seq_length"]
    except KeyError:
        return None
    except (OSError, ValueError, TypeError):
        raise CheckpointError(file.name, str(file), "is missing or damaged") from None
    return length if type(length) is int and length > 0 else None
