"""The same inputs guided by the code that they reach, by atheris (libFuzzer)."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.trust.fuzz.mutations import Draw


def guided(name: str, options: argparse.Namespace) -> None:
    """Let atheris spoil the inputs of one reader, guided by the code that they reach; it ends the process."""
    import atheris

    with atheris.instrument_imports(include=["headwise"]):
        from benchmarks.kept import Kept
        from benchmarks.trust.fuzz.trial import Trial

        folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=options.folder))
        trial = Trial(name, folder)
    findings: dict[tuple[str, str], dict[str, Any]] = {}
    count = 0

    # An input is the number of the seed, a byte, and the content of its file.
    def one(data: bytes) -> None:
        nonlocal count
        count += 1
        if data:
            draw = _Chosen(data[0])
            finding = trial.read(draw, data[1:])
            if finding is not None:
                findings.setdefault((finding["kind"], finding["place"]), {**finding, "count": 0})["count"] += 1
        if count >= options.inputs:
            Kept(options.json, {"guided": True}).add(name, {"inputs": count, "findings": list(findings.values())})
            os._exit(0)

    def spoil(data: bytes, most: int, seed: int) -> bytes:
        draw = Draw(seed)
        draw.words = trial.words
        place = data[0] % len(trial.seeds) if data else draw.randrange(len(trial.seeds))
        chosen = trial.seeds[place]
        return bytes([place]) + chosen.spoil(data[1:] or trial.whole[chosen], draw)[: most - 1]

    corpus = folder / "corpus"
    corpus.mkdir()
    for place, seed in enumerate(trial.seeds[:256]):
        (corpus / str(place)).write_bytes(bytes([place]) + trial.whole[seed])
    atheris.Setup([sys.argv[0], str(corpus), "-max_len=1000000", "-rss_limit_mb=0"], one, custom_mutator=spoil)
    atheris.Fuzz()


class _Chosen(Draw):
    """Draws that choose the seed of a number."""

    def __new__(cls, place: int) -> _Chosen:
        return super().__new__(cls)

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def choice(self, seq: Any) -> Any:
        return seq[self.place % len(seq)]
