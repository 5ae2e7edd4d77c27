"""Other inference engines on the same weights: llama.cpp, through llama-cpp-python, and CTranslate2."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwise.models.checkpoints import load_tokenizer, model_path
from headwise.models.specs import read_gguf_header
from headwise.runtime.hf import load
from headwise.study.bench.engine_process import Engine, EngineProcess
from headwise.study.bench.report import UnableError

PEERS_PIP = "pip install 'headwise[peers]'"


def llama_cpp(source: str, max_tokens: int) -> Engine:
    """Start llama.cpp on the source's ``.gguf``, widened to float32."""
    path = model_path(source)
    if path.suffix != ".gguf":
        raise UnableError("reads .gguf files only")
    return _LlamaCpp(path, max_tokens)


def ctranslate2(source: str, max_tokens: int) -> Engine:
    """Start CTranslate2 on the same weights, converted by its own converter."""
    return _CTranslate2(source, max_tokens)


TIMED_ENGINES: dict[str, Callable[[str, int], Engine]] = {"llama.cpp": llama_cpp, "CTranslate2": ctranslate2}


def start_engine(name: str, source: str | Path, dtype: str, max_tokens: int) -> EngineProcess:
    """Start an engine of `TIMED_ENGINES` in a separate process.

    Args:
        name: a key of `TIMED_ENGINES`.
        source: a model folder, ``.gguf`` or other source with weights.
        dtype: the dtype of the benchmark; engines run in float32 and refuse any other.
        max_tokens: the number of tokens that the cache has to hold.

    Raises:
        UnableError: the engine is not installed, or cannot run the model.
    """
    if importlib.util.find_spec(TIMED_ENGINES[name].__name__) is None:
        raise UnableError(f"is not installed: {PEERS_PIP}")
    if dtype != "float32":
        raise UnableError("is timed in float32 only")
    return EngineProcess(TIMED_ENGINES[name], source, max_tokens)


class _LlamaCpp:
    note = "float32 weights and cache"

    def __init__(self, path: Path, max_tokens: int) -> None:
        self._api = api = importlib.import_module("llama_cpp")
        _silence_log(api)
        api.llama_backend_init()
        with tempfile.TemporaryDirectory(prefix="headwise-bench-") as folder:
            wide = Path(folder) / "float32.gguf"
            write_in_float32(path, wide)
            self._model = api.llama_model_load_from_file(str(wide).encode(), api.llama_model_default_params())
        options = api.llama_context_default_params()
        options.n_ctx = max_tokens
        options.n_batch = options.n_ubatch = 512
        options.n_threads = options.n_threads_batch = torch.get_num_threads()
        options.type_k = options.type_v = api.GGML_TYPE_F32
        self._context = api.llama_init_from_model(self._model, options) if self._model else None
        if not self._context:
            raise UnableError("could not open the model")

    def read(self, ids: list[int]) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        for start in range(0, len(ids), 512):
            self._decode(ids[start : start + 512])

    def step(self, token: int) -> None:
        self._decode([token])

    def _decode(self, ids: list[int]) -> None:
        tokens = (self._api.llama_token * len(ids))(*ids)
        if self._api.llama_decode(self._context, self._api.llama_batch_get_one(tokens, len(ids))):
            raise RuntimeError("llama.cpp could not decode")


@cache
def _silence_log(api: Any) -> Any:
    """Drop llama.cpp's log; the callback is kept as long as the process, because llama.cpp keeps a pointer to it."""
    callback = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(callback, None)
    return callback


_OWN_FIELDS = ("general.architecture", "general.file_type", "general.alignment")
"""Metadata that the writer sets itself."""


def write_in_float32(source: Path, output: Path) -> None:
    """Copy a ``.gguf`` model with every tensor in float32, as one file."""
    import gguf

    readers = [gguf.GGUFReader(file) for file in read_gguf_header(source).files]
    fields = readers[0].fields
    architecture = fields["general.architecture"]
    writer = gguf.GGUFWriter(output, str(architecture.contents()), use_temp_file=True)
    if (alignment := fields.get("general.alignment")) is not None:
        writer.add_custom_alignment(int(alignment.contents()))
    for field in fields.values():
        if field.name.startswith(("GGUF.", "split.")) or field.name in _OWN_FIELDS:
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    for tensor in (tensor for reader in readers for tensor in reader.tensors):
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, np.ascontiguousarray(numbers))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class _CTranslate2:
    note = "float32"

    def __init__(self, source: str, max_tokens: int) -> None:
        api = importlib.import_module("ctranslate2")
        with tempfile.TemporaryDirectory(prefix="headwise-bench-") as folder:
            stock, converted = Path(folder) / "stock", Path(folder) / "converted"
            tokenizer = load_tokenizer(model_path(source))
            load(source, dtype="float32").save_pretrained(stock)
            tokenizer.save_pretrained(stock)
            try:
                api.converters.TransformersConverter(str(stock)).convert(str(converted), quantization="float32")
                self._generator = api.Generator(
                    str(converted), device="cpu", compute_type="float32", intra_threads=torch.get_num_threads()
                )
            except Exception as error:  # its converter fails in many ways
                raise UnableError(f"cannot convert the model: {str(error).strip().splitlines()[0][:160]}") from None
        self._tokens, self._max_tokens = tokenizer.convert_ids_to_tokens, max_tokens
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._ended: Exception | None = None

    def read(self, ids: list[int]) -> None:
        threading.Thread(target=self._run, args=(ids,), daemon=True).start()
        self._wait()

    def step(self, token: int) -> None:
        self._go.release()
        self._wait()

    def _run(self, ids: list[int]) -> None:
        """Generate from the prompt to the last token; `_made` holds it up after each."""
        left = self._max_tokens - len(ids)
        try:
            self._generator.generate_batch(
                [self._tokens(ids)],
                max_length=left,
                min_length=left,
                include_prompt_in_result=False,
                callback=self._made,
            )
            self._ended = UnableError(f"has no memory for more than {left} tokens")
        except Exception as error:
            self._ended = error
        self._done.release()

    def _made(self, _: Any) -> bool:
        """Called after each token: hold the engine until the next is asked for."""
        self._done.release()
        self._go.acquire()
        return False

    def _wait(self) -> None:
        self._done.acquire()
        if self._ended is not None:
            self._done.release()
            raise self._ended
