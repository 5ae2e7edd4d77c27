"""Profiles of this machine over a few sizes, their files, and what is checked with them."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.conversion.solvers.device import QUICK
from headwise.costs.formulas.model import cache_bytes
from headwise.costs.prediction import Grid, Pass, device, operators, peak_memory, seconds
from headwise.measure.profiling import (
    Check,
    TimePoint,
    check,
    measure,
    measure_curves,
    pace,
    profile,
    write_profile,
)
from headwise.measure.profiling import decoder as grids
from headwise.measure.profiling.check import attention_kinds, memory_point
from headwise.measure.profiling.decoder import Decoder, decode_step, filled_cache, prompt_call
from headwise.measure.timing.timing import record_graph
from headwise.models.specs import read_config
from tests.cli.conftest import cli, here, refused
from tests.costs.prediction.test_curves import measured_gpu, some_curves
from tests.pretended_device import placed, pretended_device, waited

__all__ = ["cli", "here", "refused"]

FEW = replace(
    grids.CPU,
    few_reads=(1 << 14, 1 << 16),
    few_tokens=(1, 16),
    few_weights=(1 << 10, 1 << 12),
    tokens=(64, 80),
    weights=(1 << 12, 1 << 14),
    product_tokens=(1, 4),
    product_weights=(1 << 12, 1 << 14),
    prompts=(16, 64),
    heads=4,
    kv_heads=(4, 1),
    coded_kv_heads=(4, 1),
    latent_heads=(4, 8),
    code_tokens=(20, 80),
    caches=(1 << 14, 1 << 16),
    coded_caches=(1 << 13, 1 << 15),
    hidden=(64, 128),
    states=(128, 512, 8192),
    latent_states=(128, 8192),
    layers=(1, 2),
    models=(Decoder(hidden_size=128, num_layers=2, num_heads=2, intermediate_size=64, vocab_size=64),),
    model_prompts=(70,),
    short=4,
    places=replace(grids.CPU.places, heads=(4,), layers=(2,), vocabularies=(64,), contexts=(100,), prompts=(50,)),
)
"""Grids of two sizes each."""

LIKE_A_GPU = replace(
    FEW,
    dtypes=(torch.bfloat16,),
    few_reads=(),
    few_weights=(),
    few_tokens=(),
    tokens=(1, 16, 80),
    turns=1 << 15,
    code_bits=(),
    prompt_heads=(2, 8),
    between=1 << 16,
    head_dim=32,
    places=replace(FEW.places, code_bits=()),
)
"""The same with what differs on a GPU: one curve of projections from one token on, and several numbers of heads."""


@pytest.fixture
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little time and small yardsticks."""
    monkeypatch.setattr(grids, "CPU", FEW)
    monkeypatch.setattr(pace, "READING", 1 << 18)
    monkeypatch.setattr(pace, "_WEIGHTS", 1 << 12)
    monkeypatch.setattr(pace, "PRODUCTS", (64, 1 << 12))
    monkeypatch.setattr(sys.modules["headwise.measure.profiling.check"], "CONTEXT", 200)
    usual = pace.Pace.measure
    monkeypatch.setattr(pace.Pace, "measure", lambda self, calls, **_: usual(self, calls, least=1, patience=0))


@pytest.mark.parametrize("kind", [{"num_kv_heads": 2}, {"num_kv_heads": 1}, {"latent": (48, 16)}])
def test_a_decoder_is_what_its_spec_says(kind: dict[str, Any]) -> None:
    decoder = Decoder(hidden_size=128, num_layers=2, num_heads=2, intermediate_size=64, vocab_size=64, **kind)
    model, spec = decoder.build(torch.float32), decoder.spec()
    assert read_config(model.config.to_dict()).layers == spec.layers
    cache = filled_cache(model, spec, batch=3, tokens=10)
    assert cache.length == 10
    assert cache.nbytes == cache_bytes(spec, 11, batch=3, dtype="float32")
    decode_step(model, cache, 3)()
    assert cache.length == 10
    assert prompt_call(model, 20)().shape == (1, 1, 64)


