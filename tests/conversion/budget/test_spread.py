"""One cache spread over layers: the sizes tried, their losses, and the even allocation where nothing is gained."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import headwise
from headwise import Conversion
from headwise.conversion.budget import spread
from headwise.conversion.budget import trials as layer_trials
from headwise.conversion.budget.trials import LayerTrials, Trial, held_pieces, sizes_to_try, small_divergence
from headwise.conversion.calibration.windows import repeating_pieces
from headwise.conversion.methods import Evidence, LatentMethod
from headwise.conversion.plan import Place, read_layer
from headwise.conversion.solvers.latent import convert_to_latent, narrowed
from headwise.conversion.solvers.layer import KEY_WEIGHT, Layer, LayerTarget, State, rotation_tables
from headwise.conversion.solvers.statistics import Statistics, statistics_of
from headwise.conversion.storage import LayerFiles
from headwise.models.checkpoints import open_checkpoint
from headwise.models.specs import GroupedSpec, LatentSpec, RopeSpec, as_latent
from headwise.runtime.hf import LayerwiseModel
from tests.real_models import save_tiny

TEXT = "the quick brown fox jumps over the lazy dog, and then it does so again. " * 40


def ids(count: int, window: int) -> torch.Tensor:
    return torch.randint(3, 97, (count, window), generator=torch.Generator().manual_seed(0))


def opened(folder: Path, model_type: str = "llama", **overrides: Any) -> LayerwiseModel:
    return LayerwiseModel(open_checkpoint(save_tiny(folder, model_type, **overrides)), torch.float32)


@torch.no_grad()
def studied(model: LayerwiseModel) -> tuple[Layer, Statistics]:
    """Layer 0 and its statistics."""
    layer = read_layer(model.checkpoint, Place(0)).float()
    call, _ = model.trace(0, model.module(0), model.begin(ids(4, 32)))
    return layer, statistics_of(layer, None, enumerate(call.inputs), torch.arange(32).expand(4, -1))


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_a_narrowed_layer_is_the_one_solved_at_that_rank(model_type: str, tmp_path: Path) -> None:
    layer, statistics = studied(opened(tmp_path, model_type))
    spec = layer.spec
    assert isinstance(spec, GroupedSpec)
    wide, narrow = as_latent(spec, 20, 8), as_latent(spec, 11, 8)
    state, channels = convert_to_latent(layer.state, spec, LayerTarget(wide), statistics=statistics)
    cut = narrowed(Layer(wide, state, channels), narrow, statistics)
    direct, same_channels = convert_to_latent(layer.state, spec, LayerTarget(narrow), statistics=statistics)
    assert (cut.spec, cut.channels) == (narrow, same_channels)
    assert {name: x.shape for name, x in cut.state.items()} == {name: x.shape for name, x in direct.items()}
    inputs, rotation = torch.randn(16, spec.hidden_size), rotation_tables(spec, torch.arange(16))
    output, other = (x.float().output(inputs, rotation) for x in (cut, Layer(narrow, direct, channels)))
    assert torch.allclose(output, other, atol=1e-3 * float(other.abs().max()))
    uncut = Layer(wide, state, channels).float().output(inputs, rotation)
    assert not torch.allclose(output, uncut, atol=1e-2 * float(other.abs().max()))


def test_sizes_are_the_even_one_first_and_within_what_a_layer_has() -> None:
    source = GroupedSpec(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeSpec(dim=16))
    for R, P in ((1, 2), (16, 4), (20, 12), (30, 32), (32, 30), (60, 4), (62, 2), (32, 32)):
        sizes = sizes_to_try(source, as_latent(source, R, P))
        assert sizes[0] == (R, P)
        assert len(set(sizes)) == len(sizes)
        for size in sizes:
            as_latent(source, *size)  # or refused
    assert sorted(sizes_to_try(source, as_latent(source, 16, 8))) == [(r, p) for r in (8, 16, 24) for p in (4, 8, 16)]
    plain = replace(source, rope=None)
    assert sorted(sizes_to_try(plain, as_latent(plain, 16, 0))) == [(8, 0), (16, 0), (24, 0)]


def test_pieces_are_of_the_held_out_text() -> None:
    windows = torch.arange(60).view(3, 20)
    assert held_pieces(windows, 20, 2).tolist() == windows[[0, 1]].tolist()
    assert held_pieces(windows, 8, 3)[:, 0].tolist() == [0, 20, 40]
    assert held_pieces(windows, 100, 9).tolist() == windows.tolist()


@torch.no_grad()
def test_divergences_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """Layer 0 gets other weights, in a trial and in the model itself."""
    model, pieces = opened(tmp_path / "source"), ids(2, 24)
    layer = read_layer(model.checkpoint, Place(0)).float()
    blurred = {name: x + 0.2 * x.std() * torch.randn_like(x) for name, x in layer.state.items()}
    trial = Trial(model, pieces)
    module = model.module(0)
    streams = [trial.replaced(0, module, trial.source, Layer(layer.spec, x)) for x in (layer.state, blurred)]
    assert trial.errors(0, module, torch.eye(48))(layer) == pytest.approx(0.0, abs=1e-9)
    trial.source = trial.model.run(0, module, trial.source)
    last = model.module(1)
    streams = [trial.model.run(1, last, stream) for stream in streams]
    trial.source = trial.model.run(1, last, trial.source)
    same, other = trial.divergences(streams)
    whole = headwise.load(tmp_path / "source", dtype="float32")
    wanted = whole(pieces, use_cache=False).logits.log_softmax(-1)
    for name, tensor in blurred.items():
        whole.model.layers[0].self_attn.get_parameter(name).copy_(tensor)
    log_probs = whole(pieces, use_cache=False).logits.log_softmax(-1)
    kl = float(F.kl_div(log_probs, wanted, log_target=True, reduction="sum")) / pieces.numel()
    assert same == pytest.approx(0.0, abs=1e-5)
    assert other == pytest.approx(kl, rel=1e-3)


@torch.no_grad()
def test_losses_are_means_over_pieces_by_their_weights(tmp_path: Path) -> None:
    model, pieces = opened(tmp_path / "source"), ids(3, 24)
    layer, module = read_layer(model.checkpoint, Place(1)).float(), model.module(1)
    blurred = Layer(layer.spec, {name: x + 0.2 * x.std() * torch.randn_like(x) for name, x in layer.state.items()})

    def losses(pieces: torch.Tensor, weights: torch.Tensor | None = None) -> tuple[float, float]:
        trial = Trial(model, pieces, weights)
        trial.source = trial.model.run(0, model.module(0), trial.source)
        error = trial.errors(1, module, torch.eye(48))(blurred)
        stream = trial.replaced(1, module, trial.source, blurred)
        trial.source = trial.model.run(1, module, trial.source)
        return error, *trial.divergences([stream])

    weights = torch.tensor([1.0, 0.25, 3.0])
    each = torch.tensor([losses(piece[None]) for piece in pieces])
    assert losses(pieces) == pytest.approx(each.mean(0).tolist(), rel=1e-5)
    assert losses(pieces, weights) == pytest.approx((weights @ each / weights.sum()).tolist(), rel=1e-5)


def uneven(folder: Path) -> Path:
    """A model whose middle layer's attention output is zero."""
    source = save_tiny(folder, num_hidden_layers=3)
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"] *= 1e-4
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    return source


