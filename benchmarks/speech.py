"""Convert the decoder of Whisper, which writes what it hears, and measure what it still understands.

    python -m benchmarks.speech              # every way; writes benchmarks/results/speech.json

Whisper tiny.en hears sentences of the Brown corpus, which voices of a synthesiser, flite, read in turn. Both
attentions of each layer are converted, to what the decoder wrote and to what the encoder heard, from the weights
alone. A way is a target as frontiers spell it, and after a slash its method. Beside the source, two losses are
measured: the divergence of the predictions for each token of the sentences, and the share of words that are wrong in
what each model writes by itself.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import shutil
import subprocess
import wave
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from benchmarks.kept import Kept, say
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.modeling_outputs import BaseModelOutput

import headwise
from benchmarks import data
from headwise.costs.formulas.target import target_options
from headwise.measure.evaluation.beside_source import bfloat16_bytes
from headwise.measure.evaluation.scoring import kl_divergence
from headwise.measure.texts import read_text
from headwise.models.checkpoints import open_checkpoint

WAYS = ("mla:0.5", "mla:0.45", "mla:0.375", "mla:0.3", "mla:0.25", "gqa:3/aligned", "gqa:3/mean")
ORIGINAL = "original"
VOICES = ("slt", "rms", "awb")
END, START, NO_TIMES = 50256, 50257, 50362
"""Special tokens of Whisper's English models: the end of a text, and the two before it."""

_NAMES = {
    "blocks": "layers",
    "attn": "self_attn",
    "attn_ln": "self_attn_layer_norm",
    "cross_attn": "encoder_attn",
    "cross_attn_ln": "encoder_attn_layer_norm",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "out_proj",
    "mlp_ln": "final_layer_norm",
    "ln": "layer_norm",
    "ln_post": "layer_norm",
    "token_embedding": "embed_tokens",
    "positional_embedding": "embed_positions.weight",
}
_SENTENCE = re.compile(r"[A-Z][a-z']*(?:,? [A-Za-z][a-z']*(?:-[a-z]+)*)+ [a-z]{4,}[.?!]")
_LONGEST = 100
"""Tokens after which a model is stopped that does not end by itself; the longest sentence has fewer."""

_BATCH, _RESAMPLES = 10, 10_000


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", default=[*WAYS], metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--sentences", type=int, default=120, help="to hear")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/speech.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where texts, models and the voices are")
    parser.add_argument("--work", type=Path, default=Path("build/speech"), help="where models are converted")
    parser.add_argument("--again", action="store_true", help="measure rows again that are kept")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    settings = {"source": "Whisper tiny.en", "voices": VOICES, "sentences": options.sentences, "dtype": "float32"}
    kept = Kept(options.json, settings)
    source = save_source(data.whisper(options.cache), data.whisper_tokens(options.cache), options.work / "source")
    own = headwise.load(source)
    said = plain_sentences(read_text(data.brown(options.cache)), options.sentences)
    heard = list(listen(own, said, data.flite(options.cache), options.work))
    for way in (ORIGINAL, *options.ways):
        if way in kept.rows and not options.again:
            continue
        folder = source if way == ORIGINAL else convert(source, way, options.work / "converted")
        model = own if way == ORIGINAL else headwise.load(folder)
        row = {"bytes": cache_bytes(folder), **measure(model, own, heard, kept.rows.get(ORIGINAL))}
        kept.add(way, row)
        wrong = row["word_error_rate"]
        say(f"{way:15} KL {row['kl']:.5f}, {row['kl_999']:.3f}  WER {100 * wrong['rate']:.2f} %, {row['same']} same")
    shutil.rmtree(options.work / "converted", ignore_errors=True)


