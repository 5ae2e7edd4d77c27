"""Measures models in an engine: a script that runs in the environment where the engine is installed.

Engines ask for other versions of the same packages than headwise does, so that it imports the standard library, NumPy
and the engine alone. ``in_engine.py`` starts it. It ends with its stdin, so that however the process that started it
ends, no engine stays behind. The first line of stdin is the request, in JSON: the ``engine``, its
``threads``, ``models`` by name (each a ``file`` and a ``cache``, None for the engine's full one; ``against`` is what
the others are compared with), ``windows`` of token ids, and a ``prompt`` behind which decoding is timed. Every line
of stdout is JSON: how far it is, and in the last one the answer.

Shapes: S tokens of a window, V tokens of the vocabulary.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Tell = Callable[[str, int, int], None]

CHUNK = 512
"""Tokens that are read at once: a window's later tokens attend to what the cache holds of the earlier ones."""

ROWS = 64
"""Positions whose log-probabilities are in memory at once."""

WARMUP, REPEATS = 3, 12
"""Tokens that are decoded before those that are timed, and these."""


class RefusedError(Exception):
    """The engine refuses a model or a cache."""


class Model(Protocol):
    """A model in an engine, with one cache.

    Attributes:
        vocabulary: the number V of the vocabulary's tokens.
        device: the device that the engine computes on.
    """

    vocabulary: int
    device: str

    def __init__(self, file: str, cache: str | None, room: int, threads: int) -> None: ...

    @classmethod
    def version(cls) -> str:
        """The engine's package and its version."""
        ...

    def logits(self, ids: list[int]) -> Iterator[Array]:
        """Read a window from its beginning, and yield logits ``[CHUNK, V]`` or fewer, which last until the next."""
        ...

    def read(self, ids: list[int]) -> None:
        """Read a prompt from its beginning."""
        ...

    def step(self, token: int) -> None:
        """Decode one more token."""
        ...

    def allocated(self) -> tuple[int, int]:
        """Bytes of the cache as it is allocated, and the number of tokens that it can hold."""
        ...


