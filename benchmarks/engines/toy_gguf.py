"""A model folder as a GGUF file without a vocabulary, by llama.cpp's own converter.

python toy_gguf.py LLAMA_CPP_SOURCE FOLDER FILE.gguf
"""

from __future__ import annotations

import sys
from pathlib import Path

source, folder, file = map(Path, sys.argv[1:])
sys.path[:0] = [str(source), str(source / "gguf-py")]

import gguf  # noqa: E402
import torch  # noqa: E402

from conversion import ModelBase, ModelType, get_model_architecture, get_model_class  # noqa: E402


def without_vocabulary(model: object) -> None:
    """Say that there is none: a toy has no tokenizer."""
    model.gguf_writer.add_tokenizer_model("none")  # type: ignore[attr-defined]
    model.gguf_writer.add_vocab_size(model.hparams["vocab_size"])  # type: ignore[attr-defined]


with torch.inference_mode():
    settings = ModelBase.load_hparams(folder, False)
    kind = get_model_class(get_model_architecture(settings, ModelType.TEXT), mmproj=False)
    for each in kind.__mro__:
        if "set_vocab" in vars(each):
            each.set_vocab = without_vocabulary
    kind(folder, gguf.LlamaFileType.ALL_F32, file, eager=True).write()
