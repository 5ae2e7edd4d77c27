"""Decoding from latents in trellis codes: one layer of SmolLM2's shape, and a whole converted model.

    python -m benchmarks.coded --json benchmarks/results/coded.json
    python -m benchmarks.coded --model coded-folder --source smollm2-135m --context 8000

A layer's codes, its latents in bfloat16 and in float32, and the time to read the bytes of each are timed in turn, and
compared by medians of ratios within a round.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headwise
from headwise.hf import HeadwiseCache
from headwise.kernels import attend
from headwise.kernels.native.codes.attention import TURN, attend_coded
from headwise.measurement.timing import seconds
from headwise.quantization import SINKS, TransformCode
from headwise.quantization.layout import kernel_layout
from headwise.quantization.transform_code import blocks

HEADS, FREQUENCIES = 9, 32
SHAPES = {"191 + 192": (191, 192), "240 + 96": (240, 96)}
COPIES = 4
"""Caches that are read in turn, as the layers of a model are."""


def code_of(rank: int, rotary: int, bits: float) -> TransformCode:
    """A code of about so many bits a value: more for the first channels of each section."""
    sections = (rank, rotary // 2, rotary // 2)
    counts: list[int] = []
    for width in sections:
        blocks_of = len(list(blocks((width,))))
        counts += [round(bits + 2 - 4 * (i + 0.5) / blocks_of) for i in range(blocks_of)]
    width = rank + rotary
    return TransformCode(torch.zeros(width), torch.ones(width), tuple(counts), sections, (rank, rotary))


def layer_calls(
    shape: tuple[int, int], bits: float, tokens: int, dtype: torch.dtype, *, content: bool
) -> dict[str, Callable[[int], object]]:
    """Ways to attend to one of `COPIES` caches by its number, and to read its bytes."""
    rank, rotary = shape
    code = code_of(rank, rotary, bits)
    codes = torch.randint(0, 256, (COPIES, 1, 1, tokens, code.token_bytes), dtype=torch.uint8)
    codes[..., 0] = 0x55
    angles = torch.arange(tokens)[:, None] * 1e5 ** (-torch.arange(FREQUENCIES) / FREQUENCIES)
    tables = angles.cos(), angles.sin()
    frequency = torch.randint(0, FREQUENCIES, (rotary // 2,))
    layout = kernel_layout(code, rank, (tables[0][:TURN, frequency], tables[1][:TURN, frequency]))
    assert layout is not None
    wide, first = torch.zeros(1, SINKS, code.width, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    query = torch.randn(1, HEADS, 1, code.width if content else rotary) / 10
    latents = {
        kind: torch.randn(COPIES, 1, 1, tokens, code.width).to(kind) for kind in (torch.bfloat16, torch.float32)
    }
    narrow = query.to(dtype)

    def coded(i: int) -> Tensor:
        rest = (tables, frequency, None, True, 0.1)
        return attend_coded(narrow, codes[i], wide, first, layout, *rest)

    def wide_way(kind: torch.dtype) -> Callable[[int], Tensor]:
        states, rows = latents[kind], query.to(kind)

        def call(i: int) -> Tensor:
            keys = states[i] if content else states[i, ..., rank:]
            return attend(rows, keys, states[i, ..., :rank], scale=0.1, is_causal=True)

        return call

    as_words = codes.flatten()[: codes.numel() // 8 * 8].view(torch.int64).view(-1)
    part = len(as_words) // COPIES
    return {
        "codes": coded,
        "bfloat16": wide_way(torch.bfloat16),
        "float32": wide_way(torch.float32),
        "read codes": lambda i: as_words[i * part : (i + 1) * part].sum(),
        "read bfloat16": lambda i: (
            latents[torch.bfloat16][i].flatten()[: tokens * code.width // 4 * 4].view(torch.int64).sum()
        ),
    }


@torch.inference_mode()
def layer(shape: str, bits: float, tokens: int, dtype: str, rounds: int, *, content: bool) -> dict[str, Any]:
    """Time one query's attention in one layer."""
    calls = layer_calls(SHAPES[shape], bits, tokens, getattr(torch, dtype), content=content)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name in random.sample(list(calls), len(calls)):
            times[name].append(seconds(lambda call=calls[name], i=turn % COPIES: call(i)))
    return medians(times)


def medians(times: dict[str, list[float]]) -> dict[str, Any]:
    """Milliseconds of each way, and the median of its ratios to the first, round by round."""
    first = next(iter(times.values()))[2:]
    result: dict[str, Any] = {}
    for name, values in times.items():
        kept = values[2:]
        ratios = [one / other for one, other in zip(first, kept, strict=True)]
        result[name] = {"ms": statistics.median(kept) * 1e3, "first_over_this": statistics.median(ratios)}
    return result


@torch.inference_mode()
def model(folder: str, source: str, context: int, rounds: int) -> dict[str, Any]:
    """Time a token of a converted model with a coded cache, and of its source with wide ones."""
    ways: dict[str, tuple[Any, HeadwiseCache]] = {}
    for name, where, dtype in (
        ("codes", folder, "float32"),
        ("source, bfloat16", source, "bfloat16"),
        ("source, float32", source, "float32"),
        ("codes, bfloat16", folder, "bfloat16"),
    ):
        loaded = headwise.optimize(headwise.load(where, dtype=dtype).eval())
        cache = HeadwiseCache(loaded, max_length=context + rounds + 8)
        for begin in range(0, context, 2048):
            ids = torch.randint(5, 40000, (1, min(2048, context - begin)))
            loaded(ids, past_key_values=cache, logits_to_keep=1)
        ways[name] = loaded, cache
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 2):
        for name in random.sample(list(ways), len(ways)):
            loaded, cache = ways[name]
            times[name].append(seconds(lambda m=loaded, c=cache: m(torch.tensor([[5]]), past_key_values=c)))
    return {"context": context, **medians(times)}


def main() -> None:
    """Measure what the arguments name, and print it as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--model")
    parser.add_argument("--source", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=8000)
    options = parser.parse_args()
    if options.model:
        row = model(options.model, options.source, options.context, options.rounds)
        print(row)
        return
    for shape in SHAPES:
        for tokens in (8192, 32768):
            for bits in (3, 4):
                for dtype in ("float32", "bfloat16"):
                    for content in (False, True):
                        name = f"{shape}, {tokens}, {bits} bits, {dtype}, {'content' if content else 'rotary'}"
                        row = layer(shape, bits, tokens, dtype, options.rounds, content=content)
                        print(
                            name,
                            {k: (round(v["ms"], 3), round(v["first_over_this"], 2)) for k, v in row.items()},
                            flush=True,
                        )


if __name__ == "__main__":
    main()
