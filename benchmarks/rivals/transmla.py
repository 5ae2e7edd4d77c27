"""TransMLA (Meng et al. 2025, arXiv:2502.07864) as its authors' code calibrates it.

Two passes: the first PCA, of keys (RoRoPE), is of the source's activations, all layers at once; the second, of keys
without rotation and values, is of the activations of the model that has lost those rotations, on as many tokens as
the authors take. `headwise.conversion.methods.transmla` solves each layer.

The authors choose the number of folded frequencies by the perplexity of the model before truncation; here the two
best of those for each width of the rotary key are truncated, and the two best of all are recalibrated. Widths are the
authors', a head's dims over 1, 2 or 4, and three quarters of them, which is better at some sizes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.rivals.simulation import BF16, Design, Rival, Rotary, Study, mean_nll, simulated
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwise.base.disk import write_whole
from headwise.conversion.methods.transmla import transmla
from headwise.conversion.solvers.layer import Layer, rotation_tables
from headwise.models.specs import GroupedSpec, as_latent, read_config

FOLDS = (1, 2, 4, 8, 16, 32)
BEST = 2
"""The number of the best settings that go to the next round."""
PARTS = (1, 0.75, 0.5, 0.25)
"""The rotary key's width over a head's dims."""
WINDOWS = 16
"""Windows of the second pass."""


@dataclass(frozen=True)
class LatentAttention:
    """An MLA layer of headwise in the place of the model's attention."""

    layer: Layer
    source: GroupedSpec

    def __call__(self, attention: Any, hidden: Tensor, rotary: Rotary) -> Tensor:
        """See `simulation.Rival`."""
        return self.layer.output(hidden[0], rotation_tables(self.source, torch.arange(hidden.shape[1])))[None]


@dataclass(frozen=True)
class _Recorded:
    """A layer's attention that adds up the second moments of its inputs."""

    rival: Rival
    moments: Tensor

    def __call__(self, attention: Any, hidden: Tensor, rotary: Rotary) -> Tensor:
        self.moments.add_((hidden[0].mT @ hidden[0]).double())
        return self.rival(attention, hidden, rotary)


def designs(study: Study, fraction: float) -> list[Design]:
    """Caches of a fraction of the bytes, with the best widths of the rotary key and folds."""
    head_dim = _spec(study).head_dim
    cached = round(fraction * study.full / BF16 / study.layers)
    widths = [int(part * head_dim) for part in PARTS if part * head_dim < cached]
    tried = [(rotary, fold) for rotary in widths for fold in best_folds(study, rotary)]
    best = sorted(tried, key=lambda way: _loss(study, _layers(study, *way, rank=cached - way[0])))[:BEST]
    found = []
    for rotary, fold in best:
        layers = _layers(study, rotary, fold, rank=cached - rotary, recalibrated=recalibrated(study, rotary, fold))
        settings = {"freqfold": fold, "qk_rope_head_dim": rotary, "kv_lora_rank": cached - rotary}
        found.append(Design(layers, BF16 * cached * study.layers, settings))
    return found


def best_folds(study: Study, rotary: int) -> list[int]:
    """The folds whose models lose least with a rotary key of that width, before any truncation."""
    path = study.work / f"transmla-{rotary}.json"
    losses = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    frequencies = _spec(study).head_dim // 2
    for fold in FOLDS:
        if frequencies % fold == 0 and str(fold) not in losses:
            losses[str(fold)] = _loss(study, _layers(study, rotary, fold))
            write_whole(path, json.dumps(losses).encode())
    return [int(fold) for fold in sorted(losses, key=losses.__getitem__)[:BEST]]


def _loss(study: Study, layers: Sequence[Rival]) -> float:
    with simulated(study.model, layers):
        return mean_nll(study.model, study.valid, coarse=True)


@torch.no_grad()
def recalibrated(study: Study, rotary: int, fold: int) -> list[Tensor]:
    """The second moments of every layer's inputs in the model that has lost its rotations but no rank."""
    path = study.work / f"transmla-{rotary}-{fold}.safetensors"
    if not path.exists():
        layers = [_Recorded(layer, torch.zeros_like(study.moments(0))) for layer in _layers(study, rotary, fold)]
        with simulated(study.model, layers):
            for ids in study.windows[:WINDOWS]:
                study.model.model(ids[None], use_cache=False)
        save_file({str(index): layer.moments for index, layer in enumerate(layers)}, path)
    tensors = load_file(path)
    return [tensors[str(index)] for index in range(study.layers)]


def _layers(
    study: Study, rotary: int, fold: int, *, rank: int | None = None, recalibrated: Sequence[Tensor] | None = None
) -> list[LatentAttention]:
    """Layers with a latent of a rank, of full rank when None."""
    spec = _spec(study)
    target = as_latent(spec, 2 * study.width - rotary if rank is None else rank, rotary)
    layers = []
    for index, layer in enumerate(study.model.model.layers):
        state = {name: tensor.detach() for name, tensor in layer.self_attn.named_parameters()}
        again = None if recalibrated is None else recalibrated[index]
        solved, channels = transmla(
            state, spec, target, moments=study.moments(index), recalibrated=again, freqfold=fold
        )
        layers.append(LatentAttention(Layer(target, solved, channels).float(), spec))
    return layers


def _spec(study: Study) -> GroupedSpec:
    """A layer of the source, as headwise describes it."""
    spec = read_config(study.model.config.to_dict()).layers[0]
    assert isinstance(spec, GroupedSpec)
    return spec
