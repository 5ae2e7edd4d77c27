"""A model folder with the queries and keys of its layers changed, in the dtype that they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from headwise.checkpoints import Checkpoint
from headwise.checkpoints.writer import FolderWriter
from headwise.preparation.change import Change, changed
from headwise.preparation.room import FAR, half_span
from headwise.progress import Progress
from headwise.specs import GroupedSpec


def folder_spans(state: Mapping[str, Tensor], layer: GroupedSpec, side: str) -> tuple[Tensor, Tensor]:
    """The least and the largest exponent that each row of a side has room for, ``[K, D]``.

    Args:
        state: the layer's attention under headwise's names, in the folder's dtype.
        layer: its spec.
        side: ``q`` or ``k``.
    """
    K, D = layer.num_kv_heads, layer.head_dim
    least, most = torch.full((K, D), -FAR), torch.full((K, D), FAR)
    for name in (f"{side}_proj.weight", f"{side}_proj.bias", f"{side}_norm.weight"):
        is_changed = name in state and name.endswith("norm.weight") == (layer.qk_norm is not None)
        if not is_changed or state[name].dtype != torch.float16:
            continue
        rows = state[name].reshape(len(state[name]), -1).double().numpy()
        low, high = (torch.from_numpy(part) for part in half_span(rows))
        shape = (1 if layer.qk_norm == "head" else K, -1, D)
        least = torch.maximum(least, low.reshape(shape).amax(1))
        most = torch.minimum(most, high.reshape(shape).amin(1))
    return least, most


def write_folder(
    checkpoint: Checkpoint,
    output: Path,
    changes: Sequence[Change],
    check: Callable[[Path], None],
    *,
    overwrite: bool,
    progress: Progress,
) -> None:
    """Write the folder: changed layers, every other tensor as it is, and what belongs to the model.

    Args:
        checkpoint: the source.
        output: the folder to write.
        changes: of each layer.
        check: given the whole folder before it is moved into place; where it raises an error, nothing is left.
        overwrite: replace a model folder there.
        progress: told of each tensor.

    Raises:
        ArgumentError: the output is taken.
        StorageError: it cannot be written.
    """
    family, spec = checkpoint.family, checkpoint.spec
    owner: dict[str, int] = {}
    for index, layer in enumerate(spec.layers):
        assert isinstance(layer, GroupedSpec)
        owner |= dict.fromkeys(family.stored_shapes(index, layer), index)
    tensors = {name: info for name, info in checkpoint.tensors.items() if name not in checkpoint.zeros}
    made: dict[str, Tensor] = {}
    with FolderWriter(output, tensors, overwrite=overwrite) as writer:
        writer.add_companions(checkpoint)
        writer.write_json("config.json", checkpoint.config)
        for done, name in enumerate(tensors):
            progress("writing", done, len(tensors))
            if name in owner and name not in made:
                index = owner[name]
                layer = spec.layers[index]
                assert isinstance(layer, GroupedSpec)
                state = family.read_attention(checkpoint.read, index, layer)
                made |= family.write_attention(changed(state, changes[index], layer), index, layer)
            writer.add(name, made.pop(name) if name in made else checkpoint.read(name))
        progress("writing", len(tensors), len(tensors))
        check(writer.folder)
