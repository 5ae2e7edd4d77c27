"""Benchmarks run on small shapes: what they count, what they leave out and why; never how fast anything is."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

import headwise
from headwise.measure.timing.machine import Limits, Probes
from headwise.runtime.kernels import attend
from headwise.study.bench import Bench, Shape, Timing, bench_decode, bench_generate, bench_module, bench_prefill, page
from headwise.study.bench.decode import expanded, ways_to_attend
from headwise.study.bench.engine_process import EngineProcess
from headwise.study.bench.engines import _CTranslate2, write_in_float32
from headwise.study.bench.report import OURS, UnableError, run_case
from tests.cli.conftest import Result, cli, one_thread
from tests.cli.test_costs import fits_80_columns
from tests.closeness import assert_close
from tests.real_models import save_tiny

__all__ = ["cli", "one_thread"]


@pytest.fixture(autouse=True)
def small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read, multiplied and held to measure this machine's limits is small: no test asks how fast it is."""
    monkeypatch.setattr("headwise.measure.timing.machine._READ_BYTES", 2**20)
    monkeypatch.setattr("headwise.measure.timing.machine._SIZE", {"cpu": 64})
    monkeypatch.setattr("headwise.study.bench.decode.BETWEEN", 2**22)


@pytest.mark.parametrize(
    ("text", "numbers"), [("9/3/64", (9, 3, 64, 64)), ("16/512+64", (16, 1, 576, 512)), ("4/4/8", (4, 4, 8, 8))]
)
def test_shapes_are_read(text: str, numbers: tuple[int, ...]) -> None:
    shape = Shape.parse(text)
    assert numbers == (shape.H, shape.K, shape.D, shape.V)
    assert str(shape) == text


@pytest.mark.parametrize("text", ["", "9", "9/2/64", "9/3/x", "0/1/64", "16/512", "16/512-64", "8/4/64/2", "8/-4/64"])
def test_malformed_shapes_are_refused(text: str) -> None:
    with pytest.raises(headwise.ArgumentError, match=re.escape(f"shape = '{text}': must be HEADS/KV_HEADS/HEAD_DIM")):
        Shape.parse(text)


def test_bytes_and_flops_are_the_tensors() -> None:
    shape = Shape.parse("8/2/16")
    assert shape.nbytes(3, 100, 2) == 2 * torch.zeros(3, 2, 100, 16, dtype=torch.bfloat16).nbytes
    assert shape.flops(3, 100) == 2 * (3 * 8 * 100 * 16) * 2
    latent = Shape.parse("8/32+4")
    assert latent.nbytes(1, 10, 4) == torch.zeros(10, 36).nbytes
    assert latent.flops(1, 10) == 2 * 8 * 10 * (36 + 32)


def test_the_limit_is_the_larger_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(bytes_per_second=10.0, flops_per_second=100.0)
    assert limits.seconds(50, 70) == 5.0
    assert limits.seconds(50, 7000) == 100.0
    monkeypatch.undo()  # of `small_probes`
    probes = Probes(torch.float32)
    assert probes.limits(0.5, 0.25) == Limits(2 * 256 * 2**20, 2 * 1024**3 * 4)


@pytest.mark.parametrize(("H", "K", "S", "T"), [(6, 2, 1, 40), (4, 4, 5, 40), (4, 1, 7, 7)])
def test_every_way_gives_the_same(H: int, K: int, S: int, T: int) -> None:
    query, key, value = torch.randn(2, H, S, 16), torch.randn(2, K, T, 16), torch.randn(2, K, T, 16)
    exact = attend(*(x.double() for x in (query, key, value)), is_causal=S > 1, backend="reference")
    for make in ways_to_attend(query, [(key, value)], with_compiled=False, is_causal=S > 1).values():
        out = make()()
        assert isinstance(out, Tensor)
        assert_close(out, exact, 1e-5)
    assert_close(expanded(query, key, value, S > 1), exact, 1e-5)


def test_decode_says_bytes_limits_and_ratios() -> None:
    bench = bench_decode(
        shapes=[Shape.parse("4/2/16"), Shape.parse("4/32+8")], lengths=[64, 128], batches=[2], quick=True
    )
    assert len(bench.cases) == 2 * 2 * 2
    for case in bench.cases:
        assert set(case.ways) == {"headwise", "packed", "SDPA", "expanded"}
        assert case.limit_ms == pytest.approx(
            1e3 * max(case.nbytes / case.read_bytes_per_second, case.flops / 0.7 / case.matmul_flops_per_second)
        )
        for timing in case.ways.values():
            assert timing.ms is not None
            assert timing.low_ms is not None
            assert timing.high_ms is not None
            assert timing.low_ms <= timing.ms <= timing.high_ms
        told = case.to_dict()["ways"]["SDPA"]
        assert told["gb_per_s"] == pytest.approx(case.nbytes / told["ms"] / 1e6)
        assert told["of_limit"] == pytest.approx(case.ratio("SDPA"))
    assert set(bench.speedups()) == {"packed", "SDPA", "expanded"}


