"""RULER's synthetic tasks with each cache of one model: the share of answers found in contexts of 4,096 tokens.

    python -m benchmarks.ruler                             # kept in benchmarks/results/ruler.json
    python -m benchmarks.ruler own llama.cpp:q4_0 build/by-model/qwen2.5-coder-0.5b-articles-1-of-3/same@0.28

Ways are spelled as those of `benchmarks.humaneval`. Haystacks are of WikiText-2's test part; every way gets the same
samples, and a row is one way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.humaneval import of_way, ways_parser
from benchmarks.kept import Kept, say

import headwise
from benchmarks import data
from headwise.measure.evaluation.ruler_tasks import TASKS


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ways_parser(__doc__)
    parser.add_argument("--length", type=int, default=4096, help="the most tokens of a sample, its answer included")
    parser.add_argument("--samples", type=int, default=5, help="of each task")
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], metavar="TASK")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/ruler.json"))
    options = parser.parse_args(arguments)
    source = options.source or data.qwen(options.cache)
    settings = {name: getattr(options, name) for name in ("length", "samples", "tasks", "dtype")}
    kept = Kept(options.json, {"source": Path(source).name, **settings})
    for way in options.ways:
        name, model, cache = of_way(way, source)
        if name not in kept.rows:
            start = time.perf_counter()
            text = data.wikitext("test", options.cache)
            result = headwise.evaluate_ruler(model, text=text, cache=cache, **settings)
            tasks = {task.task: task.score for task in result.tasks}
            kept.add(name, {"score": result.score, "tasks": tasks, "seconds": time.perf_counter() - start})
        say(f"{name:30} {100 * kept.rows[name]['score']:.1f} %")


if __name__ == "__main__":
    main()
