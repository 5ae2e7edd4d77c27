"""Stock models with ``attn_implementation="headwise"``, and what `optimize` makes of them."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

import headwise
from headwise.runtime.hf import HeadwiseCache, attention_forward
from headwise.runtime.hf.linears import FewTokensLinear
from tests.closeness import assert_close
from tests.tiny_families import FAMILIES, answer, noise, tiny_family

GENERATING = [name for name in FAMILIES if name not in ("bert", "whisper")]
MORE = {
    "gemma": {"head_dim": 14, "num_key_value_heads": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 3},
    "phi": {"partial_rotary_factor": 0.5},
    "starcoder2": {"num_key_value_heads": 2},
}
"""Families that cannot be converted, but can be run."""


def foreign(family: str, **overrides: Any) -> Any:
    """A tiny random model of a family that headwise has no file for."""
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6}
    more = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **{**sizes, **more, **MORE.get(family, {}), **overrides})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if hasattr(config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # torch has no grouped product of float64
    return model


def any_model(family: str) -> Any:
    return foreign(family) if family in MORE else tiny_family(family).float()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 97, (3, 12), generator=torch.Generator().manual_seed(2))


def named(model: Any) -> Any:
    """A copy of a model with ``attn_implementation`` set to a name."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("headwise")
    return model


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_logits_equal_those_of_stock(family: str, ids: Tensor) -> None:
    stock = any_model(family)
    expected = answer(stock, ids)
    assert_close(answer(named(stock), ids), expected, 2e-5)
    assert_close(answer(headwise.optimize(copy.deepcopy(stock)), ids), expected, 2e-5)


@pytest.mark.parametrize(
    ("family", "auto"),
    [
        ("bigbird_pegasus", "AutoModelForCausalLM"),
        ("bigbird_pegasus", "AutoModelForSeq2SeqLM"),
        ("nllb-moe", "AutoModelForSeq2SeqLM"),
        ("pegasus_x", "AutoModelForSeq2SeqLM"),
        ("bart", "AutoModelForSeq2SeqLM"),
    ],
)
@torch.inference_mode()
def test_decoders_whose_modules_do_not_say_that_they_are_causal(family: str, auto: str, ids: Tensor) -> None:
    widths = {"d_model": 48, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64}
    counts = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = AutoConfig.for_model(family, **widths, **counts, vocab_size=97, max_position_embeddings=64)
    torch.manual_seed(0)
    stock = getattr(transformers, auto).from_config(config, dtype=torch.float64).eval()
    call = {"decoder_input_ids": ids.flip(1)} if stock.config.is_encoder_decoder else {}
    expected = stock(ids, **call).logits
    for ours in (named(stock), headwise.optimize(copy.deepcopy(stock))):
        assert_close(ours(ids, **call).logits, expected, 1e-12)


@pytest.mark.parametrize("family", [*GENERATING, *MORE])
@torch.inference_mode()
def test_padded_batches_decode_as_stock(family: str, ids: Tensor) -> None:
    stock = any_model(family)
    ours = headwise.optimize(copy.deepcopy(stock))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mask[2, :9] = 0
    step = ids[:, :1]
    caches = DynamicCache(config=stock.config), HeadwiseCache(ours)
    for model, cache in zip((stock, ours), caches, strict=True):
        model(ids, attention_mask=mask, past_key_values=cache)
    for count in range(1, 4):
        longer = torch.cat((mask, torch.ones(3, count, dtype=mask.dtype)), 1)
        expected, actual = (
            model(step, attention_mask=longer, past_key_values=cache).logits
            for model, cache in zip((stock, ours), caches, strict=True)
        )
        assert_close(actual, expected, 5e-5)


