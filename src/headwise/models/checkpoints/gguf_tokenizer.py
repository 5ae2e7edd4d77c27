"""The tokenizer of a model as GGUF's metadata.

A GGUF file's own metadata are copied. A folder's ``tokenizer.json`` is of one of two kinds that llama.cpp implements.
One is byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): llama.cpp knows the ways in which these split a text, by names.
The other is BPE on characters with bytes for the rest (SentencePiece's, as in Llama 2 and Mistral): it reads scores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.errors import CheckpointError
from headwise.models.checkpoints.checkpoint import Checkpoint
from headwise.models.checkpoints.gguf_reader import GgufCheckpoint
from headwise.models.checkpoints.tokenizer import load_tokenizer, refused_tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""GGUF's kinds of tokens."""

_GPT2_SPLIT = "gpt-2"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPLITS = {_LLAMA3: "llama-bpe", _LLAMA3.replace("{1,3}", ""): "qwen2"}
"""llama.cpp's names of the ways to split a text, by their regular expressions."""

_OWN_MERGES = ("llama-bpe",)
"""The ways with which llama.cpp takes a word that is a token without merging; see `ignore_merges`."""


@dataclass(frozen=True)
class TokenizerField:
    """One value of the metadata.

    Attributes:
        key: the field's name, such as ``tokenizer.ggml.tokens``.
        value: a number, a string or a list of them.
        type: the name of its type in GGUF, such as ``ARRAY``.
        item: the name of the type of an array's items.
    """

    key: str
    value: Any
    type: str
    item: str | None = None


def tokenizer_fields(source: Checkpoint, vocab_size: int) -> list[TokenizerField]:
    """The metadata of a model's tokenizer; of a folder without one, that there is none.

    For example ``tokenizer_fields(open_checkpoint("smollm2-135m"), 49152)``.

    Args:
        source: the model folder or ``.gguf`` file.
        vocab_size: rows of the model's embeddings; a tokenizer with fewer tokens is filled up.

    Raises:
        CheckpointError: the tokenizer is damaged, has more tokens, or is of a kind that llama.cpp does not know.
    """
    if isinstance(source, GgufCheckpoint):
        return _copied(source.path, vocab_size)
    if not (source.path / "tokenizer.json").is_file():
        if any((source.path / name).is_file() for name in ("tokenizer.model", "vocab.json", "tokenizer_config.json")):
            load_tokenizer(source.path)  # refused where it is damaged
            rule = "has no tokenizer.json; save the tokenizer once with transformers, which writes one"
            raise CheckpointError("tokenizer", str(source.path), rule)
        return [TokenizerField("tokenizer.ggml.model", "none", "STRING")]
    loaded = load_tokenizer(source.path)
    fields = _of_json(source.path, vocab_size, loaded)
    for field in fields:
        for text in field.value if isinstance(field.value, list) else [field.value]:
            if isinstance(text, str) and text.encode(errors="replace").decode() != text:
                raise CheckpointError(field.key, ascii(text[:40]), "must be text that UTF-8 can hold")
    return fields


def _copied(path: Path, vocab_size: int) -> list[TokenizerField]:
    from gguf import GGUFReader

    fields = []
    for key, field in GGUFReader(path).fields.items():
        if key.startswith("tokenizer."):
            first, *rest = field.types
            fields.append(TokenizerField(key, field.contents(), first.name, rest[-1].name if rest else None))
    tokens = next((field.value for field in fields if field.key == "tokenizer.ggml.tokens"), None)
    if tokens is not None and len(tokens) != vocab_size:
        rule = f"must have a token for each of the model's {vocab_size} embeddings"
        raise CheckpointError("tokenizer", f"{len(tokens)} tokens", rule)
    return fields or [TokenizerField("tokenizer.ggml.model", "none", "STRING")]


def _of_json(folder: Path, vocab_size: int, loaded: Any) -> list[TokenizerField]:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = tokenizer["model"]
    if model.get("type") != "BPE":
        rule = "is not written as GGUF; can: BPE, byte-level or with byte_fallback"
        raise CheckpointError("tokenizer model", model.get("type"), rule)
    # As transformers numbers them, which reads more files than this one.
    added = {number: {"special": token.special} for number, token in loaded.added_tokens_decoder.items()}
    vocab = loaded.get_vocab()
    names = {number: text for text, number in vocab.items()}
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise CheckpointError(f"tokenizer {name}", model[name], "has no place in GGUF")
    if len(names) != len(vocab):
        raise CheckpointError("tokenizer.json", str(folder), "must give each token a number of its own")
    if names and max(names) >= vocab_size:
        rule = f"must be below {vocab_size}, the number of the model's embeddings"
        raise CheckpointError("tokenizer token", max(names), rule)
    tokens = [names.get(number, f"[PAD{number}]") for number in range(vocab_size)]
    types = [_type(number, names, added, model) for number in range(vocab_size)]
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    if not merges:
        raise CheckpointError("tokenizer merges", 0, "must be at least one for GGUF")
    if model.get("byte_fallback"):
        fields = _sentencepiece(tokenizer, tokens, merges)
    else:
        pairs = [" ".join(merge) for merge in merges]
        fields = [
            TokenizerField("tokenizer.ggml.model", "gpt2", "STRING"),
            TokenizerField("tokenizer.ggml.pre", _split(tokenizer), "STRING"),
            TokenizerField("tokenizer.ggml.merges", pairs, "ARRAY", "STRING"),
        ]
    fields += [
        TokenizerField("tokenizer.ggml.tokens", tokens, "ARRAY", "STRING"),
        TokenizerField("tokenizer.ggml.token_type", types, "ARRAY", "INT32"),
    ]
    with refused_tokenizer(folder, "names special tokens in a way that GGUF cannot hold"):
        special = _special_vocab(folder, vocab_size)
    words = {"unk": "unknown", "sep": "seperator", "pad": "padding"}  # "seperator" is GGUF's spelling
    for kind, number in special.special_token_ids.items():
        fields.append(TokenizerField(f"tokenizer.ggml.{words.get(kind, kind)}_token_id", number, "UINT32"))
    adds = {"bos": False, "eos": False} | special.add_special_token
    for kind, value in adds.items():
        fields.append(TokenizerField(f"tokenizer.ggml.add_{kind}_token", bool(value), "BOOL"))
    if isinstance(special.chat_template, str):
        fields.append(TokenizerField("tokenizer.chat_template", special.chat_template, "STRING"))
    return fields


