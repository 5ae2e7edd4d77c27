"""Calibration on a text: statistics, sensitivities, the descent and the refit of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import headwise
from headwise.conversion.calibration.candidates import Candidate, descended, descent_steps, refitted, select
from headwise.conversion.calibration.source import drawn_labels, output_sensitivities
from headwise.conversion.calibration.text import TextCalibrator
from headwise.conversion.calibration.windows import plain_windows
from headwise.conversion.plan import Place, read_layer
from headwise.conversion.solvers import layer as heads
from headwise.conversion.solvers.layer import Layer, rotation_tables, sample_rows
from headwise.conversion.solvers.refit import RIDGES, Cost, OutputRefit, refine
from headwise.conversion.solvers.statistics import Statistics, WindowStatistics, factor, output_metric, root
from headwise.conversion.storage import LayerFiles
from headwise.errors import CheckpointError
from headwise.models.checkpoints import open_checkpoint
from headwise.models.specs import GroupedSpec
from headwise.runtime.hf import LayerwiseModel
from tests.real_models import save_tiny

MODELS = {
    "llama": ("llama", {}),
    "biases": ("qwen2", {}),
    "partial rotary": ("phi3", {"partial_rotary_factor": 0.5, "pad_token_id": 0}),
    "window": ("mistral", {"sliding_window": 5}),
    "norms": ("qwen3", {"head_dim": 8, "rms_norm_eps": 0.3}),
    "norms as offsets": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 11, "rms_norm_eps": 0.3},
    ),
}


def opened(folder: Path, name: str) -> LayerwiseModel:
    model_type, overrides = MODELS[name]
    return LayerwiseModel(open_checkpoint(save_tiny(folder, model_type, **overrides)), torch.float32)


def ids(count: int, window: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (count, window), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("piece", [2, heads.PIECE])
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_run_for_some_rows_is_the_models_own(
    name: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "PIECE", piece)
    model = opened(tmp_path, name)
    hidden = model.begin(ids(1, 23))
    module = model.module(0)
    call, _ = model.trace(0, module, hidden)
    layer = read_layer(model.checkpoint, Place(0)).float()
    rotation = rotation_tables(layer.spec, torch.arange(23))
    rows = torch.tensor([0, 4, 11, 22])
    some = layer.output(call.inputs[0], rotation, rows)
    assert torch.allclose(some, call.output[0, rows], atol=2e-5, rtol=1e-4)
    assert torch.allclose(layer.output(call.inputs[0], rotation), call.output[0], atol=2e-5, rtol=1e-4)


def test_sampled_rows_are_spread_and_move_on() -> None:
    assert sample_rows(16, 4).tolist() == [3, 7, 11, 15]
    assert sample_rows(16, 4, 1).tolist() == [2, 6, 10, 14]
    assert sample_rows(5, 100).tolist() == [0, 1, 2, 3, 4]
    rows = {row for window in range(4) for row in sample_rows(16, 4, window).tolist()}
    assert rows == set(range(16))


def test_statistics_are_the_documented_sums(tmp_path: Path) -> None:
    """Written out: the output's derivative by a score, squared in the metric of the loss."""
    model = opened(tmp_path, "llama")
    layer, T = read_layer(model.checkpoint, Place(0)).float(), 11
    spec = layer.spec
    assert isinstance(spec, GroupedSpec)
    inputs = torch.randn(T, spec.hidden_size, generator=torch.Generator().manual_seed(1))
    chance = torch.randn(spec.hidden_size, spec.hidden_size, generator=torch.Generator().manual_seed(2)).double()
    sensitivity = chance @ chance.mT
    rotation = rotation_tables(spec, torch.arange(T))
    sums = Statistics.zeros(spec.hidden_size, spec.num_heads, T)
    metric = output_metric(layer.state["o_proj.weight"], sensitivity, spec.num_heads)
    sums.add(WindowStatistics.of(layer, inputs, metric, positions=torch.arange(T), window=0, longest=T))
    heads = layer.heads(inputs, torch.arange(T), rotation)
    extended = torch.cat((inputs, torch.ones(T, 1)), dim=1).double()
    assert torch.allclose(sums.inputs, extended.mT @ extended)
    assert int(sums.queries) == T
    weight = torch.zeros(spec.num_heads, T, dtype=torch.float64)
    keys = torch.zeros_like(sums.keys)
    w_o = torch.unflatten(layer.state["o_proj.weight"].double(), 1, (spec.num_heads, -1))
    for head in range(spec.num_heads):
        for t in range(T):
            scores = heads.query[head, t] @ heads.key[head, : t + 1].mT / spec.head_dim**0.5
            share = scores.double().softmax(-1)
            mean = share @ heads.value[head, : t + 1].double()
            for s in range(t + 1):
                change = w_o[:, head] @ (share[s] * (heads.value[head, s].double() - mean))
                # One P of the squared derivative's P² counts: the other says how often the score is attended to.
                cost = float(change @ sensitivity @ change) / float(share[s])
                weight[head, t - s] += cost
                keys += cost * torch.outer(extended[s], extended[s])
    assert torch.allclose(sums.distances, weight, rtol=1e-4, atol=1e-6)
    assert torch.allclose(sums.head_weight, weight.sum(-1), rtol=1e-4)
    assert torch.allclose(sums.keys, keys, rtol=1e-4, atol=1e-4 * float(keys.abs().max()))


