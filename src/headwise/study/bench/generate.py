"""Generation with a whole model: milliseconds a token at several contexts, in several implementations."""

from __future__ import annotations

import copy
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import DynamicCache, StaticCache

from headwise import cost
from headwise.base.progress import Progress, silent
from headwise.errors import ArgumentError
from headwise.measure.timing import cache_nbytes
from headwise.measure.timing.machine import Probes
from headwise.measure.timing.timing import time_call
from headwise.models.specs import ModelSpec, read_spec
from headwise.runtime.hf import HeadwiseCache, load, optimize
from headwise.study.bench.engine_process import EngineProcess
from headwise.study.bench.engines import TIMED_ENGINES, start_engine
from headwise.study.bench.report import MEMORY_ERRORS, OURS, Bench, Case, Timing, UnableError, case_of

CONTEXTS = (64, 2048, 8000)
_REST = 0.02
"""Seconds of rest before each step where other engines take part: their threads spin for a while after a step."""
_STOCK = ("transformers, sdpa", "transformers, sdpa, static cache")
_UNTIMED = 3
"""First steps of each way, which are not timed."""
_CHUNK = 1024
"""Tokens of a prompt in one call."""


@torch.inference_mode()
def bench_generate(
    source: str | Path,
    *,
    beside: Sequence[str | Path] = (),
    contexts: Sequence[int] | None = None,
    dtype: str = "float32",
    quick: bool = False,
    engines: bool = True,
    repeats: int | None = None,
    progress: Progress = silent,
) -> Bench:
    """Time one more token of a model at several contexts, stock and optimised, all ways in turn.

    For example ``bench_generate("./model", beside=["./mla"], contexts=[512], quick=True).to_dict()``.

    Ways are the model as transformers runs it (``sdpa``, with either of its caches, and ``eager``), the model after
    `headwise.optimize`, other folders optimised (a conversion beside its source), and, where they are installed and
    the source is a ``.gguf`` or the bundled model, llama.cpp and CTranslate2 on the same weights in float32.

    Args:
        source: a model folder, ``.gguf`` or other source with weights.
        beside: other models to time, optimised; each is named after its folder.
        contexts: the numbers of tokens in the cache before the timed tokens; `CONTEXTS` when None.
        dtype: the dtype to run in.
        quick: whether to time shorter contexts in fewer rounds, without other engines.
        engines: whether to time llama.cpp and CTranslate2.
        repeats: the number of timed tokens of each way; 25, or 7 with ``quick``, when None.
        progress: the callback that reports each round.

    Raises:
        ArgumentError: a context is not positive or near a model's last position, ``repeats`` is below 2, or two of
            ``beside`` have one name.
        CheckpointError: a model could not be read.
        SpecError: the cost of a token is not known from the model's config.
    """
    contexts = tuple(dict.fromkeys(contexts or ((64, 512) if quick else CONTEXTS)))
    repeats = (7 if quick else 25) if repeats is None else repeats
    if repeats < 2:
        raise ArgumentError("repeats", repeats, "must be at least 2")
    spec = read_spec(source)
    names = [f"{OURS}, {Path(other).name or other}" for other in beside]
    for name, other in zip(names, beside, strict=True):
        if names.count(name) > 1:
            raise ArgumentError(
                "beside", str(other), "must have a name of its own: another model's folder has it too"
            )
    stock = load(source, dtype=dtype).eval()
    others = {name: load(other, dtype=dtype).eval() for name, other in zip(names, beside, strict=True)}
    steps = 2 * (repeats + _UNTIMED)
    _check_contexts(contexts, steps, [stock, *others.values()])
    optimized, sdpa, eager = (
        optimize(_share_tensors(stock)),
        _set_attention(stock, "sdpa"),
        _set_attention(_share_tensors(stock), "eager"),
    )
    vocabulary = min(model.get_input_embeddings().weight.shape[0] for model in (stock, *others.values()))
    ids = torch.randint(vocabulary, (max(contexts),)).tolist()
    cases = [_Case(ids[:context]) for context in contexts]
    with ExitStack() as stack:
        for case in cases:
            max_tokens = len(case.ids) + steps
            case.ways = {
                OURS: _Model(optimized, HeadwiseCache(optimized)),
                _STOCK[0]: _Model(sdpa, DynamicCache(config=sdpa.config)),
                _STOCK[1]: _Model(sdpa, StaticCache(config=sdpa.config, max_cache_len=max_tokens)),
                "transformers, eager": _Model(eager, DynamicCache(config=eager.config)),
                **{name: _Model(optimize(other), HeadwiseCache(other)) for name, other in others.items()},
            }
            for name in TIMED_ENGINES if engines and not quick else ():
                try:
                    case.ways[name] = stack.enter_context(start_engine(name, source, dtype, max_tokens))
                except UnableError as error:
                    case.errors[name] = str(error)
        return _measure_cases(cases, spec, Probes(stock.dtype), stock, repeats + _UNTIMED, progress)


@dataclass
class _Case:
    """A context and the models that have read it.

    Attributes:
        ids: the token ids of the context.
        ways: the models by the names of their ways.
        times: the seconds of each way's timed tokens.
        errors: the reasons why ways could not be timed, by the ways' names.
    """

    ids: list[int]
    ways: dict[str, _Way] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def ask(self, name: str, call: Callable[[_Way], None]) -> None:
        """Call a function with a way, and drop the way if it fails; a failure of headwise's own is an error."""
        try:
            call(self.ways[name])
        except (UnableError, *MEMORY_ERRORS) as error:
            if name == OURS:
                raise
            self.errors[name] = str(error) if isinstance(error, UnableError) else "not enough memory"
            del self.ways[name]


