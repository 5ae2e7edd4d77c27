"""Which layers have a sliding window, by the fields that a family's class reads and by its defaults."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from headwise.errors import SpecError
from headwise.models.specs import read_config
from tests.toy_configs import TOYS

LAYERS = 12


def windows(model_type: str, fields: dict[str, Any]) -> tuple[list[int | None], list[int | None]]:
    """The window of each layer here, and in transformers' config class."""
    config = {**TOYS[model_type], "num_hidden_layers": LAYERS, "max_position_embeddings": 2**20, **fields}
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
    fields = {"sliding_window": 32, "sliding_window_pattern": "LLLG"}
    kinds = [*["sliding_attention"] * 3, "full_attention"] * 3
    here, stock = windows("exaone4", {**fields, "layer_types": kinds})
    assert here == stock == [32, 32, 32, None] * 3
    with pytest.raises(SpecError, match="sliding_window_pattern = 'LLLG'"):  # transformers fails too
        read_config({**TOYS["exaone4"], **fields})


@pytest.mark.parametrize("fields", [{"max_window_layers": 2}, {"sliding_window": 32}, {"sliding_window": None}])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_a_switch_alone_has_the_defaults_of_the_class(model_type: str, fields: dict[str, Any]) -> None:
    here, stock = windows(model_type, {"use_sliding_window": True, **fields})
    assert here == stock
