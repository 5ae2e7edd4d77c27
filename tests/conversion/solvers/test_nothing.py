"""Layers with zero weights, pruned or skipped, stay zero, and do not harm the conversion of other layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import headwise
from headwise.base.progress import silent
from headwise.conversion.budget.spread import choose_shared_channels, rotary_losses
from headwise.conversion.calibration.candidates import NOTHING_KNOWN
from headwise.conversion.methods import headwise as own_method
from headwise.conversion.plan import Place, make_plan, read_layer
from headwise.conversion.solvers.joint_latent import Part, joint_latent
from headwise.conversion.solvers.refit import Cost, OutputRefit
from headwise.conversion.solvers.rope_channels import keep_rotation
from headwise.conversion.solvers.statistics import Statistics
from headwise.costs.formulas.target import parse_target
from headwise.models.checkpoints import open_checkpoint
from headwise.models.specs import LatentSpec
from tests.real_models import save_tiny

TEXT = "".join(f"{index} the quick brown fox jumps over the lazy dog and {index * 7} more. " for index in range(20))
MLA: dict[str, Any] = {"to": "mla", "kv_budget": 0.5}
LAYER = "model.layers.1."
NOTHING = {
    "values": f"{LAYER}self_attn.v_proj",
    "input": f"{LAYER}input_layernorm",
    "output": f"{LAYER}self_attn.o_proj",
    "queries": f"{LAYER}self_attn.q_proj",
    "keys": f"{LAYER}self_attn.k_proj",
    "everything": "self_attn.",
}
WAYS: dict[str, dict[str, Any]] = {
    "weights alone": MLA,
    "text": {**MLA, "calibrate": ...},
    "without spread": {**MLA, "calibrate": ..., "without": ("spread", "refine")},
    "deepseek": {**MLA, "calibrate": ..., "format": "deepseek", "without": ("refine",)},
    "deepseek, weights alone": {**MLA, "format": "deepseek"},
    "statistics": {**MLA, "statistics": ...},
    "transmla": {**MLA, "calibrate": ..., "method": "transmla:2"},
    "mqa": {"to": "mqa", "calibrate": ..., "without": ("refine",)},
    "mqa, statistics": {"to": "mqa", "statistics": ...},
}

convert = partial(headwise.convert, evaluate=False)


def without(folder: Path, part: str, model_type: str = "llama") -> Path:
    """A tiny model whose weights with ``part`` in their names are 0."""
    save_tiny(folder, model_type, max_position_embeddings=64, head_dim=8)  # 128 by default in qwen3
    weights = load_file(folder / "model.safetensors")
    zeroed = {name: tensor * 0 if part in name else tensor for name, tensor in weights.items()}
    save_file(zeroed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def attention_outputs(folder: Path) -> list[torch.Tensor]:
    """The output of each layer's attention for random tokens."""
    model = headwise.load(folder)
    outputs: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *call: outputs.append(call[-1][0]))
    with torch.inference_mode():
        model(torch.randint(3, 97, (2, 40)))
    return outputs


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """For each part the folder of a source without it, of its statistics and of the text; not to be changed."""

    def make(part: str) -> Path:
        place = tmp_path_factory.mktemp("nothing")
        (place / "text.txt").write_text(TEXT)
        without(place / "source", part)
        headwise.calibrate(place / "source", place / "known", calibrate=place / "text.txt", calibration_tokens=256)
        return place

    return cache(make)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("part", NOTHING.values(), ids=NOTHING)
def test_it_converts(places: Callable[[str], Path], tmp_path: Path, part: str, way: dict[str, Any]) -> None:
    place, output = places(part), tmp_path / "out"
    given = dict(way)
    if "calibrate" in way:
        given |= {"calibrate": place / "text.txt", "calibration_tokens": 256}
    if "statistics" in way:
        given["statistics"] = place / "known"
    convert(place / "source", output, **given)
    for name, tensor in load_file(output / "model.safetensors").items():
        assert torch.isfinite(tensor).all(), name
        assert tensor.abs().max() < 1e5, name  # no weight is large to make up for a tiny one
    # The descent may use a zero layer to make up for the loss of the layer before it.
    descends = way is WAYS["text"] and part == NOTHING["values"]
    if part in (NOTHING["values"], NOTHING["input"], NOTHING["everything"]) and not descends:
        assert attention_outputs(output)[1].abs().max() < 1e-12


