"""`evaluate_in_engine`: what an engine's own cache costs, measured in the engine's own process.

`worker.py` is started in the environment where the engine is installed. It is a process of its own, because engines
need other packages than headwise, and abort the process where they fail.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from headwise.base.options import EngineOptions, takes_options
from headwise.base.processes import process_count
from headwise.base.progress import Progress, silent
from headwise.base.type_checks import checked_types
from headwise.costs.prediction import RUNNABLE, ServingEngine
from headwise.errors import ArgumentError, CheckpointError, MissingExtraError
from headwise.measure.evaluation.evaluate import (
    Windows,
    cut_evaluation_windows,
    default_context,
    leading_tokens,
    read_texts,
    summarised,
    timing_prompt,
)
from headwise.measure.evaluation.model_pair import Pair, open_pair
from headwise.measure.evaluation.results import Evaluation, Scores
from headwise.measure.evaluation.scoring import Speed
from headwise.models.checkpoints import Checkpoint, GgufCheckpoint
from headwise.serving.engines.rules import ENGINE_RULES, ModelFacts

WORKER = Path(__file__).with_name("worker.py")

_SURROUNDINGS = {
    "PYTHONSAFEPATH": "1",  # the worker's folder has modules with names of others' packages
    "PYTHONUTF8": "1",
    "GGML_NO_BACKTRACE": "1",  # ggml's own last words are then the last
}
"""The environment variables that an engine's process gets besides."""


def is_installed(module: str, python: str) -> bool:
    """Whether an interpreter finds an engine's module, which is not imported.

    For example ``is_installed("llama_cpp", sys.executable)``.

    Args:
        module: the module that the engine is imported by.
        python: the interpreter of its environment.

    Raises:
        ArgumentError: the interpreter does not exist.
    """
    search = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        words = [python, "-c", search]
        ended = subprocess.run(words, env=os.environ | _SURROUNDINGS, capture_output=True, check=False)
    except OSError as error:
        raise ArgumentError("engine_python", python, f"cannot be started: {error.strerror}") from None
    return ended.returncode == 0


