"""Models as they are stored, changed in place: the range of exponents that weights can take, folders, and GGUF files.

`Room` holds the powers of two that stored weights can be multiplied by before their type rounds or cuts them. A model
is copied, and the queries and keys of its layers are written over in the copy: dtypes that headwise does not know,
metadata and the division into files then stay as they are.

Shapes: H query heads, K key–value heads, G groups of channels, D head dim, R rows of a stored matrix.
"""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headwise.base.progress import Progress
from headwise.conversion.preparation.change import Change, changed, channels, row_plan
from headwise.conversion.solvers.layer import grouped_layers, grouped_spec
from headwise.errors import CheckpointError
from headwise.models.checkpoints import FolderCheckpoint, FolderWriter, GgufCheckpoint, QuantisedFolder
from headwise.models.checkpoints.gguf_in_place import Bytes, Rows
from headwise.models.checkpoints.quantised_formats import Rows as QuantisedRows
from headwise.models.checkpoints.writer import overwrite_tensors
from headwise.models.families.base import State, canonical_shapes, packed_shapes
from headwise.models.specs import GroupedSpec, read_gguf_header
from headwise.models.specs.gguf_header import CUT_SHORT, TYPES, read_exactly, tensor_bytes

FAR = 64
"""The largest absolute exponent that is looked for in any type."""

_LARGEST = 65504.0
_ROUNDED = 2.0**-11
"""The largest part of a row that may be lost by rounding its scales: what float16 rounds any number by."""

_TRIED = 128
"""The number of numbers of a row that are rounded to see what is lost."""

_SHIFTS = sorted(range(-12, 13), key=abs)

Span = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""The least and the largest exponent of each row."""


@dataclass(frozen=True, eq=False)
class Room:
    """The exponents of two that the stored queries and keys of a layer can be multiplied by.

    Attributes:
        keys: the least and the largest base-2 exponent of each row of keys, int64 ``[K, D]``.
        queries: the same of each row of queries, of all heads that share a key–value head together.
        turns: whether pairs may be turned by quarters, for which rows are negated.
        grain: the number of factors from one power of two to the next; 1 where any other factor would round weights.
    """

    keys: tuple[Tensor, Tensor]
    queries: tuple[Tensor, Tensor]
    turns: bool = True
    grain: int = 1


def half_span(scales: npt.NDArray[np.float64]) -> Span:
    """The exponents that rows of float16 numbers can be multiplied by, as 2 to the power of them.

    Args:
        scales: the numbers of each row, or the scales of its blocks, ``[rows, n]``.
    """
    largest = np.abs(scales).max(1)
    most = np.where(largest > 0, np.floor(np.log2(_LARGEST / np.maximum(largest, 1e-30))), FAR)
    scales = scales[:, :: max(1, scales.shape[1] // _TRIED)]
    least = np.full(len(scales), -FAR)
    size = np.sqrt(np.square(scales).sum(1))
    open_rows = size > 0
    for exponent in range(-1, -FAR, -1):
        rounded = np.ldexp(np.ldexp(scales, exponent).astype(np.float16).astype(np.float64), -exponent)
        lost = np.sqrt(np.square(rounded - scales).sum(1)) > _ROUNDED * size
        least[open_rows & lost] = exponent + 1
        open_rows &= ~lost
        if not open_rows.any():
            break
    return least.astype(np.int64), np.minimum(most, FAR).astype(np.int64)


def within(change: Change, layer: GroupedSpec, room: Room) -> Change:
    """The change nearest to a wanted one whose exponents the weights can take.

    All exponents of a head are shifted by one number, which changes no rounding of the cache, and those that are
    still too large are cut.

    Args:
        change: the wanted change.
        layer: the layer's spec.
        room: the exponents that the layer's weights can take.
    """
    first, second = channels(layer).T
    least = torch.maximum(room.keys[0], -room.queries[1])
    most = torch.minimum(room.keys[1], -room.queries[0])
    least = torch.maximum(least[:, first], least[:, second])  # [K, G]
    most = torch.maximum(torch.minimum(most[:, first], most[:, second]), least)
    wanted = torch.stack([change.exponents + shift for shift in _SHIFTS])
    missed = (least - wanted).clamp_min(0) + (wanted - most).clamp_min(0)
    chosen = missed.sum(-1).argmin(0)  # [K], the smallest shift of equally good ones
    heads = torch.arange(len(chosen))
    return replace(
        change, exponents=wanted[chosen, heads].clamp(least, most), cut=int(missed[chosen, heads].max().ceil())
    )


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
        for index, layer in enumerate(grouped_layers(checkpoint.spec)):
            for name in (*self._held(index, layer, "q"), *self._held(index, layer, "k")):
                self._check(name, is_norm=layer.qk_norm is not None)

    def _check(self, name: str, *, is_norm: bool) -> None:
        """Refuse a tensor of queries or keys whose rows cannot be multiplied one by one."""
        info = self._checkpoint.tensors.get(name)
        if is_norm and info is not None and self._checkpoint.family.gguf_norm_offset and info.dtype.itemsize < 4:
            rule = "has no room for powers of two where norms are stored as offsets"
            rule = f"{rule}: prepare a float32 copy, or a .gguf"
            raise CheckpointError(f"{name} dtype", str(info.dtype).removeprefix("torch."), rule)
        if isinstance(self._checkpoint, QuantisedFolder) and (rows := self._checkpoint.sharing(name)) > 1:
            rule = f"has one scale for {rows} rows, which are multiplied one by one"
            raise CheckpointError("tensor", name, f"{rule}: prepare the model before quantising")

    def room(self, index: int, layer: GroupedSpec) -> Room:
        """The exponents that a layer's weights can take; where scales must be positive, codes are negated.

        Args:
            index: the layer's number.
            layer: the layer's spec.
        """
        names = [name for side in "qk" for name in self._held(index, layer, side)]
        turns = all(rows.can_turn for name in names if (rows := self._rows(name)) is not None)
        keys, queries = (self._span(index, layer, side) for side in "kq")
        return Room(keys, queries, turns)

    def _span(self, index: int, layer: GroupedSpec, side: str) -> tuple[Tensor, Tensor]:
        """The least and the largest exponent that each row of a side can take, ``[K, D]`` each."""
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
            changes: the change of each layer.
            check: the function that is given the complete folder before it is moved into place; where it raises an
                error, nothing is left.
            overwrite: whether a model folder that is there is replaced.
            progress: the callback that is told of each layer.

        Raises:
            ArgumentError: the output is taken.
            StorageError: the output cannot be written.
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
        source, layer = self._checkpoint, grouped_spec(self._checkpoint.spec.layers[index])
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
        """The effect of a change on the rows of each stored matrix, ``[R]``, as `row_plan` gives it for each side."""
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
        """The tensors of a side that powers of two multiply, by headwise's names: numbers, or scales of rows."""
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

    def _rows(self, name: str) -> QuantisedRows | None:
        """The rows of a quantised matrix; None of any other tensor."""
        source = self._checkpoint
        return source.rows(name) if isinstance(source, QuantisedFolder) and source.sharing(name) else None


