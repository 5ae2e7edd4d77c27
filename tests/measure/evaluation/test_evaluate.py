"""Evaluation's numbers equal those computed in the simplest way."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise
from headwise.measure.evaluation import evaluate, open_pair, score_window
from headwise.measure.texts import token_windows
from headwise.models.checkpoints import load_tokenizer
from headwise.runtime.hf import HeadwiseCache
from tests.real_models import exchange_tokens, save_tiny
from tests.tiny_families import save_family

TEXT = "Whatever is worth measuring is worth measuring twice, side by side; and saying how. " * 20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("evaluation")
    save_tiny(root / "source")
    (root / "text.txt").write_text(TEXT)
    headwise.convert(root / "source", root / "half", to="mla", kv_budget=0.5, evaluate=False)
    return root


def test_every_number_by_hand(root: Path) -> None:
    evaluation = headwise.evaluate(
        root / "half", against=root / "source", text=root / "text.txt", window=200, windows=3, context=20
    )
    ids = token_windows(load_tokenizer(root / "source"), TEXT, window=200, windows=3)
    nll, other_nll, kl, agree = 0.0, 0.0, list[float](), 0
    with torch.inference_mode():
        model, other = (
            headwise.load(root / name)(ids).logits.double().log_softmax(-1) for name in ("half", "source")
        )
    for row in range(3):
        for position in range(199):
            p, q = other[row, position], model[row, position]
            nll -= float(q[ids[row, position + 1]])
            other_nll -= float(p[ids[row, position + 1]])
            kl.append(float((p.exp() * (p - q)).sum()))
            agree += int(p.argmax() == q.argmax())
    tokens = 3 * 199
    assert evaluation.tokens == tokens
    assert evaluation.windows == 3
    assert evaluation.perplexity == pytest.approx(math.exp(nll / tokens), rel=1e-5)
    assert evaluation.reference is not None
    assert evaluation.reference.perplexity == pytest.approx(math.exp(other_nll / tokens), rel=1e-5)
    assert evaluation.perplexity_ratio == pytest.approx(math.exp((nll - other_nll) / tokens), rel=1e-5)
    assert evaluation.kl == pytest.approx(sum(kl) / tokens, rel=1e-4)
    above, most = sorted(kl)[-2:]  # the 99.9 % quantile of 597 lies between the two largest
    assert evaluation.kl_999 == pytest.approx(above + (0.999 * 596 - 595) * (most - above), rel=1e-4)
    assert evaluation.top1_agreement == pytest.approx(agree / tokens)
    assert evaluation.top1_changed == tokens - agree > 0
    # float64: 2 layers of 3 key-value heads, 8 wide, keys and values, 8 bytes; and half of that.
    assert evaluation.reference.cache_bytes_per_token == 2 * 2 * 3 * 8 * 8
    assert evaluation.cache_bytes_per_token == 2 * 3 * 8 * 8
    assert evaluation.context == 20
    assert evaluation.decode_ms > 0
    assert evaluation.reference.decode_ms > 0


def test_a_model_against_itself_is_itself(root: Path) -> None:
    source = root / "source"
    evaluation = headwise.evaluate(source, against=source, text=root / "text.txt", window=100, windows=2, context=10)
    assert evaluation.perplexity_ratio == 1
    assert evaluation.kl == pytest.approx(0, abs=1e-9)
    assert evaluation.kl_999 == pytest.approx(0, abs=1e-9)
    assert (evaluation.top1_agreement, evaluation.top1_changed) == (1, 0)


def test_without_a_reference_there_are_no_comparisons(root: Path) -> None:
    evaluation = headwise.evaluate(root / "source", text=root / "text.txt", window=100, windows=1, context=10)
    assert evaluation.perplexity > 1
    assert evaluation.against is evaluation.perplexity_ratio is evaluation.kl is evaluation.reference is None


def test_a_context_longer_than_the_text_is_filled_by_repeating_it(root: Path) -> None:
    evaluation = headwise.evaluate(root / "source", text=root / "text.txt", window=50, windows=1, context=170)
    assert evaluation.context == 170
    assert evaluation.cache_bytes_per_token == 2 * 2 * 3 * 8 * 8


def test_windows_do_not_overlap_and_the_rest_is_left(root: Path) -> None:
    tokenizer = load_tokenizer(root / "source")
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    windows = token_windows(tokenizer, TEXT, window=64)
    assert windows.flatten().tolist() == ids[: len(ids) // 64 * 64]
    assert token_windows(tokenizer, TEXT, window=64, windows=2).tolist() == windows[:2].tolist()


def test_models_of_different_vocabularies_are_not_compared(root: Path) -> None:
    save_tiny(root / "other", vocab_size=120)
    with pytest.raises(headwise.ArgumentError, match=r"against = 120: has another vocabulary"):
        headwise.evaluate(root / "source", against=root / "other", text=root / "text.txt", window=50, windows=1)


def test_a_reference_that_numbers_tokens_otherwise_is_refused(root: Path, tmp_path: Path) -> None:
    other = exchange_tokens(save_tiny(tmp_path / "other"))
    for model in ("source", "half"):
        with pytest.raises(headwise.ArgumentError, match=r"against = .*other': has 69 as the token 'a', which is 68"):
            open_pair(root / model, against=other)
    for file in other.glob("tokenizer*"):
        file.unlink()
    open_pair(root / "source", against=other)  # nothing to compare


def test_a_model_of_few_positions_is_measured_within_them(root: Path) -> None:
    evaluation = headwise.evaluate(root / "source", text=root / "text.txt", windows=1)
    assert (evaluation.window, evaluation.context) == (256, 255)
    for options, rule in (({"window": 257}, "window = 257: .* at most 256"), ({"context": 256}, "at most 255")):
        with pytest.raises(headwise.ArgumentError, match=rule):
            headwise.evaluate(root / "source", text=root / "text.txt", **options)


def test_two_dtypes_are_run_in_the_wider_one(root: Path) -> None:
    headwise.convert(root / "source", root / "narrow", to="mla", kv_budget=0.5, dtype="bfloat16", evaluate=False)
    options = {"text": root / "text.txt", "window": 50, "windows": 1, "context": 10}
    evaluation = headwise.evaluate(root / "narrow", against=root / "source", **options)
    assert evaluation.dtype == "float64"
    assert evaluation.reference is not None
    assert evaluation.cache_bytes_per_token * 2 == evaluation.reference.cache_bytes_per_token
    assert headwise.evaluate(root / "narrow", **options).dtype == "bfloat16"


def test_several_texts_are_scored_each_and_together(root: Path) -> None:
    (root / "second.txt").write_text("Brevity. " * 60)
    texts = [root / "text.txt", root / "second.txt"]
    options = {"against": root / "source", "window": 100, "windows": 3, "context": 10}
    evaluation = headwise.evaluate(root / "half", text=texts, **options)
    alone = [headwise.evaluate(root / "half", text=text, **options) for text in texts]
    assert [score.text for score in evaluation.texts] == [str(text) for text in texts]
    for score, one in zip(evaluation.texts, alone, strict=True):
        assert one.texts == (score,)
        for name in ("windows", "tokens", "perplexity", "kl", "kl_999", "top1_agreement", "top1_changed"):
            assert getattr(one, name) == getattr(score, name)
        assert one.reference is not None
        assert score.reference is not None
        assert one.reference.perplexity == score.reference.perplexity
    assert (evaluation.windows, evaluation.tokens) == (6, 6 * 99)
    together = math.exp(sum(math.log(score.perplexity) for score in evaluation.texts) / 2)  # as many tokens in each
    assert evaluation.perplexity == pytest.approx(together)
    with pytest.raises(headwise.ArgumentError, match=r"text = .*must be at least one file"):
        headwise.evaluate(root / "half", text=[])


def test_cost_by_position_adds_up(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["headwise.measure.evaluation.results"], "_FIRST_BUCKET", 16)
    evaluation = headwise.evaluate(
        root / "half", against=root / "source", text=root / "text.txt", window=100, windows=3, context=10
    )
    (score,) = evaluation.texts
    assert [(bucket.start, bucket.stop) for bucket in score.by_position] == [(1, 16), (16, 32), (32, 64), (64, 100)]
    ids = token_windows(load_tokenizer(root / "source"), TEXT, window=100, windows=3)
    with torch.inference_mode():
        for name, measured in (("half", score), ("source", score.reference)):
            assert measured is not None
            logits = headwise.load(root / name)(ids).logits.double().log_softmax(-1)[:, :-1]
            nll = -logits.gather(-1, ids[:, 1:, None])[..., 0]
            for bucket in measured.by_position:
                mean = float(nll[:, bucket.start - 1 : bucket.stop - 1].mean())
                assert bucket.nll == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("window", [97, 128, 129])
def test_a_long_window_is_read_in_pieces_and_says_the_same(
    root: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    ids = token_windows(load_tokenizer(root / "source"), TEXT, window=window, windows=1)[0]
    models = {"model": headwise.load(root / "half"), "against": headwise.load(root / "source")}
    whole = score_window(models, ids)
    monkeypatch.setattr("headwise.measure.evaluation.scoring._WHOLE", 64)
    monkeypatch.setattr("headwise.measure.evaluation.scoring._PIECE", 32)
    monkeypatch.setattr("headwise.measure.evaluation.scoring._ROWS", 24)
    largest = 0

    def watch(_: object, __: object, out: Any) -> None:
        nonlocal largest
        largest = max(largest, out.logits.shape[1])

    models["model"].register_forward_hook(watch)
    pieces = score_window(models, ids)
    assert largest == 32
    assert whole.keys() == pieces.keys() == {"nll", "reference_nll", "kl", "agree"}
    for key, values in whole.items():
        assert values.shape == (window - 1,)
        torch.testing.assert_close(pieces[key], values, atol=1e-5, rtol=1e-4)


def test_a_config_without_positions_caps_nothing(root: Path) -> None:
    save_tiny(root / "free")
    path = root / "free/config.json"
    config = json.loads(path.read_text())
    del config["max_position_embeddings"]
    path.write_text(json.dumps(config))
    (root / "long.txt").write_text(TEXT * 2)
    options = {"text": root / "long.txt", "windows": 1}
    evaluation = headwise.evaluate(root / "free", window=2100, context=2060, **options)
    assert (evaluation.window, evaluation.context) == (2100, 2060)
    assert headwise.evaluate(root / "free", **options).window == 2048
    with pytest.raises(headwise.ArgumentError) as refused:
        headwise.evaluate(root / "free", window=1, **options)
    assert str(refused.value) == "window = 1: must be at least 2"
    with pytest.raises(headwise.ArgumentError, match="must be at least one window of 9000 tokens"):
        headwise.evaluate(root / "free", window=9000, **options)


def test_an_open_pair_is_measured_as_the_same_two_by_name(root: Path) -> None:
    pair = open_pair(root / "half", against=root / "source")
    options = {"text": root / "text.txt", "window": 50, "windows": 1, "context": 10}
    evaluation, named = evaluate(pair, **options), evaluate(root / "half", against=root / "source", **options)
    assert (evaluation.model, evaluation.against, evaluation.device) == (named.model, named.against, "cpu")
    assert (evaluation.texts, evaluation.dtype) == (named.texts, named.dtype)
    with pytest.raises(headwise.ArgumentError, match="dtype = 'float32': must be left out"):
        evaluate(pair, **options, dtype="float32")


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", "meta", ""])
def test_unknown_devices_are_refused(root: Path, device: str) -> None:
    with pytest.raises(headwise.ArgumentError, match="device = "):
        headwise.evaluate(root / "source", text=root / "text.txt", device=device)


@pytest.mark.parametrize("context", [20, 700])
def test_decoding_is_timed_behind_the_text(root: Path, context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is filled with the text's first tokens, over again where the windows have fewer."""
    prompts: list[torch.Tensor] = []
    module = sys.modules["headwise.measure.evaluation.evaluate"]
    original = module.decode_times

    def noting(models: Any, prompt: torch.Tensor, **options: Any) -> Any:
        prompts.append(prompt)
        return original(models, prompt[:, :20], **options)

    monkeypatch.setattr(module, "decode_times", noting)
    pair = open_pair(root / "source")
    ids = token_windows(load_tokenizer(root / "source"), TEXT, window=150, windows=2)
    headwise.measure.evaluation.evaluate_windows(pair, [("text", ids)], context=context)
    (prompt,) = prompts
    tokens = ids.flatten().tolist()
    assert prompt.tolist() == [(tokens * 3)[:context]]