@pytest.mark.parametrize("bits", [2, 5])
def test_latents_in_codes_are_read_as_codes(bits: int) -> None:
    sizes = {"hidden_size": 128, "num_layers": 2, "num_heads": 2, "intermediate_size": 64, "vocab_size": 64}
    decoder = Decoder(**sizes, latent=(48, 16), code_bits=bits)
    model, spec = decoder.build(torch.float32), decoder.spec()
    step = Pass(batch=3, total=600, dtype="float32", cache_bits=bits)
    assert operators(spec, step) == operators(Decoder(**sizes, latent=(48, 16)).spec(), step)
    cache = filled_cache(model, spec, batch=3, tokens=600)
    assert cache.length == 600
    codes = [layer.keys for layer in cache.layers]
    assert all(layer.shape == (3, 1, 600, 1 + 64 * bits // 8) for layer in codes)
    assert all((layer[:, :, :256] == layer[:, :, 256:512]).all() for layer in codes)
    decode_step(model, cache, 3)()
    assert cache.length == 600


@pytest.mark.usefixtures("few_sizes")
def test_a_profile_predicts_and_is_checked(tmp_path: Path, cli: Any) -> None:
    found = profile()
    assert set(found.device.curves) == {"float32", "bfloat16"}
    assert found.threads == torch.get_num_threads()
    file = tmp_path / "machine.toml"
    write_profile(found.device, file)
    assert device("this-machine", file).curves == found.device.curves
    said = json.loads(cli("profile", "--output", file, "--check", "--places", "1", "--json").out)
    assert said["seconds"] is None  # the profile that is there is kept
    points = said["check"]["points"]
    assert {point["mechanism"] for point in points} == {"MHA", "GQA", "MQA", "MLA"}
    assert {(point["cache"] or "").startswith("codes:") for point in points if point["mechanism"] == "MLA"} == {
        False,
        True,
    }
    assert all(point["measured"] > 0 < point["predicted"] for point in points)
    shown = cli("predict", "llama-3-8b", "--hardware", "this-machine", "--hardware-file", file).out
    assert "times: headwise profile" in shown
    shown = cli("advise", "smollm2-135m", "--hardware", "this-machine", "--hardware-file", file).out
    assert "times: headwise profile" in shown


@pytest.mark.usefixtures("few_sizes")
def test_a_gpu_has_curves_of_its_own_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(device("laptop"), name="mine", kind="gpu")
    usual = Decoder.build
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # which the device is not made for
    monkeypatch.setattr(Decoder, "build", lambda self, dtype, _: placed(usual(self, dtype)))
    with pretended_device() as place:
        curves = measure_curves(torch.bfloat16, limits, grids=LIKE_A_GPU, place=place)
        assert not curves.few
        mine = replace(limits, curves={"bfloat16": curves})
        found = check(mine, places=1, grids=LIKE_A_GPU, place=place)
    file = tmp_path / "gpu.toml"
    write_profile(mine, file)
    assert device("mine", file).curves == mine.curves
    assert {point.mechanism for point in found.points} == {"MHA", "GQA", "MQA", "MLA"}
    assert all(point.measured > 0 < point.predicted for point in found.points)
    assert {point.mechanism for point in found.memory} == {"MHA", "GQA", "MQA", "MLA"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_measured_and_checked() -> None:
    limits, place = replace(device("laptop"), name="mine", kind="gpu"), torch.device("cuda")
    curves = measure_curves(torch.bfloat16, limits, grids=LIKE_A_GPU, place=place)
    mine = replace(limits, curves={"bfloat16": curves})
    found = check(mine, places=1, grids=LIKE_A_GPU, place=place)
    assert all(point.measured > 0 < point.predicted for point in found.points)
    assert found.memory_error < 0.5


@pytest.mark.parametrize("kind", attention_kinds(grids.CPU.places).values(), ids=attention_kinds(grids.CPU.places))
def test_nothing_in_a_pass_waits_for_the_device(kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a CUDA graph can record it."""
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # which the device is not made for
    decoder = Decoder(hidden_size=128, num_layers=2, intermediate_size=64, vocab_size=64, **kind)
    with pretended_device() as place:
        model = placed(decoder.build(torch.bfloat16))
        calls = [prompt_call(model, 80)]
        for cache_format in grids.BITS.values() if decoder.latent is None else [None]:
            cache = filled_cache(model, decoder.spec(), batch=3, tokens=40, quantize=cache_format)
            calls.append(decode_step(model, cache, 3))
        for call in calls:
            call()  # what is made once may wait
            waited.clear()
            call()
            assert not waited
        ones = torch.ones(3, device=place)
        for wait in (ones.sum().item, lambda: ones.to("cpu"), lambda: ones.copy_(torch.zeros(3)), ones.nonzero):
            waited.clear()
            wait()
            assert waited


def test_errors_and_ranks_by_hand() -> None:
    def point(mechanism: str, measured: float, predicted: float, place: int = 1) -> TimePoint:
        return TimePoint(
            mechanism=mechanism,
            sizes="4 × 64",
            dtype="float32",
            cache=None,
            batch=place,
            context=10,
            is_prompt=False,
            measured=measured,
            predicted=predicted,
        )

    points = (
        point("MHA", 2.0, 2.2),
        point("GQA", 1.0, 1.0),
        point("MQA", 0.98, 1.5),
        point("MHA", 1.0, 0.8, place=2),
        point("GQA", 2.0, 0.7, place=2),
    )
    found = Check(points=points)
    assert found.median_error == pytest.approx(0.2)
    # MHA–GQA and MHA–MQA of the first place, MHA–GQA of the second; GQA and MQA differ by less than 10 %.
    assert found.ranked == (2, 3)
    assert found.to_dict()["pairs"] == 3


def test_codes_take_what_layers_of_the_same_heads_take_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 heads, 4 µs a layer and 4 ns a token; of one, 1 µs and 1 ns; codes take 2 µs more, and half for tokens."""

    def found(_: Any, kinds: Sequence[measure._Contexts]) -> list[measure._After]:
        times = []
        for kind in kinds:
            heads = kind.decoder.num_kv_heads or 1
            each = (0.5 if kind.bits else 1) * 1e-9 * heads
            short, more = 1e-6 * heads + (2e-6 if kind.bits else 0), [each * (count - 4) for count in kind.tokens]
            times.append(measure._After(kind, short, more))
        return times

    monkeypatch.setattr(measure, "_after_contexts", found)
    machine = measure._Machine(torch.float32, device("laptop"), FEW, pace.HERE)
    core, coded = measure._measure_attention(machine)
    assert coded == pytest.approx({8.5: 2e-6, 5.0: 2e-6})
    for bits, grid in core.items():
        token = 2 * 64 * (bits / 8 if bits else 4)
        each = (0.5 if bits else 1) * 1e-9 / token
        assert grid.seconds == tuple((pytest.approx(each),) * 2 for _ in grid.x)


def test_latents_in_codes_take_as_long_for_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 µs and 1 ns a token and head, whatever the bits: all are predicted as what was measured of some."""

    def found(_: Any, kinds: Sequence[measure._Contexts]) -> list[measure._After]:
        heads = {kind.decoder: 1e-9 * kind.decoder.num_heads for kind in kinds}
        return [
            measure._After(kind, 2e-5, [heads[kind.decoder] * (count - 4) for count in kind.tokens]) for kind in kinds
        ]

    monkeypatch.setattr(measure, "_after_contexts", found)
    machine = measure._Machine(torch.float32, device("laptop"), FEW, pace.HERE)
    _, codes, besides = measure._measure_latent_attention(machine)
    assert besides == {4.0: pytest.approx(measure._LEAST)}
    curves = replace(some_curves(), coded_latent_core=codes, coded_latent=besides)
    mine = replace(device("laptop"), name="mine", curves={"float32": curves})
    layer = {"hidden_size": 256, "num_layers": 1, "latent": FEW.latent, "num_heads": 8}
    for bits in (2, 4, 7):
        step = Pass(total=80, dtype="float32", cache_bits=bits, impl="absorbed")
        timed = {each.name: each.seconds for each in seconds(operators(Decoder(**layer).spec(), step), mine, step)}
        assert timed["attention"] == pytest.approx(8e-9 * 76 + measure._LEAST)


def test_whole_decoders_correct_what_comes_from_memory_and_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    def ratio(*of: Any) -> float:
        return 1.25 if of[3].new == 1 else 0.75

    monkeypatch.setattr(measure, "_projection_ratio", ratio)
    grid = Grid(x=(1, 64), y=(1 << 20, 1 << 28), seconds=((1.0, 2.0), (3.0, 4.0)))
    whole = replace(some_curves(), few={64.0: grid, 128.0: grid}, many=grid)
    sizes = replace(FEW, few_reads=(1 << 20, 1 << 28), weights=(1 << 20, 1 << 28))
    machine = measure._Machine(torch.float32, device("laptop"), sizes, pace.HERE)
    found = measure._scale_to_models(machine, whole)
    assert found.few[64.0].seconds == found.few[128.0].seconds == ((1.0, 2.5), (3.0, 5.0))
    assert found.many.seconds == ((0.75, 1.5), (2.25, 3.0))


def kept_check(name: str) -> dict[str, Any]:
    file = Path(__file__).parents[3] / f"benchmarks/results/{name}.json"
    found: dict[str, Any] = json.loads(file.read_text())["check"]
    return found


def the_page() -> str:
    return " ".join((Path(__file__).parents[3] / "docs/prediction.md").read_text().split())


@pytest.mark.parametrize("name", ["profile", "profile-cuda"])
def test_the_document_says_what_the_kept_check_measured(name: str) -> None:
    kept = kept_check(name)
    said = (
        f"{len(kept['points'])} points: median error {100 * kept['median_error']:.0f} %, 90th percentile"
        f" {100 * kept['high_error']:.0f} %, and {kept['pairs_in_order']} of {kept['pairs']} pairs"
    )
    assert said in the_page()
    assert f"memory within {100 * kept['memory_error']:.1f} %" in the_page()


def test_the_document_says_how_prompts_are_predicted_on_a_gpu() -> None:
    points = kept_check("profile-cuda")["points"]
    prompts, steps = (
        statistics.median(abs(each["error"]) for each in points if each["is_prompt"] == kind)
        for kind in (True, False)
    )
    worst = max(points, key=lambda each: abs(each["error"]))
    assert worst["is_prompt"]
    said = (
        f"({100 * prompts:.0f} % and {100 * steps:.0f} % in the median): the largest error is"
        f" {100 * abs(worst['error']):.0f} %, of {worst['mechanism']} reading a prompt of {worst['context']:,} tokens"
    )
    assert said in the_page()


def test_the_document_says_how_far_two_checks_differ() -> None:
    one, other = kept_check("profile"), kept_check("profile-again")
    at_pace = [[each["measured"] / each["pace"] for each in found["points"]] for found in (one, other)]
    differences = [abs(a / b - 1) for a, b in zip(*at_pace, strict=True)]
    median, high = statistics.median(differences), statistics.quantiles(differences, n=10)[-1]
    errors = f"{100 * other['median_error']:.0f} % and {100 * other['high_error']:.0f} %"
    said = (
        f"(`profile-again.json`): {errors}. What the two measured of the same points, at their paces, differs by "
        f"{100 * median:.0f} % in the median and by {100 * high:.0f} % at the 90th percentile"
    )
    assert said in the_page()


def test_what_slows_the_yardstick_as_much_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = 1.0

    def slept() -> None:
        """A call that the clock below takes for 3 ms of a machine at its usual pace."""

    def clock(call: Callable[[], object]) -> float:
        call()
        return slower * (0.003 if call is slept else 0.001)

    monkeypatch.setattr(pace, "time_call", clock)
    monkeypatch.setattr(pace, "READING", 1 << 16)
    monkeypatch.setattr(pace, "_WEIGHTS", 1 << 12)
    monkeypatch.setattr(pace, "PRODUCTS", (64, 1 << 12))
    mine = pace.Pace(torch.float32)
    assert mine.reference == (0.001, 0.001)
    slower = 1.7
    assert mine.medians([slept, slept], patience=0) == pytest.approx([0.003, 0.003])
    assert mine.measure([slept], patience=0)[0] == pytest.approx((0.003 * 1.7, 1.7))
    assert pace.Pace(torch.float32, mine.reference).measure([slept], patience=0)[0][1] == pytest.approx(1.7)
    some = pace.Pace(torch.float32, (mine.reference[0] / 4, mine.reference[1]))
    assert some.measure([slept], patience=0)[0][1] == pytest.approx(1.7 * 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["MHA", "GQA", "MQA", "MLA"])
@pytest.mark.parametrize("inner", [1024, 2048])
def test_predicted_memory_is_that_of_all_tensors(name: str, dtype: str, inner: int) -> None:
    if dtype == "bfloat16" and not QUICK:
        pytest.skip("a processor that does not multiply bfloat16 copies weights to float32, which is not predicted")
    sizes = {"hidden_size": 512, "num_layers": 2, "num_heads": 8, "vocab_size": 512, "intermediate_size": inner}
    found = memory_point(name, Decoder(**{**sizes, **attention_kinds(grids.CPU.places)[name]}), dtype)
    assert abs(found.error) < 0.05


def test_a_call_has_the_pace_of_its_own_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of 3, 9 and 5 ms, on a machine that is once, twice and once as slow: the second is the median."""
    monkeypatch.setattr(pace, "_OFTEN", -1.0)  # yardsticks before the call, and at the end of each round
    monkeypatch.setattr(pace, "READING", 1 << 16)
    monkeypatch.setattr(pace, "_WEIGHTS", 1 << 12)
    monkeypatch.setattr(pace, "PRODUCTS", (64, 1 << 12))
    mine = pace.Pace(torch.float32)
    times, paces = iter([3e-3, 9e-3, 5e-3]), iter([7.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0])
    monkeypatch.setattr(pace, "_median_seconds", lambda *_: next(times))
    monkeypatch.setattr(pace.Pace, "_now", lambda _: next(paces))
    assert mine.measure([lambda: None]) == [(9e-3, pytest.approx(2.0))]


@pytest.mark.parametrize("batch", [1, 8])
def test_all_decoders_of_a_place_are_held_at_once(batch: int) -> None:
    step = Pass(batch=batch, total=500, dtype="float32")
    one, other = Decoder(), Decoder(num_kv_heads=1)
    memory_of = {each: peak_memory(each.spec(), step) for each in (one, other)}
    found = sys.modules["headwise.measure.profiling.check"]._held_bytes(
        [(one, step), (one, replace(step, cache_bits=8)), (other, step)]
    )
    weights = memory_of[one].weights + memory_of[other].weights
    workspace = max(each.workspace for each in memory_of.values())
    assert found == weights + int(1.25 * memory_of[one].cache) + memory_of[other].cache + workspace


def test_bad_input(refused: Any, here: Path) -> None:
    assert "places = 0: must be from 1 to 1000" in refused("profile", "--places", "0")
    assert "output = 'no/file.toml': cannot be written" in refused("profile", "--output", "no/file.toml")
    assert "device = 'nowhere': must be a device that torch has here" in refused("profile", "--device", "nowhere")
    (here / "damaged.toml").write_text("[this-machine]\n")
    assert "label" in refused("profile", "--check", "--output", "damaged.toml")


def test_a_profile_of_a_gpu_is_none_of_the_processor(here: Path, refused: Any) -> None:
    write_profile(replace(measured_gpu(), name="this-gpu"), here / "gpu.toml")
    assert "hardware = 'this-machine': must be one of" in refused("profile", "--check", "--output", "gpu.toml")


def test_recorded_calls_keep_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph reads the addresses of its tensors, whatever lies there later."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda: types.SimpleNamespace(wait_stream=lambda _: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(wait_stream=lambda _: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: types.SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(pace, "time_call", lambda _: pace._FEW * pace._ENOUGH / 123)  # a busy processor's own varies
    call, count = pace.repeat_for_clock(
        pace.project_in_turn(torch.float32, 1, 1 << 12, 1), types.SimpleNamespace(type="cuda")
    )  # type: ignore[arg-type]
    call()
    assert count == 123
    yardstick = pace.project_in_turn(torch.float32, 1, 1 << 12, 1)
    alive, held = weakref.ref(yardstick), record_graph(yardstick, 2)
    del yardstick
    gc.collect()
    assert alive() is not None
    del held
    gc.collect()
    assert alive() is None


def test_checks_need_curves() -> None:
    with pytest.raises(IndexError):
        check(device("laptop"), places=1)
