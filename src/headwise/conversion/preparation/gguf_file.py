"""A GGUF model with the queries and keys of its layers changed in place: all other bytes are copied.

Shapes: H query heads, K key–value heads, D head dim.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headwise.base.disk import clearly, refuse_no_file, replace
from headwise.conversion.preparation.change import Change, row_plan
from headwise.conversion.preparation.room import FAR, Room, half_span
from headwise.errors import ArgumentError, CheckpointError
from headwise.models.checkpoints import GgufCheckpoint
from headwise.models.checkpoints.gguf.scaling import Bytes, Rows
from headwise.models.specs import GroupedSpec, read_gguf_header
from headwise.models.specs.gguf.parts import renamed_parts
from headwise.models.specs.gguf.types import TYPES, tensor_bytes

_WIDE = ("F64", "F32", "BF16")
"""Types that have room for every exponent."""


class GgufLayers:
    """The queries and keys of a GGUF model's layers, as they are stored.

    Args:
        checkpoint: the model.
    """

    def __init__(self, checkpoint: GgufCheckpoint) -> None:
        self._checkpoint, self._header = checkpoint, read_gguf_header(checkpoint.path)
        self._is_interleaved = checkpoint.family.gguf_interleaved

    def room(self, index: int, layer: GroupedSpec) -> Room:
        """What a layer has room for, rows in transformers' order. Every type has signs, of its numbers or its scales.

        Rows of blocks are multiplied by powers of 2^¼, which round float16 scales by far less than codes are off; of
        other types they would round weights.

        Args:
            index: of the layer.
            layer: its spec.
        """
        tensors = [self._header.tensors[name] for side in "qk" for name, _ in self._places(index, layer, side)]
        blocks = [TYPES[tensor.ggml_type][1] for tensor in tensors if len(tensor.shape) > 1]
        keys, queries = (self._span(index, layer, side) for side in "kq")
        return Room(keys, queries, grain=4 if min(blocks, default=1) > 1 else 1)

    def _span(self, index: int, layer: GroupedSpec, side: str) -> tuple[Tensor, Tensor]:
        """The least and the largest exponent that each row of a side has room for, ``[K, D]``."""
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
                raw = np.frombuffer(bytearray(file.read(tensor_bytes(tensor) or 0)), np.uint8)
            scales = Rows(raw, tensor.ggml_type, tensor.shape).scales()[start : start + heads * D]
            low, high = (torch.from_numpy(part).reshape(heads, D)[:, place] for part in half_span(scales))
            least, most = torch.maximum(least, low), torch.minimum(most, high)
        shared = (min(heads, layer.num_kv_heads), -1, D)
        low, high = least.reshape(shared).amax(1), most.reshape(shared).amin(1)
        return low.expand(layer.num_kv_heads, D), high.expand(layer.num_kv_heads, D)

    def write(self, changes: Sequence[Change], files: dict[Path, Path]) -> None:
        """Change the layers in copies of the model's files.

        Args:
            changes: of each layer.
            files: the copy of each file.

        Raises:
            OSError: a copy cannot be written.
        """
        for path, copy in files.items():
            with copy.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
                for index, change in enumerate(changes):
                    layer = self._checkpoint.spec.layers[index]
                    assert isinstance(layer, GroupedSpec)
                    for side in ("q", "k"):
                        for name, start in self._places(index, layer, side):
                            tensor = self._header.tensors[name]
                            if tensor.file == path:
                                size = tensor_bytes(tensor)
                                assert size is not None
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
            CheckpointError: there is none.
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


def check_file(files: Sequence[Path], output: Path, *, overwrite: bool) -> None:
    """Refuse an output that cannot be written, or that would replace the source.

    Args:
        files: of the source, as many as are written.
        output: the file to write; of a split model the name that its parts get their numbers in.
        overwrite: replace a file there.

    Raises:
        ArgumentError: it does not end in .gguf, cannot be written, exists, or is the source.
    """
    if output.suffix != ".gguf":
        raise ArgumentError("output", str(output), "must end in .gguf, as the source does")
    for part in renamed_parts(output, len(files)):
        refuse_no_file("output", part)
        if part.exists() and any(part.samefile(file) for file in files):
            raise ArgumentError("output", str(part), "must not be the source")
        if part.exists() and not overwrite:
            raise ArgumentError("output", str(part), "exists; say --overwrite to replace it")


@contextmanager
def copied_files(files: Sequence[Path], output: Path, *, moved: bool = False) -> Iterator[dict[Path, Path]]:
    """Copy the files of a GGUF model, let the block change the copies, and then move them into place.

    Args:
        files: the model's.
        output: see `check_file`.
        moved: whether the model's files are moved in the place of a copy.

    Yields:
        The copy of each file, in their order.

    Raises:
        StorageError: they cannot be written; nothing is left then.
    """
    targets = renamed_parts(output, len(files))
    with ExitStack() as partials, clearly("output", output):
        copies, places = {}, {}
        for file, target in zip(files, targets, strict=True):
            folder = Path(os.path.realpath(target)).parent
            if folder not in places:  # the parts of a model side by side, so that it can be read before it is moved
                partial = tempfile.TemporaryDirectory(prefix=".headwise-partial-", dir=folder)
                places[folder] = Path(partials.enter_context(partial))
            copies[file] = places[folder] / target.name
            (os.replace if moved else shutil.copyfile)(file, copies[file])
        first = copies[files[0]]
        for copy in copies.values():  # parts are looked for beside each other
            if copy.parent != first.parent:
                (first.parent / copy.name).symlink_to(copy)
        yield copies
        for file, target in zip(files, targets, strict=True):
            replace(copies[file], Path(os.path.realpath(target)))


def _stored_heads(layer: GroupedSpec, side: str) -> int:
    """The heads that a side has numbers for: one where a norm of every head has the same weights."""
    if layer.qk_norm == "head":
        return 1
    return layer.num_heads if side == "q" else layer.num_kv_heads
