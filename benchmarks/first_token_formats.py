"""Ways to store the first tokens of a cache in codes: perplexity of converted models with each.

    python -m benchmarks.first_token_formats ./mla ./same

Most models rest their attention on the first token of a text, whose values are unlike all others'. In bfloat16 the
first four tokens cost 6 to 12 % of a page of a paged cache. The ways:

- ``own code``: as it is, the first token in its code, with offsets and scales of its own; no bytes besides;
- ``four wide``: the first four in bfloat16 beside their codes, as the first format of the file has them;
- ``one wide``: the first one alone in bfloat16;
- ``8 bits``: the first four in int8, with a scale for each token and part;
- ``none``: all in the code of the other tokens.

Kept in benchmarks/results/first-token-formats.json, and shown in docs/conversion.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from benchmarks.kept import Kept, say
from torch import Tensor

from benchmarks import data
from headwise.measure.evaluation import open_pair, score_window
from headwise.measure.texts import cut_windows, read_text, token_ids
from headwise.runtime.quantization.transform_code import SINKS, TransformCode
from headwise.runtime.quantization.trellis_format import TrellisFormat

Way = Callable[[TransformCode, Tensor], Tensor]
"""The values ``[SINKS, W]`` of a text's first tokens as a way gives them back."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--texts", nargs="+", default=["wikitext-test", "brown", "python-reference"], metavar="TEXT")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--window", type=int, default=1024, help="tokens in each")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/first-token-formats.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    options = parser.parse_args(arguments)
    kept = Kept(options.json, {name: getattr(options, name) for name in ("windows", "window")})
    for folder in options.folders:
        names = [f"{folder.name} {text}" for text in options.texts]
        if all(name in kept.rows for name in names):
            continue
        pair = open_pair(folder, dtype="float32")
        for name, text in zip(names, options.texts, strict=True):
            ids = token_ids(
                pair.tokenizer, read_text(data.ALL[text](options.cache)), at_most=options.windows * options.window
            )
            windows = cut_windows(ids, window=options.window, windows=options.windows)
            row = {}
            for way, change in WAYS.items():
                with first_tokens(change):
                    scores = [score_window(pair.models, ids)["nll"] for ids in windows]
                row[way] = float(torch.cat(scores).mean().exp())
            kept.add(name, {"perplexity": row})
            say(f"{name}: {row}")


def own_code(code: TransformCode, states: Tensor) -> Tensor:
    return code.rounded(states, torch.arange(len(states)) == 0)


def in_int8(code: TransformCode, states: Tensor) -> Tensor:
    rounded = []
    for part in states.split(list(code.parts), -1):
        scale = part.abs().amax(-1, keepdim=True) / 127
        rounded.append((part / scale).round() * scale)
    return torch.cat(rounded, -1)


WAYS: dict[str, Way] = {
    "own code": own_code,
    "four wide": lambda code, states: states,
    "one wide": lambda code, states: torch.cat((states[:1], code.rounded(states[1:]))),
    "8 bits": in_int8,
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


if __name__ == "__main__":
    main()
