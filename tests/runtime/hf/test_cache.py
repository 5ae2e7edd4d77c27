"""`HeadwiseCache` returns what transformers' caches return, without copying the cached tokens at every step."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, DynamicCache

import headwise
from headwise.runtime.hf import HeadwiseCache
from tests.tiny_families import tiny_family


def config(**changes: Any) -> Any:
    values = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    return AutoConfig.for_model("mistral", **{**values, "sliding_window": None, **changes})


SLIDING = {"sliding_window": 5}


def pair(**changes: Any) -> tuple[HeadwiseCache, DynamicCache]:
    return HeadwiseCache(config(**changes)), DynamicCache(config=config(**changes))


def told(caches: tuple[Any, ...], tokens: int, batch: int = 2) -> None:
    """Update all caches with the same new tokens, and check that they return the same."""
    for layer in range(2):
        keys, values = torch.randn(2, batch, 2, tokens, 8)
        options = [cache.update(keys, values, layer) for cache in caches]
        for ours, stock in zip(options[0], options[-1], strict=True):
            assert torch.equal(ours, stock)


def assert_alike(ours: Any, stock: Any) -> None:
    assert ours.get_seq_length() == stock.get_seq_length()
    assert ours.get_mask_sizes(3, 0) == stock.get_mask_sizes(3, 0)
    for a, b in zip(ours.layers, stock.layers, strict=True):
        assert a.keys.shape == b.keys.shape
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)


@pytest.mark.parametrize("changes", [{}, SLIDING, {"sliding_window": 200}], ids=["full", "window of 5", "of 200"])
@pytest.mark.parametrize("seed", range(12))
def test_any_history_equals_that_of_stock_caches(changes: dict[str, Any], seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    ours, stock = pair(**changes)
    batch = 2
    told((ours, stock), chance.choice([1, 3, 40, 300]), batch)
    for _ in range(40):
        step = chance.random()
        if step < 0.7:
            told((ours, stock), chance.choice([1, 1, 1, 2, 7, 90]), batch)
        elif step < 0.8:
            beams = torch.tensor([chance.randrange(batch) for _ in range(batch)])
            for cache in (ours, stock):
                cache.reorder_cache(beams)
        elif step < 0.85 and batch < 5:
            batch *= 2
            for cache in (ours, stock):
                cache.batch_repeat_interleave(2)
        elif step < 0.9:
            kept = torch.tensor(sorted(chance.sample(range(batch), chance.randint(1, batch))))
            batch = len(kept)
            for cache in (ours, stock):
                cache.batch_select_indices(kept)
        elif not changes and stock.get_seq_length() > 3:
            cut = chance.randint(0, 3)
            for cache in (ours, stock):
                cache.crop(-cut)
        elif step > 0.97:
            for cache in (ours, stock):
                cache.reset()
            told((ours, stock), 4, batch)
        assert_alike(ours, stock)


def test_what_is_held_is_not_moved_for_a_token() -> None:
    ours = HeadwiseCache(config())
    told((ours,), 100)
    places, moved = set(), 0
    for _ in range(1000):
        told((ours,), 1)
        place = ours.layers[0].keys.data_ptr()
        moved += place not in places
        places.add(place)
    assert moved <= 5  # doubling from 256 to 1100 tokens
    assert ours.nbytes < 2 * 2.2 * (2 * 2 * 1100 * 8 * 4) * 2


def test_a_window_is_kept_in_little_more_than_its_room() -> None:
    ours = HeadwiseCache(config(sliding_window=400))
    told((ours,), 3000)
    for _ in range(500):
        told((ours,), 1)
        assert ours.nbytes <= 2 * 2 * (2 * 2 * (400 + 101) * 8 * 4)


def test_bytes_are_counted_whatever_is_in_use_of_them() -> None:
    ours = HeadwiseCache(config(), max_length=50)
    told((ours,), 20)
    allocated = ours.nbytes
    assert allocated == len(ours.layers) * 2 * (2 * 2 * 50 * 8 * 4)
    ours.batch_select_indices(torch.tensor([1]))
    assert ours.nbytes >= allocated
    ours.reset()
    assert ours.nbytes >= allocated


def test_max_length_is_room_at_once_and_a_limit() -> None:
    ours = HeadwiseCache(config(), max_length=50)
    told((ours,), 20)
    assert ours.layers[0].memory["keys"].shape == (2, 2, 50, 8)
    assert ours.get_max_length() == 50
    told((ours,), 30)
    keys = torch.zeros(2, 2, 1, 8)
    with pytest.raises(headwise.ArgumentError, match="cache length = 51: is over max_length = 50"):
        ours.update(keys, keys, 0)
    assert ours.length == 50


def test_max_length_is_a_limit_of_windows_too() -> None:
    ours = HeadwiseCache(config(sliding_window=8), max_length=50)
    told((ours,), 20)
    told((ours,), 30)
    keys = torch.zeros(2, 2, 1, 8)
    with pytest.raises(headwise.ArgumentError, match="cache length = 51: is over max_length = 50"):
        ours.update(keys, keys, 0)
    assert ours.length == 50


@pytest.mark.parametrize("options", [{}, {"max_length": 50}, {"quantize": "int8"}], ids=["growing", "fixed", "int8"])
@pytest.mark.parametrize("changes", [{}, SLIDING, {"sliding_window": 1}], ids=["full", "window of 5", "of 1"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_another_batch_is_refused_by_name(options: dict[str, Any], changes: dict[str, Any], needs_grad: bool) -> None:
    ours = HeadwiseCache(config(**changes), **options)
    keys = torch.randn(2, 2, 7, 8)
    ours.update(keys, keys, 0)
    for batch in (1, 3):
        other = torch.randn(batch, 2, 1, 8, requires_grad=needs_grad and "quantize" not in options)
        with pytest.raises(headwise.ArgumentError, match=f"^batch = {batch}: must be 2, the batch size of"):
            ours.update(other, other, 0)
    assert ours.get_seq_length() == 7


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 20}], ids=["full", "window of 20"])
def test_an_emptied_cache_takes_another_batch(changes: dict[str, Any]) -> None:
    ours = HeadwiseCache(config(**changes))
    told((ours,), 7)
    ours.crop(-7)
    keys = torch.randn(1, 2, 3, 8)
    assert torch.equal(ours.update(keys, keys, 0)[0], keys)
    assert ours.get_seq_length() == 3


@pytest.mark.parametrize("max_length", [0, -1, 2.5, True, "8"])
def test_a_limit_that_is_no_number_is_refused(max_length: Any) -> None:
    with pytest.raises(headwise.ArgumentError, match="max_length"):
        HeadwiseCache(config(), max_length=max_length)
    with pytest.raises(headwise.ArgumentError, match="must be a transformers model or config"):
        HeadwiseCache(torch.nn.Linear(2, 2))


def test_a_copy_goes_its_own_way() -> None:
    ours = HeadwiseCache(config())
    told((ours,), 10)
    other = copy.deepcopy(ours)
    before = ours.layers[0].keys.clone()
    told((other,), 3)
    told((ours,), 2)
    assert torch.equal(other.layers[0].keys[:, :, :10], before)
    assert torch.equal(ours.layers[0].keys[:, :, :10], before)
    assert other.length == 13


def test_what_was_cached_in_inference_mode_goes_on_outside() -> None:
    ours, stock = pair()
    with torch.inference_mode():
        told((ours, stock), 10)
    with torch.no_grad():
        told((ours, stock), 1)
        for cache in (ours, stock):
            cache.reorder_cache(torch.tensor([1, 0]))
    with torch.inference_mode():
        told((ours, stock), 1)
    assert_alike(ours, stock)


def test_gradients_go_through_what_is_cached() -> None:
    ours, stock = pair()
    grads = []
    for cache in (ours, stock):
        torch.manual_seed(0)
        steps = [torch.randn(2, 2, 3, 8, requires_grad=True) for _ in range(3)]
        for states in steps:
            keys, values = cache.update(states, 2 * states, 0)
        (keys * values).sum().backward()
        grads.append([states.grad for states in steps])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_a_cache_with_one_tensor_a_layer_and_mixed_dtypes() -> None:
    ours = HeadwiseCache(config())
    latent = torch.randn(2, 1, 4, 12)
    keys, values = ours.update(latent, latent[..., :0], 0)
    keys, values = ours.update(latent[:, :, :1], latent[:, :, :1, :0], 0)
    assert values.shape == (2, 1, 5, 0)
    assert torch.equal(keys, torch.cat((latent, latent[:, :, :1]), 2))


def attended(model: Any, ids: Tensor, cache: Any, steps: int = 6) -> Tensor:
    logits = [model(ids[:, :-steps], past_key_values=cache).logits[:, -1]]
    logits += [
        model(ids[:, i : i + 1], past_key_values=cache).logits[:, -1]
        for i in range(ids.shape[1] - steps, ids.shape[1])
    ]
    return torch.stack(logits)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3_text", "gpt2", "gpt_neox"])
@torch.inference_mode()
def test_models_are_given_what_they_are_used_to(family: str) -> None:
    model = tiny_family(family)
    ids = torch.randint(3, 97, (2, 30), generator=torch.Generator().manual_seed(0))
    stock = attended(model, ids, DynamicCache(config=model.config))
    assert torch.equal(attended(model, ids, HeadwiseCache(model)), stock)
    assert torch.equal(attended(model, ids, HeadwiseCache(model, max_length=64)), stock)


@torch.inference_mode()
def test_int8_takes_a_quarter_and_differs_little() -> None:
    model = headwise.optimize(tiny_family("llama", head_dim=64).float())
    ids = torch.randint(3, 97, (2, 60), generator=torch.Generator().manual_seed(0))
    exact, codes = HeadwiseCache(model, max_length=64), HeadwiseCache(model, max_length=64, quantize="int8")
    expected, actual = (attended(model, ids, cache) for cache in (exact, codes))
    assert codes.nbytes * 64 * 4 == exact.nbytes * (64 + 4)
    assert torch.equal(actual[0], expected[0])  # a prompt attends to itself as it is
    error = (actual[1:] - expected[1:]).norm() / expected[1:].norm()
    assert 1e-6 < error < 0.02
    prompt = {"max_new_tokens": 5, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    for how in ({}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}):
        rows = ids[:1] if "prompt_lookup_num_tokens" in how else ids
        mask = torch.ones_like(rows)
        cache = HeadwiseCache(model, quantize="int8")
        out = model.generate(rows, **{**prompt, "attention_mask": mask}, **how, past_key_values=cache)
        assert out.shape == (len(rows), 65)


@torch.inference_mode()
def test_int8_returns_weights_where_they_are_asked_for() -> None:
    model = headwise.optimize(tiny_family("llama", head_dim=64).float())
    cache = HeadwiseCache(model, quantize="int8")
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    model(ids, past_key_values=cache)
    expected = model(ids[:, :1], past_key_values=copy.deepcopy(cache)).logits
    out = model(ids[:, :1], past_key_values=cache, output_attentions=True)
    assert [tuple(weights.shape[2:]) for weights in out.attentions] == [(1, 10)] * len(cache.layers)
    assert (out.logits - expected).abs().max() < 1e-5


@torch.inference_mode()
def test_int8_is_refused_for_latents() -> None:
    ours = HeadwiseCache(tiny_family("llama", attn_implementation="headwise"), quantize="int8")
    latent = torch.randn(2, 1, 4, 12)
    with pytest.raises(headwise.ArgumentError, match="is for keys and values of heads, not for latents"):
        ours.update(latent, latent[..., :0], 0)
    assert ours.length == 0


@pytest.mark.parametrize("kind", ["inference", "gradients"])
def test_beams_are_reordered_where_states_cannot_be_written_to(kind: str) -> None:
    """Tensors made in inference mode, and those that a backward pass needs, are replaced and not changed."""
    ours, stock = pair()
    states = [torch.randn(2, 2, 5, 8) for _ in range(2)]
    if kind == "inference":
        with torch.inference_mode():
            for cache in (ours, stock):
                cache.update(*(x.clone() for x in states), 0)
    else:
        for cache in (ours, stock):
            cache.update(*(x.requires_grad_() * 1.0 for x in states), 0)
    for cache in (ours, stock):
        cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(ours.layers[0].keys, stock.layers[0].keys)
    assert torch.equal(ours.layers[0].keys, states[0][[1, 0]])
