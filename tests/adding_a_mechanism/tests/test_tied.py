"""A new mechanism gets costs, caches, JSON, inspection and timing without any edit of other files."""

from __future__ import annotations

import json

import torch
from headwise.models.specs.tied import TiedSpec
from torch.utils.flop_counter import FlopCounterMode

from headwise import compare, cost, inspect
from headwise.measure.timing import measure_layers
from headwise.models.specs import ModelSpec, read_config, spec_from_dict
from headwise.runtime.attention import build

SPEC = TiedSpec(hidden_size=24, num_heads=3, head_dim=10)


def test_cached_is_uncached() -> None:
    layer, x = build(SPEC).double(), torch.randn(2, 9, 24, dtype=torch.float64)
    cache = layer.new_cache(2, 9)
    parts = [layer(x[:, a:b], is_causal=True, cache=cache) for a, b in ((0, 4), (4, 5), (5, 9))]
    assert torch.allclose(torch.cat(parts, 1), layer(x, is_causal=True), rtol=1e-12, atol=1e-12)
    assert cache.nbytes == cost.cache_bytes(SPEC, 9, batch=2, dtype="float64")


def test_costs_are_the_modules() -> None:
    layer = build(SPEC)
    layer.backend = "reference"
    assert cost.parameters(SPEC) == sum(p.numel() for p in layer.parameters())
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(1, 7, 24))
    assert cost.forward_flops(SPEC, 7, causal=False) == counter.get_total_flops()


def test_it_travels_as_json_and_is_inspected_compared_and_timed() -> None:
    assert spec_from_dict(json.loads(json.dumps(SPEC.to_dict()))) == SPEC
    attention = [{"layers": [0, 1], **SPEC.to_dict()}]
    config = {"model_type": "headwise_llama", "num_hidden_layers": 2, "headwise": {"attention": attention}}
    model = read_config(config)
    assert model == ModelSpec(model_type="headwise_llama", hidden_size=24, layers=(SPEC, SPEC))
    inspection = inspect(model, dtype="float32")
    assert (inspection.mechanism, inspection.kv_bytes_per_token) == ("tied", 2 * 30 * 4)
    assert [row.label for row in compare(model).rows] == ["TIED 3 × 10"]
    assert measure_layers([SPEC], context=16, repeats=1)[0].decode_ms > 0