def test_lengths_may_be_given_in_bytes() -> None:
    shapes = [Shape.parse("4/2/16"), Shape.parse("4/32+8")]
    bench = bench_decode(shapes=shapes, cache_mib=1, batches=[1, 2], quick=True)
    assert len(bench.cases) == 2 * 2 * 2
    assert all(2**20 - 1000 < case.nbytes <= 2**20 for case in bench.cases)


def test_prefill_leaves_out_what_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.study.bench.prefill.MOST_SCORES", 4 * 100 * 100 * 4)
    bench = bench_prefill(shapes=[Shape.parse("4/2/16")], lengths=[100, 120], dtypes=["float32"], quick=True)
    short, long = bench.cases
    assert short.ways["expanded"].ms is not None
    assert long.ways["expanded"].error == "would hold 0 GiB of scores"
    assert short.ways["SDPA, copies"].ms is not None
    with pytest.raises(headwise.ArgumentError, match="prompts are read expanded"):
        bench_prefill(shapes=[Shape.parse("4/32+8")])


def test_modules_of_every_library_are_asked() -> None:
    bench = bench_module(hidden_size=64, num_heads=4, num_kv_heads=2, lengths=[16], dtypes=["float32"], quick=True)
    assert [case.values["tokens"] for case in bench.cases] == [1, 1, 16, 16]
    for case in bench.cases:
        failed = {way: timing.error for way, timing in case.ways.items() if timing.ms is None}
        if importlib.util.find_spec("x_transformers") is None:
            failed.pop("x-transformers", None)
        assert failed == {}
    with pytest.raises(headwise.ArgumentError, match="hidden_size = 65"):
        bench_module(hidden_size=65)


