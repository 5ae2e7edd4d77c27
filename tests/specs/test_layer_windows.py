"""Which layers have a sliding window, by the fields that a family's class reads and by its defaults."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from headwise.errors import SpecError
from headwise.specs import read_config
from tests.toy_configs import TOY_CONFIGS

LAYERS = 12


def windows(model_type: str, fields: dict[str, Any]) -> tuple[list[int | None], list[int | None]]:
    """The window of each layer here, and in transformers' config class."""
    config = {**TOY_CONFIGS[model_type], "num_hidden_layers": LAYERS, "max_position_embeddings": 2**20, **fields}
    if "layer_types" not in fields:
        config.pop("layer_types", None)
    stock = AutoConfig.for_model(**config)
    sliding = [stock.sliding_window if kind == "sliding_attention" else None for kind in stock.layer_types]
    return [layer.sliding_window for layer in read_config(config).layers], sliding


@pytest.mark.parametrize("field", ["sliding_window_pattern", "_sliding_window_pattern"])
@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "cohere2", "olmo3", "gpt_oss"])
def test_a_period_counts_where_the_class_reads_it(model_type: str, field: str) -> None:
    here, stock = windows(model_type, {"sliding_window": 32, field: 3})
    assert here == stock


def test_listed_layers_need_no_period() -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    fields = {"sliding_window": 32, "layer_types": kinds * 3, "sliding_window_pattern": "LLLG"}
    here, stock = windows("exaone4", fields)
    assert here == stock == [32, 32, 32, None] * 3
    del fields["layer_types"]  # transformers fails
    with pytest.raises(SpecError, match="sliding_window_pattern = 'LLLG'"):
        windows_here = read_config({**TOY_CONFIGS["exaone4"], "num_hidden_layers": LAYERS, **fields})
        assert windows_here is None


@pytest.mark.parametrize("fields", [{"max_window_layers": 2}, {"sliding_window": 32}, {"sliding_window": None}])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_a_switch_alone_has_the_defaults_of_the_class(model_type: str, fields: dict[str, Any]) -> None:
    config = {"use_sliding_window": True, **fields}
    if "sliding_window" not in fields:
        TOY = TOY_CONFIGS[model_type]
        assert "sliding_window" not in TOY or TOY["sliding_window"] is None
    here, stock = windows(model_type, config)
    assert here == stock