@contextmanager
def record(model: Any, outputs: list[torch.Tensor]) -> Iterator[None]:
    """Record the output of every layer's attention."""
    handles = [
        layer.self_attn.register_forward_hook(lambda *args: outputs.append(args[2][0]))
        for layer in model.model.layers
    ]
    yield
    for handle in handles:
        handle.remove()


def any_labels(outputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(outputs.shape[-1], outputs.shape[:1], generator=generator)


@pytest.mark.parametrize("quick", [False, True])
def test_sensitivities_are_the_models_own_derivatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    """Sensitivities layer by layer equal those of one backward pass through the whole model; in bfloat16, nearly."""
    monkeypatch.setattr("headwise.conversion.solvers.device.QUICK", quick)
    # Drawn from the model, some labels would depend on the rounding.
    monkeypatch.setattr("headwise.conversion.calibration.source.drawn_labels", any_labels)
    torch.manual_seed(3)
    folder = save_tiny(tmp_path / "tiny", "llama")
    model = LayerwiseModel(open_checkpoint(folder), torch.float32)
    windows = ids(2, 17)
    results = LayerFiles(tmp_path / "results")
    output_sensitivities(model, plain_windows(windows), results)
    assert sorted(file.suffix for file in results.folder.iterdir()) == [".safetensors"] * 2
    whole = headwise.load(folder, dtype="float32")
    grams = [torch.zeros(48, 48, dtype=torch.float64) for _ in range(2)]
    for at, window in enumerate(windows):
        outputs: list[torch.Tensor] = []
        with record(whole, outputs):
            logits = whole(window[None], use_cache=False).logits[0]
        generator = torch.Generator().manual_seed(at)
        loss = F.cross_entropy(logits, any_labels(logits, generator), reduction="sum")
        for index, gradient in enumerate(torch.autograd.grad(loss, outputs)):
            wide = gradient[0].double()
            grams[index] += wide.mT @ wide / windows.numel()
    for index, gram in enumerate(grams):
        kept = results.load(index)
        assert kept is not None
        sensitivity = kept[0]["sensitivity"].double()
        assert torch.allclose(gram, sensitivity, rtol=1e-3, atol=(0.08 if quick else 1e-4) * float(gram.abs().max()))


def test_labels_are_drawn_as_often_as_they_are_likely() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2]).repeat(20_000, 1)
    drawn = drawn_labels(probabilities, torch.Generator().manual_seed(0))
    shares = drawn.bincount(minlength=4) / len(drawn)
    assert float(shares[1]) == 0
    assert torch.allclose(shares, probabilities[0], atol=0.015)  # four standard deviations


def test_an_error_costs_its_nats_up_to_a_limit() -> None:
    generator = torch.Generator().manual_seed(0)
    metric, errors = torch.randn(5, 5, generator=generator), torch.randn(301, 5, generator=generator)
    errors[0] *= 1e4
    plain = 0.5 * torch.stack([error @ metric @ metric.mT @ error for error in errors])
    unlimited = Cost(metric)
    assert torch.allclose(unlimited(errors), plain, rtol=1e-4)
    assert torch.equal(unlimited.weight(errors), torch.ones(301))
    cost = unlimited.limited(unlimited.plain(errors))
    assert cost.limit == pytest.approx(10 * float(plain.median()), rel=1e-4)
    assert float(cost(errors)[0]) == pytest.approx(cost.limit, rel=1e-3)
    varied = errors.clone().requires_grad_()
    (slope,) = torch.autograd.grad(cost(varied).sum(), varied)
    assert torch.allclose(slope, cost.weight(errors)[:, None] * (errors @ metric @ metric.mT), rtol=1e-3, atol=1e-6)