def save_source(pickle: Path, ranks: Path, folder: Path) -> Path:
    """OpenAI's pickle of an English Whisper as a model folder of transformers, in float32, with its tokenizer."""
    stored = torch.load(pickle, weights_only=True)
    sizes, tensors = stored["dims"], stored["model_state_dict"]
    special = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END, "decoder_start_token_id": START}
    config = WhisperConfig(
        vocab_size=sizes["n_vocab"],
        num_mel_bins=sizes["n_mels"],
        d_model=sizes["n_text_state"],
        encoder_layers=sizes["n_audio_layer"],
        encoder_attention_heads=sizes["n_audio_head"],
        encoder_ffn_dim=4 * sizes["n_audio_state"],
        max_source_positions=sizes["n_audio_ctx"],
        decoder_layers=sizes["n_text_layer"],
        decoder_attention_heads=sizes["n_text_head"],
        decoder_ffn_dim=4 * sizes["n_text_state"],
        max_target_positions=sizes["n_text_ctx"],
        **special,
    )
    model = WhisperForConditionalGeneration(config)
    # The head, which is the embedding, is the only tensor that the pickle lacks.
    model.model.load_state_dict({tensor_name(name): tensor for name, tensor in tensors.items()})
    model.generation_config = GenerationConfig(**special, is_multilingual=False, no_timestamps_token_id=NO_TIMES)
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_pairs(ranks), eos_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    return folder


def tensor_name(name: str) -> str:
    """The name in transformers' ``WhisperModel`` of a tensor of OpenAI's."""
    name = name.replace("mlp.0", "fc1").replace("mlp.2", "fc2")
    return ".".join(_NAMES.get(part, part) for part in name.split("."))