def _measure_cases(
    cases: Sequence[_Case], spec: ModelSpec, probes: Probes, stock: Any, rounds: int, progress: Progress
) -> Bench:
    """Time all contexts in the same rounds, so that a disturbance of the machine strikes all of them alike."""
    to_read = [(case, name) for case in cases for name in case.ways]
    for index, (case, name) in enumerate(to_read):
        progress("prompts", index, len(to_read))
        case.ask(name, methodcaller("read", case.ids))
    progress("prompts", len(to_read), len(to_read))
    cached = [cache_nbytes(case.ways[OURS].cache) for case in cases]  # type: ignore[attr-defined]
    rest = _REST if any(isinstance(way, EngineProcess) for case in cases for way in case.ways.values()) else 0
    probed: dict[str, list[float]] = {name: [] for name in probes.calls()}
    for index in range(rounds):
        progress("tokens", index, rounds)
        turns: list[tuple[_Case | None, str]] = [(case, name) for case in cases for name in case.ways]
        turns += [(None, name) for name in probed]
        for turn, name in random.sample(turns, len(turns)):
            time.sleep(rest)
            if turn is None:
                probed[name].append(time_call(probes.calls()[name]))
            else:
                token = turn.ids[index % len(turn.ids)]
                turn.ask(name, partial(_time_step, token, turn.times.setdefault(name, [])))
    progress("tokens", rounds, rounds)
    limits = probes.limits(*(statistics.median(probed[name][_UNTIMED:]) for name in ("read", "product")))
    active = cost.model.weights(spec, active=True)
    # A token reads one row of the embedding, unless the embedding is the head too.
    read = stock.dtype.itemsize * (active.total - (active.embedding if active.head else 0))
    measured = []
    for case, held in zip(cases, cached, strict=True):
        timings = {name: _timing(case.times[name][_UNTIMED:], way.note) for name, way in case.ways.items()}
        timings |= {name: Timing(error=error) for name, error in case.errors.items()}
        values = {"context": len(case.ids), "weights_bytes": read, "cache_bytes": held}
        flops = cost.model.forward_flops(spec, 1, len(case.ids) + 1).total
        title = f"{len(case.ids):,} tokens"
        measured.append(case_of(title, values, timings, nbytes=read + held, flops=flops, limits=limits))
    return Bench("generate", measured, notes=_growth_notes(measured))


def _time_step(token: int, times: list[float], way: _Way) -> None:
    way.step(token)  # wakes its threads, which stay awake between the tokens of a text
    times.append(way.step(token))


class _Way(Protocol):
    """A model that reads a prompt once and then makes one token at a time."""

    note: str | None

    def read(self, ids: list[int]) -> None:
        """Read a prompt, once."""

    def step(self, token: int) -> float:
        """Make one more token, and return the seconds it took."""


class _Model:
    """A transformers model and its cache."""

    note: str | None = None

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.cache = model, cache

    def read(self, ids: list[int]) -> None:
        for first in range(0, len(ids), _CHUNK):
            chunk = torch.tensor([ids[first : first + _CHUNK]])
            self.model(chunk, past_key_values=self.cache, logits_to_keep=1)

    def step(self, token: int) -> float:
        return time_call(lambda: self.model(torch.tensor([[token]]), past_key_values=self.cache, use_cache=True))


def _share_tensors(model: Any) -> Any:
    """Copy a model's modules, but not its tensors, which both models use."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, tensors)


def _set_attention(model: Any, implementation: str) -> Any:
    model.set_attn_implementation(implementation)
    return model


def _check_contexts(contexts: Sequence[int], steps: int, models: Sequence[Any]) -> None:
    for model in models:
        positions = getattr(model.config, "max_position_embeddings", None)
        most = positions - steps if isinstance(positions, int) else max(contexts)
        for context in contexts:
            if not 1 <= context <= most:
                rule = f"must be at least 1, and at most {most}: {steps} tokens follow it"
                raise ArgumentError("context", context, rule if positions else "must be at least 1")


def _growth_notes(cases: Sequence[Case]) -> list[str]:
    """Notes on the growth of each model's time from the first context to the last, beside the stock model's."""
    notes = []
    if len(cases) > 1:
        first, last = cases[0].ways, cases[-1].ways
        stock = min(_STOCK, key=lambda name: last[name].ms or math.inf)  # whichever cache is faster
        growth = {
            name: last[name].ms - first[name].ms  # type: ignore[operator]
            for name in first
            if first[name].ms is not None and last[name].ms is not None
        }
        for name, ms in growth.items():
            share = f", {ms / growth[stock]:.2f} of {stock}'s" if name != stock and growth.get(stock, 0) > 0 else ""
            notes.append(f"{name}: {ms:+.1f} ms from {cases[0].name} to {cases[-1].name}{share}")
    return notes


def _timing(values: list[float], note: str | None) -> Timing:
    low, median, high = statistics.quantiles(values, n=4)
    return Timing(median * 1e3, low * 1e3, high * 1e3, note=note)
