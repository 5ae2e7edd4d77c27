"""A model folder with the queries and keys of its layers changed as they are stored: all other bytes are copied.

Shapes: H query heads, K key–value heads, D head dim, R rows of a stored matrix.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from headwise.base.progress import Progress
from headwise.conversion.preparation.change import Change, changed, row_plan
from headwise.conversion.preparation.room import FAR, Room, half_span
from headwise.errors import CheckpointError
from headwise.models.checkpoints import FolderCheckpoint, FolderWriter, QuantisedFolder
from headwise.models.checkpoints.layout import State, canonical_shapes, packed_shapes
from headwise.models.checkpoints.quantised.rows import Rows
from headwise.models.checkpoints.safetensors_shards import overwrite_tensors
from headwise.models.specs import GroupedSpec

_OF_A_CACHE = (".k_scale", ".q_scale", ".kv_scale", ".output_scale")
"""Ends of the names of numbers that were measured on queries and keys, and by which engines round them."""


class FolderLayers:
    """The queries and keys of a folder's layers, as they are stored.

    Args:
        checkpoint: the folder, perhaps with quantised weights.

    Raises:
        CheckpointError: rows of queries or keys share a scale; norms are stored so that powers of two would round
            them; or the folder has scales of a cache.
    """

    def __init__(self, checkpoint: FolderCheckpoint) -> None:
        self._checkpoint = checkpoint
        for name in checkpoint.tensors:
            if name.endswith(_OF_A_CACHE):
                rule = "was measured on the keys or queries as they are: prepare the model before that"
                raise CheckpointError("tensor", name, rule)
        for index, layer in enumerate(checkpoint.spec.layers):
            assert isinstance(layer, GroupedSpec)
            for name in (*self._held(index, layer, "q"), *self._held(index, layer, "k")):
                self._check(name, is_norm=layer.qk_norm is not None)

    def _check(self, name: str, *, is_norm: bool) -> None:
        """Refuse a tensor of queries or keys whose rows cannot be multiplied one by one."""
        info = self._checkpoint.tensors.get(name)
        if is_norm and info is not None and self._checkpoint.family.gguf_norm_offset and info.dtype.itemsize < 4:
            rule = (
                "has no room for powers of two where norms are stored as offsets: prepare a float32 copy, or a .gguf"
            )
            raise CheckpointError(f"{name} dtype", str(info.dtype).removeprefix("torch."), rule)
        if isinstance(self._checkpoint, QuantisedFolder) and (rows := self._checkpoint.sharing(name)) > 1:
            rule = (
                f"has one scale for {rows} rows, which are multiplied one by one: prepare the model before quantising"
            )
            raise CheckpointError("tensor", name, rule)

    def room(self, index: int, layer: GroupedSpec) -> Room:
        """What a layer has room for; where scales are always positive, a row is negated in its codes.

        Args:
            index: of the layer.
            layer: its spec.
        """
        names = [name for side in "qk" for name in self._held(index, layer, side)]
        turns = all(rows.can_turn for name in names if (rows := self._rows(name)) is not None)
        keys, queries = (self._span(index, layer, side) for side in "kq")
        return Room(keys, queries, turns)

    def _span(self, index: int, layer: GroupedSpec, side: str) -> tuple[Tensor, Tensor]:
        """The least and the largest exponent that each row of a side has room for, ``[K, D]``."""
        K, D = layer.num_kv_heads, layer.head_dim
        least, most = torch.full((K, D), -FAR), torch.full((K, D), FAR)
        for numbers in self._multiplied(index, layer, side).values():
            if numbers.dtype == torch.float16:
                rows = numbers.reshape(len(numbers), -1).double().numpy()
                low, high = (torch.from_numpy(part) for part in half_span(rows))
                shape = (1 if layer.qk_norm == "head" else K, -1, D)
                least = torch.maximum(least, low.reshape(shape).amax(1))
                most = torch.minimum(most, high.reshape(shape).amin(1))
        return least, most

    def write(
        self,
        output: Path,
        changes: Sequence[Change],
        check: Callable[[Path], None],
        *,
        overwrite: bool,
        progress: Progress,
    ) -> None:
        """Copy the folder, and change the copy.

        Args:
            output: the folder to write.
            changes: of each layer.
            check: given the whole folder before it is moved into place; where it raises an error, nothing is left.
            overwrite: replace a model folder there.
            progress: told of each layer.

        Raises:
            ArgumentError: the output is taken.
            StorageError: it cannot be written.
        """
        source = self._checkpoint
        nbytes = sum(file.stat().st_size for file in source.read_files)
        with FolderWriter(output, {}, overwrite=overwrite, work_bytes=nbytes) as writer:
            writer.add_companions(source)
            writer.write_json("config.json", source.stored_config)
            for file in source.read_files:
                writer.write_file(file.name, partial(shutil.copyfile, file))
            for index, change in enumerate(changes):
                progress("writing", index, len(changes))
                for name, tensor in self._changed(index, change).items():
                    file, stored = source.place(name)
                    writer.write_file(file.name, partial(overwrite_tensors, {stored: tensor}))
            progress("writing", len(changes), len(changes))
            check(writer.folder)

    def _changed(self, index: int, change: Change) -> dict[str, Tensor]:
        """The stored tensors of a layer's queries and keys after a change."""
        source, layer = self._checkpoint, self._checkpoint.spec.layers[index]
        assert isinstance(layer, GroupedSpec)
        names = dict.fromkeys(name for side in "qk" for name in self._held(index, layer, side))
        quantised = {name: rows for name in names if (rows := self._rows(name)) is not None}

        def read(name: str) -> Tensor:  # what is not changed here need not be read
            is_read = name in names and name not in quantised
            return source.read(name) if is_read else torch.zeros(source.tensors[name].shape)

        family = source.family
        state = changed(family.read_attention(read, index, layer), change, layer)
        plain = family.write_attention(state, index, layer)
        new = {
            name: plain[name].to(source.tensors[name].dtype)
            for name in names
            if name not in quantised and name not in source.zeros
        }
        if isinstance(source, QuantisedFolder) and quantised:
            plan = self._plan(index, layer, change)
            for name, rows in quantised.items():
                order, signs, factors = plan[name]
                new |= source.written(name, rows.taken(order, signs).multiplied(factors))
        return new

    def _plan(self, index: int, layer: GroupedSpec, change: Change) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """What a change does to the rows of each stored matrix, as `row_plan` tells it of each side, ``[R]``."""
        family = self._checkpoint.family
        stored = {
            name: torch.arange(shape[0])[:, None]
            for name, shape in packed_shapes(family.layout, layer).items()
            if name.endswith(".weight") and len(shape) > 1
        }
        order = family.layout.unpack(stored, layer)
        signs = {name: torch.ones_like(rows) for name, rows in order.items()}
        factors = {name: torch.ones_like(rows, dtype=torch.double) for name, rows in order.items()}
        for side in "qk":
            name = f"{side}_proj.weight"
            taken, *others = row_plan(change, layer, side)
            order[name] = order[name][(taken + torch.arange(len(taken))[:, None] * layer.head_dim).flatten()]
            signs[name], factors[name] = (other.reshape(-1, 1) for other in others)
        plans = [
            {name: part.flatten() for name, part in family.write_attention(state, index, layer).items()}
            for state in (order, signs, factors)
        ]
        return {name: (plans[0][name], plans[1][name], plans[2][name]) for name in plans[0]}

    def _multiplied(self, index: int, layer: GroupedSpec, side: str) -> State:
        """What powers of two multiply of a side, under headwise's names: numbers of tensors, or scales of rows."""
        names = self._held(index, layer, side)
        place = self._checkpoint.family.place(index)
        stored = {}
        for suffix, shape in packed_shapes(self._checkpoint.family.layout, layer).items():
            name = f"{place}.{suffix}"
            if name in names:
                rows = self._rows(name)
                stored[suffix] = self._checkpoint.read(name) if rows is None else rows.scales
            else:
                stored[suffix] = torch.zeros(shape)
        state = self._checkpoint.family.layout.unpack(stored, layer)
        parts = ("norm.weight",) if layer.qk_norm else ("proj.weight", "proj.bias")
        return {name: state[name] for part in parts if (name := f"{side}_{part}") in state}

    def _held(self, index: int, layer: GroupedSpec, side: str) -> list[str]:
        """The tensors that hold what is changed of a side: its rows, or its norm."""
        family = self._checkpoint.family
        if layer.qk_norm:
            return [f"{family.place(index)}.{side}_norm.weight"]
        marks = {
            name: torch.full((shape[0], 1)[: len(shape)], name.startswith(f"{side}_"))
            for name, shape in canonical_shapes(layer).items()
        }
        return [name for name, mark in family.write_attention(marks, index, layer).items() if bool(mark.any())]

    def _rows(self, name: str) -> Rows | None:
        """The rows of a quantised matrix; None of any other tensor."""
        source = self._checkpoint
        return source.rows(name) if isinstance(source, QuantisedFolder) and source.sharing(name) else None
