"""TransMLA (Meng et al. 2025, arXiv:2502.07864) as its authors' code calibrates it.

Two passes: the first PCA, of keys (RoRoPE), is of the source's activations, all layers at once; the second, of keys
without rotation and values, is of the activations of the model that has lost those rotations. The number of folded
frequencies is chosen by the perplexity of that model, as the code's ``--freqfold auto`` does, and the two best are
tried at each size. `headwise.conversion.methods.transmla` solves each layer.
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

from headwise.checkpoints.disk import write_whole
from headwise.conversion.methods.transmla import transmla
from headwise.conversion.solvers.layer import Layer, rotation_tables
from headwise.specs import GroupedSpec, as_latent, read_config

FOLDS = (1, 2, 4, 8, 16, 32)
TRIED_FOLDS = 2
COLLAPSE = (1, 2, 4)
"""A head's dims over those of the rotary key, as the authors' code names it."""


@dataclass(frozen=True)
class LatentAttention:
    """An MLA layer of headwise in the place of the model's attention."""

    layer: Layer
    source: GroupedSpec

    def __call__(self, attention: Any, hidden: Tensor, rotary: Rotary) -> Tensor:
        """See `simulation.Rival`."""
        return self.layer.output(hidden[0], rotation_tables(self.source, hidden.shape[1]))[None]


@dataclass(frozen=True)
class _Recorded:
    """A layer's attention that adds up the second moments of its inputs."""

    rival: Rival
    moments: Tensor

    def __call__(self, attention: Any, hidden: Tensor, rotary: Rotary) -> Tensor:
        self.moments.add_((hidden[0].mT @ hidden[0]).double())
        return self.rival(attention, hidden, rotary)


def designs(study: Study, fraction: float) -> list[Design]:
    """Caches of a fraction of the bytes, with each width of the rotary key and its best folds."""
    spec = _spec(study)
    cached = round(fraction * study.full / BF16 / study.layers)
    found = []
    for collapse in COLLAPSE:
        rotary = spec.head_dim // collapse
        if cached <= rotary:
            continue
        for fold in best_folds(study, rotary, collapse):
            layers = _layers(
                study, rotary, fold, rank=cached - rotary, recalibrated=recalibrated(study, rotary, fold)
            )
            settings = {"freqfold": fold, "qk_rope_head_dim": rotary, "kv_lora_rank": cached - rotary}
            found.append(Design(layers, BF16 * cached * study.layers, settings))
    return found


def best_folds(study: Study, rotary: int, collapse: int) -> list[int]:
    """The folds whose models lose least with a rotary key of that width, before any truncation."""
    path = study.work / f"transmla-{rotary}.json"
    losses = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    frequencies = _spec(study).head_dim // 2
    for fold in FOLDS:
        if fold % collapse == 0 == frequencies % fold and str(fold) not in losses:
            with simulated(study.model, _layers(study, rotary, fold)):
                losses[str(fold)] = mean_nll(study.model, study.valid, coarse=True)
            write_whole(path, json.dumps(losses).encode())
    return [int(fold) for fold in sorted(losses, key=losses.__getitem__)[:TRIED_FOLDS]]


@torch.no_grad()
def recalibrated(study: Study, rotary: int, fold: int) -> list[Tensor]:
    """The second moments of every layer's inputs in the model that has lost its rotations but no rank."""
    path = study.work / f"transmla-{rotary}-{fold}.safetensors"
    if not path.exists():
        layers = [_Recorded(layer, torch.zeros_like(study.moments(0))) for layer in _layers(study, rotary, fold)]
        with simulated(study.model, layers):
            for ids in study.windows:
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
