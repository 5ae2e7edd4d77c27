"""Decode a million tokens with windows and crops, and convert a hundred times in one process; memory must stay flat.

    python -m benchmarks.trust.long --json benchmarks/results/trust/long.json

Every kind of cache decodes its share, several sequences at a time and a token of each at a time. Windows slide, or
record the past and are cropped as in speculative decoding; growing caches are cropped after every few tokens, and to
`LEAST` tokens where they are longer than `MOST`. At the end, the next logits must be bit for bit those of a fresh
cache that was given what is kept: all tokens that no crop has removed, or the latest that a window's layers see.
(Kivi's is not compared: a crop into one of its blocks codes the block's other tokens again.) Then toys are converted
to each of `TARGETS` in turn, and every file must be the first conversion's byte for byte. Memory is read, and its
growth is told, as in `benchmarks.trust.threads`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.kept import run, say
from benchmarks.trust.threads import Kind, load_model
from benchmarks.trust.toys import CODED, VOCABULARY, WINDOW, convert_toy, growth, resident, save_toy
from torch import Tensor
from transformers.utils import logging

from headwise.runtime.hf import HeadwiseCache
from headwise.runtime.kernels.native.abi import MOST_ROWS

LEAST, MOST = 64, 512
SLIDING = (
    Kind("mistral", "headwise"),
    Kind("mistral", "headwise", "int8"),
    Kind("latents-in-windows", "optimize"),
)
CROPPED = (
    Kind("llama", "optimize"),
    Kind("llama", "headwise", "int4"),
    Kind("llama", "headwise", "kivi4:32:32"),
    Kind("latents", "optimize"),
    Kind("heads", "optimize"),
    Kind("mistral", "headwise"),
    Kind("latents-in-windows", "optimize"),
)
TARGETS: tuple[tuple[str, dict[str, Any]], ...] = (
    CODED["latents"],
    CODED["heads"],
    ("llama", {"to": "mqa"}),
    ("llama", {"to": "mla", "kv_budget": 0.5}),
    ("mistral", {"to": "mla", "kv_bytes": 0.25}),
)
"""A source, and what it is converted to."""


class Decoding:
    """Sequences that are decoded for a long time.

    Args:
        model: the model.
        kind: the kind of that.
        has_crops: whether tokens are removed.
    """

    def __init__(self, model: Any, kind: Kind, *, has_crops: bool) -> None:
        self.model, self.kind, self.has_crops = model, kind, has_crops
        self.batch = MOST_ROWS if kind.attention == "optimize" else 32  # which a layer's kernel takes at once
        self.has_windows = kind.model in ("mistral", "latents-in-windows")
        self.draw = torch.Generator().manual_seed(0)
        self.cache = self._cache()
        self.ids = torch.zeros(self.batch, 0, dtype=torch.int64)
        """The latest tokens that are kept, ``[B, T]``, the last of which is the cache's last."""

    def _cache(self) -> HeadwiseCache:
        cache = HeadwiseCache(self.model, quantize=self.kind.quantize)
        if self.has_windows and self.has_crops:
            cache.activate_past_recording()
        return cache

    def step(self) -> None:
        """Decode a token of each sequence."""
        new = torch.randint(3, VOCABULARY, (self.batch, 1), generator=self.draw)
        self.model(new, past_key_values=self.cache)
        self.ids = torch.cat((self.ids, new), 1)
        if self.has_windows and self.ids.shape[1] > 2 * MOST:
            self.ids = self.ids[:, -MOST:].clone()

    def crop(self, since: int) -> None:
        """Remove some of the tokens that have come since the last crop; of a growing cache many, if it is long."""
        gone = int(torch.randint(0, since + 1, (1,), generator=self.draw))
        if not self.has_windows and self.cache.length > MOST:
            gone = self.cache.length - LEAST
        self.cache.crop(-gone)
        self.ids = self.ids[:, : self.ids.shape[1] - gone]

    def run(self, steps: int) -> list[float]:
        """Decode so many tokens of each sequence; memory, MiB, a hundred times, once a cache is at its largest."""
        while self.has_crops and not self.has_windows and self.cache.length <= MOST:
            self.step()
        every, mib, draw, since, until = max(steps // 100, 1), [resident()], random.Random(0), 0, 4
        for at in range(1, steps + 1):
            self.step()
            since += 1
            if self.has_crops and since == until:
                self.crop(since)
                since, until = 0, draw.randint(1, 12)
            if at % every == 0:
                mib.append(resident())
        return mib

    def is_as_fresh(self) -> bool:
        """Whether the next logits are those of a fresh cache that was given what is kept, a token at a time."""
        next_ids, fresh = torch.full((self.batch, 1), 5), self._cache()
        seen = self.ids[:, -3 * WINDOW :] if self.has_windows else self.ids  # two layers see two windows
        begin = self.cache.length - seen.shape[1]

        def logits(ids: Tensor, cache: HeadwiseCache, position: int) -> Tensor:
            out: Tensor = self.model(ids, position_ids=torch.tensor([[position]]), past_key_values=cache).logits
            return out

        for at in range(seen.shape[1]):
            logits(seen[:, at : at + 1], fresh, begin + at)
        end = self.cache.length
        return torch.equal(logits(next_ids, self.cache, end), logits(next_ids, fresh, end))


@torch.inference_mode()
def decode(folder: Path, tokens: int) -> dict[str, Any]:
    """Every kind's share of the tokens."""
    kinds = [(kind, False) for kind in SLIDING] + [(kind, True) for kind in CROPPED]
    rows: dict[str, Any] = {}
    for kind, has_crops in kinds:
        decoding = Decoding(load_model(folder, kind), kind, has_crops=has_crops)
        steps = -(-tokens // decoding.batch // len(kinds))
        mib = decoding.run(steps)
        is_compared = not (kind.quantize or "").startswith("kivi")
        row = {
            "tokens": decoding.batch * steps,
            "kept": decoding.cache.length,
            "cache_bytes": decoding.cache.nbytes,
            "as_fresh": decoding.is_as_fresh() if is_compared else None,
            "growth_mib": growth(mib),
            "mib": mib,
        }
        name = f"{' '.join(filter(None, kind))}, {'cropped' if has_crops else 'sliding'}"
        say(f"{name}: {row['tokens']} tokens, as fresh: {row['as_fresh']}, grew {row['growth_mib']} MiB")
        rows[name] = row
    return rows


def convert(folder: Path, times: int) -> dict[str, Any]:
    """Conversions, one after another."""
    mib, digests, different = [resident()], {}, []
    for at in range(times):
        number = at % len(TARGETS)
        source, target = TARGETS[number]
        out = convert_toy(save_toy(folder, source), folder / "out", **target)
        digest = hashlib.sha256()
        for file in sorted(file for file in out.rglob("*") if file.is_file()):
            digest.update(f"{file.relative_to(out)} {file.stat().st_size}\n".encode() + file.read_bytes())
        if digests.setdefault(number, digest.hexdigest()) != digest.hexdigest():
            different.append(at)
        shutil.rmtree(out)
        mib.append(resident())
    say(f"{times} conversions, {len(different)} different, grew {growth(mib)} MiB")
    return {"times": times, "different": different, "growth_mib": growth(mib), "mib": mib}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--conversions", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        result = {
            "decode": decode(Path(name), options.tokens),
            "convert": convert(Path(name), options.conversions),
            "run": run(),
        }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
