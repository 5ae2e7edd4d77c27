"""The header of a whole GGUF model, which may lie in several files.

llama.cpp's ``gguf-split`` gives every part the metadata ``split.count``, ``split.no`` (from 0) and
``split.tensors.count`` (of all parts), and all other metadata to the first part alone. The parts lie in one folder,
and their names end in ``-00001-of-00003.gguf`` and so on.
Sources: llama.cpp's ``tools/gguf-split`` and ``src/llama-model-loader.cpp``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from headwise.errors import CheckpointError
from headwise.models.specs.gguf.header import GgufHeader, GgufTensor, read_part_header

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def first_part(path: Path) -> Path:
    """The first part of the model that a file is a part of, by the file's name, where that lies beside it.

    For example ``first_part(Path("model-00002-of-00003.gguf"))`` is ``Path("model-00001-of-00003.gguf")`` where that
    exists. Every other path is returned as it is.
    """
    match = _NAME.fullmatch(path.name)
    first = path if match is None else path.with_name(_part_name(match["stem"], 1, int(match["count"])))
    return first if first.is_file() else path


def renamed_parts(path: Path, count: int) -> list[Path]:
    """The files of a model in so many parts that is called by a path: the path itself where it is whole.

    For example ``renamed_parts(Path("out.gguf"), 2)[0]`` is ``Path("out-00001-of-00002.gguf")``.

    Args:
        path: a ``.gguf``, with or without the number of a part.
        count: of parts.
    """
    if count == 1:
        return [path]
    match = _NAME.fullmatch(path.name)
    stem = path.stem if match is None else match["stem"]
    return [path.with_name(_part_name(stem, number, count)) for number in range(1, count + 1)]


def are_of_one_model(files: Sequence[Path]) -> bool:
    """Whether files are parts of one model by their names, which leave open whether parts are missing.

    For example ``are_of_one_model([Path("a-00001-of-00002.gguf"), Path("b-00002-of-00002.gguf")])`` is False.
    """
    matches = [_NAME.fullmatch(file.name) for file in files]
    return None not in matches and len({(match["stem"], match["count"]) for match in matches if match}) == 1


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse the header of a GGUF model; of one that is split over several files, the headers of all of them.

    For example ``read_gguf_header(Path("model-00001-of-00003.gguf")).files``.

    An array of more than 1024 items (the vocabulary) is stepped over, and its value is its length.

    Args:
        path: the file, or any part of a model.

    Raises:
        CheckpointError: a file is not GGUF, is of an unknown version, or ends before its header does; a part is
            missing, or is none of this model.
        StorageError: a file cannot be opened.
    """
    named = read_part_header(path)
    count = named.metadata.get("split.count", 0)
    if count in (0, 1):  # 0 is what ``gguf-split --merge`` leaves
        return named
    files = _part_files(path, count)
    parts = [named if file == path else read_part_header(file) for file in files]
    return _joined(parts)


def _part_files(path: Path, count: object) -> list[Path]:
    """The files of all parts of a model, by the name of one of them.

    Raises:
        CheckpointError: the name does not say where the others are, or one of them is missing.
    """
    match = _NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        rule = f"is a part of a model in {count} files, so that its name must end in -00001-of-{count!s:0>5}.gguf"
        raise CheckpointError("file", str(path), rule)
    names = [_part_name(match["stem"], number, int(match["count"])) for number in range(1, int(match["count"]) + 1)]
    files = [path.with_name(name) for name in names]
    for file in files:
        if not file.is_file():
            rule = f"is missing from {path.parent}: a part of the model of {path.name}"
            raise CheckpointError("file", file.name, rule)
    return files


def _part_name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05d}-of-{count:05d}.gguf"


def _joined(parts: Sequence[GgufHeader]) -> GgufHeader:
    """The header of the whole model, of the headers of its parts in the order of their names.

    Raises:
        CheckpointError: a part is none of this model.
    """
    expected = parts[0].metadata.get("split.tensors.count")
    tensors: dict[str, GgufTensor] = {}
    factors: dict[str, tuple[float, ...]] = {}
    for number, part in enumerate(parts):
        (file,) = part.files
        wanted = {"split.no": number, "split.count": len(parts), "split.tensors.count": expected}
        for key, value in wanted.items():
            if part.metadata.get(key) != value:
                rule = f"must be {value} in part {number + 1} of {len(parts)}: {file.name} is none of this model"
                raise CheckpointError(key, part.metadata.get(key), rule)
        for name in (*part.tensors, *part.factors):
            if name in tensors or name in factors:
                raise CheckpointError("GGUF tensor", name, f"is in {file.name} and in a part before it")
        tensors |= part.tensors
        factors |= part.factors
    if len(tensors) + len(factors) != expected:
        rule = f"must be the number of tensors of all parts, which have {len(tensors) + len(factors)}"
        raise CheckpointError("split.tensors.count", expected, rule)
    return GgufHeader(parts[0].metadata, tensors, factors, tuple(file for part in parts for file in part.files))