@pytest.mark.parametrize("cache", ["int4", "int8/int3+hadamard", "kivi4:16"])
def test_a_quantised_cache_is_read_in_windows_whole_and_in_pieces(
    root: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = root / "source"
    pair = open_pair(source, against=source)
    options = {"text": root / "text.txt", "window": 128, "windows": 2, "context": 20}
    plain, evaluation = evaluate(pair, **options), evaluate(pair, **options, cache=cache)
    ids = token_windows(load_tokenizer(source), TEXT, window=128, windows=2)
    model = headwise.load(source)
    with torch.inference_mode():
        rows = [model(row[None], past_key_values=HeadwiseCache(model, quantize=cache)).logits for row in ids]
    logits = torch.cat(rows).double().log_softmax(-1)[:, :-1]
    nll = float(-logits.gather(-1, ids[:, 1:, None]).mean())
    assert evaluation.cache == cache
    assert evaluation.perplexity == pytest.approx(math.exp(nll), rel=1e-5)
    assert evaluation.reference is not None
    assert evaluation.reference.cache is None
    assert evaluation.reference.perplexity == plain.perplexity != evaluation.perplexity
    # Bytes in one head of width 8: codes, and scales of 4 bytes a group, or of a channel and 16 tokens.
    key, value = {"int4": (4 + 4, 4 + 4), "int8/int3+hadamard": (8 + 4, 3 + 4), "kivi4:16": (4 + 8 * 4 / 16, 4 + 4)}[
        cache
    ]
    assert evaluation.cache_bytes_per_token == 2 * 3 * (key + value)
    assert evaluation.reference.cache_bytes_per_token == plain.cache_bytes_per_token
    assert not model._forward_pre_hooks
    monkeypatch.setattr("headwise.measure.evaluation.scoring._WHOLE", 64)
    monkeypatch.setattr("headwise.measure.evaluation.scoring._PIECE", 32)
    pieces = evaluate(pair, **options, cache=cache)
    # A token-wise code is the same in pieces; kivi's latest block is read before it is full.
    assert pieces.perplexity == pytest.approx(evaluation.perplexity, rel=1e-2 if "kivi" in cache else 1e-6)
    assert pieces.cache_bytes_per_token == evaluation.cache_bytes_per_token
    assert evaluate(pair, **options).perplexity == plain.perplexity


def test_windows_are_filled_alike(tmp_path: Path) -> None:
    """Of a sliding window a short prompt holds more bytes a token than a long one."""
    source = save_family(tmp_path / "source", "mistral", sliding_window=32, max_position_embeddings=256)
    (tmp_path / "text.txt").write_text(TEXT)
    short, long = (
        evaluate(
            open_pair(source, against=source),
            text=tmp_path / "text.txt",
            window=window,
            windows=1,
            context=20,
            cache="int4",
        )
        for window in (32, 200)
    )
    assert short.reference is not None
    assert long.reference is not None
    assert long.reference.cache_bytes_per_token < 0.6 * short.reference.cache_bytes_per_token
    of_reference = [one.cache_bytes_per_token / one.reference.cache_bytes_per_token for one in (short, long)]  # type: ignore[union-attr]
    assert of_reference[0] == pytest.approx(of_reference[1], rel=0.01)


def test_a_cache_that_cannot_be_is_refused(root: Path) -> None:
    options = {"text": root / "text.txt", "window": 50, "windows": 1, "context": 10}
    with pytest.raises(headwise.ArgumentError, match=r"^cache = 'int9': must be int8, int4, int3 or int2"):
        evaluate(root / "source", **options, cache="int9")
    with pytest.raises(headwise.ArgumentError, match=r"^cache = 'int4': is for keys"):
        evaluate(root / "half", **options, cache="int4")
