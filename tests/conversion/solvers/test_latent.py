"""One layer converted by its weights alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwise.conversion.plan import Place, read_layer
from headwise.conversion.solvers.aligned import align
from headwise.conversion.solvers.latent import convert_to_latent, solve_sizes
from headwise.conversion.solvers.layer import Layer, LayerTarget, rotation_tables
from headwise.conversion.solvers.statistics import statistics_of
from headwise.models.checkpoints import open_checkpoint
from headwise.models.specs import GroupedSpec, as_latent
from tests.closeness import assert_close
from tests.real_models import save_tiny


@pytest.mark.parametrize("to", ["mla", "mqa"])
def test_without_a_text_biases_are_inputs_too(tmp_path: Path, to: str) -> None:
    """The output for zero inputs comes from biases alone, and qwen2's output projection has none to correct it."""
    save_tiny(tmp_path / "source", "qwen2")
    source = read_layer(open_checkpoint(tmp_path / "source"), Place(0))
    spec, state = source.spec, dict(source.state)
    assert isinstance(spec, GroupedSpec)
    state["v_proj.bias"] = 10 * state["v_proj.bias"]
    if to == "mla":
        target = as_latent(spec, 20, 8)
        converted = Layer(target, *convert_to_latent(state, spec, LayerTarget(target), statistics=None))
    else:
        fewer = replace(spec, num_kv_heads=1)
        converted = Layer(fewer, align(state, spec, fewer))
    rotation, nothing = rotation_tables(spec, torch.arange(5)), torch.zeros(5, spec.hidden_size)
    wanted = Layer(spec, state).float().output(nothing, rotation)
    assert (converted.float().output(nothing, rotation) - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_sizes_that_are_solved_together_are_those_solved_alone(model_type: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "source", model_type)
    source = read_layer(open_checkpoint(tmp_path / "source"), Place(0)).float()
    spec, generator = source.spec, torch.Generator().manual_seed(0)
    assert isinstance(spec, GroupedSpec)
    positions = torch.arange(40).repeat(4, 1)
    inputs = [(window, torch.randn(40, spec.hidden_size, generator=generator)) for window in range(4)]
    statistics = statistics_of(source, None, inputs, positions)
    sizes = [(16, 8), (10, 8), (16, 4), (30, 4), (4, 4)]
    target = LayerTarget(as_latent(spec, *sizes[0]))
    together = dict(solve_sizes(source, sizes, target, statistics))
    assert {*together} == {*sizes}
    rotation = rotation_tables(spec, positions[0])
    for size, layer in together.items():
        (_, alone), *_ = solve_sizes(source, [size], target, statistics)
        assert layer.channels == alone.channels
        outputs = [each.float().output(inputs[0][1], rotation) for each in (layer, alone)]
        assert_close(outputs[0], outputs[1], 1e-5)