def test_a_refit_is_the_least_squares_solution() -> None:
    generator = torch.Generator().manual_seed(0)
    mixed, wanted = torch.randn(200, 6, generator=generator), torch.randn(200, 4, generator=generator)
    weight, bias = torch.randn(4, 6, generator=generator), torch.randn(4, generator=generator)
    for start_bias in (None, bias):
        refit = OutputRefit(weight, start_bias)
        refit.add(refit.weighed(mixed[:80], wanted[:80], Cost(torch.eye(4))))
        refit.add(refit.weighed(mixed[80:], wanted[80:], Cost(torch.eye(4))))
        solution = refit.solve(0.0)
        extended = mixed if start_bias is None else torch.cat((mixed, torch.ones(200, 1)), 1)
        best = torch.linalg.lstsq(extended.double(), wanted.double()).solution.mT
        own = solution["o_proj.weight"]
        if start_bias is not None:
            own = torch.cat((own, solution["o_proj.bias"][:, None]), 1)
        assert torch.allclose(own, best, atol=1e-6)  # a window's products are float32
        penalised = refit.solve(1e9)["o_proj.weight"]
        assert torch.allclose(penalised, weight.double(), atol=1e-6)


def test_an_outlier_is_not_what_a_refit_serves() -> None:
    generator = torch.Generator().manual_seed(0)
    mixed, weight = torch.randn(400, 6, generator=generator), torch.randn(4, 6, generator=generator)
    start = weight + 0.1 * torch.randn(4, 6, generator=generator)
    wanted = mixed @ weight.mT
    wanted[7] += 1e4
    results = {}
    for limited in (False, True):
        cost = Cost(torch.eye(4))
        refit = OutputRefit(start, None)
        refit.add(
            refit.weighed(mixed, wanted, cost.limited(cost.plain(wanted - mixed @ start.mT)) if limited else cost)
        )
        results[limited] = float((refit.solve(0.0)["o_proj.weight"] - weight).abs().max())
    assert results[True] < 0.02
    assert results[False] > 1


def test_refining_lowers_the_error_it_descends_on(tmp_path: Path) -> None:
    model = opened(tmp_path, "llama")
    layer = read_layer(model.checkpoint, Place(0)).float()
    rotation = rotation_tables(layer.spec, torch.arange(13))  # type: ignore[arg-type]
    inputs = torch.randn(13, 48, generator=torch.Generator().manual_seed(1))
    rows = torch.arange(13)
    wanted = layer.output(inputs, rotation)
    blurred = {name: tensor + 0.1 * tensor.std() * torch.randn_like(tensor) for name, tensor in layer.state.items()}

    def error(state: Mapping[str, torch.Tensor], drawn: torch.Tensor) -> torch.Tensor:
        output = Layer(layer.spec, state).output(inputs, rotation, drawn)
        return (output - wanted[drawn]).square().sum(-1).mean()

    refined = refine(blurred, error, lambda: rows, steps=200)
    assert error(refined, rows) < 0.2 * error(blurred, rows)
    assert all(not tensor.requires_grad for tensor in refined.values())


def test_a_descent_does_not_depend_on_threads() -> None:
    """Gradients of two steps are taken at one point, and an odd number of steps has a last one by itself."""
    weight, before = {"weight": torch.randn(6, 8), "unused": torch.ones(2)}, torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            generator, points = torch.Generator().manual_seed(0), list[float]()

            def sample(generator: torch.Generator = generator) -> torch.Tensor:
                return torch.randn(16, 8, generator=generator)

            def cost(
                state: Mapping[str, torch.Tensor], inputs: torch.Tensor, points: list[float] = points
            ) -> torch.Tensor:
                points.append(float(state["weight"].detach().sum()))
                return (inputs @ state["weight"].mT - inputs[:, :6]).square().sum(-1).mean()

            results.append(refine(weight, cost, sample, steps=5))
            assert len(points) == 5
            assert points[0] == points[1]
            assert points[2] == points[3]
            assert len(set(points)) == 3
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0]["weight"], results[1]["weight"])
    assert not torch.equal(results[0]["weight"], weight["weight"])
    assert torch.equal(results[0]["unused"], weight["unused"])