def _special_vocab(folder: Path, vocab_size: int) -> Any:
    """The special tokens that a folder names, by the gguf package; -1 is none, as configs of Llama say of padding."""
    from gguf import SpecialVocab

    class Named(SpecialVocab):  # type: ignore[misc]
        def _set_special_token(self, typ: str, tid: Any) -> None:
            if tid != -1:
                super()._set_special_token(typ, tid)

    return Named(folder, n_vocab=vocab_size)


def _type(number: int, names: Mapping[int, str], added: Mapping[int, Any], model: Mapping[str, Any]) -> int:
    """GGUF's kind of a token."""
    if number not in names:
        return _UNUSED
    text = names[number]
    if text == model.get("unk_token"):
        return _UNKNOWN
    if number in added:
        return _CONTROL if added[number].get("special") else _USER_DEFINED
    is_byte = bool(model.get("byte_fallback")) and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
    return _BYTE if is_byte else _NORMAL


def _split(tokenizer: Mapping[str, Any]) -> str:
    """llama.cpp's name of the way in which a byte-level tokenizer splits a text.

    Raises:
        CheckpointError: llama.cpp has no name for it.
    """
    steps = tokenizer.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    normalizer, ignores_merges = tokenizer.get("normalizer"), bool(tokenizer["model"].get("ignore_merges"))
    kinds = [step.get("type") for step in steps]
    last = steps[-1] if steps else {}
    name = None
    is_byte_level = kinds[-1:] == ["ByteLevel"] and not last.get("add_prefix_space")
    if is_byte_level and normalizer in (None, {"type": "NFC"}):
        uses_regex = last.get("use_regex", True)
        if kinds == ["ByteLevel"] and uses_regex:
            name = _GPT2_SPLIT
        elif kinds == ["Digits", "ByteLevel"] and uses_regex and steps[0].get("individual_digits"):
            name = "smollm"
        elif kinds == ["Split", "ByteLevel"] and not uses_regex and not steps[0].get("invert"):
            is_isolated = steps[0].get("behavior") == "Isolated"
            name = _SPLITS.get(steps[0].get("pattern", {}).get("Regex")) if is_isolated else None
    if name is None or ignores_merges != (name in _OWN_MERGES):
        rule = f"splits a text in a way that headwise knows no name of in GGUF; can: {', '.join(_NAMES)}"
        raise CheckpointError("tokenizer pre_tokenizer", ", ".join(map(str, kinds)), rule)
    return name


_NAMES = (_GPT2_SPLIT, "smollm", *_SPLITS.values())


def _sentencepiece(
    tokenizer: Mapping[str, Any], tokens: list[str], merges: list[tuple[str, ...]]
) -> list[TokenizerField]:
    """Tokens with scores: llama.cpp merges the pair whose result has the highest, as BPE does by rank.

    Raises:
        CheckpointError: spaces are treated in another way than SentencePiece does.
    """
    steps = tokenizer.get("pre_tokenizer")
    normalizer = tokenizer.get("normalizer") or {}
    parts = normalizer.get("normalizers", [normalizer])
    kinds = [part.get("type") for part in parts]
    is_usual = all(_is_usual(part) for part in (*parts, steps or {}))
    if is_usual and steps is None and kinds in (["Prepend", "Replace"], ["Replace"]):
        adds_space = kinds[0] == "Prepend"
    elif is_usual and steps and steps.get("type") == "Metaspace" and kinds == [None] and not steps.get("split"):
        adds_space = steps.get("prepend_scheme", "always") != "never"
    else:
        rule = "must be SentencePiece's: a space in front and ▁ for spaces, with nothing split before"
        raise CheckpointError("tokenizer normalizer", str(kinds), rule)
    rank: dict[str, int] = {}
    for number, (first, second) in enumerate(merges):
        rank.setdefault(first + second, number)
    scores = [float(-rank[token]) if token in rank else float(-len(merges)) for token in tokens]
    return [
        TokenizerField("tokenizer.ggml.model", "llama", "STRING"),
        TokenizerField("tokenizer.ggml.pre", "default", "STRING"),
        TokenizerField("tokenizer.ggml.scores", scores, "ARRAY", "FLOAT32"),
        TokenizerField("tokenizer.ggml.add_space_prefix", adds_space, "BOOL"),
    ]


def _is_usual(step: Mapping[str, Any]) -> bool:
    """Whether a step writes spaces as SentencePiece does."""
    usual = {"prepend": _SPACE, "content": _SPACE, "replacement": _SPACE, "pattern": {"String": " "}}
    return all(step.get(name, value) == value for name, value in usual.items())


_SPACE = "▁"
