"""The rotary embedding that is read of a config is the one that transformers computes with it, or neither is."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoModelForCausalLM

from headwise.errors import SpecError
from headwise.models.specs import RopeSpec, read_config
from headwise.runtime.attention import RotaryEmbedding
from tests.meta_models import meta_model, transformers_config
from tests.toy_configs import TOYS

Config = dict[str, Any]
Rotation = dict[int, tuple[list[float], float]]
"""Frequencies, and the factor of cos and sin, by the length of a text."""

FULL, SLIDING = "full_attention", "sliding_attention"
LENGTHS = (5, 50, 300, 5)
"""Within an original length and beyond it, beyond the longest, and short again."""


def heads_of_16(name: str) -> Config:
    """A family's toy with heads, or rotary keys, of 16 dims."""
    own: Config = {
        "deepseek_v4": {"layer_types": ["sliding_attention", "compressed_sparse_attention"] * 3},
        "minimax_m2": {"rotary_dim": 8},
        "granitemoehybrid": {"position_embedding_type": "rope"},
    }.get(name, {})
    width = "qk_rope_head_dim" if "kv_lora_rank" in TOYS[name] else "head_dim"
    head = {} if name == "falcon" else {width: 16}  # Falcon's divide the hidden size, whatever is said
    return {**TOYS[name], "hidden_size": 128, "num_attention_heads": 8, "max_position_embeddings": 256, **own, **head}


FAMILIES = [name for name in TOYS if any(layer.rope for layer in read_config(heads_of_16(name)).layers)]


@cache
def rotary_class(name: str) -> Any:
    """The class of the family's rotary embedding."""
    classes = [type(module) for module in meta_model(heads_of_16(name)).modules()]
    return next(own for own in classes if own.__name__.endswith("RotaryEmbedding"))


BY_LAYER = ("gemma3_text", "gemma3n_text", "olmo3", "deepseek_v4")
"""Families whose layers differ in their embedding."""


def theirs(config: Config) -> dict[str, Rotation]:
    """What transformers' module computes, by the type of layers; an empty type where all are alike."""
    stock = transformers_config(deepcopy(config))
    rotary = rotary_class(config["model_type"])(stock)
    types = sorted(getattr(rotary, "layer_types", None) or {""})
    found: dict[str, Rotation] = {kind: {} for kind in types}
    for kind in types:
        prefix = f"{kind}_" if kind else ""
        for length in LENGTHS:
            positions = torch.arange(length)[None]
            rotary(torch.zeros(1, length, 8), positions, **({"layer_type": kind} if kind else {}))
            frequencies = getattr(rotary, f"{prefix}inv_freq").tolist()
            found[kind][length] = frequencies, float(getattr(rotary, f"{prefix}attention_scaling"))
    return found


def ours(rope: RopeSpec) -> Rotation:
    """The same of headwise's module: position 1 is turned by the frequencies."""
    module, found = RotaryEmbedding(rope), {}
    for length in LENGTHS:
        cos, sin = module(torch.ones(1, 1, dtype=torch.int64), torch.float64, length)
        scale = torch.hypot(cos, sin)
        assert torch.allclose(scale, scale[..., :1])
        found[length] = torch.atan2(sin, cos)[0, 0].tolist(), float(scale[0, 0, 0])
    return found


def assert_same_or_both_refuse(config: Config) -> bool:
    """Compare the two, of every type of layers; whether they computed something."""
    try:
        mine = [ours(rope) for rope in {layer.rope for layer in read_config(deepcopy(config)).layers} if rope]
    except SpecError:
        with pytest.raises(REFUSALS):
            run(config)
        return False
    expected = theirs(config)
    assert ("" in expected) == (config["model_type"] not in BY_LAYER)
    for rotation in expected.values():
        assert any(_near(one, rotation) for one in mine), (mine, rotation)
    for one in mine:
        assert any(_near(one, rotation) for rotation in expected.values()), (one, expected)
    return True


def _near(one: Rotation, other: Rotation) -> bool:
    return all(
        one[n][1] == pytest.approx(other[n][1], rel=1e-6) and one[n][0] == pytest.approx(other[n][0], rel=1e-5)
        for n in LENGTHS
    )


REFUSALS = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, StrictDataclassClassValidationError)


def run(config: Config) -> None:
    """Make transformers' embedding of a config, and run its model."""
    theirs(config)
    AutoModelForCausalLM.from_config(transformers_config(deepcopy(config)))(torch.arange(7)[None])


# --- Random combinations

_NUMBERS: dict[str, Config] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "beta_fast": 16.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {},
    "proportional": {"factor": 2.0},
}
_THETAS, _PARTS, _LENGTHS = (500.0, 2e4, 1e6), (0.25, 0.5, 1.0), (32, 64)


def an_object(draw: Random) -> Config:
    """A ``rope_parameters`` or ``rope_scaling`` of any kind, with or without what may stand beside it instead."""
    kind = draw.choice(list(_NUMBERS))
    values = {
        **_NUMBERS[kind],
        **dict.fromkeys(draw.choice([("rope_type",), ("type",), ("type", "rope_type")]), kind),
    }
    values |= some(draw, rope_theta=_THETAS, partial_rotary_factor=_PARTS, original_max_position_embeddings=_LENGTHS)
    if kind == "longrope":
        pairs = int(16 * values.get("partial_rotary_factor", 1.0)) // 2
        values |= {"short_factor": [1.0 + i for i in range(pairs)], "long_factor": [2.0 + i for i in range(pairs)]}
    if kind == "yarn":
        values |= some(draw, attention_factor=(1.5,), truncate=(False,))
    return values


def some(draw: Random, **choices: Sequence[Any]) -> Config:
    """Half of the fields, each with one of its values."""
    return {name: draw.choice(values) for name, values in choices.items() if draw.random() < 0.5}


def fields(draw: Random, *, by_layer: bool) -> Config:
    """A combination of everything that a file may say of its rotary embedding.

    Args:
        draw: the source of choices.
        by_layer: whether ``rope_parameters`` may hold an object for each type of layers.
    """
    nested = {kind: an_object(draw) for kind in (FULL, SLIDING) if draw.random() < 0.8}
    return some(
        draw,
        rope_scaling=(an_object(draw),),
        rope_parameters=(an_object(draw), nested) if by_layer else (an_object(draw),),
        rope_theta=_THETAS,
        partial_rotary_factor=_PARTS,
        rotary_dim=(4, 8),
        rotary_pct=_PARTS,
        rotary_emb_base=_THETAS,
        rope_local_base_freq=_THETAS,
        original_max_position_embeddings=_LENGTHS,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_fields_that_disagree_are_read_as_transformers_reads_them(name: str) -> None:
    draw = Random(name)
    computed = [
        assert_same_or_both_refuse({**heads_of_16(name), **fields(draw, by_layer=name in BY_LAYER)})
        for _ in range(20)
    ]
    assert sum(computed) > 4
