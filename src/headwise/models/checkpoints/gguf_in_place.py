"""GGUF files that are changed in place: copies of a model's files are written over, and no code is decoded.

ggml's types keep a row as blocks of codes, each with one or two scales. A row times a number has the same codes and
other scales; of a power of two, scales with another exponent. Source: ggml's block structs (ggml-common.h), read in
2026-11.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headwise.base.checksums import replace_listed
from headwise.base.disk import refuse_no_file, storage_errors
from headwise.base.jobs import Job, clear_finished, partial_folder
from headwise.errors import ArgumentError, CheckpointError
from headwise.models.specs.gguf_header import TYPES, renamed_parts


def check_file(files: Sequence[Path], output: Path, *, overwrite: bool) -> None:
    """Refuse an output that cannot be written, or that would replace the source.

    Args:
        files: the files of the source; as many are written.
        output: the file to write; of a split model the name that its parts get their numbers in.
        overwrite: replace a file there.

    Raises:
        ArgumentError: the output does not end in .gguf, cannot be written, exists, or is the source.
    """
    if output.suffix != ".gguf":
        raise ArgumentError("output", str(output), "must end in .gguf, as the source does")
    for part in renamed_parts(output, len(files)):
        refuse_no_file("output", part)
        if part.exists() and any(part.samefile(file) for file in files):
            raise ArgumentError("output", str(part), "must not be the source")
        if part.exists() and not overwrite:
            target = Path(os.path.realpath(output))
            for folder in (partial_folder(target), _copies_folder(target)):
                clear_finished(folder)
            raise ArgumentError("output", str(part), "exists; say --overwrite to replace it")


@contextmanager
def copied_files(files: Sequence[Path], output: Path, *, moved: bool = False) -> Iterator[dict[Path, Path]]:
    """Copy the files of a GGUF model, let the block change the copies, and then move them into place.

    Args:
        files: the model's.
        output: the file to write, as for `check_file`.
        moved: whether the model's files are moved in the place of a copy.

    Yields:
        The copy of each file, in their order.

    Raises:
        ArgumentError: another process is writing them.
        StorageError: the copies cannot be written; nothing is left then.
    """
    targets = renamed_parts(output, len(files))
    with ExitStack() as partials, storage_errors("output", output):
        copies, jobs = dict[Path, Path](), dict[Path, Job]()
        for file, target in zip(files, targets, strict=True):
            folder = _copies_folder(Path(os.path.realpath(target)).with_name(output.name))
            if folder not in jobs:  # the parts of a model side by side, so that it can be read before it is moved
                # In a folder of a name that the next run knows, which removes what a killed one has left.
                jobs[folder] = partials.enter_context(Job(output, folder=folder, run=None))
            copies[file] = folder / target.name
            (os.replace if moved else shutil.copyfile)(file, copies[file])
        first = copies[files[0]]
        for copy in copies.values():  # parts are looked for beside each other
            if copy.parent != first.parent:
                (first.parent / copy.name).symlink_to(copy)
        yield copies
        for job in jobs.values():
            job.finish()
        # The first part, by which a model is opened, comes last.
        for file, target in reversed([*zip(files, targets, strict=True)]):
            replace_listed(copies[file], Path(os.path.realpath(target)))


def _copies_folder(target: Path) -> Path:
    """The folder beside an output that `copied_files` works in; the output's own may be that of a training."""
    return target.with_name(f".{target.name}.headwise-copies")


Bytes = npt.NDArray[np.uint8]

_PLAIN = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,),
    "IQ3_S": (0,), "IQ1_S": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "Q1_0": (0,),
}  # fmt: skip
"""The offsets, in a block, of its float16 scales (and of its minimum, which is multiplied like a scale)."""


def has_scales(ggml_type: int) -> bool:
    """Whether a GGML type has blocks whose float16 scales `Rows` reads. For example ``has_scales(8)``, of Q8_0."""
    return TYPES[ggml_type][0] in _SCALES


class Rows:
    """The rows of a stored matrix, or the numbers of a stored vector.

    For example ``Rows(raw, 8, (64, 576)).multiply(factors)`` multiplies each row by a number.

    Args:
        raw: the tensor's bytes, which are changed in place.
        ggml_type: the GGML type of the tensor.
        shape: the shape of the tensor: ``(rows, columns)``, or ``(rows,)`` for a bias or a norm.

    Raises:
        CheckpointError: the type's rows cannot be multiplied without decoding them.
    """

    def __init__(self, raw: Bytes, ggml_type: int, shape: tuple[int, ...]) -> None:
        name, _, block_bytes = TYPES[ggml_type]
        if name not in _PLAIN and name not in _SCALES:
            rule = f"can be scaled in place only of {', '.join((*_PLAIN, *_SCALES))}"
            raise CheckpointError("GGUF tensor type", name, rule)
        self.name = name
        self._raw = raw.reshape(shape[0], -1)
        self._blocks = self._raw.reshape(shape[0], -1, block_bytes)

    def scales(self) -> npt.NDArray[np.float64]:
        """The numbers that are multiplied, ``[rows, n]``: scales of blocks, or the values of types without blocks."""
        return np.concatenate([self._read(offset) for offset in self._offsets], 1)

    def multiply(self, factors: npt.NDArray[np.float64]) -> None:
        """Multiply each row; scales are rounded to their type.

        Args:
            factors: ``[rows]``; by a power of two a scale is rounded only where it becomes too small for its type.
        """
        for offset in self._offsets:
            self._write(offset, self._read(offset) * factors[:, None])

    def take(self, order: npt.NDArray[np.int64], signs: npt.NDArray[np.int64]) -> None:
        """Put row ``order[r]`` in the place of row r, times ``signs[r]``.

        Args:
            order: ``[rows]``.
            signs: ``[rows]``, each 1 or −1.
        """
        self._raw[:] = self._raw[order]
        for offset in self._offsets:
            self._write(offset, self._read(offset) * signs[:, None])

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Add to the numbers of a stored vector, which are rounded to its type.

        Args:
            values: ``[rows]``.

        Raises:
            CheckpointError: the type has blocks.
        """
        if self.name not in _PLAIN:
            raise CheckpointError("GGUF tensor type", self.name, f"can be added to only if it is {', '.join(_PLAIN)}")
        self._write(0, self._read(0) + values[:, None])

    @property
    def _offsets(self) -> tuple[int, ...]:
        return _SCALES.get(self.name, (0,))

    def _read(self, offset: int) -> npt.NDArray[np.float64]:
        if self.name in _PLAIN:
            stored = self._raw.view(_PLAIN[self.name])
            if self.name == "BF16":
                return (stored.astype("<u4") << 16).view("<f4").astype(np.float64)
            return stored.astype(np.float64)
        return self._blocks[:, :, offset : offset + 2].copy().view("<f2")[:, :, 0].astype(np.float64)

    def _write(self, offset: int, values: npt.NDArray[np.float64]) -> None:
        if self.name == "BF16":
            self._raw[:] = _bfloat16(values).view(np.uint8).reshape(self._raw.shape)
        elif self.name in _PLAIN:
            self._raw[:] = values.astype(_PLAIN[self.name]).view(np.uint8).reshape(self._raw.shape)
        else:
            self._blocks[:, :, offset : offset + 2] = values.astype("<f2")[:, :, None].view(np.uint8)


def _bfloat16(values: npt.NDArray[np.float64]) -> npt.NDArray[np.uint16]:
    """Numbers rounded to bfloat16, to even."""
    bits = values.astype("<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