@pytest.mark.parametrize("to", ["mla", "mqa"])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize("part", [f"{LAYER}self_attn.", f"{LAYER}input_layernorm", f"{LAYER}self_attn.k_"])
def test_so_do_families_with_biases_and_norms_of_keys(tmp_path: Path, part: str, model_type: str, to: str) -> None:
    source, text = without(tmp_path / "source", part, model_type), tmp_path / "text.txt"
    text.write_text(TEXT)
    how: dict[str, Any] = MLA if to == "mla" else {"to": to}
    convert(source, tmp_path / "out", **how, calibrate=text, calibration_tokens=256, without=("refine",))
    for name, tensor in load_file(tmp_path / "out/model.safetensors").items():
        # Keys that are all alike leave queries undetermined but for a ridge of 1e-12 of the mean square.
        assert tensor.abs().max() < 1e6, name


def test_a_layer_without_keys_has_no_say_in_the_channels_that_all_keep(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(without(tmp_path / "source", NOTHING["keys"]))
    plan = make_plan(checkpoint, parse_target("mla", kv_budget=0.5))
    target = plan.after.layers[0]
    assert isinstance(target, LatentSpec)
    source = read_layer(checkpoint, Place(0))
    statistics = Statistics.nothing(
        source.spec.hidden_size, source.spec.num_heads, plan.layer_target(Place(0)).longest
    )
    energy, lost = rotary_losses(source.state, source.spec, target, statistics)  # type: ignore[arg-type]
    alone = keep_rotation(energy, lost, target.qk_rope_head_dim // 2)
    assert torch.equal(choose_shared_channels(plan, NOTHING_KNOWN, silent), alone)


def test_where_every_channel_rotates_keys_leave_nothing_for_the_latent(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source")
    convert(source, tmp_path / "out", to="mla", kv_lora_rank=12, qk_rope_head_dim=24)
    for name, tensor in load_file(tmp_path / "out/model.safetensors").items():
        assert tensor.abs().max() < 1e5, name


@pytest.mark.parametrize("size", [1.0, 1e-8])
def test_a_part_of_zeros_does_not_change_the_latent_of_the_other(size: float) -> None:
    """Beside a part of zeros the latent is the truncated SVD of the other part, however little its errors cost."""
    generator = torch.Generator().manual_seed(torch.seed() % 2**32)
    rows, x = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((7, 11), (44, 11)))
    moments = x.mT @ x / len(x)
    identity, none = torch.eye(7, dtype=torch.float64) * size, torch.zeros(11, 11, dtype=torch.float64)
    singular = torch.linalg.svdvals(rows @ torch.linalg.cholesky(moments))
    for other in (
        Part(torch.zeros(6, 11, dtype=torch.float64), identity[:6, :6], moments / 2),
        Part(torch.randn(6, 11, dtype=torch.float64, generator=generator), none[:6, :6], none),
    ):
        down, (_, up) = joint_latent([other, Part(rows, identity, moments)], 4)
        wrong = rows - up @ down
        lost = float((wrong @ moments * wrong).sum())
        assert lost == pytest.approx(float(singular[4:].square().sum()), rel=1e-3)


def test_a_refit_of_zeros_changes_nothing() -> None:
    weight, bias = torch.randn(5, 8), torch.randn(5)
    refit = OutputRefit(weight, None)
    refit.add(refit.weighed(torch.zeros(20, 8), torch.randn(20, 5), Cost(torch.eye(5))))
    assert torch.equal(refit.solve()["o_proj.weight"], weight.double())
    refit = OutputRefit(weight, bias)  # there is an error for the bias to correct
    refit.add(refit.weighed(torch.zeros(20, 8), torch.randn(20, 5), Cost(torch.eye(5))))
    solution = refit.solve()
    assert torch.equal(solution["o_proj.weight"], weight.double())
    assert not torch.equal(solution["o_proj.bias"], bias.double())


def test_nan_is_reported_as_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No wider dtype is advised: it would hold the value no better."""
    source, original = save_tiny(tmp_path / "source"), own_method.convert_to_latent

    def broken(*args: Any, **kwargs: Any) -> Any:
        state, channels = original(*args, **kwargs)
        return {**state, "kv_b_proj.weight": state["kv_b_proj.weight"] * torch.nan}, channels

    monkeypatch.setattr(own_method, "convert_to_latent", broken)
    with pytest.raises(headwise.CheckpointError, match=r"kv_b_proj\.weight': came out NaN$"):
        convert(source, tmp_path / "out", **MLA)
