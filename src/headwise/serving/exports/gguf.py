"""Write a model folder as one GGUF file, the format of llama.cpp.

A file is written from the config and the tensors of a stock model: MLA becomes deepseek_v3 first. So llama.cpp's
names and forms are one table (`headwise.models.checkpoints.gguf_reader`), for every source, which the reader uses the
other way round.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from headwise.base.checksums import replace_listed
from headwise.base.disk import refuse_no_file, storage_errors
from headwise.base.jobs import Job, clear_finished, partial_folder
from headwise.base.progress import Progress, silent
from headwise.base.type_checks import checked_types
from headwise.errors import ArgumentError
from headwise.models.checkpoints import Checkpoint, GgufFile, dtype_name, open_checkpoint, tokenizer_fields
from headwise.models.specs import GGUF_ARCHITECTURES, HOSTED_PREFIX, gguf_model
from headwise.runtime.hf import check_complete, expected_tensors, stock_config, tensors_of
from headwise.serving.exports.deepseek import deepseek_config, deepseek_tensors

_TYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def gguf_type(dtype: torch.dtype) -> str:
    """The type of GGUF that a dtype is written as.

    For example ``gguf_type(torch.bfloat16)`` is ``"bf16"``.
    """
    return _TYPES.get(dtype, "f32")


def engine_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the stock model that a folder becomes: its own, or deepseek_v3's for MLA in headwise's format.

    For example ``engine_config(open_checkpoint("./half").config)["model_type"]``.

    Args:
        config: the content of a folder's ``config.json``, with its ``dtype``.

    Raises:
        ArgumentError: the layers differ in a setting that deepseek_v3 has once for all.
        SpecError: deepseek_v3 cannot hold the family or its layers.
    """
    if str(config.get("model_type")).startswith(HOSTED_PREFIX):
        return deepseek_config(config, for_engines=True)
    if config.get("model_type") not in GGUF_ARCHITECTURES:
        return dict(config)  # `GgufFile` refuses it
    return {**stock_config(dict(config)).to_dict(), **config}


def engine_tensors(
    checkpoint: Checkpoint, config: Mapping[str, Any], progress: Progress = silent
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of that stock model in the order of `expected_tensors`, a layer in memory at a time.

    Args:
        checkpoint: the folder.
        config: the config that `engine_config` made.
        progress: called for each layer.
    """
    names = list(expected_tensors(dict(config)))
    if str(checkpoint.config["model_type"]).startswith(HOSTED_PREFIX):
        yield from deepseek_tensors(checkpoint, config, names, progress)
        return
    for done, name in enumerate(names):
        progress("exporting", done, len(names))
        yield name, checkpoint.read(name)
    progress("exporting", len(names), len(names))


@checked_types
def export_gguf(
    source: str | Path,
    output: str | Path,
    *,
    outtype: Literal["f32", "f16", "bf16", "q8_0"] | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> int:
    """Write a model as one GGUF file, a layer in memory at a time.

    For example ``export_gguf("./half", "half.gguf", outtype="q8_0")``.

    Args:
        source: a model folder: Llama, Mistral, Qwen2 or Qwen3, or MLA without biases in the format ``deepseek`` or
            headwise's own.
        output: the ``.gguf`` file to write.
        outtype: the type of matrices; when None the one nearest to the source's dtype. Vectors are ``f32``.
        overwrite: replace a file at ``output``.
        progress: called as the file is written.

    Returns:
        Bytes of the file.

    Raises:
        ArgumentError: the output exists, cannot be written, or is being written by another process; or the layers
            differ in a setting that llama.cpp's model has once for all.
        SpecError: llama.cpp has no such model.
        CheckpointError: the source cannot be read, or its tokenizer has no place in GGUF.
        StorageError: the file cannot be written.
    """
    path = Path(output)
    if path.suffix != ".gguf":
        raise ArgumentError("output", str(output), "must end in .gguf")
    refuse_no_file("output", path)
    target = Path(os.path.realpath(path))  # a link stays
    if path.exists() and not overwrite:
        clear_finished(partial_folder(target))
        raise ArgumentError("output", str(output), "exists; say --overwrite to replace it")
    checkpoint = open_checkpoint(source)
    if path.exists() and any(path.samefile(file) for file in checkpoint.files):
        raise ArgumentError("output", str(output), "must not be the source")
    config = engine_config({**checkpoint.config, "dtype": dtype_name(checkpoint.dtype)})
    gguf_model(config)  # refused where llama.cpp has no such model, before a large one is looked through
    check_complete(checkpoint)
    tensors = tensors_of(config, checkpoint.dtype)
    fields = tokenizer_fields(checkpoint, config["vocab_size"])
    file = GgufFile(config, tensors, outtype or gguf_type(checkpoint.dtype), fields)
    with Job(path, folder=partial_folder(target), run=None) as job, storage_errors("output", path):
        partial = job.work / path.name
        file.write(partial, engine_tensors(checkpoint, config, progress))
        job.finish()
        replace_listed(partial, target)
        return target.stat().st_size