class LlamaCpp:
    """A GGUF file in llama.cpp, with flash attention, which quantised values need."""

    ERROR = 4
    """ggml's level of errors, for which the package has no name."""

    def __init__(self, file: str, cache: str | None, room: int, threads: int) -> None:
        self._api = api = importlib.import_module("llama_cpp")
        self._log: list[str] = []
        self._errors: list[str] = []
        # The engine keeps a pointer to it.
        self._callback = api.llama_log_callback(self._said)
        api.llama_log_set(self._callback, None)
        api.llama_backend_init()
        weights = api.llama_model_load_from_file(os.fsencode(file), api.llama_model_default_params())
        if not weights:
            raise RefusedError("; ".join(self._errors))
        options = api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.swa_full = room, CHUNK, CHUNK, False
        options.n_threads = options.n_threads_batch = threads
        options.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        keys, _, values = (cache or "f16").partition("/")
        options.type_k = getattr(api, f"GGML_TYPE_{keys.upper()}")
        options.type_v = getattr(api, f"GGML_TYPE_{(values or keys).upper()}")
        self._context = api.llama_init_from_model(weights, options)
        if not self._context:
            raise RefusedError("; ".join(self._errors))
        self.vocabulary = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(weights)))
        self.device = "gpu" if api.llama_supports_gpu_offload() else "cpu"
        self._batch = api.llama_batch_init(CHUNK, 0, 1)
        sizes = re.findall(r"llama_(?:kv_cache|memory_recurrent): +size = +([\d.]+) MiB", "".join(self._log))
        self._bytes = round(sum(map(float, sizes)) * 2**20)
        self._length = 0

    @classmethod
    def version(cls) -> str:
        """See `Model`."""
        return f"llama-cpp-python {version('llama-cpp-python')}"

    def _said(self, level: int, text: bytes, _: object) -> None:
        """Keep what the engine logs."""
        self._log.append(text.decode(errors="replace"))
        if level == self.ERROR:
            self._errors.append(self._log[-1].strip())

    def logits(self, ids: list[int]) -> Iterator[Array]:
        """See `Model`."""
        self._clear()
        for start in range(0, len(ids), CHUNK):
            piece = ids[start : start + CHUNK]
            self._decode(piece, outputs=len(piece))
            values = self._api.llama_get_logits(self._context)
            yield np.ctypeslib.as_array(values, (len(piece), self.vocabulary))

    def read(self, ids: list[int]) -> None:
        """See `Model`."""
        self._clear()
        for start in range(0, len(ids), CHUNK):
            self._decode(ids[start : start + CHUNK])

    def step(self, token: int) -> None:
        """See `Model`."""
        self._decode([token])

    def allocated(self) -> tuple[int, int]:
        """See `Model`."""
        return self._bytes, int(self._api.llama_n_ctx(self._context))

    def _clear(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        self._length = 0

    def _decode(self, ids: list[int], outputs: int = 1) -> None:
        """Read tokens behind those that are there, and compute logits of the last ``outputs``."""
        batch = self._batch
        batch.n_tokens = len(ids)
        for at, token in enumerate(ids):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, self._length + at, 1
            batch.seq_id[at][0], batch.logits[at] = 0, at >= len(ids) - outputs
        if status := self._api.llama_decode(self._context, batch):
            raise RefusedError(f"llama_decode returned {status}")
        self._api.llama_synchronize(self._context)
        self._length += len(ids)


class MlxLm:
    """A model folder in MLX-LM, with a cache that is quantised from its first token on, in groups of 64 channels."""

    GROUP = 64

    def __init__(self, file: str, cache: str | None, room: int, threads: int) -> None:
        self._mx = mx = importlib.import_module("mlx.core")
        self._caches = importlib.import_module("mlx_lm.models.cache")
        self._bits = None if cache is None else int(cache)
        self._model, _ = importlib.import_module("mlx_lm.utils").load_model(Path(file))
        self.device = str(mx.default_device().type).rpartition(".")[2]
        self.read([0])
        self.vocabulary = int(self._last.shape[-1])

    @classmethod
    def version(cls) -> str:
        """See `Model`."""
        return f"mlx-lm {version('mlx-lm')}, mlx {version('mlx')}"

    def logits(self, ids: list[int]) -> Iterator[Array]:
        """See `Model`."""
        self._clear()
        for start in range(0, len(ids), CHUNK):
            logits = self._call(ids[start : start + CHUNK])
            yield np.array(logits.astype(self._mx.float32))

    def read(self, ids: list[int]) -> None:
        """See `Model`."""
        self._clear()
        for start in range(0, len(ids), CHUNK):
            self._last = self._call(ids[start : start + CHUNK])[-1]
            self._mx.eval(self._last)

    def step(self, token: int) -> None:
        """See `Model`."""
        self._mx.eval(self._call([token]))

    def allocated(self) -> tuple[int, int]:
        """See `Model`."""
        keys = self._cache[0].keys
        return sum(layer.nbytes for layer in self._cache), int((keys if self._bits is None else keys[0]).shape[-2])

    def _clear(self) -> None:
        self._cache = self._caches.make_prompt_cache(self._model)
        if self._bits is not None:
            self._cache = [layer.to_quantized(group_size=self.GROUP, bits=self._bits) for layer in self._cache]

    def _call(self, ids: list[int]) -> Any:
        """Logits ``[S, V]`` of tokens behind those that are there."""
        return self._model(self._mx.array([ids]), cache=self._cache)[0]


class Vllm:
    """A model folder in vLLM, whose engine runs in this process, one request at a time."""

    POOL = 2
    """GiB of memory for blocks of the cache."""

    def __init__(self, file: str, cache: str | None, room: int, threads: int) -> None:
        # vLLM reads them when it is imported, and keeps what is set already.
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": str(self.POOL),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # some tokens are decoded behind the longest prompt
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(threads),
        }
        self._api = api = importlib.import_module("vllm")
        model = api.LLM(
            model=file,
            kv_cache_dtype=cache or "auto",
            max_model_len=room + WARMUP,
            max_num_seqs=1,
            max_num_batched_tokens=CHUNK,
            kv_cache_memory_bytes=self.POOL * 2**30,
            enable_prefix_caching=False,
            async_scheduling=False,
            enforce_eager=True,
            skip_tokenizer_init=True,
            # Its compiled rotary embedding (0.32) takes the wrong stride of MLA's tensors on a CPU.
            compilation_config={"custom_ops": ["none"]},
        )
        self._engine = model.llm_engine
        self._caught: list[Any] = []
        model.apply_model(self._catch)
        self._room, self._requests = room, 0
        self.vocabulary = int(self._engine.model_config.get_vocab_size())
        self.device = str(importlib.import_module("vllm.platforms").current_platform.device_type)

    @classmethod
    def version(cls) -> str:
        """See `Model`."""
        return f"vllm {importlib.import_module('vllm').__version__}"

    def _catch(self, model: Any) -> None:
        """Keep the logits that the engine computes: its answers have them as Python's numbers, one by one."""
        compute = model.compute_logits

        def caught(*args: Any) -> Any:
            self._caught.append(compute(*args))
            return self._caught[-1]

        model.compute_logits = caught

    def logits(self, ids: list[int]) -> Iterator[Array]:
        """See `Model`."""
        self._ask(ids, 1, prompt_logprobs=0)
        while self._engine.has_unfinished_requests():
            self._caught.clear()
            self._engine.step()
            for logits in self._caught[1:]:  # the first are those that the next token is drawn by
                yield logits.float().cpu().numpy()

    def read(self, ids: list[int]) -> None:
        """See `Model`."""
        self._ask(ids, 1 + WARMUP + REPEATS)
        while not any(output.outputs[0].token_ids for output in self._engine.step()):
            pass

    def step(self, token: int) -> None:
        """See `Model`; the engine takes the token that it finds likeliest."""
        self._caught.clear()
        self._engine.step()

    def allocated(self) -> tuple[int, int]:
        """See `Model`: of the pool's blocks, those that this run's tokens take."""
        cache = self._engine.vllm_config.cache_config
        blocks = -(-self._room // cache.block_size)
        return round(blocks * self.POOL * 2**30 / cache.num_gpu_blocks), blocks * int(cache.block_size)

    def _ask(self, ids: list[int], new: int, prompt_logprobs: int | None = None) -> None:
        """Start a request."""
        sampling = self._api.SamplingParams(
            temperature=0, max_tokens=new, prompt_logprobs=prompt_logprobs, ignore_eos=True, detokenize=False
        )
        self._requests += 1
        self._engine.add_request(str(self._requests), {"prompt_token_ids": ids}, sampling)


RUNNERS: dict[str, type[Model]] = {"llama.cpp": LlamaCpp, "MLX-LM": MlxLm, "vLLM": Vllm}


def measure(request: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Score every window and time decoding; see the top of this file.

    For example ``measure({"engine": "llama.cpp", …}, print)["scores"]["model"]["nll"]``.

    Raises:
        RefusedError: the engine refuses a model.
    """
    kind = RUNNERS[request["engine"]]
    windows, prompt = request["windows"], request["prompt"]
    room = max(len(windows[0]), len(prompt) + WARMUP + REPEATS)
    models: dict[str, Model] = {}
    for name, one in request["models"].items():
        tell("loading", len(models), len(request["models"]))
        models[name] = kind(one["file"], one["cache"], room, request["threads"])
    sizes = {name: model.vocabulary for name, model in models.items()}
    largest = max(map(max, windows))
    if len(set(sizes.values())) > 1 or largest >= min(sizes.values()):
        raise RefusedError(f"vocabularies of {sizes} tokens do not suit a text with token {largest}")
    tell("loading", len(models), len(models))
    scores: dict[str, dict[str, list[list[float]]]] = {name: {} for name in models}
    for done, ids in enumerate(windows):
        tell("perplexity", done, len(windows))
        for name, of_model in score_window(models, ids).items():
            for key, values in of_model.items():
                scores[name].setdefault(key, []).append(values)
    tell("perplexity", len(windows), len(windows))
    allocated = {name: model.allocated() for name, model in models.items()}
    seconds = decode_seconds(models, prompt, tell)
    speed = {
        name: {"bytes": allocated[name][0], "room": allocated[name][1], "seconds": seconds[name]} for name in models
    }
    return {"scores": scores, "speed": speed, "version": kind.version(), "device": next(iter(models.values())).device}


def score_window(models: dict[str, Model], ids: list[int]) -> dict[str, dict[str, list[float]]]:
    """The scores of the tokens of a window after the first, of each model, as
    `headwise.measure.evaluation.score_window`.

    For example ``score_window({"model": model}, [1, 2, 3])["model"]["nll"]`` has two costs, in nats.

    Where one of the models is named ``against``, the others are compared with it. All models read a chunk before any
    reads the next, so that no more than a chunk's logits are in memory.
    """
    scores: dict[str, dict[str, list[float]]] = {name: {} for name in models}
    for chunk, pieces in enumerate(zip(*(model.logits(ids) for model in models.values()), strict=True)):
        targets = ids[chunk * CHUNK + 1 : (chunk + 1) * CHUNK + 1]
        for first in range(0, len(targets), ROWS):
            rows = slice(first, min(first + ROWS, len(targets)))
            logits = {name: piece[rows] for name, piece in zip(models, pieces, strict=True)}
            for name, of_model in _score(logits, targets[rows]).items():
                for key, values in of_model.items():
                    scores[name].setdefault(key, []).extend(values.tolist())
    return scores


def _score(logits: dict[str, Array], targets: list[int]) -> dict[str, dict[str, Array]]:
    """The scores of some positions, from logits ``[rows, V]`` of each model."""
    log_probs = {name: _log_softmax(rows) for name, rows in logits.items()}
    at = np.arange(len(targets))
    scores = {name: {"nll": -own[at, targets]} for name, own in log_probs.items()}
    if (reference := log_probs.pop("against", None)) is not None:
        probs, likeliest = np.exp(reference), reference.argmax(-1)
        for name, own in log_probs.items():
            scores[name]["reference_nll"] = scores["against"]["nll"]
            scores[name]["kl"] = (probs * (reference - own)).sum(-1)
            scores[name]["agree"] = (own.argmax(-1) == likeliest).astype(np.float32)
    return scores


def _log_softmax(logits: Array) -> Array:
    shifted: Array = logits - logits.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def decode_seconds(models: dict[str, Model], prompt: list[int], tell: Tell) -> dict[str, float]:
    """Median seconds of one more token behind a prompt, of models in turn.

    For example ``decode_seconds({"model": model}, [1, 2, 3], print)["model"]``.
    """
    for model in models.values():
        model.read(prompt)
    times: dict[str, list[float]] = {name: [] for name in models}
    for index in range(WARMUP + REPEATS):
        tell("decoding", index, WARMUP + REPEATS)
        for name, model in models.items():
            start = time.perf_counter()
            model.step(prompt[-1])
            times[name].append(time.perf_counter() - start)
    tell("decoding", WARMUP + REPEATS, WARMUP + REPEATS)
    return {name: statistics.median(values[WARMUP:]) for name, values in times.items()}


def main() -> None:
    """Answer the request on stdin."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines print to stdout, where only lines of JSON may be
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()

    def tell(stage: str, done: int, total: int) -> None:
        print(json.dumps({"stage": stage, "done": done, "total": total}), file=lines)

    try:
        print(json.dumps(measure(request, tell)), file=lines)
    except ModuleNotFoundError as error:
        print(json.dumps({"missing": error.name}), file=lines)
    except RefusedError as error:
        print(json.dumps({"refused": str(error)}), file=lines)
    except Exception as error:  # engines fail in many ways
        print(json.dumps({"refused": f"{type(error).__name__}: {error}"}), file=lines)
    os._exit(0)  # an engine's threads may wait for ever, and destructors may crash


def _end_with_stdin() -> None:
    """End this process with the one that started it, however that ends."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
