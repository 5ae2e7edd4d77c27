"""Other people's conversions of a whole model, as folders, from its weights and its layers' second moments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwise.checkpoints import Checkpoint, FolderWriter
from headwise.conversion import Target, mha2mla, transmla
from headwise.conversion.job import Job
from headwise.hf import LayerwiseModel
from headwise.specs import GroupedSpec, LatentSpec

LatentMethod = Callable[[dict[str, Tensor], GroupedSpec, LatentSpec, Tensor], tuple[dict[str, Tensor], list[int]]]
"""From a layer's tensors, what they are, what to make and E[x xᵀ] to the MLA layer's tensors and frequencies."""


def by_transmla(freqfold: int) -> LatentMethod:
    """TransMLA, so many neighbouring frequencies taken as one."""
    return lambda state, source, target, moments: transmla(state, source, target, moments=moments, freqfold=freqfold)


def by_mha2mla(*, on_text: bool) -> LatentMethod:
    """MHA2MLA, its channels ranked by queries and keys of a text (as its paper has it) or by weights alone."""
    return lambda state, source, target, moments: mha2mla(state, source, target, moments=moments if on_text else None)


def write(checkpoint: Checkpoint, target: Target, method: LatentMethod, moments: list[Tensor], output: Path) -> None:
    """The model converted by another's method, in headwise's format; a folder that is there is replaced."""
    job = _PublishedJob(checkpoint, target, method, moments)
    with FolderWriter(output, job.tensors, overwrite=True) as writer:
        writer.add_companions(checkpoint)
        job.write(writer, None, lambda *_: None)
        writer.write_json("config.json", job.config())


@torch.no_grad()
def input_moments(checkpoint: Checkpoint, windows: Tensor, kept: Path) -> list[Tensor]:
    """E[x xᵀ] of what goes into each layer's attention, ``[E + 1, E + 1]`` float64, the last input a constant 1.

    Args:
        checkpoint: the source.
        windows: ``[N, W]`` token ids.
        kept: a file that they are kept in, and found in the next time.
    """
    if kept.exists():
        found = load_file(kept)
        return [found[str(index)] for index in range(len(found))]
    model = LayerwiseModel(checkpoint, torch.float32)
    hidden = torch.cat([model.begin(window[None]) for window in windows])
    moments = []
    for index in range(model.num_layers):
        module, gram = model.layer(index), torch.zeros(0)
        for at in range(len(hidden)):
            call, output = model.trace(index, module, hidden[at : at + 1])
            hidden[at] = output[0]
            seen = torch.cat((call.inputs[0], call.inputs.new_ones(windows.shape[1], 1)), dim=1).double()
            gram = seen.mT @ seen + (gram if gram.numel() else 0)
        moments.append(gram / windows.numel())
    kept.parent.mkdir(parents=True, exist_ok=True)
    beside = kept.with_name(kept.name + ".part")
    save_file({str(index): gram for index, gram in enumerate(moments)}, beside)
    beside.rename(kept)
    return moments


class _PublishedJob(Job):
    """A job whose layers are solved by another method."""

    def __init__(self, checkpoint: Checkpoint, target: Target, method: LatentMethod, moments: list[Tensor]) -> None:
        super().__init__(checkpoint, target, None)
        self._published, self._moments = method, moments

    def convert_layer(self, index: int, *_: Any, **__: Any) -> dict[str, Tensor]:
        source, target = self.before.layers[index], self.after.layers[index]
        assert isinstance(source, GroupedSpec)
        assert isinstance(target, LatentSpec)
        state = self.family.read_attention(self.checkpoint.read, index, source)
        tensors, self.channels[index] = self._published(state, source, target, self._moments[index])
        prefix = self.family.place(index, cross=False, hosted=True)
        return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}
