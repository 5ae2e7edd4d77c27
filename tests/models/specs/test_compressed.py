"""DeepSeek-V4: its config, its weights and its cache beside transformers', its pairs and FLOPs by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.models.auto import AutoModelForCausalLM

from headwise import complexity
from headwise.costs.formulas import (
    attended_pairs,
    cache_bytes,
    decode_intensity,
    forward_flops,
    parameters,
    state_bytes,
)
from headwise.costs.formulas.layer import shard
from headwise.costs.formulas.model import weights
from headwise.costs.formulas.stages import attended_entries
from headwise.costs.prediction import ALLOCATING_ENGINES, Pass, allocation, operators, predict
from headwise.costs.prediction.work import Reach, model_work
from headwise.errors import ArgumentError, SpecError
from headwise.models.specs import CompressedSpec, read_config, read_spec, spec_from_dict
from headwise.runtime.attention import build
from tests.meta_models import transformers_config
from tests.toy_configs import TOYS

TOY: dict[str, Any] = TOYS["deepseek_v4"]
TYPED = {
    **TOY,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        *["compressed_sparse_attention"] * 3,
    ],
}


@torch.no_grad()
@pytest.mark.parametrize("config", [TOY, TYPED], ids=["usual", "typed"])
def test_weights_and_cache_are_those_of_transformers(config: dict[str, Any]) -> None:
    spec = read_config(config)
    model = AutoModelForCausalLM.from_config(transformers_config(config)).eval()
    # The table of token ids and their experts is no weight.
    stored = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("tid2eid")}
    assert weights(spec).total == sum(tensor.numel() for tensor in stored.values())
    for layer, module in zip(spec.layers, model.model.layers, strict=True):
        assert parameters(layer) == sum(parameter.numel() for parameter in module.self_attn.parameters())
    cache = DynamicCache(config=model.config)
    for tokens in range(1, 41):
        model(torch.randint(3, 90, (2, 1)), past_key_values=cache)
        for layer, held in zip(spec.layers, cache.layers, strict=True):
            assert isinstance(layer, CompressedSpec)
            # Of the window, and of what waits to be in an entry, ours are the most.
            ours = cache_bytes(layer, tokens - tokens % (layer.rate or 1), batch=2, dtype="float32")
            kept = 2 * 4 * layer.head_dim * (layer.window - 1 - min(tokens, layer.window - 1))
            waiting = 0
            if layer.rate is not None:
                # Tokens that wait for their entry; beyond the first, with the last ones where entries overlap.
                width, overlap = layer.head_dim + layer.index_head_dim, 2 if layer.has_indexer else 1
                waiting = (layer.rate - 1 - tokens % layer.rate) * overlap
                waiting += layer.rate * (overlap - 1) if tokens < layer.rate else 0
                waiting *= 2 * 4 * 2 * width
            # Transformers stores a window less one token, whose place the next one takes.
            assert _bytes(held) == ours - kept - waiting - 2 * 4 * layer.head_dim


def _bytes(layer: Any) -> int:
    """The bytes of a cache of one layer; keys are values."""
    tensors = [layer.keys]
    for name in ("buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv", "overlap_gate"):
        tensors += [tensor for tensor in getattr(layer, name, {}).values() if tensor is not None]
    return sum(tensor.nbytes for tensor in tensors)


@given(st.integers(1, 40), st.integers(0, 60), st.integers(1, 9), st.none() | st.integers(1, 6))
def test_entries_are_those_of_the_definition(new: int, past: int, rate: int, most: int | None) -> None:
    """A query sees the entries whose last token is itself or before it."""
    total = new + past
    seen = [(position + 1) // rate for position in range(past, total)]
    chosen = [count if most is None else min(count, most) for count in seen]
    assert attended_entries(new, total, rate) == sum(seen)
    assert attended_entries(new, total, rate, most) == sum(chosen)
    found = Reach(most=5, rate=rate, chosen=most).counts(3, new, total)
    assert (found["entry pairs"], found["chosen"]) == (3 * sum(seen), 3 * sum(chosen))
    assert found["entries"] == 3 * (total // rate)
    assert found["chosen read"] <= min(found["entries"], max(found["chosen"], 3 * new * (most or total)))
    assert found["selected"] == 3 * attended_pairs(new, total, causal=True, window=5)


def test_flops_by_hand() -> None:
    sliding, sparse, heavy, *_ = read_config(TYPED).layers
    E, H, D, Q, groups, O, window, J, heads = 64, 8, 24, 20, 2, 12, 16, 8, 3  # noqa: E741
    for new, total in ((1, 60), (5, 60), (40, 40)):
        near = attended_pairs(new, total, causal=True, window=window)
        projections = new * (E * Q + Q * H * D + E * D + H * D * O + groups * O * E)
        plain = projections + near * H * 2 * D
        assert forward_flops(sliding, new, total) == 2 * plain
        entries = attended_entries(new, total, 8)
        assert forward_flops(heavy, new, total) == 2 * (plain + new * 2 * E * D + entries * H * 2 * D)
        index = new * (2 * E * 2 * J + Q * heads * J + E * heads) + attended_entries(new, total, 4) * heads * J
        chosen = attended_entries(new, total, 4, 2)
        assert forward_flops(sparse, new, total) == 2 * (plain + new * 4 * E * D + index + chosen * H * 2 * D)
    # In the limit an indexer's entries are all that is read more, of a token's share of an entry.
    assert decode_intensity(sparse) == pytest.approx(2 * heads * J / (2 * (D + J)))
    assert decode_intensity(heavy) == pytest.approx(4 * H * D / (2 * D))
    with pytest.raises(SpecError, match="no cache that grows"):
        decode_intensity(sliding)


def test_operators_read_the_window_and_the_chosen_entries() -> None:
    config = {**TYPED, "layer_types": ["compressed_sparse_attention"] * 6}
    model = read_config(config)
    work = {one.name: one for one in operators(model, Pass(batch=3, new=1, total=400, dtype="float32"))}
    assert work["entry attention"].cache_bytes == 3 * 2 * 24 * 4
    assert work["index scores"].cache_bytes == 3 * 100 * 8 * 4
    assert work["window attention"].flops == 3 * 16 * 4 * 8 * 24
    assert {"streams", "streams' end"} <= {*work}


def test_a_share_of_the_groups() -> None:
    layer = read_config(TOY).layers[0]
    half = shard(layer, 2)
    assert (half.num_heads, half.output_groups) == (4, 1)  # type: ignore[attr-defined]
    assert state_bytes(half) == state_bytes(layer)
    with pytest.raises(ArgumentError, match="ranks = 4: must divide"):
        shard(layer, 4)


def test_flash_at_a_million_tokens() -> None:
    """A twelfth of DeepSeek-V3.2's cache; 284 billion weights, as published."""
    flash, before, tokens = read_spec("deepseek-v4-flash"), read_spec("deepseek-v3.2"), 1 << 20
    ours, theirs = (sum(cache_bytes(layer, tokens) for layer in model.layers) for model in (flash, before))
    assert 12 < theirs / ours < 13
    assert round(weights(flash).total / 1e9) == 284
    assert predict("deepseek-v4-flash", hardware="h200", context=tokens, ranks=8).memory.total > 0
    for engine in ALLOCATING_ENGINES:
        with pytest.raises(SpecError, match="is not known here"):
            allocation(flash, Pass(total=100), engine)