@pytest.mark.parametrize("family", [*GENERATING, *MORE])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=["greedy", "beams", "best beams", "sampled", "looked up"],
)
def test_generation_equals_that_of_stock(family: str, how: dict[str, Any], ids: Tensor) -> None:
    stock = any_model(family).double()
    ours = headwise.optimize(copy.deepcopy(stock))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    if "prompt_lookup_num_tokens" in how:
        ids, mask = ids[:1].repeat(1, 2), mask[:1].repeat(1, 2)
    outputs = []
    for model in (stock, ours):
        torch.manual_seed(5)
        outputs.append(model.generate(ids, attention_mask=mask, max_new_tokens=12, pad_token_id=0, **how))
    assert torch.equal(*outputs)


def test_generate_uses_headwises_cache_by_default(ids: Tensor) -> None:
    model = headwise.optimize(tiny_family("llama"))
    kept = {"max_new_tokens": 3, "return_dict_in_generate": True}
    cache = model.generate(ids, **kept).past_key_values
    assert type(cache) is HeadwiseCache
    assert cache.length == ids.shape[1] + 2
    assert cache.layers[0].memory["keys"].shape[2] <= ids.shape[1] + 3  # what generate will fill, and no more
    own = DynamicCache(config=model.config)
    assert model.generate(ids, past_key_values=own, **kept).past_key_values is own
    assert model.generate(ids, use_cache=False, **kept).past_key_values is None
    static = model.generate(ids, cache_implementation="static", disable_compile=True, **kept)
    assert type(static.past_key_values) is StaticCache
    stock = tiny_family("llama")
    ours = HeadwiseCache(stock)
    assert torch.equal(stock.generate(ids, past_key_values=ours, max_new_tokens=3), static.sequences)
    assert ours.length == ids.shape[1] + 2


def test_an_encoders_decoder_remembers_in_our_cache(ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = []

    class Watched(HeadwiseCache):  # Whisper hands back a copy of what it used
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            caches.append(self)

    monkeypatch.setattr(sys.modules["headwise.runtime.hf.optimize"], "HeadwiseCache", Watched)
    stock = tiny_family("whisper")
    ours = headwise.optimize(copy.deepcopy(stock))
    options = {"input_features": noise(2), "decoder_input_ids": ids[:2, :3], "max_new_tokens": 6}
    for how in ({}, {"num_beams": 2}):
        expected, actual = (
            model.generate(**options, **how, force_unique_generate_call=True) for model in (stock, ours)
        )
        assert torch.equal(actual, expected)
        assert caches.pop().length >= 8


@torch.inference_mode()
def test_a_static_cache_has_slots_that_nobody_sees(ids: Tensor) -> None:
    stock = tiny_family("qwen2").float()
    ours = named(stock)
    for mask in (None, torch.ones(3, 12).index_fill(1, torch.arange(4), 0)):
        caches = [StaticCache(config=stock.config, max_cache_len=20) for _ in range(2)]
        for tokens, seen in ((ids, mask), (ids[:, :1], None if mask is None else torch.cat((mask, mask[:, -1:]), 1))):
            expected, actual = (
                model(tokens, attention_mask=seen, past_key_values=cache).logits
                for model, cache in zip((stock, ours), caches, strict=True)
            )
            assert_close(actual, expected, 2e-5)


@torch.inference_mode()
def test_masks_that_are_added_are_understood_as_far_as_they_only_hide(ids: Tensor) -> None:
    stock = tiny_family("llama").float()
    ours = named(stock)
    hidden = torch.zeros(3, 1, 12, 12).masked_fill(torch.ones(12, 12).triu(1).bool(), torch.finfo(torch.float32).min)
    hidden[:, :, 7:, 2] = -torch.inf
    assert_close(ours(ids, attention_mask=hidden).logits, stock(ids, attention_mask=hidden).logits, 2e-5)
    with pytest.raises(headwise.ArgumentError, match="attention_mask = 'floats': must contain only 0"):
        ours(ids, attention_mask=hidden - 0.5)


def test_weights_are_returned_where_they_are_asked_for() -> None:
    module = torch.nn.Module()
    query, key, value = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8)
    out, weights = attention_forward(module, query, key, value, None, scaling=0.3, output_attentions=True)
    assert out.shape == (2, 3, 4, 8)
    assert weights is not None
    assert_close(weights.sum(-1), torch.ones(2, 4, 3), 1e-6)
    assert torch.equal(weights, weights.tril())
    plain, none = attention_forward(module, query, key, value, None, scaling=0.3)
    assert none is None
    assert_close(plain, out, 1e-6)


