"""What a report's numbers depend on besides the model: dtype, texts, the tokens they begin with, seed and machine."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from headwise.errors import CheckpointError
from headwise.measure.texts.windows import first_ids
from headwise.measure.timing.machine import describe_machine
from headwise.models.checkpoints import dtype_name, load_tokenizer, versions


def circumstances(
    model: Path,
    *,
    dtype: torch.dtype | str | None,
    texts: Iterable[str | Path],
    seed: int = 0,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """What a report of a model says of how its numbers were made, as ``made_with``; the same fields in each.

    For example ``circumstances(Path("./model"), dtype="float32", texts=["text.txt"])["versions"]["torch"]``.

    Args:
        model: the folder or ``.gguf`` whose tokenizer read the texts.
        dtype: the dtype that was computed in; None where there are several.
        texts: the texts that were read, of all kinds.
        seed: the seed that every draw followed from.
        device: the device that was computed on; the CPU when None.

    Returns:
        ``dtype``, ``texts``, ``begin`` (the tokens before every text, such as BOS; empty without texts), ``seed``,
        ``machine`` (`describe_machine`) and ``versions``.
    """
    names, begin = [*map(str, texts)], list[str]()
    with suppress(CheckpointError):  # windows of tokens need no tokenizer
        if names:
            tokenizer = load_tokenizer(model)
            begin = tokenizer.convert_ids_to_tokens(first_ids(tokenizer))
    return {
        "dtype": dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype,
        "texts": names,
        "begin": begin,
        "seed": seed,
        "machine": describe_machine(),
        "versions": {**versions(), "python": platform.python_version()},
    }