def test_types_of_layers_in_todays_fields_and_in_older_ones() -> None:
    ratios = [0, 4, 8, 4, 4, 4, 0]  # and one of a layer that predicts further tokens
    older = {**TOY, "compress_ratios": ratios}
    assert read_config(older) == read_config(TYPED)
    rates = {"compress_rates": None, "compress_rate_csa": 4, "compress_rate_hca": 8}
    assert read_config({**older, **rates}) == read_config(TYPED)
    for layer in read_config(TYPED).layers:
        assert spec_from_dict(layer.to_dict()) == layer
    labels = [layer.label for layer in read_config(TYPED).layers]
    assert labels[:3] == [
        "window 8 × 24, 16",
        "CSA 8 × 24, top 2 of T/4",
        "HCA 8 × 24, T/8",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compress_rates": 4}, "compress_rates = 4: must be a JSON object"),
        ({"compress_ratios": [0, 5, 0, 0, 0, 0]}, "compress_ratios"),
        ({"compress_ratios": [[4], {}, 0, 0, 0, 0]}, "compress_ratios"),
        ({"compress_rate_csa": 8}, "compress_rates = .*: must differ"),
        ({"num_key_value_heads": 4}, "num_key_value_heads = 4: must be 1"),
        ({"attention_bias": True}, "attention_bias = True: is not understood"),
        ({"n_shared_experts": 2}, "n_shared_experts = 2: is understood only as 1"),
        ({"rope_scaling": 3}, "rope_parameters = 3: must be a JSON object"),
        ({"o_groups": 3}, "output_groups = 3: must divide"),
        ({"compress_rate_csa": 7}, "rate = 7: must divide"),
        ({"index_topk": 0}, "index_topk = 0"),
        ({"layer_types": ["full_attention"] * 6}, "layer_types"),
        ({"sliding_window": None}, "sliding_window"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_config({**TOY, **fields})


def test_layers_with_entries_have_a_base_of_their_own() -> None:
    flat = {**TOY, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "compress_rope_theta": 77.0}
    assert {layer.rope.theta for layer in read_config(flat).layers if layer.rope} == {77.0}


def test_formulas_have_letters() -> None:
    layers = model_work(read_config(TYPED)).layers
    formulas = {work.name: work.formula for kind in layers for work in kind.prompt["direct"] if kind.reach.chosen}
    assert formulas["index scores"] == "2·B·I·entries·J"
    assert formulas["entry attention"] == "4·B·H·chosen·D"
    assert formulas["window attention"] == "4·B·H·selected·D"
    (heavy,) = (kind for kind in layers if kind.reach.rate and not kind.reach.chosen)
    assert "4·B·H·entries·D" in {work.formula for work in heavy.step["direct"]}
    symbols = complexity(read_config(TYPED).layers[1], 5, 60).symbols
    assert {"I", "J", "G", "O", "Q", "entries", "chosen"} <= {*symbols}


def test_impossible_specs() -> None:
    layer = read_config(TYPED).layers[1].to_dict()
    for fields, message in (
        ({"rate": None}, "rate = None: is required"),
        ({"sliding_window": 16}, "the field of this layer is window"),
        ({"index_head_dim": 0}, "index_head_dim = 0"),
    ):
        with pytest.raises(SpecError, match=message):
            spec_from_dict({**layer, **fields})
    with pytest.raises(SpecError, match="has costs"):
        build(read_config(TYPED).layers[1])