_WIDE = ("F64", "F32", "BF16")
"""The types whose range holds every exponent."""


class GgufLayers:
    """The queries and keys of a GGUF model's layers, as they are stored.

    Args:
        checkpoint: the model.
    """

    def __init__(self, checkpoint: GgufCheckpoint) -> None:
        self._checkpoint, self._header = checkpoint, read_gguf_header(checkpoint.path)
        self._is_interleaved = checkpoint.family.gguf_interleaved

    def room(self, index: int, layer: GroupedSpec) -> Room:
        """The exponents that a layer's weights can take, rows in transformers' order.

        Every type has signs, of its numbers or its scales. Rows of blocks are multiplied by powers of 2^¼, which
        round float16 scales by far less than codes are off; of other types they would round weights.

        Args:
            index: the layer's number.
            layer: the layer's spec.
        """
        tensors = [self._header.tensors[name] for side in "qk" for name, _ in self._places(index, layer, side)]
        blocks = [TYPES[tensor.ggml_type][1] for tensor in tensors if len(tensor.shape) > 1]
        keys, queries = (self._span(index, layer, side) for side in "kq")
        return Room(keys, queries, grain=4 if min(blocks, default=1) > 1 else 1)

    def _span(self, index: int, layer: GroupedSpec, side: str) -> tuple[Tensor, Tensor]:
        """The least and the largest exponent that each row of a side can take, ``[K, D]`` each."""
        D = layer.head_dim
        heads = _stored_heads(layer, side)
        least, most = torch.full((heads, D), -FAR), torch.full((heads, D), FAR)
        place = self._held(D).argsort()
        for name, start in self._places(index, layer, side):
            tensor = self._header.tensors[name]
            if TYPES[tensor.ggml_type][0] in _WIDE:
                continue
            with tensor.file.open("rb") as file:
                file.seek(tensor.offset)
                raw = np.frombuffer(read_exactly(file, tensor_bytes(tensor) or 0, tensor.file), np.uint8)
            scales = Rows(raw, tensor.ggml_type, tensor.shape).scales()[start : start + heads * D]
            low, high = (torch.from_numpy(part).reshape(heads, D)[:, place] for part in half_span(scales))
            least, most = torch.maximum(least, low), torch.minimum(most, high)
        shared = (min(heads, layer.num_kv_heads), -1, D)
        low, high = least.reshape(shared).amax(1), most.reshape(shared).amin(1)
        return low.expand(layer.num_kv_heads, D), high.expand(layer.num_kv_heads, D)

    def write(self, changes: Sequence[Change], files: dict[Path, Path]) -> None:
        """Change the layers in copies of the model's files.

        Args:
            changes: the change of each layer.
            files: the copy of each of the model's files, by the file.

        Raises:
            OSError: a copy cannot be written.
        """
        for path, copy in files.items():
            with copy.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
                for index, change in enumerate(changes):
                    layer = grouped_spec(self._checkpoint.spec.layers[index])
                    for side in ("q", "k"):
                        for name, start in self._places(index, layer, side):
                            tensor = self._header.tensors[name]
                            if tensor.file == path:
                                size = tensor_bytes(tensor)
                                assert size is not None
                                if len(data) < tensor.offset + size:
                                    raise CheckpointError("file", str(path), CUT_SHORT)
                                raw = np.frombuffer(data, np.uint8, size, tensor.offset).copy()
                                self._change(raw, tensor.ggml_type, tensor.shape, start, change, layer, side)
                                data[tensor.offset : tensor.offset + size] = raw.tobytes()

    def _change(
        self, raw: Bytes, kind: int, shape: tuple[int, ...], start: int, change: Change, layer: GroupedSpec, side: str
    ) -> None:
        """Change the bytes of a tensor, of which the side's rows begin at ``start``."""
        D, heads = layer.head_dim, _stored_heads(layer, side)
        held = self._held(D)
        # In transformers' order row c becomes row order[c] of the old ones; the file's row r is channel held[r].
        order, signs, factors = (part[:heads, held] for part in row_plan(change, layer, side))
        old = held.argsort()[order] + torch.arange(heads)[:, None] * D + start
        every, sign, factor = np.arange(shape[0]), np.ones(shape[0], np.int64), np.ones(shape[0])
        part = slice(start, start + heads * D)
        every[part], sign[part], factor[part] = (each.flatten().numpy() for each in (old, signs, factors))
        rows = Rows(raw, kind, shape)
        if side == "k" and len(shape) == 1 and change.shift is not None:
            added = np.zeros(shape[0])
            added[part] = change.shift[:, held].flatten().double().numpy()
            rows.add(added)
        if bool(change.turns.any()):
            rows.take(every, sign)
        rows.multiply(factor)

    def _places(self, index: int, layer: GroupedSpec, side: str) -> list[tuple[str, int]]:
        """The stored tensors of a side, and the first row of the side in each.

        Raises:
            CheckpointError: the model has no such tensor.
        """
        prefix = f"blk.{index}.attn_"
        if layer.qk_norm:
            names = [(f"{prefix}{side}_norm.weight", 0)]
        elif f"{prefix}qkv.weight" in self._header.tensors:
            start = 0 if side == "q" else layer.num_heads * layer.head_dim
            names = [(f"{prefix}qkv.{kind}", start) for kind in ("weight", "bias")]
        else:
            names = [(f"{prefix}{side}.{kind}", 0) for kind in ("weight", "bias")]
        found = [(name, start) for name, start in names if name in self._header.tensors]
        if not found:
            raise CheckpointError("GGUF tensor", names[0][0], "is missing")
        return found

    def _held(self, head_dim: int) -> Tensor:
        """The channel, as transformers numbers them, that each row of a head in the file holds, ``[D]``."""
        rows = torch.arange(head_dim)
        return rows.reshape(2, -1).T.flatten() if self._is_interleaved else rows


def _stored_heads(layer: GroupedSpec, side: str) -> int:
    """The number of heads that a side has numbers for: one where a norm of every head has the same weights."""
    if layer.qk_norm == "head":
        return 1
    return layer.num_heads if side == "q" else layer.num_kv_heads
