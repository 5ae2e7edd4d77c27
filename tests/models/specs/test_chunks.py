"""Llama 4: layers that attend within chunks, beside layers without positions that see everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from headwise import cost
from headwise.costs.formulas import attended_pairs, compare, layer
from headwise.costs.prediction import ALLOCATING_ENGINES, Pass, allocation
from headwise.costs.prediction.work import Reach
from headwise.errors import SpecError
from headwise.models.specs import GroupedSpec, read_config, read_spec
from headwise.runtime.attention import build
from tests.meta_models import transformers_config
from tests.toy_configs import TOYS

TOY: dict[str, Any] = TOYS["llama4_text"]
CHUNK = TOY["attention_chunk_size"]


def seen(new: int, total: int, chunk: int) -> list[list[int]]:
    """The keys that each query sees, by the definition: those of its own chunk up to itself."""
    return [
        [key for key in range(query + 1) if key // chunk == query // chunk] for query in range(total - new, total)
    ]


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 30))
def test_pairs_and_tokens_are_those_of_the_definition(new: int, past: int, chunk: int) -> None:
    keys = seen(new, new + past, chunk)
    pairs = sum(map(len, keys))
    assert attended_pairs(new, new + past, causal=True, window=chunk, chunked=True) == pairs
    found = Reach(window=chunk, chunked=True).counts(3, new, new + past)
    assert found["pairs"] == 3 * pairs
    assert found["total"] == 3 * len({key for row in keys for key in row})
    spec = GroupedSpec(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, sliding_window=chunk, chunked=True)
    call = layer.call_of(spec, new, new + past)
    assert int(call.pairs) == pairs
    assert int(call.total) == found["total"] // 3


def test_the_mask_of_transformers_has_as_many_pairs() -> None:
    from transformers.masking_utils import create_chunked_causal_mask

    tokens = 3 * CHUNK + 5
    config = transformers_config(TOY)
    config._attn_implementation = "eager"
    mask = create_chunked_causal_mask(
        config=config,
        inputs_embeds=torch.zeros(1, tokens, config.hidden_size),
        attention_mask=None,
        past_key_values=None,
        position_ids=torch.arange(tokens)[None],
    )
    assert int((mask == 0).sum()) == attended_pairs(tokens, tokens, causal=True, window=CHUNK, chunked=True)


def test_the_cache_is_transformers_own() -> None:
    from transformers import AutoModelForCausalLM

    spec, tokens = read_config(TOY), 3 * CHUNK + 5
    model = AutoModelForCausalLM.from_config(transformers_config(TOY)).eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for token in torch.randint(3, 90, (2, tokens)).split(1, dim=1):
            model(token, past_key_values=cache)
    held = [layer.keys.shape[2] for layer in cache.layers]
    ours = [layer.held_tokens(one, tokens) for one in spec.layers]
    # Of a full window transformers stores one token fewer: the next one takes its place.
    assert held == [count - 1 if one.chunked else count for count, one in zip(ours, spec.layers, strict=True)]


def test_chunks_and_positions_layer_by_layer() -> None:
    layers = read_config(TOY).layers
    assert [(one.sliding_window, one.chunked, one.rope is None) for one in layers] == [
        (CHUNK, True, False),
        (CHUNK, True, False),
        (None, False, True),
    ] * 2
    assert [one.experts_per_token for one in read_config(TOY).body.feed_forward] == [None, 2] * 3  # type: ignore[union-attr]
    every = read_config({**TOY, "moe_layers": [0, 5]}).body
    assert [bool(one.num_experts) for one in every.feed_forward] == [True, *[False] * 4, True]  # type: ignore[union-attr]
    named = ["chunked_attention"] * 3 + ["full_attention"] * 3
    assert [one.chunked for one in read_config({**TOY, "layer_types": named}).layers] == [True] * 3 + [False] * 3
    assert not any(one.chunked for one in read_config({**TOY, "attention_chunk_size": None}).layers)
    marked = read_config({**TOY, "no_rope_layers": [0, 1, 1, 1, 1, 0]}).layers
    assert [one.rope is None for one in marked] == [True, False, False, False, False, True]


def test_scout_at_a_million_tokens() -> None:
    """12 of 48 layers see all of them; the others 8,192."""
    scout = read_spec("llama-4-scout")
    assert cost.model.cache_bytes(scout, 1 << 20) == 4096 * (12 * (1 << 20) + 36 * 8192)
    assert cost.model.weights(scout).total == 107_769_861_120
    text = {"model_type": "llama4", "text_config": {**TOY}}
    assert read_config(text) == read_config(TOY)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe_layers": "all"}, "moe_layers = 'all': must list"),
        ({"moe_layers": [-1]}, "must list layer numbers below 6"),
        ({"no_rope_layers": [1, 0]}, "must list 0 or 1 for each of 6 layers"),
        ({"layer_types": ["sliding_attention"] * 6}, "layer_types"),
        ({"attention_chunk_size": -8}, "attention_chunk_size = -8"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_config({**TOY, **fields})


def test_it_is_counted_and_compared_but_neither_built_nor_converted() -> None:
    chunked = read_config(TOY).layers[0]
    with pytest.raises(SpecError, match="chunked = True: is not supported"):
        build(chunked)
    with pytest.raises(SpecError, match="needs sliding_window"):
        GroupedSpec(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, chunked=True)
    (source,) = (row for row in compare(read_config(TOY), context=100).rows if row.is_source)
    assert source.kv_bytes == cost.model.cache_bytes(read_config(TOY), 100)
    for engine in ALLOCATING_ENGINES:
        with pytest.raises(SpecError, match="is not known here"):
            allocation(read_config(TOY), Pass(total=100), engine)
