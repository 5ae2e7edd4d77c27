from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise import cost
from headwise.costs.formulas import Comparison, Row, compare, ladder
from headwise.errors import ArgumentError, SpecError
from headwise.models.specs import GroupedSpec, LatentSpec, ModelSpec, catalog, read_config, read_spec
from tests.strategies import AnySpec, causal, grouped_specs, latent_specs, specs
from tests.toy_configs import TOYS


def source_row(comparison: Comparison) -> Row:
    (row,) = [row for row in comparison.rows if row.is_source]
    return row


def test_llama_3_8b_row_by_row() -> None:
    rows = compare(read_spec("llama-3-8b"), context=8192).rows
    assert [(row.label, row.kv_bytes_per_token // 32, row.is_source) for row in rows] == [
        ("MHA 32/32 × 128", 16384, False),
        ("GQA 32/16 × 128", 8192, False),
        ("GQA 32/8 × 128", 4096, True),
        ("GQA 32/4 × 128", 2048, False),
        ("GQA 32/2 × 128", 1024, False),
        ("MQA 32/1 × 128", 512, False),
        ("MLA 1024 + 1024", 4096, False),
        ("MLA 896 + 128", 2048, False),
        ("MLA 384 + 128", 1024, False),
        ("latent-space 1024", 4096, False),
        ("latent-space 512", 2048, False),
        ("latent-space 256", 1024, False),
        ("experts 8×128 2/8 P16", 4096, False),
        ("experts 8×64 2/8 P16", 2048, False),
        ("experts 8×32 2/8 P16", 1024, False),
        ("single head × 4096", 16384, False),
    ]
    assert [row.convert_to for row in rows[:9]] == [
        "--to mha",
        "--to gqa:16",
        None,
        "--to gqa:4",
        "--to gqa:2",
        "--to mqa",
        *(f"--to mla --kv-lora-rank {r} --qk-rope-head-dim {p}" for r, p in ((1024, 1024), (896, 128), (384, 128))),
    ]
    assert {row.convert_to for row in rows[9:]} == {None}
    source = rows[2]
    assert source.attention_parameters_per_layer == 41943040
    assert source.kv_bytes == 8192 * 131072
    assert source.decode_intensity == 4
    assert source.decode_flops == 32 * (2 * 41943040 + 4 * 32 * 128 * 8192)
    assert source.prefill_flops == 32 * (2 * 8192 * 41943040 + 4 * 32 * 128 * 8192 * 8193 // 2)


def test_deepseek_v3_against_the_dense_attention_it_replaces() -> None:
    comparison = compare(read_spec("deepseek-v3"))
    labels = [row.label for row in comparison.rows]
    assert labels == [*(f"{'MHA' if k == 128 else 'MQA' if k == 1 else 'GQA'} 128/{k} × 128" for k in
                        (128, 64, 32, 16, 8, 4, 2, 1)), "MLA 512 + 64",
                      "latent-space 256", "latent-space 128", *(f"experts 32×{c} 2/8 P16" for c in (9, 4, 2)),
                      "single head × 16384"]  # fmt: skip
    assert comparison.rows[0].kv_bytes_per_token == 61 * 2 * 128 * 128 * 2
    assert source_row(comparison).kv_bytes_per_token == 70272


KINDS = {name: {layer.kind for layer in read_spec(name).layers} for name in catalog()}
ONE_KIND = [name for name, kinds in KINDS.items() if len(kinds) == 1 and kinds != {"compressed"}]  # of several sizes


@pytest.mark.parametrize("name", ONE_KIND)
def test_the_source_row_is_the_model_itself(name: str) -> None:
    model = read_spec(name)
    comparison = compare(model, context=3000, batch=2, dtype="float32")
    row = source_row(comparison)
    assert row.kv_bytes_per_token == cost.model.cache_bytes_per_token(model, "float32")
    assert row.kv_bytes == cost.model.cache_bytes(model, 3000, batch=2, dtype="float32")
    assert row.prefill_flops == cost.model.attention_flops(model, 3000, batch=2, causal=True)
    assert row.decode_flops == cost.model.attention_flops(model, 1, 3000, batch=2, causal=True)
    assert row.attention_parameters_per_layer * model.num_layers == cost.model.parameters(model)
    assert row.mechanism == model.mechanism
    assert row.decode_intensity == cost.decode_intensity(model.layers[0], dtype="float32")
    assert (comparison.context, comparison.batch, comparison.dtype) == (3000, 2, "float32")


def test_every_candidate_keeps_each_layers_window() -> None:
    model = read_spec("gpt-oss-120b")
    comparison = compare(model, context=1000)
    for row, spec in zip(comparison.rows, comparison.specs, strict=True):
        values = cost.formulas(spec).cache_values(spec)
        assert row.kv_bytes == 18 * values * 2 * (128 + 1000)
        assert row.kv_bytes_per_token == 36 * values * 2


@given(grouped_specs())
def test_a_grouped_ladder_goes_down_from_mha_to_mqa_and_on_to_mla(spec: GroupedSpec) -> None:
    rungs = ladder(spec)
    assert rungs.count(spec) == 1
    heads = spec.num_heads
    dense = [rung for rung in rungs if isinstance(rung, GroupedSpec) and rung.num_heads == heads]
    if heads == 1:  # the one wide head is then of the same number of heads
        dense = dense[: dense.index(spec) + 1]
    latents = [rung for rung in rungs if isinstance(rung, LatentSpec)]
    designs = rungs[len(dense) + len(latents) :] if heads > 1 else []
    if heads > 1:
        assert rungs == [*dense, *latents, *designs]
        assert {rung.mechanism for rung in designs} == {"latent_space", "expert_latent", "single_head"}
    counts = [rung.num_kv_heads for rung in dense]
    assert counts == sorted(set(counts), reverse=True)
    assert (counts[0], counts[-1]) == (spec.num_heads, 1)
    values = spec.num_kv_heads * (spec.head_dim + spec.value_dim)
    sizes = [rung.kv_lora_rank + rung.qk_rope_head_dim for rung in latents]
    has_a_pair = spec.num_kv_heads * spec.head_dim > 1
    assert sizes == [size for size in (values, values // 2, values // 4) if size >= 3 and has_a_pair]


@given(latent_specs())
def test_a_latent_ladder_sets_the_attention_it_replaces_before_the_layer(spec: LatentSpec) -> None:
    rungs = ladder(spec)
    dense, designs = rungs[: rungs.index(spec)], rungs[rungs.index(spec) + 1 :]
    assert rungs.count(spec) == 1
    assert {rung.mechanism for rung in designs} == {"latent_space", "expert_latent", "single_head"}
    assert [rung.mechanism for rung in dense][-1] == ("single_head" if spec.num_heads == 1 else "mqa")
    for rung in dense:
        assert isinstance(rung, GroupedSpec)
        assert rung.v_head_dim == spec.v_head_dim


@given(specs(), st.integers(1, 5000))
def test_any_causal_model_can_be_compared(spec: AnySpec, context: int) -> None:
    layer = causal(spec)
    model = ModelSpec(model_type="toy", hidden_size=layer.hidden_size, layers=(layer,) * 2)
    comparison = compare(model, context=context)
    assert source_row(comparison).kv_bytes == 2 * cost.cache_bytes(layer, context)
    assert len(comparison.rows) == len(comparison.specs)


def test_a_row_is_json_and_has_measured_times_only_when_measured() -> None:
    row = compare(read_spec("llama-3-8b")).rows[0]
    values = json.loads(json.dumps(row.to_dict()))
    assert values["mechanism"] == "mha"
    assert not {"decode_ms", "prefill_ms"} & set(values)
    assert dataclasses.replace(row, decode_ms=1.5).to_dict()["decode_ms"] == 1.5


@pytest.mark.parametrize("value", [0, -1, True, 4096.0, "4096"])
@pytest.mark.parametrize("field", ["context", "batch"])
def test_context_and_batch_are_whole_numbers(field: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"^{field} = {value!r}: must be a whole number"):
        compare(read_spec("llama-3-8b"), **{field: value})


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^dtype = 'fp4': must be one of"):
        compare(read_spec("llama-3-8b"), dtype="fp4")


def test_an_encoder_has_no_cache_to_compare() -> None:
    bert = read_config({"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8})
    with pytest.raises(SpecError, match=r"^model_type = 'bert': is an encoder"):
        compare(bert)


def test_layers_of_two_kinds_have_no_one_ladder() -> None:
    layers = (read_spec("llama-3-8b").layers[0], read_spec("deepseek-v3").layers[0])
    with pytest.raises(SpecError, match=r"^attention kinds = \['grouped', 'latent'\]: must be one:"):
        compare(ModelSpec(model_type="toy", hidden_size=4096, layers=layers))


def _mixed_sizes() -> ModelSpec:
    layer = read_spec("llama-3-8b").layers[0]
    assert isinstance(layer, GroupedSpec)
    layers = (layer, dataclasses.replace(layer, num_kv_heads=32))
    return ModelSpec(model_type="toy", hidden_size=4096, layers=layers)


def test_recurrent_layers_stay_beside_every_candidate() -> None:
    model = read_spec("jamba-v0.1")
    comparison = compare(model, context=5000)
    state = cost.model.state_bytes(model)
    attention = sum(layer.kind == "grouped" for layer in model.layers)
    for row, spec in zip(comparison.rows, comparison.specs, strict=True):
        assert row.kv_bytes == state + attention * 5000 * cost.cache_values(spec) * 2


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-2-7b", "falcon-7b", "deepseek-v3", "gemma-2b"])
@pytest.mark.parametrize("match", ["cache", "parameters"])
def test_matched_sizes_are_the_nearest(name: str, match: Any) -> None:
    source = read_spec(name).layers[0]
    measure = cost.cache_values if match == "cache" else cost.parameters
    goal = measure(source)
    first, *others = cost.matched(source, match)
    assert first is source
    assert len({spec.mechanism for spec in others}) == len(others) >= 3
    fields = {"latent_space": "latent_dim", "expert_latent": "kv_dim", "mla": "kv_lora_rank"}
    for spec in others:
        field = fields.get(spec.mechanism, "head_dim")
        step = spec.num_heads * 2 if field == "latent_dim" else 2 if field == "head_dim" else 1  # type: ignore[attr-defined]
        for size in (getattr(spec, field) - step, getattr(spec, field) + step):
            sizes = {field: size} | ({"v_head_dim": size} if field == "head_dim" and spec.kind == "grouped" else {})
            if isinstance(spec, GroupedSpec) and spec.rope is not None and spec.rope.dim > size:
                sizes["rope"] = dataclasses.replace(spec.rope, dim=size)  # type: ignore[dict-item]
            try:
                neighbour = dataclasses.replace(spec, **sizes)
            except SpecError:
                continue
            assert abs(measure(neighbour) - goal) >= abs(measure(spec) - goal)


def test_an_unknown_match_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^match = 'speed': must be one of"):
        compare(read_spec("llama-3-8b"), match="speed")  # type: ignore[arg-type]


def test_what_convert_takes_has_a_way_to_mla_behind_norms_too() -> None:
    rows = [row for row in compare(read_spec("qwen3-0.6b")).rows if row.mechanism == "mla"]
    assert rows
    assert all(row.convert_to is not None for row in rows)


@pytest.mark.parametrize("name", ["gpt-oss-120b", "gemma-2-9b"])
def test_what_convert_refuses_has_no_way_to_mla(name: str) -> None:
    rows = compare(read_spec(name)).rows
    assert {row.convert_to for row in rows if row.mechanism == "mla"} == {None}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (read_spec("qwen3-next-80b-a3b"), r"model_type = 'qwen3_next': has layers that gate their output"),
        (_mixed_sizes(), r"attention = \['GQA 32/8"),
        (read_config(TOYS["gemma3n_text"]), r"model_type = 'gemma3n_text': has layers that share keys and values"),
    ],
)
def test_a_stack_that_has_no_one_ladder(source: ModelSpec, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        compare(source)
