"""Have a model write HumanEval's 164 functions with each cache, and run them against its tests: greedy pass@1.

    python -m benchmarks.humaneval                              # kept in benchmarks/results/humaneval.json
    python -m benchmarks.humaneval own llama.cpp:q4_0 build/by-model/MODEL-SAMPLE/same@0.28
    python -m benchmarks.humaneval --alone 10                   # ten problems again without a batch

A way is ``own``, a format of ``headwise evaluate --cache``, or a converted model, named by its last part; of a
prepared one, ``FORMAT=MODEL``. The prompt is the problem's, without a chat template. A continuation ends before
the first of `STOPS`, at an end-of-text token, or after ``--tokens``; one that was made is kept in the work folder,
and a run that is stopped goes on with the next batch. Programs run by `benchmarks.isolated`, without which nothing
is run. A row is one way. Its interval is that of Clopper and Pearson, and it is paired with ``own``, problem by
problem. In bfloat16 a batch rounds otherwise than one problem does, so that near ties may be decided otherwise;
``alone`` in a row says how often.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from benchmarks.isolated import refuse_no_isolation, run_isolated
from benchmarks.kept import Kept, say

from benchmarks import data
from headwise.base.disk import write_whole
from headwise.hf import HeadwiseCache, load
from headwise.measure.evaluation import compare_rates
from headwise.models.checkpoints import load_tokenizer, model_path
from headwise.runtime.hf.generate import stop_tokens

WAYS = ("own", "llama.cpp:q8_0", "llama.cpp:q4_0")
STOPS = ("\nclass", "\ndef", "\n#", "\n@", "\nprint", "\nif", "\n```")
"""What no function's body holds: the stops of the paper, and the two that later harnesses have beside them."""
_LOOKED_AT = 8
"""The last tokens in which a stop is looked for, which is none longer than so many characters."""

Problem = dict[str, str]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ways_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=320, help="the most of a continuation")
    parser.add_argument("--batch", type=int, default=82, help="problems that are continued together")
    parser.add_argument("--problems", type=int, help="how many, from the first; all when left out")
    parser.add_argument("--alone", type=int, default=0, metavar="N", help="continue N problems again, one at a time")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/humaneval.json"))
    parser.add_argument("--work", type=Path, default=Path("build/humaneval"), help="for continuations")
    options = parser.parse_args(arguments)
    refuse_no_isolation()
    source = options.source or data.qwen(options.cache)
    settings = {name: getattr(options, name) for name in ("tokens", "batch", "problems", "dtype")}
    kept = Kept(options.json, {"source": Path(source).name, **settings})
    problems = read_problems(options.cache)[: options.problems]
    for way in options.ways:
        name, model, cache = of_way(way, source)
        if name not in kept.rows:
            written = Written(options.work / f"{name.replace('/', '-')}.json", model, cache, options)
            row = {"way": name, **scored(problems, written.all(problems)), "seconds": written.seconds}
            if options.alone:
                row["alone"] = written.compare_alone(problems[:: max(len(problems) // options.alone, 1)])
            if "own" in kept.rows:
                row["beside_own"] = beside(row["outcomes"], kept.rows["own"]["outcomes"])
            kept.add(name, row)
        row = kept.rows[name]
        low, high = (f"{100 * end:.1f}" for end in row["interval"])
        say(f"{name:20} {row['passed']} of {row['problems']}, {100 * row['rate']:.1f} % ({low} to {high})")


def ways_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of ways to a smaller cache of one model, and of what they are run in."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", default=WAYS, metavar="WAY")
    parser.add_argument("--source", type=Path, help="Qwen2.5-Coder-0.5B-Instruct when left out")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts and the source are")
    return parser


def of_way(way: str, source: str | Path) -> tuple[str, str | Path, str | None]:
    """The name of a way, the model that it runs, and the format of its cache; None for the model's own."""
    cache, _, folder = way.rpartition("=")
    if Path(folder).is_file() or (Path(folder) / "config.json").exists():
        return Path(folder).name.removesuffix(".gguf"), folder, cache or None
    return way, source, None if way == "own" else way


def read_problems(cache: Path = data.CACHE) -> list[Problem]:
    """HumanEval's problems, each with ``task_id``, ``prompt``, ``test`` and ``entry_point``."""
    return [json.loads(line) for line in data.humaneval(cache).read_text(encoding="utf-8").splitlines()]


class Written:
    """The continuations of problems by one model and cache, kept in a file.

    Args:
        file: where they are kept.
        model: a source of weights.
        cache: the format of its cache; None for the model's own.
        options: ``dtype``, ``tokens`` and ``batch``.
    """

    def __init__(self, file: Path, model: str | Path, cache: str | None, options: argparse.Namespace) -> None:
        self.file, self.options = file, options
        self.made = {"model": str(model), "cache": cache, "dtype": options.dtype, "tokens": options.tokens}
        document = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        is_same = document.get("made") == self.made
        self.texts: dict[str, str] = document["texts"] if is_same else {}
        self.seconds: float = document["seconds"] if is_same else 0.0
        self._loaded: tuple[Any, Any] | None = None

    def all(self, problems: Sequence[Problem]) -> dict[str, str]:
        """The continuation of each problem, by its name; those that are missing are made, the shortest first."""
        missing = [problem for problem in problems if problem["task_id"] not in self.texts]
        missing.sort(key=lambda problem: len(problem["prompt"]))
        for first in range(0, len(missing), self.options.batch):
            batch = missing[first : first + self.options.batch]
            start = time.perf_counter()
            texts = self._continue([problem["prompt"] for problem in batch])
            self.seconds += time.perf_counter() - start
            self.texts |= {problem["task_id"]: text for problem, text in zip(batch, texts, strict=True)}
            document = {"made": self.made, "seconds": self.seconds, "texts": self.texts}
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.file, json.dumps(document, indent=1).encode())
            say(f"{self.file.stem}: {len(self.texts)} continued, {self.seconds:.0f} s")
        return self.texts

    def compare_alone(self, problems: Sequence[Problem]) -> dict[str, int]:
        """How many continuations are the same one at a time, and how many others pass or fail as those of a batch."""
        alone = {problem["task_id"]: self._continue([problem["prompt"]])[0] for problem in problems}
        others = [problem for problem in problems if alone[problem["task_id"]] != self.texts[problem["task_id"]]]
        ends = [scored(others, texts)["outcomes"] for texts in (alone, self.texts)] if others else [{}, {}]
        alike = sum((ends[0][name] == "passed") == (ends[1][name] == "passed") for name in ends[0])
        return {"problems": len(problems), "same": len(problems) - len(others), "other_but_alike": alike}

    def _continue(self, prompts: Sequence[str]) -> list[str]:
        if self._loaded is None:
            path = model_path(self.made["model"])
            self._loaded = load(path, dtype=self.options.dtype), load_tokenizer(path)
        model, tokenizer = self._loaded
        cache = HeadwiseCache(model, quantize=self.made["cache"])
        return continue_all(model, tokenizer, prompts, cache, tokens=self.options.tokens)


@torch.inference_mode()
def continue_all(model: Any, tokenizer: Any, prompts: Sequence[str], cache: Any, *, tokens: int) -> list[str]:
    """Continue prompts together greedily, up to the first stop of each; a row that has ended leaves the batch."""
    rows = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])  # [B, S], padded on the left
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    running, made = list(range(len(rows))), [list[int]() for _ in rows]
    ends = stop_tokens(model)
    for _ in range(tokens):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits = model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        new = logits[:, -1].argmax(-1).tolist()
        for row, token in zip(running, new, strict=True):
            made[row].append(token)
        stay = [place for place, row in enumerate(running) if not _has_ended(tokenizer, made[row], ends)]
        if not stay:
            break
        if len(stay) < len(running):
            cache.batch_select_indices(torch.tensor(stay))
            mask, running = mask[stay], [running[place] for place in stay]
        ids = torch.tensor([[new[place]] for place in stay])
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
    return [until_stop(tokenizer.decode(row, skip_special_tokens=True)) for row in made]