def taken_by(monkeypatch: pytest.MonkeyPatch, step: Callable[[Candidate], Iterator[Candidate]]) -> list[Candidate]:
    """The candidates that a step of conversions takes from now on, as they come."""
    candidates = list[Candidate]()

    def counted(candidate: Candidate) -> Iterator[Candidate]:
        candidates.append(candidate)
        return step(candidate)

    monkeypatch.setattr(f"headwise.conversion.write_folder.{step.__name__}", counted)
    return candidates


@pytest.mark.parametrize(
    ("without", "refits"), [((), 2), (("refine",), 2), (("refit",), 0), (("refine", "refit"), 0)]
)
def test_a_layer_is_refitted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: tuple[str, ...], refits: int
) -> None:
    (tmp_path / "text.txt").write_text("a stitch in time saves nine, or so it is said. " * 40)
    candidates = taken_by(monkeypatch, refitted)
    headwise.convert(
        save_tiny(tmp_path / "tiny"),
        tmp_path / "out",
        to="mqa",
        calibrate=tmp_path / "text.txt",
        calibration_tokens=512,
        without=without,
        evaluate=False,
    )
    assert len(candidates) == refits  # of two layers


@pytest.mark.parametrize(("size", "descents"), [({"kv_lora_rank": 24}, 2), ({"kv_lora_rank": 40}, 0)])
def test_a_layer_that_keeps_nearly_all_values_is_not_refined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: dict[str, int], descents: int
) -> None:
    """The source caches 3 heads of 8 + 8 values: five sixths of these are 40, of which the rotary key has 4."""
    (tmp_path / "text.txt").write_text("a stitch in time saves nine, or so it is said. " * 40)
    candidates = taken_by(monkeypatch, descended)
    source, text = save_tiny(tmp_path / "tiny"), tmp_path / "text.txt"
    options: dict[str, Any] = {"calibrate": text, "calibration_tokens": 512, "evaluate": False}
    headwise.convert(source, tmp_path / "out", to="mla", qk_rope_head_dim=4, **size, **options)
    assert len(candidates) == descents  # of two layers


def test_the_ridge_of_a_refit_is_the_best_on_held_out_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("a stitch in time saves nine, or so it is said. " * 40)
    tried = dict[float, list[float]]()
    held_error = Candidate.error
    of_ridge: list[float] = []
    solve = OutputRefit.solve

    def solved(self: OutputRefit, ridge: float) -> dict[str, torch.Tensor]:
        of_ridge.append(ridge)
        return solve(self, ridge)

    def measured(self: Candidate) -> float:
        error = held_error(self)
        if of_ridge:
            tried.setdefault(of_ridge.pop(), []).append(error)
        return error

    monkeypatch.setattr(OutputRefit, "solve", solved)
    monkeypatch.setattr(Candidate, "error", measured)
    source = save_tiny(tmp_path / "tiny")
    options = {"to": "mqa", "calibrate": tmp_path / "text.txt", "calibration_tokens": 512, "evaluate": False}
    report = headwise.convert(source, tmp_path / "out", **options, without=("refine",))
    assert report.evaluation is None
    assert {*tried} == {*RIDGES}
    losses = torch.tensor([tried[ridge] for ridge in RIDGES])  # [ridges, layers]
    worst_first = tuple(RIDGES[index] for index in losses[:, 0].argsort(descending=True).tolist())
    for name, ridges in (("reordered", worst_first), ("one", worst_first[-1:])):
        tried.clear()
        monkeypatch.setattr("headwise.conversion.calibration.candidates.RIDGES", ridges)
        headwise.convert(source, tmp_path / name, **options, without=("refine",))
    (alone,) = tried.values()
    assert alone[0] == losses[:, 0].min()
    own, reordered, one = (
        headwise.load(tmp_path / name).state_dict()["model.layers.0.self_attn.o_proj.weight"]
        for name in ("out", "reordered", "one")
    )
    assert torch.equal(own, one)
    assert torch.equal(reordered, one)


