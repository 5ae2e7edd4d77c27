from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest
from hypothesis import given

from headwise.errors import CheckpointError, HeadwiseError, SpecError
from headwise.models.specs import (
    AttentionSpec,
    ExpertLatentSpec,
    GroupedSpec,
    LatentSpaceSpec,
    LatentSpec,
    ModelSpec,
    RopeSpec,
    mechanism_module,
    spec_from_dict,
)
from tests.strategies import grouped_specs, latent_specs, recurrent_specs, rope_specs, specs

GROUPED: dict[str, Any] = {"hidden_size": 64, "num_heads": 8, "num_kv_heads": 2, "head_dim": 8}
LATENT: dict[str, Any] = {
    "hidden_size": 64,
    "num_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


@given(specs() | recurrent_specs())
def test_a_spec_survives_json(spec: AttentionSpec) -> None:
    values = json.loads(json.dumps(spec.to_dict()))
    assert spec_from_dict(values) == spec
    assert hash(spec_from_dict(values)) == hash(spec)


@given(specs())
def test_to_dict_begins_with_the_kind_and_has_every_field(spec: AttentionSpec) -> None:
    values = spec.to_dict()
    assert next(iter(values)) == "kind"
    kinds = {LatentSpec: "latent", LatentSpaceSpec: "latent_space", ExpertLatentSpec: "expert_latent"}
    assert values["kind"] == kinds.get(type(spec), "grouped")
    assert set(values) == {"kind", *(field.name for field in dataclasses.fields(spec))}


@given(rope_specs())
def test_rope_parameters_in_another_order_are_the_same_rope(rope: RopeSpec) -> None:
    assert dataclasses.replace(rope, parameters=rope.parameters[::-1]) == rope


@given(grouped_specs())
def test_the_mechanism_is_the_number_of_key_value_heads(spec: GroupedSpec) -> None:
    expected = {spec.num_heads: "mha"}.get(spec.num_kv_heads, "mqa" if spec.num_kv_heads == 1 else "gqa")
    if spec.num_heads == 1:
        assert (spec.mechanism, spec.label) == ("single_head", f"single head × {spec.head_dim}")
        return
    assert spec.mechanism == expected
    assert spec.label == f"{expected.upper()} {spec.num_heads}/{spec.num_kv_heads} × {spec.head_dim}"
    assert spec.group_size * spec.num_kv_heads == spec.num_heads


@given(latent_specs())
def test_mla_is_labelled_by_what_a_token_caches(spec: LatentSpec) -> None:
    assert spec.mechanism == "mla"
    rope = f" + {spec.qk_rope_head_dim}" if spec.qk_rope_head_dim else ""
    assert spec.label == f"MLA {spec.kv_lora_rank}{rope}"
    assert spec.qk_head_dim == spec.qk_nope_head_dim + spec.qk_rope_head_dim


def test_a_value_head_is_as_wide_as_a_key_head_by_default() -> None:
    assert GroupedSpec(**GROUPED).value_dim == 8
    assert GroupedSpec(**GROUPED, v_head_dim=5).value_dim == 5
    assert GroupedSpec(**GROUPED) == GroupedSpec(**GROUPED, v_head_dim=8)


@pytest.mark.parametrize(
    ("bias", "names"),
    [
        (True, ("q_proj", "k_proj", "v_proj", "o_proj")),
        (False, ()),
        ("qkv", ("q_proj", "k_proj", "v_proj")),
        (("o_proj", "q_proj"), ("q_proj", "o_proj")),
    ],
)
def test_grouped_bias(bias: Any, names: tuple[str, ...]) -> None:
    assert GroupedSpec(**GROUPED, bias=bias).bias == names


@pytest.mark.parametrize(
    ("bias", "q_lora_rank", "names"),
    [
        (True, None, ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
        (True, 8, ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
        ("hf", None, ("kv_a_proj_with_mqa", "o_proj")),
        ("hf", 8, ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")),
        ("qkv", None, ("q_proj", "kv_a_proj_with_mqa")),
        ("qkv", 8, ("q_b_proj", "kv_a_proj_with_mqa")),
    ],
)
def test_latent_bias(bias: Any, q_lora_rank: int | None, names: tuple[str, ...]) -> None:
    assert LatentSpec(**LATENT, q_lora_rank=q_lora_rank, bias=bias).bias == names


NOT_A_SIZE = [0, -3, True, 2.0, "8", None]


@pytest.mark.parametrize("value", NOT_A_SIZE)
@pytest.mark.parametrize("field", ["hidden_size", "num_heads", "num_kv_heads", "head_dim"])
def test_grouped_sizes_are_whole_numbers(field: str, value: object) -> None:
    with pytest.raises(SpecError, match=rf"^{field} = {value!r}: must be a whole number"):
        GroupedSpec(**{**GROUPED, field: value})


@pytest.mark.parametrize("value", NOT_A_SIZE)
@pytest.mark.parametrize("field", ["hidden_size", "num_heads", "kv_lora_rank", "v_head_dim"])
def test_latent_sizes_are_whole_numbers(field: str, value: object) -> None:
    with pytest.raises(SpecError, match=rf"^{field} = {value!r}: must be a whole number"):
        LatentSpec(**{**LATENT, field: value})


@pytest.mark.parametrize("value", [-1, True, 1.5, "8", None])
@pytest.mark.parametrize("field", ["qk_nope_head_dim", "qk_rope_head_dim"])
def test_either_part_of_a_latent_key_may_be_0_and_nothing_less(field: str, value: object) -> None:
    assert LatentSpec(**{**LATENT, field: 0}).qk_head_dim == LatentSpec(**LATENT).qk_head_dim - LATENT[field]
    with pytest.raises(SpecError, match=rf"^{field} = {value!r}: must be a whole number"):
        LatentSpec(**{**LATENT, field: value})


def test_a_latent_key_has_some_width() -> None:
    with pytest.raises(SpecError, match=r"^qk_nope_head_dim = 0: must be at least 1"):
        LatentSpec(**{**LATENT, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0})


def test_a_latent_without_a_rotary_key_is_named_by_its_rank() -> None:
    assert LatentSpec(**{**LATENT, "qk_rope_head_dim": 0}).label == f"MLA {LATENT['kv_lora_rank']}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_heads": 3}, r"num_kv_heads = 3: must divide"),
        ({"num_kv_heads": 16}, r"num_kv_heads = 16: must divide"),
        ({"v_head_dim": 0}, r"v_head_dim = 0: must be a whole number"),
        ({"sliding_window": 0}, r"sliding_window = 0: must be a whole number"),
        ({"is_causal": 1}, r"is_causal = 1: must be true or false"),
        ({"sinks": "no"}, r"sinks = 'no': must be true or false"),
        ({"sliding_window": "128"}, r"sliding_window = '128': must be a whole number"),
        ({"softmax_scale": 0.0}, r"softmax_scale = 0.0: must be a number"),
        ({"softmax_scale": float("nan")}, r"softmax_scale = nan: must be a number"),
        ({"softcap": -50.0}, r"softcap = -50.0: must be a number"),
        ({"qk_norm": "layer"}, r"qk_norm = 'layer': must be None"),
        ({"rope": RopeSpec(dim=10)}, r"rope dim = 10: must be at most head_dim = 8"),
        ({"bias": "all"}, r"bias = 'all': must be True, False"),
        ({"bias": ("q_proj", "kv_b_proj")}, r"bias = 'kv_b_proj': must name"),
    ],
)
def test_what_a_grouped_spec_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        GroupedSpec(**{**GROUPED, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"latent_norm": None}, r"latent_norm = None: must be true or false"),
        ({"q_lora_rank": 0}, r"q_lora_rank = 0: must be a whole number"),
        ({"qk_rope_head_dim": 5}, r"qk_rope_head_dim = 5: must be even"),
        ({"rope": RopeSpec(dim=2)}, r"rope dim = 2: must equal"),
        ({"sliding_window": -1}, r"sliding_window = -1: must be a whole number"),
        ({"bias": ("q_a_proj",)}, r"bias = 'q_a_proj': must name one of \['q_proj'"),
        ({"bias": ("q_proj",), "q_lora_rank": 8}, r"bias = 'q_proj': must name one of \['q_a_proj'"),
    ],
)
def test_what_a_latent_spec_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        LatentSpec(**{**LATENT, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 0}, r"rope dim = 0: must be a whole number"),
        ({"dim": 7}, r"rope dim = 7: must be an even number"),
        ({"dim": "64"}, r"rope dim = '64': must be a whole number"),
        ({"dim": 64, "interleaved": "yes"}, r"interleaved = 'yes': must be true or false"),
        ({"dim": 64, "rope_type": []}, r"rope_type = \[\]: must be the name"),
        ({"dim": 64, "parameters": (("factor", None),)}, r"rope factor = None: must be a number"),
        ({"dim": 64, "parameters": (("factor", 0.0),)}, r"rope factor = 0\.0: must be a number"),
        ({"dim": 64, "parameters": (("factor", -2),)}, r"rope factor = -2: must be a number"),
        ({"dim": 64, "parameters": (("factor", "2"),)}, r"rope factor = '2': must be a number"),
        (
            {"dim": 4, "parameters": (("long_factor", (1.0, 0.0)),)},
            r"rope long_factor = 0\.0: must be a number",
        ),
        ({"dim": 64, "theta": 0}, r"rope_theta = 0: must be a number"),
        ({"dim": 64, "theta": 4.2e-45}, r"rope_theta = 4\.2e-45: must be at least 1e-06"),
        ({"dim": 64, "theta": float("nan")}, r"rope_theta = nan: must be a number"),
        ({"dim": 64, "theta": float("inf")}, r"rope_theta = inf: must be a number"),
        ({"dim": 64, "theta": "1e4"}, r"rope_theta = '1e4': must be a number"),
        ({"dim": 64, "max_position_embeddings": 0}, r"max_position_embeddings = 0: must be a whole number"),
    ],
)
def test_what_a_rope_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        RopeSpec(**fields)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"attention kind = None: must be the name"),
        ({"kind": "os.path"}, r"attention kind = 'os.path': must be the name"),
        ({"kind": 3}, r"attention kind = 3: must be the name"),
        ({"kind": "linear"}, r"attention kind = 'linear': there is no module"),
        ({"kind": "model"}, r"attention kind = 'model': headwise.models.specs.model defines no AttentionSpec"),
        ({"kind": "base", "hidden_size": 8}, r"attention kind = 'base': headwise.models.specs.base defines no"),
        ({"kind": "grouped", **GROUPED, "heads": 2}, r"grouped spec key = 'heads': must be one of"),
        ({"kind": "grouped", "hidden_size": 64}, r"grouped spec = \{.*missing 3 required"),
        ({"kind": "grouped", **GROUPED, "bias": 5}, r"grouped spec = \{.*'int' object is not iterable"),
        ({"kind": "grouped", **GROUPED, "rope": "yes"}, r"grouped spec = \{.*cannot be read"),
        (
            {"kind": "grouped", **GROUPED, "rope": {"dims": 8}},
            r"grouped spec = \{.*unexpected keyword argument 'dims'",
        ),
        ({"kind": "grouped", **GROUPED, "rope": {"dim": 8, "parameters": 3}}, r"grouped spec = \{.*cannot be read"),
        ({"kind": "latent", **LATENT, "v_head_dim": "8"}, r"v_head_dim = '8': must be a whole number"),
    ],
)
def test_spec_from_dict_refuses_what_to_dict_never_wrote(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        spec_from_dict(values)


def test_a_mechanism_is_a_module_of_the_same_name_in_every_room() -> None:
    assert mechanism_module("models.specs", "latent").LatentSpec is LatentSpec
    assert mechanism_module("costs.formulas", "latent").__name__ == "headwise.costs.formulas.latent"
    with pytest.raises(SpecError, match=r"^attention kind = 'linear': there is no module headwise.costs"):
        mechanism_module("costs.formulas", "linear")


def test_a_model_groups_its_equal_layers() -> None:
    full, local = GroupedSpec(**GROUPED), GroupedSpec(**GROUPED, sliding_window=4)
    latent = LatentSpec(**LATENT)
    model = ModelSpec(model_type="toy", hidden_size=64, layers=(local, full, local, latent))
    assert model.num_layers == 4
    assert model.distinct_layers() == [(local, (0, 2)), (full, (1,)), (latent, (3,))]
    assert model.mechanism == "mixed"
    assert dataclasses.replace(model, layers=(local, full)).mechanism == "gqa"
    assert model.is_causal


def test_a_model_has_a_layer_and_a_width() -> None:
    with pytest.raises(SpecError, match=r"^num_hidden_layers = 0: must be at least 1$"):
        ModelSpec(model_type="toy", hidden_size=64, layers=())
    with pytest.raises(SpecError, match=r"^hidden_size = -1: must be a whole number"):
        ModelSpec(model_type="toy", hidden_size=-1, layers=(GroupedSpec(**GROUPED),))


def test_an_error_keeps_its_parts_through_a_pickle_and_shortens_its_value() -> None:
    error = pickle.loads(pickle.dumps(CheckpointError("file", "x" * 1000, "must exist")))
    assert isinstance(error, HeadwiseError)
    assert isinstance(error, ValueError)
    assert (error.field, error.value, error.rule) == ("file", "x" * 1000, "must exist")
    assert len(str(error)) < 230
    assert str(error).endswith("…: must exist")