def byte_pairs(ranks: Path) -> Tokenizer:
    """The tokenizer of a file of tiktoken's: on each line a token in base64 and its rank."""
    lines = (line.split() for line in ranks.read_bytes().splitlines())
    letters = bytes_to_unicode()
    vocabulary = {"".join(letters[byte] for byte in base64.b64decode(token)): int(rank) for token, rank in lines}
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(vocabulary, key=vocabulary.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def plain_sentences(text: str, count: int) -> list[str]:
    """Sentences of 16 to 44 words, letters and commas, whose words can be counted: evenly spread over a text."""
    sentences = [
        sentence
        for paragraph in text.split("\n")
        for sentence in re.split(r"(?<=[.?!]) ", paragraph)
        if _SENTENCE.fullmatch(sentence) and 16 <= len(sentence.split()) <= 44
    ]
    return [sentences[index * len(sentences) // count] for index in range(count)]


@dataclass(frozen=True)
class Heard:
    """Some sentences as the encoder heard them, and as tokens.

    Attributes:
        said: the sentences.
        states: the encoder's output, ``[B, 1500, E]``.
        tokens: what the decoder should write, with special tokens before and after, padded, ``[B, T]``.
        counts: how many tokens of each sentence follow the two special ones.
    """

    said: Sequence[str]
    states: Tensor
    tokens: Tensor
    counts: list[int]


@torch.inference_mode()
def listen(model: Any, said: Sequence[str], synthesiser: Path, work: Path) -> Iterator[Heard]:
    """Let voices read sentences to a model, in batches."""
    hear, tokenizer = WhisperFeatureExtractor(), PreTrainedTokenizerFast.from_pretrained(model.name_or_path)
    for start in range(0, len(said), _BATCH):
        batch = said[start : start + _BATCH]
        voices = (VOICES[number % len(VOICES)] for number in range(start, start + len(batch)))
        sounds = [read_aloud(*each, synthesiser, work / "said.wav") for each in zip(batch, voices, strict=True)]
        features = hear(sounds, sampling_rate=16_000, return_tensors="pt").input_features
        ids = [[*tokenizer.encode(f" {sentence}"), END] for sentence in batch]
        longest = max(map(len, ids))
        tokens = [[START, NO_TIMES, *row, *[END] * (longest - len(row))] for row in ids]
        states = model.model.encoder(features).last_hidden_state
        yield Heard(batch, states, torch.tensor(tokens), [*map(len, ids)])


def read_aloud(sentence: str, voice: str, synthesiser: Path, file: Path) -> np.ndarray:
    """The samples of a sentence in a voice of flite, 16,000 a second, from -1 to 1."""
    libraries = next((synthesiser / "lib").glob("*/libflite.so.1")).parent
    command = [synthesiser / "bin/flite", "-voice", voice, "-t", sentence, "-o", file]
    subprocess.run(command, check=True, env={**os.environ, "LD_LIBRARY_PATH": str(libraries)})
    with wave.open(str(file)) as sound:
        assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (16_000, 1, 2)
        return np.frombuffer(sound.readframes(sound.getnframes()), "<i2") / np.float32(2**15)


def convert(source: Path, way: str, folder: Path) -> Path:
    """Convert a model one way."""
    target, _, method = way.partition("/")
    headwise.convert(
        source, folder, **target_options(target), method=method or None, evaluate=False, overwrite=folder.exists()
    )
    return folder


def cache_bytes(folder: Path) -> float:
    """Bytes in bfloat16 of a token in either cache: what it wrote, and what the encoder heard."""
    checkpoint = open_checkpoint(folder)
    spec = checkpoint.spec
    assert [replace(layer, is_causal=True) for layer in spec.cross_layers] == [*spec.layers]
    return bfloat16_bytes(checkpoint, checkpoint.config["max_source_positions"])


@torch.inference_mode()
def measure(model: Any, source: Any, heard: Sequence[Heard], original: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of a row: divergences of what is predicted, and errors of what is written.

    Args:
        model: the model.
        source: the source, which ``original`` is the row of.
        heard: the sentences.
        original: None for the source itself.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source.name_or_path)
    divergences, agreements, written = [], [], []
    for batch in heard:
        states = BaseModelOutput(batch.states)
        scores, reference = (
            each(decoder_input_ids=batch.tokens[:, :-1], encoder_outputs=states).logits[:, 1:].log_softmax(-1)
            for each in (model, source)
        )
        kl = kl_divergence(reference, scores)  # [B, T - 2]
        agree = scores.argmax(-1) == reference.argmax(-1)
        for row, count in enumerate(batch.counts):
            divergences.append(kl[row, :count])
            agreements.append(agree[row, :count])
        ids = model.generate(encoder_outputs=states, max_new_tokens=_LONGEST, do_sample=False)
        written += tokenizer.batch_decode(ids, skip_special_tokens=True)
    said = [sentence for batch in heard for sentence in batch.said]
    errors = [word_errors(*pair) for pair in zip(said, written, strict=True)]
    counts = [len(words(sentence)) for sentence in said]
    other = None if original is None else original["errors"]
    texts = written if original is None else original["written"]
    divergence = torch.cat(divergences).double()
    return {
        "tokens": len(divergence),
        "kl": max(float(divergence.mean()), 0.0),
        "kl_999": float(divergence.quantile(0.999)),
        "top1_agreement": float(torch.cat(agreements).double().mean()),
        "same": sum(own == text for own, text in zip(written, texts, strict=True)),
        "word_error_rate": error_rate(errors, counts, other),
        "words": counts,
        "errors": errors,
        **({"written": written} if original is None else {}),
    }


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation: ``words("Half-past one.")`` are three."""
    return re.findall(r"[a-z0-9']+", text.lower())


def word_errors(said: str, written: str) -> int:
    """The fewest words to put in, take out or replace in what was said to have what was written."""
    before = [*range(len(words(written)) + 1)]
    for count, word in enumerate(words(said), 1):
        after = [count]
        for place, other in enumerate(words(written)):
            after.append(min(before[place + 1] + 1, after[place] + 1, before[place] + (word != other)))
        before = after
    return before[-1]


def error_rate(
    errors: Sequence[int], counts: Sequence[int], reference: Sequence[int] | None = None, *, seed: int = 0
) -> dict[str, float]:
    """The errors of all sentences by their words, with 95 % bootstrap intervals over sentences.

    Args:
        errors: the number of wrong words of each sentence.
        counts: the number of words of each sentence.
        reference: the number that a reference has wrong; None without one.
        seed: the seed of the bootstrap.
    """
    drawn = np.random.default_rng(seed).integers(len(errors), size=(_RESAMPLES, len(errors)))
    many = np.array(counts)

    def summary(wrong: np.ndarray, *names: str) -> dict[str, float]:
        low, high = np.percentile(wrong[drawn].sum(1) / many[drawn].sum(1), [2.5, 97.5])
        return dict(zip(names, (float(wrong.sum() / many.sum()), float(low), float(high)), strict=True))

    result = summary(np.array(errors), "rate", "low", "high")
    if reference is not None:
        result |= summary(np.array(errors) - reference, "difference", "difference_low", "difference_high")
    return result


if __name__ == "__main__":
    main()
