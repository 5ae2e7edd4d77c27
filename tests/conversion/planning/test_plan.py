"""A plan's target for each layer, and the stages that it carries out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwise.conversion import parse_target
from headwise.conversion.methods import STAGES
from headwise.conversion.plan import LayerSize, Place, make_plan, read_layer
from headwise.models.checkpoints import open_checkpoint
from headwise.models.specs import LatentSpec
from tests.real_models import save_tiny

EVEN = tuple(stage for stage in STAGES if stage != "spread")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("plan") / "source", num_hidden_layers=3)


def test_errors_of_keys_count_half_unless_a_spread_says_otherwise(source: Path) -> None:
    plan = make_plan(open_checkpoint(source), parse_target("mla", kv_budget=0.5))
    assert [plan.layer_target(place).key_weight for place in plan.places] == [0.5] * 3
    resized = plan.resized([LayerSize(12, 4, 2.0), LayerSize(16, 8), LayerSize(20, 8, 0.125)])
    targets = [resized.layer_target(place) for place in resized.places]
    assert [target.key_weight for target in targets] == [2.0, 0.5, 0.125]
    specs = [target.spec for target in targets]
    assert all(isinstance(spec, LatentSpec) for spec in specs)
    assert [(s.kv_lora_rank, s.qk_rope_head_dim) for s in specs if isinstance(s, LatentSpec)] == [
        (12, 4),
        (16, 8),
        (20, 8),
    ]
    assert plan.key_weights is None  # a plan does not change


@pytest.mark.parametrize(
    ("target", "options", "stages"),
    [
        ({"to": "mla", "kv_budget": 0.44}, {}, STAGES),
        ({"to": "mla", "kv_budget": 0.44}, {"without": ["refit"]}, STAGES[:-1]),
        ({"to": "mla", "kv_budget": 0.5}, {"spread": True}, STAGES),
        ({"to": "mla", "kv_budget": 0.5}, {}, EVEN),
        ({"to": "mla", "kv_bytes": 0.25}, {}, STAGES),
        ({"to": "mla", "kv_budget": 0.5}, {"spread": True, "without": ["spread"]}, EVEN),
        (
            {"to": "mla", "kv_budget": 0.25},
            {"without": ["sensitivity"]},
            ("recall", "starts", "channels", "sequence", "refine", "refit"),
        ),
        ({"to": "mla", "kv_budget": 0.5}, {"calibration": "statistics"}, ("sensitivity", "channels")),
        ({"to": "mla", "kv_budget": 0.5}, {"calibration": None}, ()),
        ({"to": "mla", "kv_budget": 1.0}, {}, ()),
        ({"to": "mla", "kv_budget": 0.5}, {"method": "mha2mla"}, ()),
        ({"to": "mqa"}, {}, ("recall", "starts", "sensitivity", "sequence", "refine", "refit")),
        ({"to": "mqa"}, {"without": ["refine", "refit"]}, ("recall", "sensitivity", "sequence")),
        ({"to": "mqa"}, {"method": "mean"}, ()),
        ({"to": "mha"}, {}, ()),
    ],
    ids=str,
)
def test_stages_are_those_that_the_method_has_and_can_use(
    target: dict[str, Any], options: dict[str, Any], stages: tuple[str, ...], source: Path
) -> None:
    options = dict(options)
    wanted = replace(parse_target(**target), spreads=options.pop("spread", False))
    assert make_plan(open_checkpoint(source), wanted, **options).stages == stages


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ({"to": "mha"}, "repeat"),
        ({"to": "gqa:3"}, "copy"),
        ({"to": "mqa"}, "aligned"),
        ({"to": "mla", "kv_budget": 0.5}, "headwise"),
    ],
    ids=str,
)
def test_the_method_follows_from_the_target(target: dict[str, Any], name: str, source: Path) -> None:
    plan = make_plan(open_checkpoint(source), parse_target(**target))
    assert plan.method.name == name
    assert plan.is_exact == (name in ("repeat", "copy"))
    assert read_layer(plan.checkpoint, Place(1)).spec == plan.before.layers[1]
