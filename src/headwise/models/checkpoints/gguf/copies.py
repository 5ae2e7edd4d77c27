"""GGUF files that are changed in place: a model's files are copied, and the copies are written over."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headwise.base.disk import refuse_no_file, replace, storage_errors
from headwise.errors import ArgumentError
from headwise.models.specs.gguf.header import renamed_parts


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
        StorageError: the copies cannot be written; nothing is left then.
    """
    targets = renamed_parts(output, len(files))
    with ExitStack() as partials, storage_errors("output", output):
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
