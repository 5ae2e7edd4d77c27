"""Tokens that begin a text: their ids, their way through a layer, and what a conversion gains by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headwise
from headwise.conversion.calibration.windows import DRAWN, FirstTokens, first_token_ids, plain_windows
from headwise.conversion.plan import Place, read_layer
from headwise.conversion.solvers.layer import rotation_tables
from headwise.conversion.solvers.refit import OUTLIER, Cost, OutputRefit
from headwise.measure.texts.windows import put_begin_before
from headwise.models.checkpoints import open_checkpoint
from headwise.models.specs import GroupedSpec
from headwise.runtime.hf import LayerwiseModel
from tests.conversion.calibration.test_text import MODELS, ids, opened
from tests.real_models import save_tiny


def test_they_are_different_tokens_of_the_training_windows() -> None:
    windows = plain_windows(ids(4, 30), 1)
    first_tokens = first_token_ids(windows)
    assert len(first_tokens) == 30
    assert len(first_tokens.unique()) == 30
    assert {*first_tokens.tolist()} <= {*windows.trained.ids.flatten().tolist()}
    assert torch.equal(first_tokens, first_token_ids(windows))


def test_a_few_tokens_begin_several_texts() -> None:
    windows = plain_windows(torch.tensor([[4, 5, 6, 4, 5, 6, 4], [7, 7, 7, 7, 7, 7, 7]]), 1)
    first_tokens = first_token_ids(windows)
    assert len(first_tokens) == 7
    assert {*first_tokens.tolist()} == {4, 5, 6}


def test_one_in_four_is_the_token_before_any_text() -> None:
    windows = put_begin_before(ids(4, 29) + 2, [1])
    first_tokens, without = (first_token_ids(plain_windows(windows, 1, begin)) for begin in (1, 0))
    others = torch.arange(30) % 4 != 0
    assert bool((first_tokens[~others] == 1).all())
    assert torch.equal(first_tokens[others], without[others])


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_alone_is_the_models_own(name: str, tmp_path: Path) -> None:
    model = opened(tmp_path, name)
    hidden = model.begin(ids(1, 9).T)  # nine texts of one token
    call, _ = model.trace(0, model.module(0), hidden)
    layer = read_layer(model.checkpoint, Place(0)).float()
    assert isinstance(layer.spec, GroupedSpec)
    rotation = rotation_tables(layer.spec, torch.arange(9))
    output = layer.projected(layer.own_values(call.inputs[:, 0], rotation))
    assert torch.allclose(output, call.output[:, 0], atol=2e-5, rtol=1e-4)


def test_a_model_of_another_width_is_as_if_it_had_begun_so(tmp_path: Path) -> None:
    model = opened(tmp_path, "window")
    module = model.module(1)
    alone = model.begin(ids(1, 9).T)
    expected = model.run(1, module, alone)
    states = model.begin(ids(2, 9))
    whole = model.run(1, module, states)
    assert model.of_width(9) is model
    assert torch.equal(model.of_width(1).run(1, module, alone), expected)
    assert torch.equal(model.run(1, module, states), whole)


def sample_first_tokens(tmp_path: Path) -> tuple[FirstTokens, LayerwiseModel, Tensor]:
    model = opened(tmp_path, "llama")
    call, _ = model.trace(0, model.module(0), model.begin(ids(1, 90).T))
    layer = read_layer(model.checkpoint, Place(0)).float()
    assert isinstance(layer.spec, GroupedSpec)
    rotation = rotation_tables(layer.spec, torch.arange(90))
    wanted = call.output[:, 0] + torch.linspace(0, 1, 90)[:, None]
    return FirstTokens(call.inputs[:, 0], wanted, rotation, Cost(torch.eye(48))), model, call.output[:, 0]


def test_errors_limits_and_draws(tmp_path: Path) -> None:
    first_tokens, model, output = sample_first_tokens(tmp_path)
    layer = read_layer(model.checkpoint, Place(0)).float()
    assert torch.allclose(first_tokens.error(layer), output - first_tokens.wanted, atol=1e-5)
    nats = 0.5 * (output - first_tokens.wanted).square().sum(-1)
    assert first_tokens.limited(layer).cost.limit == pytest.approx(OUTLIER * float(nats.median()), rel=1e-4)
    some = first_tokens.drawn(DRAWN, torch.Generator().manual_seed(0))
    assert len(some.inputs) == len(some.wanted) == DRAWN
    assert len(first_tokens.drawn(100, torch.Generator()).inputs) == 90
    assert torch.allclose(some.error(layer), some.inputs.new_tensor(0) - (some.wanted - _outputs(some, layer)))


def _outputs(first_tokens: FirstTokens, layer: object) -> Tensor:
    return replace(first_tokens, wanted=torch.zeros_like(first_tokens.wanted)).error(layer)  # type: ignore[arg-type]


def test_a_refit_on_them_finds_the_projection(tmp_path: Path) -> None:
    """Where o_proj alone was changed, first tokens find it again: 90 tokens span the 12 directions of values."""
    first_tokens, model, output = sample_first_tokens(tmp_path)
    first_tokens = replace(first_tokens, wanted=output)
    layer = read_layer(model.checkpoint, Place(0)).float()
    state = dict(layer.state)
    blurred = replace(layer, state={**state, "o_proj.weight": 0.5 * state["o_proj.weight"]})
    refit = OutputRefit(blurred.state["o_proj.weight"], None)
    refit.add(first_tokens.weighed(refit, blurred, 90))
    mended = replace(layer, state={**state, "o_proj.weight": refit.solve(1e-6)["o_proj.weight"].float()})
    assert float(first_tokens.error(mended).square().sum()) < 1e-4 * float(first_tokens.error(blurred).square().sum())


@pytest.mark.parametrize("target", [{"to": "mla", "kv_budget": 0.5}, {"to": "mqa"}], ids=lambda target: target["to"])
def test_the_first_token_of_a_text_is_predicted_better_with_them(tmp_path: Path, target: dict[str, object]) -> None:
    source = save_tiny(tmp_path / "source")
    (tmp_path / "text.txt").write_text("a stitch in time saves nine, or so it is said. " * 40)
    losses = {}
    for without in ((), ("starts",)):
        output = tmp_path / f"out{len(without)}"
        headwise.convert(
            source,
            output,
            **target,
            calibrate=tmp_path / "text.txt",
            calibration_tokens=1024,
            without=without,
            evaluate=False,
        )
        used = _first_token_logits(source), _first_token_logits(output)
        first, second = (logits.log_softmax(-1) for logits in used)
        losses[without] = float((first.exp() * (first - second)).sum(-1).mean())
    assert losses[()] < losses[("starts",)]


@torch.no_grad()
def _first_token_logits(folder: Path) -> Tensor:
    """The logits behind each token of the vocabulary as the only one of a text."""
    model = LayerwiseModel(open_checkpoint(folder), torch.float32)
    hidden = model.begin(torch.arange(97)[:, None])
    for index in range(model.num_layers):
        hidden = model.run(index, model.module(index), hidden)
    return model.finish(hidden)[:, 0]
