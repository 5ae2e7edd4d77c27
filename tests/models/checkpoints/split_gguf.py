"""A ``.gguf`` file in several parts, as llama.cpp's ``gguf-split`` writes them."""

from __future__ import annotations

from pathlib import Path

import gguf


def split(
    path: Path,
    folder: Path,
    tensors: int,
    *,
    first_is_empty: bool = False,
    count: int | None = None,
    without: tuple[str, ...] = (),
) -> list[Path]:
    """Write a file's model as parts of so many tensors each, by the gguf package's own writer.

    ``count`` is the ``split.count`` of a model that fits in one part; tensors that end in ``without`` are left out.
    """
    folder.mkdir()
    reader = gguf.GGUFReader(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    architecture = str(fields.pop("general.architecture").contents())
    writer = gguf.GGUFWriter(
        folder / path.name, architecture, split_max_tensors=tensors, small_first_shard=first_is_empty
    )
    for name, field in fields.items():
        first, *rest = field.types
        writer.add_key_value(name, field.contents(), first, rest[-1] if rest else None)
    if count is not None:
        writer.add_uint16("split.count", count)
    for tensor in reader.tensors:
        if not tensor.name.endswith(without):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.iterdir())