def converted(tmp_path: Path, name: str = "out", *, without: Sequence[str] = (), **options: Any) -> Conversion:
    (tmp_path / "text.txt").write_text(TEXT)
    if options.get("kv_budget") != 1.0:  # which has no stages
        options["without"] = [*without, "refit", "refine"]
    given = {"to": "mla", "kv_budget": 0.5, "calibrate": tmp_path / "text.txt", "calibration_tokens": 512}
    given["spread"] = "spread" not in without
    return headwise.convert(tmp_path / "source", tmp_path / name, evaluate=False, **{**given, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """A conversion of the uneven model that ran to its end; not to be changed."""
    place = tmp_path_factory.mktemp("whole")
    uneven(place / "source")
    return converted(place)


class OneHeadChannels(LatentMethod):
    """A method of its own, which does not say how it solves several sizes; counts the sizes that it solves."""

    name, label = "one_head", "one head's channels"
    stages = ("sensitivity", "spread")

    def __init__(self) -> None:
        self.solved: list[tuple[int, int]] = []

    def solve_latent(
        self, state: State, source: GroupedSpec, target: LayerTarget, evidence: Evidence
    ) -> tuple[dict[str, torch.Tensor], list[int]]:
        assert isinstance(target.spec, LatentSpec)
        self.solved.append((target.spec.kv_lora_rank, target.spec.qk_rope_head_dim))
        target = LayerTarget(target.spec, mixes_heads=False)
        return convert_to_latent(state, source, target, statistics=evidence.statistics)


def test_every_size_is_solved_by_the_plans_own_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = OneHeadChannels()
    monkeypatch.setattr("headwise.conversion.plan.choose_method", lambda *_: method)
    uneven(tmp_path / "source")
    (tmp_path / "text.txt").write_text(TEXT)
    done = headwise.convert(
        tmp_path / "source",
        tmp_path / "out",
        to="mla",
        kv_budget=0.5,
        calibrate=tmp_path / "text.txt",
        calibration_tokens=512,
        spread=True,
        evaluate=False,
    )
    assert done.method == "one_head"
    assert done.spread is not None
    spec = open_checkpoint(tmp_path / "source").spec.layers[0]
    assert isinstance(spec, GroupedSpec)
    tried = sizes_to_try(spec, as_latent(spec, *done.spread.even[0]))
    assert set(tried) <= set(method.solved)
    assert set(done.spread.sizes) <= set(method.solved)


def test_a_layer_that_does_nothing_gives_its_cache_to_the_others(tmp_path: Path) -> None:
    uneven(tmp_path / "source")
    done, even = converted(tmp_path), converted(tmp_path, "even", without=["spread"])
    assert done.spread is not None
    assert even.spread is None
    values = [sum(size) for size in done.spread.sizes]
    assert values[1] == min(values) < 24
    assert values[0] + values[2] > 2 * 24
    assert sum(values) == 3 * 24
    assert done.kv_bytes_per_token_after == even.kv_bytes_per_token_after
    assert done.spread.measured is not None
    assert done.spread.measured[1] < done.spread.measured[0]
    means = [round(sum(widths) / 3) for widths in zip(*done.spread.sizes, strict=True)]
    assert (done.label, even.label) == (f"MLA {means[0]} + {means[1]} on average", "MLA 18 + 6")
    inspection = headwise.inspect(tmp_path / "out")
    assert inspection.kv_bytes_per_token == 2 * 3 * 24  # in bfloat16
    assert [(x.spec["kv_lora_rank"], x.spec["qk_rope_head_dim"]) for x in inspection.layers] == list(
        done.spread.sizes
    )
    measured = headwise.evaluate(tmp_path / "out", text=str(tmp_path / "text.txt"), windows=1, window=64)
    assert measured.cache_bytes_per_token == even.kv_bytes_per_token_after
    assert any("spread over layers" in note for note in done.notes)
    assert "spread over layers" in (tmp_path / "out" / "README.md").read_text()


def test_an_allocation_that_is_no_better_when_measured_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uneven(tmp_path / "source")
    monkeypatch.setattr(LayerTrials, "divergences", lambda *_: [0.5, 0.5])
    done = converted(tmp_path)
    assert done.spread is not None
    assert done.spread.is_even
    assert done.label == "MLA 18 + 6"
    assert any("did not help" in note for note in done.notes)


@pytest.mark.parametrize("without", [(), ("recall",)])
def test_layers_are_tried_on_text_and_on_its_passages_repeated(
    without: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uneven(tmp_path / "source")
    tried = list[Trial]()

    class Noted(Trial):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            tried.append(self)

    monkeypatch.setattr(spread, "Trial", Noted)
    converted(tmp_path, without=without, calibration_tokens=1024, calibration_window=128)
    assert [trial.pieces.shape[1] for trial in tried] == [128, 128]
    for trial in tried:
        text, repeating = trial.pieces.chunk(2) if not without else (trial.pieces, trial.pieces[:0])
        assert torch.equal(repeating, repeating_pieces(text)[: len(repeating)])
        assert len(text) in (1, 2)
        assert trial.weights.tolist() == pytest.approx([1.0] * len(text) + [spread.RECALL_WEIGHT] * len(repeating))


def test_an_allocation_is_found_once(whole: Conversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed run has found the allocation: the next run does not search again."""
    uneven(tmp_path / "source")
    with monkeypatch.context() as patch:
        patch.setattr("headwise.conversion.write_folder._fill", None)
        with pytest.raises(TypeError):
            converted(tmp_path)
    monkeypatch.setattr(spread, "_search", None)
    again = converted(tmp_path)
    assert again.spread == whole.spread
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (Path(whole.output) / file).read_bytes()


@pytest.mark.parametrize(
    ("saves", "tried", "allocated"),
    [
        (4, [0, 1, 2], [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]),  # statistics of layer 0, and not its trial
        (5, [1, 2], [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]),
        (8, [2], [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]),
        (9, [], [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]),
        (10, [], [(0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]),
        (13, [], [(2, 0), (2, 1)]),
        (15, [], []),
    ],
)
def test_a_search_that_is_killed_goes_on(
    saves: int,
    tried: list[int],
    allocated: list[tuple[int, int]],
    whole: Conversion,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No trial is repeated: 3 sensitivities are saved, then two files a layer, then one an allocation."""
    uneven(tmp_path / "source")
    original, count = LayerFiles.save, 0

    def stopping(self: LayerFiles, *args: Any) -> None:
        nonlocal count
        original(self, *args)
        count += 1
        if count == saves:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LayerFiles, "save", stopping)
        with pytest.raises(KeyboardInterrupt):
            converted(tmp_path)
    tries, allocations = list[int](), list[tuple[int, int]]()

    def noting(self: LayerFiles, index: int, tensors: Any, about: Any) -> None:
        if self.folder.name == "tried":
            tries.append(index)
        if self.folder.name == "allocations":
            allocations.append((about["layers"] - 1, index))
        original(self, index, tensors, about)

    monkeypatch.setattr(LayerFiles, "save", noting)
    again = converted(tmp_path)
    assert (tries, allocations) == (tried, allocated)
    assert again.spread == whole.spread
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (Path(whole.output) / file).read_bytes()


@pytest.mark.parametrize(
    "options",
    [{}, {"without": ["sensitivity"]}, {"format": "deepseek"}, {"to": "mqa", "kv_budget": None}, {"kv_budget": 1.0}],
    ids=["half of the values", "no sensitivity", "one size", "no latent", "lossless"],
)
def test_where_there_is_nothing_to_spread_it_is_not_tried(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path / "source")
    monkeypatch.setattr(spread, "_search", None)
    done = converted(tmp_path, **options, spread=False)
    assert done.spread is None
    assert "spread" not in json.dumps(done.notes)


def test_keys_count_in_each_layer_what_costs_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uneven(tmp_path / "source")
    wanted = layer_trials.KEY_WEIGHTS[2], layer_trials.KEY_WEIGHTS[0], layer_trials.KEY_WEIGHTS[1]
    weights: dict[int, float] = {}
    kept, given = list[Layer](), list[float]()
    solutions, solve = LayerTrials._solutions, convert_to_latent

    def noted(*args: Any) -> Iterator[tuple[tuple[int, int], Layer]]:
        for size, layer in solutions(*args):
            kept.append(layer)  # so that no other has its id
            weights[id(layer)] = args[-1]
            yield size, layer

    def solved(state: State, source: GroupedSpec, target: LayerTarget, **kwargs: Any) -> Any:
        given.append(target.key_weight)
        return solve(state, source, target, **kwargs)

    def errors(_: Trial, index: int, *rest: Any) -> Callable[[Layer], float]:
        return lambda layer: 0.5 if weights[id(layer)] == wanted[index] else 1.0

    monkeypatch.setattr(LayerTrials, "_solutions", noted)
    monkeypatch.setattr(Trial, "errors", errors)
    monkeypatch.setattr(LayerTrials, "divergences", lambda *_: [0.5, 0.4])
    monkeypatch.setattr("headwise.conversion.methods.headwise.convert_to_latent", solved)
    done = converted(tmp_path)
    assert done.spread is not None
    assert done.spread.key_weights == wanted == tuple(given)
    assert not done.spread.is_even
    assert done.spread.predicted[1] < done.spread.predicted[0]
    note_start = "before any refit KL 0.400 nats in trials on text, and 0.500 with one size for all"
    assert any(note_start in note for note in done.notes)
    given.clear()
    monkeypatch.setattr(LayerTrials, "divergences", lambda *_: [0.4, 0.5])
    assert converted(tmp_path, "even").spread == replace(
        done.spread, sizes=done.spread.even, key_weights=(KEY_WEIGHT,) * 3, measured=(0.4, 0.5)
    )
    assert given == [KEY_WEIGHT] * 3


@given(seed=st.integers(0, 2**31), size=st.sampled_from([1e-4, 1e-2, 1.0, 30.0, 300.0]))
def test_a_divergence_is_exact_however_small(seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    reference = 3 * torch.randn(4, 500, generator=generator)
    logits = reference + size * torch.randn(4, 500, generator=generator)
    p, q = (part.double().log_softmax(-1) for part in (reference, logits))
    expected = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    found = small_divergence(reference.softmax(-1), logits - reference)
    assert found.tolist() == pytest.approx(expected.tolist(), rel=2e-2 if size < 1e-3 else 1e-4)
    assert (small_divergence(reference.softmax(-1), torch.zeros(4, 500)) == 0).all()