def ask(engine: ServingEngine, python: str, request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """What an engine's process answers; the process ends with this call, however that ends.

    For example ``ask(RUNNABLE["llama.cpp"], sys.executable, request, silent)["version"]``.

    Args:
        engine: one that the worker knows.
        python: the interpreter of its environment.
        request: the JSON-able request that ``worker.py`` reads.
        progress: called at every step.

    Raises:
        MissingExtraError: the engine is not installed there.
        ArgumentError: the interpreter does not exist, or the engine refuses the model or ends without an answer.
    """
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                [python, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=os.environ | _SURROUNDINGS,
                start_new_session=True,
            )
        except OSError as error:
            raise ArgumentError("engine_python", python, f"cannot be started: {error.strerror}") from None
        with process:
            assert process.stdin is not None
            try:
                answer, last = _answer(process, request | {"engine": engine.title}, progress)
                status = process.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(BrokenPipeError):  # of a request that was not read
                    process.stdin.close()
        if missing := answer.get("missing"):
            is_itself = engine.module.startswith(missing)  # mlx of mlx_lm is
            what = "is not installed" if is_itself else f"asks for {missing}"
            rule = f"{what} in {python}: {python} -m pip install '{engine.install}'"
            raise MissingExtraError("engine", engine.title, rule)
        if refused := answer.get("refused"):
            raise ArgumentError("engine", engine.title, f"refuses this: {refused}")
        if "scores" not in answer:
            raise ArgumentError("engine", engine.title, f"{_end(status)}; its last words: {_last_words(log, last)}")
        return answer


def _answer(
    process: subprocess.Popen[str], request: dict[str, Any], progress: Progress
) -> tuple[dict[str, Any], str]:
    """Hand the request over, and wait for the answer; empty where there is none, and the last line besides."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):  # the missing answer says that the process has ended
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
    last = ""
    for line in process.stdout:
        last = line.strip() or last
        said = _object(line)
        if said.keys() == {"stage", "done", "total"}:
            progress(said["stage"], said["done"], said["total"])
        elif said:
            return said, last
    return {}, last


def _object(line: str) -> dict[str, Any]:
    """The JSON object of a line; empty where it is none."""
    with suppress(ValueError):
        if isinstance(said := json.loads(line), dict):
            return said
    return {}


def _end(status: int) -> str:
    """How a process ended."""
    if status >= 0:
        return f"ended with status {status} and no result"
    name = signal.Signals(-status).name
    hint = " (a build for another processor ends so)" if name == "SIGILL" else ""
    return f"was ended by {name}{hint}"


def _last_words(log: IO[bytes], said: str) -> str:
    """The last line of an engine's log, which is its error; what it said to us where the log is empty."""
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return (lines or [said or "none"])[-1]


@takes_options(EngineOptions)
@checked_types
def evaluate_in_engine(model: str | Path, options: EngineOptions, *, progress: Progress = silent) -> Evaluation:
    """Evaluate a model on text in an engine, with a cache of the engine's, beside the engine's full cache.

    For example ``evaluate_in_engine("model.gguf", engine="llama.cpp", cache="q4_0", text="text.txt").kl``.

    The reference is ``against``, or without it the model itself, and has the engine's full cache. The engine runs in
    a process of its own, and both models read windows in chunks of 512 tokens through their caches.

    Args:
        model: a ``.gguf`` for llama.cpp, a model folder for the others.
        options: the keywords below as one object, in place of them.
        progress: called for each window.

    Raises:
        ArgumentError: the engine does not take such a model or cache, fails, or a text is shorter than a window.
        CheckpointError: a model cannot be read, or computes NaN or infinite logits.
        MissingExtraError: the engine is not installed.
    """
    engine = _engine(options.engine)
    if process_count() > 1:
        raise ArgumentError("engine", options.engine, "runs in one process, and not under torchrun")
    if options.cache is not None:
        engine.check_cache(options.cache)
    contents = read_texts(options.text)
    against = options.against if options.against is not None or options.cache is None else model
    pair = open_pair(model, against=against)
    for name in pair.sources:
        _file(engine, pair, name)  # refused before a text is cut into windows
    texts, context = cut_evaluation_windows(contents, pair, options)
    return evaluate_windows_in_engine(
        pair,
        texts,
        engine=options.engine,
        cache=options.cache,
        python=options.engine_python,
        context=context,
        progress=progress,
    )


def evaluate_windows_in_engine(
    pair: Pair,
    texts: Windows,
    *,
    engine: str,
    cache: str | None = None,
    python: str | Path | None = None,
    context: int | None = None,
    progress: Progress = silent,
) -> Evaluation:
    """Evaluate a model in an engine on windows of tokens, beside its reference; see `evaluate_in_engine`.

    For example ``evaluate_windows_in_engine(pair, [("text.txt", windows)], engine="llama.cpp", cache="q4_0").kl``.

    Args:
        pair: the model and its reference.
        texts: the name of each text, and its windows ``[n, W]``; W is the same for all.
        engine: one of `RUNNABLE`.
        cache: the model's cache, by the engine's name for it; the engine's full cache when None.
        python: the interpreter of the engine's environment; this process's own when None.
        context: tokens in the cache while decoding is timed; see `headwise.measure.evaluation.evaluate_windows`.
        progress: called for each window.

    Raises:
        ArgumentError: the engine does not take such a model or cache, or fails.
        CheckpointError: a model computes NaN or infinite logits.
        MissingExtraError: the engine is not installed.
    """
    runnable = _engine(engine)
    if cache is not None:
        runnable.check_cache(cache)
    context = default_context(pair) if context is None else context
    files = {name: _file(runnable, pair, name) for name in pair.sources}
    request = {
        "models": {
            name: {"file": str(file), "cache": cache if name == "model" else None} for name, file in files.items()
        },
        "windows": torch.cat([batch for _, batch in texts]).tolist(),
        "prompt": timing_prompt(texts, context)[0].tolist(),
        "threads": torch.get_num_threads(),
    }
    answer = ask(runnable, str(python or sys.executable), request, progress)
    return _evaluation(pair, texts, answer, context, cache)


def _engine(name: str) -> ServingEngine:
    """The engine of a name.

    Raises:
        ArgumentError: no engine has this name.
    """
    if (engine := RUNNABLE.get(name)) is None:
        raise ArgumentError("engine", name, f"must be {' or '.join(RUNNABLE)}")
    return engine


def _file(engine: ServingEngine, pair: Pair, name: str) -> Path:
    """What the engine opens of a model.

    Raises:
        ArgumentError: the engine does not serve such a model.
    """
    checkpoint: Checkpoint = pair.checkpoints[name]
    rules = next(one for one in ENGINE_RULES if one.served is engine)
    if (refusal := rules.refusal(ModelFacts(checkpoint, pair.sources[name]))) is not None:
        why, instead = refusal
        raise ArgumentError(name, pair.sources[name], f"{engine.title} {why}; instead: {instead}")
    return checkpoint.files[0] if isinstance(checkpoint, GgufCheckpoint) else checkpoint.path


def _evaluation(pair: Pair, texts: Windows, answer: dict[str, Any], context: int, cache: str | None) -> Evaluation:
    """An engine's answer as an evaluation.

    Raises:
        CheckpointError: the engine computes NaN or infinite logits.
    """
    scores = {key: torch.tensor(values, dtype=torch.float64) for key, values in answer["scores"]["model"].items()}
    for key, name in (("nll", "model"), ("reference_nll", "against")):
        if key in scores and not bool(scores[key].isfinite().all()):
            raise CheckpointError(name, pair.sources[name], f"computes NaN or infinite logits in {answer['version']}")
    counts = [len(batch) for _, batch in texts]
    parts = {key: values.split(counts) for key, values in scores.items()}  # type: ignore[no-untyped-call]
    names = [name for name, _ in texts]
    own: Scores = [(name, {key: part[at] for key, part in parts.items()}) for at, name in enumerate(names)]
    speed = {
        name: Speed(one["bytes"] / one["room"], 1e3 * one["seconds"], one["bytes"])
        for name, one in answer["speed"].items()
    }
    about = {"window": texts[0][1].shape[1], "begin": leading_tokens(pair, texts), "context": context}
    return summarised(
        pair, own, speed, about | {"engine": answer["version"], "device": answer["device"], "cache": cache}
    )
