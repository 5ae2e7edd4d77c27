"""The speech benchmark's model, tokens, sentences and errors."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import torch
from benchmarks.speech import (
    byte_pairs,
    error_rate,
    plain_sentences,
    save_source,
    tensor_name,
    word_errors,
    words,
)
from transformers import WhisperConfig, WhisperForConditionalGeneration

import headwise

OPENAI = {
    "encoder.conv1.weight": "encoder.conv1.weight",
    "encoder.positional_embedding": "encoder.embed_positions.weight",
    "encoder.ln_post.bias": "encoder.layer_norm.bias",
    "decoder.token_embedding.weight": "decoder.embed_tokens.weight",
    "decoder.ln.weight": "decoder.layer_norm.weight",
    "decoder.blocks.3.attn.query.bias": "decoder.layers.3.self_attn.q_proj.bias",
    "decoder.blocks.0.attn_ln.bias": "decoder.layers.0.self_attn_layer_norm.bias",
    "decoder.blocks.0.cross_attn.value.weight": "decoder.layers.0.encoder_attn.v_proj.weight",
    "decoder.blocks.0.cross_attn_ln.weight": "decoder.layers.0.encoder_attn_layer_norm.weight",
    "decoder.blocks.0.mlp.2.weight": "decoder.layers.0.fc2.weight",
    "decoder.blocks.0.mlp_ln.bias": "decoder.layers.0.final_layer_norm.bias",
}


def test_names_of_tensors() -> None:
    assert {name: tensor_name(name) for name in OPENAI} == OPENAI


def ranks(path: Path, *tokens: bytes) -> Path:
    """All bytes, and then some tokens, as tiktoken stores them."""
    every = [*(bytes([byte]) for byte in range(256)), *tokens]
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(every)))
    return path


def test_a_pickle_becomes_a_model_that_computes_the_same(tmp_path: Path) -> None:
    config = WhisperConfig(
        vocab_size=50_400,
        num_mel_bins=8,
        d_model=24,
        encoder_layers=1,
        encoder_attention_heads=3,
        encoder_ffn_dim=96,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=96,
        max_source_positions=10,
        max_target_positions=12,
    )
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config).eval()
    theirs = {ours: name for name, ours in each_name(model)}
    tensors = {theirs[name]: tensor for name, tensor in model.model.state_dict().items()}
    sizes = {"n_vocab": 50_400, "n_mels": 8, "n_audio_ctx": 10, "n_text_ctx": 12}
    sizes |= {f"n_{part}_state": 24 for part in ("audio", "text")} | {"n_audio_head": 3, "n_text_head": 2}
    sizes |= {"n_audio_layer": 1, "n_text_layer": 2}
    torch.save({"dims": sizes, "model_state_dict": tensors}, tmp_path / "tiny.pt")
    folder = save_source(tmp_path / "tiny.pt", ranks(tmp_path / "ranks"), tmp_path / "model")
    inputs = {"input_features": torch.randn(1, 8, 20), "decoder_input_ids": torch.tensor([[3, 1, 4, 1, 5]])}
    with torch.inference_mode():
        expected, actual = model(**inputs).logits, headwise.load(folder)(**inputs).logits
    assert torch.equal(actual, expected)


def each_name(model: WhisperForConditionalGeneration) -> list[tuple[str, str]]:
    """OpenAI's name of each tensor of a model, and transformers'."""
    blocks = [
        f"{side}.blocks.{number}.{part}"
        for side, count, parts in (("encoder", 1, ("attn",)), ("decoder", 2, ("attn", "cross_attn")))
        for number in range(count)
        for part in (
            *(f"{own}.{name}" for own in parts for name in ("query.weight", "query.bias", "key.weight")),
            *(f"{own}.{name}" for own in parts for name in ("value.weight", "value.bias", "out.weight", "out.bias")),
            *(f"{own}_ln.{name}" for own in (*parts, "mlp") for name in ("weight", "bias")),
            *(f"mlp.{number}.{name}" for number in (0, 2) for name in ("weight", "bias")),
        )
    ]
    rest = [f"encoder.{name}.{kind}" for name in ("conv1", "conv2", "ln_post") for kind in ("weight", "bias")]
    rest += ["encoder.positional_embedding", "decoder.positional_embedding", "decoder.token_embedding.weight"]
    names = [*blocks, *rest, "decoder.ln.weight", "decoder.ln.bias"]
    assert {tensor_name(name) for name in names} == set(model.model.state_dict())
    return [(name, tensor_name(name)) for name in names]


def test_pairs_of_bytes_are_joined_by_rank(tmp_path: Path) -> None:
    tokenizer = byte_pairs(ranks(tmp_path / "ranks", b"on", b" t", b"ton"))
    assert tokenizer.encode("ton ton").tokens == ["ton", "Ġt", "on"]
    assert tokenizer.encode("\xc3\n").ids == [0xC3, 0x83, 0x0A]
    assert tokenizer.decode(tokenizer.encode("naïve — ton").ids) == "naïve — ton"


def test_sentences_of_plain_words_evenly_spread() -> None:
    plain = [
        f"{name} saw, as one's half-brother did, that all of the others there had gone away before it began."
        for name in ("Ann", "Bob", "Cy", "Dee")
    ]
    text = f'{plain[0]} Too short. {plain[1]}\n\n"{plain[0]}" It cost 3 cents. {plain[2]}\n\n{plain[3]}'
    assert plain_sentences(text, 4) == plain
    assert plain_sentences(text, 2) == [plain[0], plain[2]]


@pytest.mark.parametrize(
    ("said", "written", "errors"),
    [
        ("The dog ran.", " the dog, ran", 0),
        ("a half-dozen eggs", "a half dozen egg", 1),
        ("one two three four", "one three four", 1),
        ("one two", "one and two and", 2),
        ("one two", "", 2),
        ("a b c d", "b c d e", 2),
        ("it's", "its", 1),
    ],
)
def test_words_that_are_wrong(said: str, written: str, errors: int) -> None:
    assert word_errors(said, written) == word_errors(written, said) == errors


def test_words_are_without_case_and_punctuation() -> None:
    assert words('"Half-past one," it\'s 5.') == ["half", "past", "one", "it's", "5"]


def test_rates_of_errors_beside_the_references() -> None:
    assert error_rate([1, 1, 1], [4, 4, 4]) == {"rate": 0.25, "low": 0.25, "high": 0.25}
    rate = error_rate([0, 2, 4, 0], [10, 20, 30, 40], [0, 1, 1, 0])
    assert rate["rate"] == 0.06
    assert rate["difference"] == 0.04
    assert 0 <= rate["low"] < 0.06 < rate["high"] < 0.15
    assert 0 <= rate["difference_low"] < 0.04 < rate["difference_high"] < 0.11
    alike = error_rate([0, 2, 4, 0], [10, 20, 30, 40], [0, 2, 4, 0])
    assert (alike["difference_low"], alike["difference_high"]) == (0, 0)