def test_the_root_is_symmetric_and_its_square_is_the_matrix() -> None:
    x = torch.randn(3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    square = x @ x.mT
    assert torch.allclose(root(square) @ root(square), square)
    assert torch.allclose(root(square), root(square).mT)


@pytest.mark.parametrize("rank", [0, 3, 8])
def test_a_factor_times_its_transpose_is_the_matrix(rank: int) -> None:
    x = torch.randn(8, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    square = x @ x.mT
    lower = factor(square)
    assert torch.allclose(lower @ lower.mT, square, rtol=0, atol=1e-11 * float(square.trace()))


def test_what_is_not_finite_has_no_factor() -> None:
    with pytest.raises(torch.linalg.LinAlgError):
        factor(torch.full((3, 3), torch.nan, dtype=torch.float64))


def test_a_sensitivity_that_is_lost_is_not_one_that_is_left_out(tmp_path: Path) -> None:
    model, windows = opened(tmp_path / "source", "llama"), plain_windows(ids(4, 16), 1)
    (tmp_path / "work").mkdir()
    calibrator = TextCalibrator(model, windows, folder=tmp_path / "work")
    assert calibrator.sensitivity(1) is not None
    calibrator.sensitivities.file(1).unlink()
    with pytest.raises(CheckpointError, match="layer = 1: an earlier run's result is lost"):
        calibrator.sensitivity(1)
    assert TextCalibrator(model, windows, folder=tmp_path / "none", stages=()).sensitivity(1) is None


def calibrator_of(folder: Path, **options: Any) -> TextCalibrator:
    """A calibrator on random windows of a tiny model, before layer 0."""
    model = opened(folder / "source", "llama")
    (folder / "work").mkdir()
    return TextCalibrator(model, plain_windows(ids(5, 32), 1), folder=folder / "work", **options)


def test_what_is_worse_on_held_out_text_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrator = calibrator_of(tmp_path, stages=("sequence", "refine"))
    source = read_layer(calibrator.model.checkpoint, Place(0))

    def spoil(layer: Layer, *_: Any, **__: Any) -> Layer:
        return Layer(layer.spec, {name: torch.randn_like(tensor) for name, tensor in layer.state.items()})

    monkeypatch.setattr("headwise.conversion.calibration.candidates.descend", spoil)
    _, data = calibrator.collect(Place(0), source)
    near = {name: tensor * 1.01 for name, tensor in source.state.items()}
    best, about = select(Layer(source.spec, near), {"refine": descended}, data)
    assert about["errors"]["refine"] > about["errors"]["solved"] > 0
    assert about["chosen"] == "solved"
    assert torch.equal(best.layer.state["o_proj.weight"], near["o_proj.weight"].float())


@pytest.mark.parametrize(("quick", "atol"), [(False, 1e-5), (True, 0.1)])
def test_a_layer_is_asked_to_make_up_for_the_drift_of_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool, atol: float
) -> None:
    """The wanted output is the source's output plus the difference of the streams before the layer."""
    monkeypatch.setattr("headwise.conversion.solvers.device.QUICK", quick)
    calibrator = calibrator_of(tmp_path, stages=("sequence",))
    model = calibrator.model
    source = read_layer(model.checkpoint, Place(0))
    _, data = calibrator.collect(Place(0), source)
    near = {name: tensor * 1.1 for name, tensor in source.state.items()}
    best, _ = select(Layer(source.spec, near), {}, data)
    calibrator.advance(data, best)
    own, converted = (calibrator.streams.read(name, 0, 1) for name in ("source", "converted"))
    assert (own - converted).abs().max() > 1e-3
    call, _ = model.trace(1, model.module(1), own)
    inputs = model.attention_inputs(1, model.module(1), converted)
    _, data = calibrator.collect(Place(1), read_layer(model.checkpoint, Place(1)))
    assert torch.allclose(data.wanted.read(0), (call.output + own - converted)[0], atol=atol)
    assert torch.allclose(data.inputs.read(0), inputs[0], atol=atol)


def test_the_descents_steps_follow_the_text() -> None:
    """Steps are counted by windows, and by 512 tokens of longer ones."""
    assert descent_steps(plain_windows(ids(3, 16))) == 21
    assert descent_steps(plain_windows(ids(4, 512), 1)) == 15
    assert descent_steps(plain_windows(ids(2, 4096))) == 80
