"""Ways to store the first tokens of a cache in codes: perplexity of converted models with each.

    python -m benchmarks.first_token_formats ./mla ./same

The first four tokens of a text are stored in bfloat16 beside their codes, because most models rest their attention on
the first one, whose values are unlike all others'. In a paged cache they cost 6 to 12 % of a page. The ways:

- ``four wide``: as it is;
- ``one wide``: the first token alone in bfloat16;
- ``8 bits``: the four in int8, with a scale for each token and part;
- ``own code``: the four in their codes, with an offset and a scale for each of the four places, fitted to the first
  tokens of other windows; no bytes a token;
- ``own first``: the same for the first token alone;
- ``first in 8 bits``, ``first in 8 bits, own``: the first token in int8, the others in the common or their own code;
- ``none``: the four in their codes.

Kept in benchmarks/results/first-token-formats.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from benchmarks.kept import Kept, say
from torch import Tensor

from benchmarks import data
from headwise.measure.evaluation import Pair, open_pair, score_window
from headwise.measure.texts import cut_windows, read_text, token_ids
from headwise.runtime.quantization.transform_code import SINKS, TransformCode, TrellisFormat

Way = Callable[[TransformCode, Tensor], Tensor]
"""The values ``[SINKS, W]`` of a text's first tokens as a way gives them back."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--texts", nargs="+", default=["wikitext-test", "brown", "python-reference"], metavar="TEXT")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=1024, help="tokens in each")
    parser.add_argument("--fitted", type=int, default=1024, help="beginnings of WikiText-2 train to fit to")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/first-token-formats.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    options = parser.parse_args(arguments)
    kept = Kept(options.json, {name: getattr(options, name) for name in ("windows", "window", "fitted")})
    for folder in options.folders:
        names = [f"{folder.name} {text}" for text in options.texts]
        if all(name in kept.rows for name in names):
            continue
        pair = open_pair(folder, dtype="float32")
        text = read_text(data.wikitext("train", options.cache))
        train = torch.tensor(token_ids(pair.tokenizer, text, at_most=64 * options.fitted))[: 64 * options.fitted]
        ways = all_ways(beginnings(pair, train.view(options.fitted, -1)[:, : 2 * SINKS]))
        for name, text in zip(names, options.texts, strict=True):
            ids = token_ids(
                pair.tokenizer, read_text(data.ALL[text](options.cache)), at_most=options.windows * options.window
            )
            windows = cut_windows(ids, window=options.window, windows=options.windows)
            row = {}
            for way, change in ways.items():
                with first_tokens(change):
                    scores = [score_window(pair.models, ids)["nll"] for ids in windows]
                row[way] = float(torch.cat(scores).mean().exp())
            kept.add(name, {"perplexity": row})
            say(f"{name}: {row}")


def all_ways(seen: dict[int, Tensor]) -> dict[str, Way]:
    def one_wide(code: TransformCode, states: Tensor) -> Tensor:
        return torch.cat((states[:1], code.rounded(states[1:])))

    def int8(code: TransformCode, states: Tensor) -> Tensor:
        rounded = []
        for part in states.split(list(code.parts), -1):
            scale = part.abs().amax(-1, keepdim=True) / 127
            rounded.append((part / scale).round() * scale)
        return torch.cat(rounded, -1)

    def own(code: TransformCode, states: Tensor) -> Tensor:
        known = seen[id(code)]  # [beginnings, SINKS, W]
        offsets, scales = known.mean(0), known.std(0).clamp_min(1e-6)
        rows = [
            replace(code, offset=offset, scale=scale).rounded(row[None])
            for offset, scale, row in zip(offsets, scales, states, strict=True)
        ]
        return torch.cat(rows)

    return {
        "four wide": lambda code, states: states,
        "one wide": one_wide,
        "8 bits": int8,
        "own code": own,
        "own first": lambda code, states: torch.cat((own(code, states)[:1], code.rounded(states[1:]))),
        "first in 8 bits": lambda code, states: torch.cat((int8(code, states[:1]), code.rounded(states[1:]))),
        "first in 8 bits, own": lambda code, states: torch.cat((int8(code, states[:1]), own(code, states)[1:])),
        "none": lambda code, states: code.rounded(states),
    }


@contextmanager
def first_tokens(way: Way) -> Iterator[None]:
    """Layers attend to the first tokens as a way gives them back."""
    own = TrellisFormat.rounded

    def changed(codec: TrellisFormat, states: Tensor, first: Tensor, begin: int) -> Tensor:
        assert begin == 0
        assert not first.any()
        assert len(states) == 1
        rounded = own(codec, states, first, begin)
        rounded[0, 0, :SINKS] = way(codec.code, states[0, 0, :SINKS]).bfloat16()
        return rounded

    TrellisFormat.rounded = changed  # type: ignore[method-assign]
    try:
        yield
    finally:
        TrellisFormat.rounded = own  # type: ignore[method-assign]


def beginnings(pair: Pair, windows: Tensor) -> dict[int, Tensor]:
    """The values of the first tokens of windows, ``[windows, SINKS, W]`` of each layer's code."""
    seen: dict[int, list[Tensor]] = {}

    def record(code: TransformCode, states: Tensor) -> Tensor:
        seen.setdefault(id(code), []).append(states.clone())
        return states

    with first_tokens(record):
        for ids in windows:
            score_window(pair.models, ids)
    return {code: torch.stack(rows) for code, rows in seen.items()}


if __name__ == "__main__":
    main()