def test_generate_steps_all_models_from_the_same_context(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    save_tiny(tmp_path / "other", "llama")
    bench = bench_generate(tmp_path / "model", beside=[tmp_path / "other"], contexts=[3, 9], repeats=4, engines=False)
    stock = headwise.load(tmp_path / "model", dtype="float32")
    # Of the embedding a token reads one row; the head is another tensor.
    weights = sum(weight.nbytes for weight in stock.parameters()) - stock.get_input_embeddings().weight.nbytes
    assert not stock.config.tie_word_embeddings
    stocks = {"transformers, sdpa", "transformers, sdpa, static cache", "transformers, eager"}
    for case, context in zip(bench.cases, (3, 9), strict=True):
        assert set(case.ways) == {"headwise", *stocks, "headwise, other"}
        assert all(timing.ms is not None for timing in case.ways.values())
        assert case.values["weights_bytes"] == weights
        assert case.nbytes > weights
        assert case.values["context"] == context
    assert len(bench.notes) == 5
    last = stock.config.max_position_embeddings - 14
    bench_generate(tmp_path / "model", contexts=[last], repeats=4, engines=False)
    for context in (0, last + 1):
        rule = f"context = {context}: must be at least 1, and at most {last}: 14 tokens follow it"
        with pytest.raises(headwise.ArgumentError, match=rule):
            bench_generate(tmp_path / "model", contexts=[context], repeats=4)
    with pytest.raises(headwise.ArgumentError, match="repeats = 1: must be at least 2"):
        bench_generate(tmp_path / "model", repeats=1)
    with pytest.raises(headwise.ArgumentError, match=r"beside = .*: must have"):
        bench_generate(tmp_path / "model", beside=[tmp_path / "a" / "one", tmp_path / "b" / "one"])


def test_engines_that_are_not_there_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.study.bench.engines.importlib.util.find_spec", lambda _: None)
    save_tiny(tmp_path / "model", "llama")
    bench = bench_generate(tmp_path / "model", contexts=[3], repeats=3)
    for engine in ("llama.cpp", "CTranslate2"):
        assert bench.cases[0].ways[engine].error == "is not installed: pip install 'headwise[peers]'"


ENGINE = """
import os
from headwise.study.bench.report import UnableError

class Engine:
    note = "counts"
    def read(self, ids):
        print("not an answer")
        if len(ids) > 3:
            raise UnableError("takes three tokens")
        self.ids = ids
    def step(self, token):
        print("nor this")
        if token == -1:
            raise ValueError("no such token")
        if token == -9:
            os._exit(7)
        self.ids.append(token)

def make(source, max_tokens):
    if source == "none":
        raise UnableError("reads no such thing")
    if source == "broken":
        raise KeyError("weight")
    assert (source, max_tokens) == ("model", 4)
    return Engine()
"""


@pytest.fixture
def an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    (tmp_path / "an_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    make: Callable[..., Any] = importlib.import_module("an_engine").make
    return make


def test_an_engine_apart_answers_and_fails_by_name(an_engine: Callable[..., Any]) -> None:
    with EngineProcess(an_engine, "model", 4) as engine:
        assert engine.note == "counts"
        engine.read([1, 2])
        assert 0 < engine.step(5) < 1
        with pytest.raises(UnableError, match="takes three tokens"):
            engine.read([1, 2, 3, 4])
        with pytest.raises(UnableError, match="ValueError: no such token"):
            engine.step(-1)
        with pytest.raises(UnableError, match="its process ended with status 7"):
            engine.step(-9)
        with pytest.raises(UnableError, match="its process ended with status 7"):
            engine.step(5)
    with pytest.raises(UnableError, match=r"^reads no such thing$"):
        EngineProcess(an_engine, "none", 4)
    with pytest.raises(UnableError, match="KeyError: 'weight'"):
        EngineProcess(an_engine, "broken", 4)


def test_generate_goes_on_without_an_engine_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, an_engine: Callable[..., Any]
) -> None:
    save_tiny(tmp_path / "model", "llama")
    make = partial(EngineProcess, an_engine, "model", 4)
    monkeypatch.setattr("headwise.study.bench.generate.TIMED_ENGINES", ["counting"])
    monkeypatch.setattr("headwise.study.bench.generate.start_engine", lambda *_: make())
    bench = bench_generate(tmp_path / "model", contexts=[2, 6], repeats=3)
    first, second = bench.cases
    assert first.ways["counting"].ms is not None
    assert first.ways["counting"].note == "counts"
    assert second.ways["counting"].error == "takes three tokens"
    assert second.ways["headwise"].ms is not None


class Generating:
    """A CTranslate2 generator that calls back after each token."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.made = error, 0

    def generate_batch(self, prompts: Any, max_length: int, callback: Callable[[Any], bool], **_: Any) -> None:
        for _ in range(max_length):
            self.made += 1
            assert not callback(None)
        if self.error:
            raise self.error


@pytest.mark.parametrize("error", [None, RuntimeError("out of memory")])
def test_ctranslate2_generates_a_token_on_request_and_reports_its_end(error: Exception | None) -> None:
    engine = object.__new__(_CTranslate2)
    engine._generator, engine._tokens, engine._max_tokens = Generating(error), list, 5
    engine._go, engine._done, engine._ended = threading.Semaphore(0), threading.Semaphore(0), None
    engine.read([1, 2])
    assert engine._generator.made == 1
    engine.step(0)
    engine.step(0)
    assert engine._generator.made == 3
    for _ in range(2):
        with pytest.raises(RuntimeError if error else UnableError, match="memory"):
            engine.step(0)


def test_caches_are_read_in_turn_by_all_ways_together() -> None:
    query, caches = (
        torch.zeros(1, 2, 1, 8),
        [(torch.zeros(1, 2, 3, 8), torch.full((1, 2, 3, 8), n)) for n in (0.0, 1.0, 2.0)],
    )
    ways = ways_to_attend(query, caches, with_compiled=False, is_causal=False)
    calls = [make() for make in ways.values()]
    read = [float(call().mean()) for _ in range(3) for call in calls]  # type: ignore[attr-defined, union-attr]
    assert read == pytest.approx([n % 3 for n in range(len(read))])


def test_what_is_named_twice_is_measured_once() -> None:
    shapes = [Shape.parse("2/1/8"), Shape.parse("2/1/8")]
    report = bench_decode(shapes=shapes, lengths=[4, 4], batches=[1, 1], dtypes=["float32", "float32"], quick=True)
    assert len(report.cases) == 1


def test_latents_need_no_rotation_to_be_latents() -> None:
    shape = Shape.parse("16/512+0")
    assert shape.is_latent
    assert str(shape) == "16/512+0"
    assert shape.nbytes(1, 10, 4) == 512 * 10 * 4


@pytest.mark.parametrize("alignment", [32, 64, 128])
def test_a_gguf_is_widened_whole(tmp_path: Path, alignment: int) -> None:
    numbers = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_context_length(77)
    writer.add_custom_alignment(alignment)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    quantised = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("w", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_in_float32(tmp_path / "a.gguf", tmp_path / "b.gguf")
    reader = gguf.GGUFReader(tmp_path / "b.gguf")
    assert reader.fields["llama.context_length"].contents() == 77
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    (tensor,) = reader.tensors
    assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
    exact = gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(np.asarray(tensor.data).reshape(4, 64), exact)


def test_a_way_that_fails_is_left_out_and_a_slow_one_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def unable() -> Any:
        raise UnableError("has no time")

    def fails() -> object:
        raise RuntimeError("first line\nsecond line")

    def starves() -> object:
        raise MemoryError

    calls: list[str] = []
    monkeypatch.setattr("headwise.study.bench.report._PATIENCE", 0.02)
    ways: dict[str, Callable[[], Callable[[], object]]] = {
        OURS: lambda: lambda: None,
        "unable": unable,
        "fails": lambda: fails,
        "starves": lambda: starves,
        "slow": lambda: lambda: (calls.append("slow"), torch.randn(1500, 1500) @ torch.randn(1500, 1500))[1],
    }
    case = run_case("a", {}, ways, nbytes=8, flops=8, probes=Probes(torch.float32), budget=0.01)
    assert case.ways["unable"] == Timing(error="has no time")
    assert case.ways["fails"] == Timing(error="first line")
    assert case.ways["starves"] == Timing(error="not enough memory")
    assert case.ways["slow"].note == "one call: too slow to repeat"
    assert len(calls) == 1
    assert list(case.ways) == list(ways)
    text = page(Bench("decode", [case]), "headwise bench <decode>")
    assert text.count("<tr>") == 2
    assert 'title="has no time"' in text
    assert "&lt;decode&gt;" in text


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_the_command_prints_json_writes_a_page_and_fits(
    cli: Callable[..., Result], tmp_path: Path, kind: str
) -> None:
    options = ("--shape", "4/2/16", "--length", "64", "--quick")
    fits_80_columns(cli("bench", kind, *options))
    result = cli("bench", kind, *options, "--json", "--html", tmp_path / "page.html")
    assert result.status == 0
    report = json.loads(result.out)
    assert report["kind"] == kind
    assert report["machine"]["threads"] >= 1
    assert [case["values"]["dtype"] for case in report["cases"]] == ["float32", "bfloat16"]
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_modules_and_models_fit_a_terminal(cli: Callable[..., Result], tmp_path: Path) -> None:
    sizes = ("--hidden-size", 64, "--heads", 4, "--kv-heads", 2, "--length", 16, "--dtype", "float32", "--quick")
    fits_80_columns(cli("bench", "module", *sizes))
    save_tiny(tmp_path / "model", "llama")
    fits_80_columns(cli("bench", "generate", tmp_path / "model", "--context", 4, "--quick"))


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("decode", "--shape", "8"), "shape = '8': must be HEADS/KV_HEADS/HEAD_DIM"),
        (("decode", "--length", "0"), "length = 0: must be at least 1"),
        (("decode", "--batch", "-2"), "batch = -2: must be at least 1"),
        (("decode", "--dtype", "int8"), "dtype = 'int8': must be float64, float32"),
        (("decode", "--length", "9", "--cache-mib", "1"), "--cache-mib = 1: must not be given together with lengths"),
        (("decode", "--shape", "8/1/64", "--length", "2000000000"), "must fit in memory: "),
        (("prefill", "--shape", "8/1/64", "--length", "2000000000"), "must fit in memory: 8,583.1 GiB"),
        (("prefill", "--shape", "8/64+8"), "prompts are read expanded"),
        (("module", "--heads", "3"), "--hidden-size = 2048: must be a multiple"),
        (("generate", "nowhere"), "nowhere"),
    ],
)
def test_bad_input_is_one_line(cli: Callable[..., Result], arguments: tuple[str, ...], rule: str) -> None:
    result = cli("bench", *arguments)
    assert result.status == 2
    assert result.out == ""
    assert rule in result.err
    assert result.err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_gpu_that_is_not_there_is_refused(cli: Callable[..., Result]) -> None:
    result = cli("bench", "decode", "--device", "cuda", "--quick")
    assert (result.status, result.out) == (2, "")
    assert "device = 'cuda': must be a device that torch has here" in result.err


def test_the_doctor_says_what_there_is(cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    result = cli("doctor")
    assert result.status == 0
    assert "reading" in result.out
    report = json.loads(cli("doctor", "--json").out)
    assert report["read_bytes_per_second"] > 0
    assert set(report["matmul_flops_per_second"]) == {"float32", "bfloat16"}
    assert report["versions"]["torch"] == torch.__version__
    from headwise.runtime.kernels.native import Build

    monkeypatch.setattr("headwise.measure.timing.machine.built", lambda: Build(None, None, "no C++ compiler"))
    health = headwise.doctor()
    assert not health.kernels["built"]
    assert any("decoding falls back on torch's own ways (no C++ compiler)" in line for line in health.advice)