def _has_ended(tokenizer: Any, made: list[int], ends: Sequence[int]) -> bool:
    end = tokenizer.decode(made[-_LOOKED_AT:])
    return made[-1] in ends or any(stop in end for stop in STOPS)


def until_stop(text: str) -> str:
    """The part of a continuation before the first stop."""
    return text[: min(text.find(stop) % (len(text) + 1) for stop in STOPS)]


def scored(problems: Sequence[Problem], texts: dict[str, str]) -> dict[str, Any]:
    """Run each problem's program, and say how many pass."""
    programs = [program(problem, texts[problem["task_id"]]) for problem in problems]
    with ThreadPoolExecutor(2) as threads:  # each waits for a process
        outcomes = list(threads.map(run_isolated, programs))
    passed = sum(outcome.passed for outcome in outcomes)
    return {
        "problems": len(problems),
        "passed": passed,
        "rate": passed / len(problems),
        "interval": exact_interval(passed, len(problems)),
        "outcomes": {problem["task_id"]: outcome.why for problem, outcome in zip(problems, outcomes, strict=True)},
    }


def program(problem: Problem, text: str) -> str:
    """A problem's function as it was continued, and its tests."""
    return f"{problem['prompt']}{text}\n\n{problem['test']}\n\ncheck({problem['entry_point']})\n"


def beside(outcomes: dict[str, str], own: dict[str, str]) -> dict[str, Any]:
    """The difference from the model's own cache, problem by problem; see `compare_rates`."""
    both = [[end[name] == "passed" for name in outcomes] for end in (outcomes, own)]
    return compare_rates(*both).to_dict()


def exact_interval(right: int, items: int) -> tuple[float, float]:
    """The 95 % interval of a fraction. Source: Clopper and Pearson 1934.

    Args:
        right: the number of items that pass.
        items: the number of all items.
    """

    def at_least(count: int, chance: float) -> float:
        return math.fsum(_binomial(items, chance, range(count, items + 1)))

    low = 0.0 if right == 0 else _root(lambda chance: at_least(right, chance) - 0.025)
    high = 1.0 if right == items else _root(lambda chance: at_least(right + 1, chance) - 0.975)
    return low, high


def _binomial(items: int, chance: float, counts: range) -> Iterator[float]:
    return (math.comb(items, count) * chance**count * (1 - chance) ** (items - count) for count in counts)


def _root(rising: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return middle


if __name__ == "__main__":
    main()