def test_training_equals_that_of_stock(ids: Tensor) -> None:
    stock = tiny_family("qwen3")
    ours = headwise.optimize(copy.deepcopy(stock))
    for model in (stock, ours):
        model.train()
        model(ids, labels=ids).loss.backward()
    for (name, a), (_, b) in zip(stock.named_parameters(), ours.named_parameters(), strict=True):
        assert a.grad is not None, name
        assert_close(b.grad, a.grad, 1e-9)


def test_parameters_stay_and_twice_is_once(tmp_path: Any, ids: Tensor) -> None:
    model = tiny_family("llama")
    stock = copy.deepcopy(model)
    before = dict(model.named_parameters())
    assert headwise.optimize(headwise.optimize(model)) is model
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert any(type(module) is FewTokensLinear for module in model.modules())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(stock)
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(answer(loaded, ids), answer(stock, ids))
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(copied.generate(ids, max_new_tokens=4), stock.generate(ids, max_new_tokens=4))
        assert copied._prepare_cache_for_generation.args[0] is copied


@torch.inference_mode()
def test_a_compiled_model_is_traced_through(ids: Tensor) -> None:
    stock = tiny_family("llama").float()
    compiled = torch.compile(headwise.optimize(copy.deepcopy(stock)), backend="eager", fullgraph=True)
    assert_close(compiled(ids, use_cache=False).logits, stock(ids, use_cache=False).logits, 2e-5)


@pytest.mark.parametrize(
    ("family", "changes", "rule"),
    [
        ("gemma2", {"head_dim": 14, "num_key_value_heads": 2}, "cannot be optimised: it caps its scores"),
        ("falcon", {}, "transformers cannot set its attention"),
        ("gpt_oss", {"head_dim": 14, "num_key_value_heads": 2, "num_local_experts": 4}, "it has attention sinks"),
    ],
)
def test_what_attend_does_not_know_is_refused(family: str, changes: dict[str, Any], rule: str, ids: Tensor) -> None:
    model = foreign(family, **changes)
    before = model.config._attn_implementation
    with pytest.raises(headwise.SpecError, match=f"model_type = '{family}': .*{rule}"):
        headwise.optimize(model)
    assert model.config._attn_implementation == before
    assert not any(type(module) is FewTokensLinear for module in model.modules())
    if family == "falcon":
        return
    model.config._attn_implementation = "headwise"
    with pytest.raises(headwise.ArgumentError, match="is not supported by headwise's attention; use sdpa or eager"):
        model(ids)


def test_biases_of_scores_are_refused() -> None:
    config = transformers.T5Config(d_model=16, d_kv=4, num_heads=4, d_ff=16, num_layers=1, vocab_size=32)
    with pytest.raises(headwise.SpecError, match="model_type = 't5': cannot be optimised"):
        headwise.optimize(transformers.T5ForConditionalGeneration(config))


def test_biases_of_scores_in_a_part_of_a_model_are_refused() -> None:
    model = foreign("llama")
    text = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 97}
    model.encoder = transformers.T5EncoderModel(transformers.T5Config(**text))
    with pytest.raises(headwise.SpecError, match="adds a learned bias to its scores"):
        headwise.optimize(model)
    assert model.config._attn_implementation != "headwise"


def test_a_cache_may_be_asked_for_by_keywords() -> None:
    model = headwise.optimize(foreign("llama"))
    options: dict[str, Any] = {}
    config = model._prepare_generation_config(None)[0]
    model._prepare_cache_for_generation(config, options, generation_mode=None, batch_size=1, max_cache_length=300)
    assert isinstance(options["past_key_values"], HeadwiseCache)
    assert options["past_key_values"].layers[0].expected == 300


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(headwise.ArgumentError, match="model = 'Linear': must be a loaded transformers model"):
        headwise.optimize(torch.nn.Linear(2, 2))
