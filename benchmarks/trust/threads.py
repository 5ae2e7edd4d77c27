"""Serve sequences that come and go from several threads, and compare each one's logits with a replay by one thread.

    python -m benchmarks.trust.threads --json benchmarks/results/trust/threads.json

A request is a sequence: a prompt, then tokens; its cache is cropped, forked, reordered, reset or given up, also by
an error in the middle of a forward. Its number decides all of it, so that it can be replayed. 64 sequences are alive
at a time, and any of the threads takes the next step of any of them. Models are loaded anew every so many requests,
because threads may collide over what is made when it is first used; and threads are switched a hundred times more
often than usual. All logits of a request must be the replay's bit for bit. torch is held to one thread, because sums
depend on how many share them. Memory is read a hundred times in each pass, once the allocator has given back what is
free; it grew by the median of the last tenth less that of the second.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from benchmarks.kept import run, say
from benchmarks.trust.toys import VOCABULARY, growth, resident, save_toy
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import headwise
import headwise.hf  # makes headwise's attention known to transformers
from headwise.runtime.hf import HeadwiseCache

SWITCH = 5e-5
"""Seconds after which Python lets another thread run."""
PLAIN = (None, "int8", "int4", "int2", "int8/int4", "int4+hadamard", "fp8", "kivi2:32:64", "kivi4:32:32")
ENGINES = ("llama.cpp:q8_0", "llama.cpp:q4_0", "mlx:4", "vllm:fp8")
WAYS = ("optimize", "sdpa")


class Kind(NamedTuple):
    """What a request runs: one of `benchmarks.trust.toys`, its attention, and how its cache is quantised."""

    model: str
    attention: str
    quantize: str | None = None


KINDS = (
    *(Kind("llama", "headwise", how) for how in (*PLAIN, *ENGINES)),
    *(Kind("llama", "sdpa", how) for how in (None, "int4", "kivi2:32:64", "llama.cpp:q4_0")),
    *(Kind("llama", "optimize", how) for how in (None, "int8", "kivi4:32:32")),
    *(Kind("mistral", "headwise", how) for how in (None, "int8", "int4+hadamard", "fp8")),
    *(Kind(name, way) for name in ("gemma3_text", "deepseek_v3", "latents", "heads") for way in WAYS),
    *(Kind(name, way) for name in ("latents-in-windows", "heads-in-windows") for way in WAYS),
)
WINDOWED = {"mistral", "gemma3_text", "latents-in-windows", "heads-in-windows"}
ACTS = {"token": 12, "tokens": 3, "crop": 4, "fork": 1, "reorder": 1, "repeat": 1, "select": 1, "reset": 1, "fail": 1}
"""The steps of a request, by how often they are taken."""


class GivenUpError(RuntimeError):
    """A request is given up in the middle of a forward."""


_GIVEN_UP = threading.local()


def give_up(*_: object) -> None:
    """Before the second layer: raise in a thread that has asked for it."""
    if getattr(_GIVEN_UP, "asked", False):
        _GIVEN_UP.asked = False
        raise GivenUpError


def named(number: int) -> str:
    """The kind of a request, in words."""
    return " ".join(filter(None, KINDS[number % len(KINDS)]))


def load_models(folder: Path) -> dict[tuple[str, str], Any]:
    """The models of all kinds, by their names and attention."""
    models = {kind[:2]: load_model(folder, kind) for kind in {kind[:2]: kind for kind in KINDS}.values()}
    for model in models.values():
        model.model.layers[1].register_forward_pre_hook(give_up)
    return models


def load_model(folder: Path, kind: Kind) -> Any:
    """The model of a kind, from a folder of toys."""
    path, way = save_toy(folder, kind.model), kind.attention
    if way == "headwise":
        return AutoModelForCausalLM.from_pretrained(path, dtype="float32", attn_implementation=way).eval()
    model = headwise.load(path, dtype="float32")
    return headwise.optimize(model) if way == "optimize" else model


@dataclass
class Held:
    """A cache, and which of its slots hold tokens, ``[B, T]``; None for all."""

    cache: HeadwiseCache
    mask: Tensor | None


class Request:
    """A sequence that is served; what it does follows from its number alone.

    Args:
        number: of the request.
        models: of all kinds.
    """

    def __init__(self, number: int, models: dict[tuple[str, str], Any]) -> None:
        self.number, self.kind = number, KINDS[number % len(KINDS)]
        self.model = models[self.kind[:2]]
        self.draw = random.Random(number)
        self.digest, self.acts = hashlib.sha256(), Counter[str]()
        self.held: list[Held] = []
        self.mode = self.draw.choice((torch.inference_mode, torch.no_grad))
        self.running = self.steps()

    def steps(self) -> Iterator[None]:
        """Take one step after another."""
        self.start()
        for _ in range(self.draw.randint(2, 16)):
            yield
            (name,) = self.draw.choices(list(ACTS), list(ACTS.values()))
            one = self.draw.choice(self.held)
            self.acts[name] += 1
            with self.mode():
                getattr(self, name)(one)
            if not self.held:
                return

    def start(self) -> None:
        """A prompt; the shorter ones of a batch are padded."""
        cache = HeadwiseCache(self.model, self.draw.choice((None, 500)), quantize=self.kind.quantize)
        if self.kind.model in WINDOWED:
            cache.activate_past_recording()
        B, S, mask = self.draw.choice((1, 1, 3)), self.draw.randint(1, 70), None
        if B > 1:
            mask = torch.ones(B, S, dtype=torch.int64)
            mask[1, : self.draw.randrange(S)] = 0
        self.acts["start"] += 1
        self.held.append(Held(cache, mask))
        with self.mode():
            self.forward(self.held[0], S, B)

    def forward(self, one: Held, S: int, B: int) -> None:
        ids = torch.tensor([[self.draw.randrange(3, VOCABULARY) for _ in range(S)] for _ in range(B)])
        if one.mask is not None and one.cache.length:
            one.mask = torch.cat((one.mask, one.mask.new_ones(B, S)), 1)
        out = self.model(ids, attention_mask=one.mask, past_key_values=one.cache)
        self.digest.update(out.logits.numpy().tobytes())

    def token(self, one: Held) -> None:
        self.forward(one, 1, self.batch(one))

    def tokens(self, one: Held) -> None:
        self.forward(one, self.draw.randint(2, 9), self.batch(one))

    def crop(self, one: Held) -> None:
        """Remove some of the tokens, as speculative decoding does; of a window no more than have just come."""
        count, S = self.draw.randint(1, 6), one.cache.length
        self.forward(one, count, self.batch(one))
        gone = self.draw.randint(0, count if self.kind.model in WINDOWED else S)
        one.cache.crop(-gone)
        if one.mask is not None:
            one.mask = one.mask[:, : one.mask.shape[1] - gone]

    def fork(self, one: Held) -> None:
        if len(self.held) < 3:
            self.held.append(copy.deepcopy(one))

    def reorder(self, one: Held) -> None:
        B = self.batch(one)
        rows = torch.tensor([self.draw.randrange(B) for _ in range(B)])
        one.cache.reorder_cache(rows)
        one.mask = None if one.mask is None else one.mask[rows]

    def repeat(self, one: Held) -> None:
        if self.batch(one) == 1:
            one.cache.batch_repeat_interleave(2)
            one.mask = None if one.mask is None else one.mask.repeat_interleave(2, 0)

    def select(self, one: Held) -> None:
        rows = torch.tensor([self.draw.randrange(self.batch(one))])
        one.cache.batch_select_indices(rows)
        one.mask = None if one.mask is None else one.mask[rows]

    def reset(self, one: Held) -> None:
        """Begin anew in the same memory."""
        B = self.draw.choice((1, self.batch(one)))
        one.cache.reset()
        one.mask = None
        self.forward(one, self.draw.randint(1, 40), B)

    def fail(self, one: Held) -> None:
        """Give a cache up while some of its layers have new tokens that others do not have yet."""
        _GIVEN_UP.asked = True
        try:
            self.tokens(one)
        except GivenUpError:
            self.held.remove(one)
            return
        raise AssertionError("the forward was not given up")

    def batch(self, one: Held) -> int:
        """B of a cache that holds tokens."""
        return int(one.cache.layers[0].keys.shape[0])


class Pass:
    """The requests of one pass: their digests or errors, what they did, and memory while they were served.

    Args:
        every: requests after which memory is read.
    """

    def __init__(self, every: int) -> None:
        self.every, self.mib = every, [resident()]
        self.digests: dict[int, str] = {}
        self.errors: dict[int, str] = {}
        self.acts = Counter[str]()
        self.lock = threading.Lock()
        self.begin = time.perf_counter()

    def advance(self, request: Request) -> bool:
        """Take one step of a request, and say whether another one is left."""
        try:
            next(request.running)
            return True
        except StopIteration:
            pass
        except Exception as error:  # a finding, whatever it is
            self.errors[request.number] = repr(error)
        with self.lock:
            self.acts += request.acts
            self.digests[request.number] = request.digest.hexdigest()
            if len(self.digests) % self.every == 0:
                self.mib.append(resident())
        return False

    def report(self) -> dict[str, Any]:
        """Seconds, and memory in MiB."""
        return {"seconds": time.perf_counter() - self.begin, "mib": self.mib, "growth_mib": growth(self.mib)}


def serve(kept: Pass, numbers: Sequence[int], models: dict[tuple[str, str], Any], threads: int, live: int) -> None:
    """Serve requests from several threads."""
    waiting, ready = iter(numbers), SimpleQueue[Request | None]()
    lock, left = threading.Lock(), len(numbers)

    def begin() -> None:
        with lock:
            number = next(waiting, None)
        if number is not None:
            ready.put(Request(number, models))

    def work() -> None:
        nonlocal left
        while (request := ready.get()) is not None:
            if kept.advance(request):
                ready.put(request)
                continue
            begin()
            with lock:
                left -= 1
                if not left:
                    for _ in range(threads):
                        ready.put(None)

    for _ in range(live):
        begin()
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--live", type=int, default=64)
    parser.add_argument("--each", type=int, default=500, help="requests after which models are loaded anew")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    every = max(options.requests // 100, 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in KINDS:
            save_toy(folder, kind.model)
        switch = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH)
        served = Pass(every)
        for first in range(0, options.requests, options.each):
            numbers = range(first, min(first + options.each, options.requests))
            serve(served, numbers, load_models(folder), options.threads, options.live)
            say(f"{numbers.stop} served, {served.mib[-1]:.0f} MiB, {len(served.errors)} errors")
        in_threads = served.report()
        sys.setswitchinterval(switch)
        replayed, models = Pass(every), load_models(folder)
        for number in range(options.requests):
            request = Request(number, models)
            while replayed.advance(request):
                pass
    different = {n: named(n) for n, digest in replayed.digests.items() if served.digests[n] != digest}
    result = {
        **{name: getattr(options, name) for name in ("requests", "threads", "live", "each")},
        "kinds": Counter(named(number) for number in range(options.requests)),
        "acts": served.acts,
        "different": different,
        "errors": {"served": served.errors, "replayed": replayed.errors},
        "served": in_threads,
        "replayed": replayed.report(),
        "run": run(),
    }
    say(f"{options.requests} requests, {len(different)} different, {served.errors or 'no errors'}")
    say({name: result[name]["growth_mib"] for name in ("served", "replayed")}, "MiB of growth")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
