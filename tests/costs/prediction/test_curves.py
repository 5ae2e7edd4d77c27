"""Measured times over grids: interpolation, files, and predictions that are made of them."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.costs.prediction import (
    Curves,
    Device,
    Grid,
    Pass,
    Sizes,
    curves_of,
    device,
    devices,
    operators,
    predict,
    seconds,
    to_table,
)
from headwise.errors import SpecError
from headwise.measure.profiling import write_profile
from headwise.models.specs import read_spec

POWERS = st.floats(0, 1)


def some_grid(chosen: random.Random) -> Grid:
    x, y = (tuple(sorted(chosen.sample(range(1, 5000), 3))) for _ in range(2))
    return Grid(x=x, y=y, seconds=tuple(tuple(chosen.uniform(1e-6, 1e-2) for _ in y) for _ in x))


def some_curves(seed: int = 0) -> Curves:
    chosen = random.Random(seed)
    by_bits = {bits: some_grid(chosen) for bits in (0.0, 8.5, 5.0)}
    few, many, product, prompt, latent_input, norm, embedding = (some_grid(chosen) for _ in range(7))
    return Curves(
        pace=(0.01, 0.02),
        few={float(1 << 20): replace(few, seconds=some_grid(chosen).seconds), float(1 << 16): few},
        many=many,
        product=product,
        core=by_bits,
        latent_core=some_grid(chosen),
        coded_latent_core={3.0: some_grid(chosen), 6.0: some_grid(chosen)},
        coded={8.5: 1e-4, 5.0: 2e-4},
        coded_latent={3.0: 3e-4, 6.0: 4e-4},
        prompt=prompt,
        latent_input=latent_input,
        norm=norm,
        embedding=embedding,
    )


def measured_device() -> Device:
    curves = {"float32": some_curves(1), "bfloat16": some_curves(2)}
    return replace(device("laptop"), name="mine", label='my "machine" \\', curves=curves)


def measured_gpu() -> Device:
    """A device whose caches hold nothing from one pass to the next, and whose latents in codes were not measured."""
    nothing: dict[str, Any] = {"few": {}, "coded_latent_core": {}, "coded_latent": {}}
    curves = {name: replace(found, **nothing) for name, found in measured_device().curves.items()}
    return replace(measured_device(), name="my-gpu", kind="gpu", curves=curves)


@given(POWERS, POWERS, st.floats(0.01, 1e6), st.floats(0.01, 1e6))
def test_powers_are_met_exactly_within_and_beyond_the_ends(a: float, b: float, x: float, y: float) -> None:
    xs, ys = (1.0, 3.0, 50.0), (2.0, 90.0)
    grid = Grid(x=xs, y=ys, seconds=tuple(tuple(7 * one**a * other**b for other in ys) for one in xs))
    assert grid.at(x, y) == pytest.approx(7 * x**a * y**b, rel=1e-9)


@given(st.floats(-2, 3), st.floats(2, 1e4))
def test_beyond_the_ends_times_grow_at_most_as_sizes_do(power: float, size: float) -> None:
    grid = Grid(x=(1, 2), y=(1, 2), seconds=((1, 1), (2**power, 2**power)))
    assert grid.at(size, 1) == pytest.approx(2**power * (size / 2) ** min(max(power, 0), 1))
    assert grid.at(1 / size, 5) == pytest.approx(size ** -min(max(power, 0), 1))
    assert grid.at(1.5, 1.2) == pytest.approx(1.5**power)


@pytest.mark.parametrize(
    ("x", "seconds"),
    [
        ((1,), ((1, 1),)),
        ((2, 1), ((1, 1), (1, 1))),
        ((0, 1), ((1, 1), (1, 1))),
        ((1, 2), ((1, 1), (1, 0))),
        ((1, 2), ((1, 1), (1, math.nan))),
    ],
)
def test_grids_that_are_none_are_refused(x: tuple[float, ...], seconds: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(SpecError, match=r"must (be|have)"):
        Grid(x=x, y=(1, 2), seconds=seconds)


@pytest.mark.parametrize("mine", [measured_device(), measured_gpu()], ids=["processor", "gpu"])
def test_a_profile_is_read_as_it_was_written(tmp_path: Path, mine: Device) -> None:
    file = tmp_path / "machine.toml"
    write_profile(mine, file)
    (read,) = (each for name, each in devices(file).items() if name == mine.name)
    assert read.curves == mine.curves
    assert read.label == mine.label
    assert read.peaks == pytest.approx(mine.peaks)
    assert read.memory_bytes == mine.memory_bytes
    assert curves_of(to_table(mine.curves["float32"])) == mine.curves["float32"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("curves = 3", "must be a table of dtypes"),
        ("curves = {float32 = {}}", "^form = None: must be 4 in curves: run headwise profile again"),
        ("curves = {float32 = {form = 1}}", "^form = 1: must be 4 in curves: run headwise profile again"),
        ("curves = {float32 = {form = 4}}", "must be as headwise profile writes them"),
        ("curves = {float32 = 3}", "must be as headwise profile writes them"),
    ],
)
def test_damaged_curves_are_refused(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "machine.toml"
    rest = 'label = "a"\nkind = "cpu"\nmemory_gib = 8\nbandwidth_gb = 10\ndense_tflops = {float32 = 1}\n'
    file.write_text(f"[mine]\n{rest}{text}\n")
    with pytest.raises(SpecError, match=what):
        devices(file)


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v2-lite"])
@pytest.mark.parametrize("bits", [None, 8.5, 4.0, 32.0])
def test_a_prediction_is_the_sum_of_what_was_measured(name: str, bits: float | None) -> None:
    model, mine = read_spec(name), measured_device()
    step = Pass(batch=3, total=500, dtype="float32", cache_bits=bits)
    curves = mine.curves["float32"]
    timed = {each.name: each for each in seconds(operators(model, step), mine, step)}
    work = {each.name: replace(each, times=timed[each.name].times) for each in operators(model, step)}
    head, core = work["head"], work["attention"]
    (small, of_small), (large, of_large) = sorted(curves.few.items())
    read = sum(each.times * (each.weight_bytes + each.cache_bytes) for each in operators(model, step))
    assert read > max(of_small.y)  # beyond what was measured, a byte takes as long as at the end
    place = 3, of_small.y[-1]

    def few(weights: float) -> float:
        """A power between two sizes, and beyond them one from 0 to 1."""
        power = math.log(of_large.at(*place) / of_small.at(*place)) / math.log(large / small)
        within = min(max(weights, small), large)
        beyond = (weights / within) ** min(max(power, 0), 1)
        return float(of_small.at(*place) * (within / small) ** power * beyond)

    assert timed["head"].seconds == pytest.approx(few(head.weights))
    if name == "llama-3-8b":
        near = {None: 0.0, 8.5: 8.5, 4.0: 5.0, 32.0: 0.0}[bits]
        grid = curves.core[near]
        one = core.cache_bytes * grid.at(grid.x[-1], core.flops / core.cache_bytes) + curves.coded.get(near, 0)
    elif bits in (None, 32.0):
        grid = curves.latent_core
        one = core.cache_bytes * grid.at(grid.x[-1], core.flops / core.cache_bytes)
    else:  # as many values in as many bits as were measured
        near = {8.5: 6.0, 4.0: 3.0}[bits]
        alike = core.cache_bytes * near / bits
        one = curves.coded_latent_core[near].at(alike, core.flops / alike) + curves.coded_latent[near]
    assert timed["attention"].seconds == pytest.approx(core.times * one)
    norms = timed["norm"].seconds / timed["norm"].times
    assert norms == pytest.approx(curves.norm.at(3 * model.hidden_size, model.hidden_size))
    if name == "deepseek-v2-lite":
        down = work["kv_a_proj_with_mqa"]
        besides = curves.latent_input.at(3 * model.hidden_size, model.hidden_size)
        one = few(down.weights) + besides
        assert timed["kv_a_proj_with_mqa"].seconds == pytest.approx(down.times * one)
        absorbed = work["absorb keys"]
        one = curves.product.at(3, absorbed.weights)
        assert timed["absorb keys"].seconds == pytest.approx(absorbed.times * one)


def test_latents_in_codes_are_read_as_others_where_they_were_not_measured() -> None:
    model, mine = read_spec("deepseek-v2-lite"), measured_gpu()
    step = Pass(batch=3, total=500, cache_bits=4)
    core = next(each for each in operators(model, step) if each.kind == "latent core")
    timed = {each.name: each.seconds / each.times for each in seconds(operators(model, step), mine, step)}
    grid = mine.curves["bfloat16"].latent_core
    of_a_byte = grid.at(min(max(core.cache_bytes, grid.x[0]), grid.x[-1]), core.flops / core.cache_bytes)
    assert timed[core.name] == pytest.approx(core.cache_bytes * of_a_byte)


def test_a_gpu_has_one_curve_of_projections_and_cores_by_what_they_read_themselves() -> None:
    model, mine = read_spec("llama-3-8b"), measured_gpu()
    curves = mine.curves["bfloat16"]
    step = Pass(batch=3, total=500)
    work = {each.name: each for each in operators(model, step)}
    timed = {each.name: each.seconds / each.times for each in seconds(operators(model, step), mine, step)}
    assert timed["head"] == pytest.approx(curves.many.at(3, work["head"].weights))
    core, grid = work["attention"], curves.core[0.0]
    assert grid.x[0] < core.cache_bytes
    own = min(core.cache_bytes, grid.x[-1])
    assert timed["attention"] == pytest.approx(core.cache_bytes * grid.at(own, core.flops / core.cache_bytes))
    # Less than the whole pass reads: the grid's place is another one where it was measured as far.
    wide = Grid(x=(1e3, 1e12), y=grid.y, seconds=(grid.seconds[0], grid.seconds[-1]))
    mine = replace(mine, curves={"bfloat16": replace(curves, core={0.0: wide})})
    timed = {each.name: each.seconds / each.times for each in seconds(operators(model, step), mine, step)}
    expected = core.cache_bytes * wide.at(core.cache_bytes, core.flops / core.cache_bytes)
    assert timed["attention"] == pytest.approx(expected)


def test_prompts_have_a_curve_of_their_own_and_other_dtypes_the_roofline() -> None:
    model, mine = read_spec("llama-3-8b"), measured_device()
    prompt = Pass(new=300, total=300, dtype="bfloat16")
    (timed,) = (each for each in seconds(operators(model, prompt), mine, prompt) if each.name == "attention")
    (core,) = (each for each in operators(model, prompt) if each.name == "attention")
    assert timed.seconds == pytest.approx(32 * mine.curves["bfloat16"].prompt.at(300, core.flops / (300 * 301 / 2)))
    (timed,) = (each for each in seconds(operators(model, prompt), mine, prompt) if each.name == "o_proj")
    assert timed.seconds == pytest.approx(32 * mine.curves["bfloat16"].many.at(300, 4096 * 4096))
    other = Pass(total=300, dtype="float16")
    plain = replace(mine, curves={})
    assert seconds(operators(model, other), mine, other) == seconds(operators(model, other), plain, other)
    assert predict("llama-3-8b", hardware=mine).efficiency.is_measured
    assert not predict("llama-3-8b", hardware=mine, dtype="float16").efficiency.is_measured
    sizes = Sizes(tokens=1, new=1, rows=1, weights=1, flops=1, cache_bytes=1, bits=0, hidden_size=1, pass_bytes=1)
    assert some_curves().seconds("other", sizes) is None
