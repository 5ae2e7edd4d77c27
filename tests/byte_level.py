"""Tokenizers of the two kinds that GGUF knows, trained on a line of text, in a model's folder."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = "the quick brown fox jumps over the lazy dog; 1,234.5 naïve cafés, it's   about\n\n 2048 tokens — and so on. "
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "qwen2": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}
"""llama.cpp's names of ways to split a text, and what does it."""


def save_byte_level(folder: Path, vocab_size: int, split: str = "gpt-2") -> None:
    """A byte-level BPE tokenizer of fewer tokens than ``vocab_size``, which must be above 270."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=split == "llama-bpe"))
    tokenizer.pre_tokenizer = SPLITS[split]
    tokenizer.decoder = decoders.ByteLevel()
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 4,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    _save(tokenizer, folder)


def save_sentencepiece(folder: Path, vocab_size: int) -> None:
    """BPE on characters with bytes for the rest, spaces as ▁: of fewer tokens than ``vocab_size``, above 330."""
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 270, show_progress=False)
    pieces.train_from_iterator([TEXT] * 4, trainer)
    trained = pieces.get_vocab()
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for token in sorted(trained, key=lambda token: trained[token]):
        vocab.setdefault(token, len(vocab))
    # As SentencePiece's merges: every pair whose result is a token, by the result's rank.
    merges = [
        (token[:cut], token[cut:])
        for token in sorted((token for token in trained if len(token) > 1), key=lambda token: trained[token])
        for cut in range(1, len(token))
        if token[:cut] in trained and token[cut:] in trained
    ]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    _save(tokenizer, folder)


def _save(tokenizer: Tokenizer, folder: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
